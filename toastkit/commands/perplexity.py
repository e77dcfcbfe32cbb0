"""toast-perplexity: how well a model predicts texts."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from toastkit.commands import cli, options
from toastkit.errors import DataError, UsageError, from_os_error

if TYPE_CHECKING:
    from toastkit.engine.engine import Engine
    from toastkit.engine.perplexity import Scores, Totals
    from toastkit.text.tokenizer import Tokenizer

WINDOW = 1024  # tokens, unless the model's context is shorter
STDIN = "-"
LABEL_CHARACTERS = 20


@dataclass(frozen=True)
class Text:
    """A text to score. name: the file, "-" for stdin. ids: its tokens; the first is not scored.
    bytes: of UTF-8 that the scored tokens stand for."""

    name: str
    ids: list[int]
    bytes: int


@cli.command("perplexity")
@click.argument("files", nargs=-1, type=click.Path(allow_dash=True))
@options.model
@click.option(
    "--context", "window_tokens", type=click.IntRange(1), metavar="N",
    help=f"Most tokens that a token is predicted from (default: {WINDOW}).",
)  # fmt: skip
@click.option("--chunk", type=click.IntRange(1), metavar="N", help="Tokens of a window per pass.")
@click.option(
    "--limit", type=click.IntRange(1), metavar="N", help="Score the first N tokens of each text."
)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object per token.")
@options.engine
def perplexity(files: tuple[str, ...], **flags) -> int:
    from toastkit.commands.engines import load
    from toastkit.commands.pipes import Signals
    from toastkit.model.config import load_config
    from toastkit.model.locate import locate
    from toastkit.text.tokenizer import Tokenizer

    Signals()  # SIGTERM and SIGHUP end a run as Ctrl-C does
    checkpoint = locate(flags["model"] or "crumb")
    window = _window(flags["window_tokens"], load_config(checkpoint).context)
    tokenizer = Tokenizer(checkpoint)
    # All of them before the model is loaded: a missing file costs nothing.
    texts = [_tokenize(name, tokenizer, flags["limit"]) for name in _names(files, flags)]
    engine = load(checkpoint, flags)
    report = JsonReport(tokenizer, window) if flags["as_json"] else TextReport()
    _score_all(engine, texts, window, flags, report)
    return 0


def _window(wanted: int | None, context: int | None) -> int:
    if wanted is None:
        return min(WINDOW, context or WINDOW)
    if context is not None and wanted > context:
        raise UsageError(f"--context {wanted} is more than the model's context of {context}")
    return wanted


def _names(files: tuple[str, ...], flags: dict[str, Any]) -> tuple[str, ...]:
    """The files to read; stdin where none is named."""
    names = files or (STDIN,)
    if names.count(STDIN) > 1:
        raise UsageError(f"{STDIN} is standard input, which can be read only once")
    if STDIN in names and sys.stdin is not None and sys.stdin.isatty() and not flags["quiet"]:
        cli.say("reading the text from the terminal, up to Ctrl-D")
    return names


def _tokenize(name: str, tokenizer: Tokenizer, limit: int | None) -> Text:
    """Reads a text whole and tokenises it, so that no cut changes a token.

    limit: tokens to score. Raises NoInputError, DataError.
    """
    data = _read(name)
    label = "standard input" if name == STDIN else name
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{label} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}"
        ) from error
    if not text:
        raise DataError(f"{label}: empty text")
    ids = tokenizer.encode_prompt(text, templated=False)
    if len(ids) < 2:
        raise DataError(f"{label}: a text of one token, and nothing before it to predict it from")
    first = tokenizer.decode(ids[:1], keep_special=True)
    if limit is not None and limit < len(ids) - 1:
        ids = ids[: limit + 1]
        text = tokenizer.decode(ids, keep_special=True)
    unscored = len(first.encode()) if text.startswith(first) else 0
    return Text(name, ids, len(text.encode()) - unscored)


def _read(name: str) -> bytes:
    try:
        if name != STDIN:
            return Path(name).read_bytes()
        return sys.stdin.buffer.read() if sys.stdin is not None else b""
    except OSError as error:
        raise from_os_error(error, f"cannot read {name}") from error


def _score_all(
    engine: Engine, texts: list[Text], window: int, flags: dict[str, Any], report: Report
) -> None:
    """Scores the texts one after another; a line for all of them where there are several."""
    from toastkit.engine.perplexity import Totals

    overall = Totals()
    for text in texts:
        if flags["verbose"]:
            count = len(text.ids) - 1
            said = f"{_count(count, 'token')}, {_count(-(-count // window), 'window')}"
            cli.say(f"{text.name}: {said} of {window}")
        totals = Totals()
        try:
            with closing(_scores(engine, text, window, flags, totals)) as parts:
                for scores in parts:
                    report.tokens(text, scores)
        except SystemExit:
            _report_part(text, totals)
            raise
        totals.bytes = text.bytes
        overall.include(totals)
        report.text(text, totals)
    if len(texts) > 1:
        report.overall(len(texts), overall)


def _scores(
    engine: Engine, text: Text, window: int, flags: dict[str, Any], totals: Totals
) -> Generator[Scores, None, None]:
    """The scores of a text, counted into totals, with a bar where a person may be waiting."""
    from toastkit.engine.perplexity import timed

    bar = ScoreBar(text) if _bar_wanted(flags) else None
    try:
        for scores in timed(engine, text.ids, window, flags["chunk"], totals):
            yield scores
            if bar is not None:
                bar.update(totals)
    except DataError as error:
        raise DataError(f"{text.name}: {error.message}", error.hint) from error
    finally:
        if bar is not None:
            bar.close()


def _bar_wanted(flags: dict[str, Any]) -> bool:
    """On a terminal, unless JSON lines scroll by on the same one."""
    busy = flags["as_json"] and sys.stdout.isatty()
    return sys.stderr.isatty() and not flags["quiet"] and not busy


def _report_part(text: Text, totals: Totals) -> None:
    """Says on stderr how far an interrupted text got."""
    if totals.tokens:
        cli.say(f"interrupted at token {totals.tokens} of {len(text.ids) - 1}")
        print(_line(text.name, totals), file=sys.stderr, flush=True)


def _line(name: str, totals: Totals) -> str:
    parts = [
        f"{name}: perplexity {totals.perplexity:.4f}",
        f"entropy {totals.mean_entropy:.4f} bits",
        _count(totals.tokens, "token"),
        f"{totals.speed:.1f} tokens/s",
    ]
    if totals.bits_per_byte is not None:
        parts.insert(3, f"{totals.bits_per_byte:.4f} bits/byte")
    return ", ".join(parts)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


class TextReport:
    """One line for each text, written when it is done."""

    def tokens(self, text: Text, scores: Scores) -> None:
        """Nothing: tokens are not shown."""

    def text(self, text: Text, totals: Totals) -> None:
        """The line of a text."""
        print(_line(text.name, totals), flush=True)

    def overall(self, count: int, totals: Totals) -> None:
        """The line of all texts together."""
        print(_line("total", totals), flush=True)


class JsonReport:
    """One JSON object for each token, one for each text after its tokens, one for all texts."""

    def __init__(self, tokenizer: Tokenizer, window: int):
        self._tokenizer = tokenizer
        self._window = window
        self._stream: Any = None

    def tokens(self, text: Text, scores: Scores) -> None:
        """The objects of some tokens."""
        if scores.position == 1:
            from toastkit.text.detokenizer import StreamingDetokenizer

            self._stream = StreamingDetokenizer(self._tokenizer, keep_special=True)
            self._stream.add(text.ids[0])
        values = zip(scores.ids, scores.logprobs, scores.entropies)
        for pos, (token, logprob, entropy) in enumerate(values, scores.position):
            piece = self._stream.add(token)
            if pos == len(text.ids) - 1:
                piece += self._stream.finish()
            self._write(
                {
                    "file": text.name, "pos": pos, "id": token, "text": piece,
                    "logprob": _finite(logprob), "entropy": _finite(entropy),
                }
            )  # fmt: skip
        sys.stdout.flush()

    def text(self, text: Text, totals: Totals) -> None:
        """The totals of a text."""
        self._write({"file": text.name, **self._summary(totals)})
        sys.stdout.flush()

    def overall(self, count: int, totals: Totals) -> None:
        """The totals of all texts together."""
        self._write({"files": count, **self._summary(totals)})
        sys.stdout.flush()

    def _summary(self, totals: Totals) -> dict[str, Any]:
        return {
            "perplexity": _finite(totals.perplexity),
            "loss": _finite(totals.loss),
            "entropy": _finite(totals.mean_entropy),
            "tokens": totals.tokens,
            "bytes": totals.bytes,
            "bits_per_byte": _finite(totals.bits_per_byte),
            "window": self._window,
            "seconds": round(totals.seconds, 6),
            "tokens_per_second": _finite(totals.speed),
        }

    def _write(self, value: dict[str, Any]) -> None:
        print(json.dumps(value, ensure_ascii=False))


Report = TextReport | JsonReport


def _finite(value: float | None) -> float | None:
    """JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None


class ScoreBar:
    """A progress bar on stderr with the perplexity so far, once a text takes over a second."""

    def __init__(self, text: Text):
        self._text = text
        self._start = time.monotonic()
        self._bar: Any = None
        self._shown = 0

    def update(self, totals: Totals) -> None:
        """Shows how far the text has got."""
        from toastkit.commands.progress import PATIENCE

        if self._bar is None:
            if time.monotonic() - self._start < PATIENCE:
                return
            self._bar = click.progressbar(
                length=len(self._text.ids) - 1,
                label=_short(self._text.name),
                file=sys.stderr,
                show_pos=True,
                item_show_func=lambda t: None if t is None else f"perplexity {t.perplexity:.4f}",
            )
        self._bar.update(totals.tokens - self._shown, totals)
        self._shown = totals.tokens

    def close(self) -> None:
        """Ends the line."""
        if self._bar is not None:
            self._bar.render_finish()


def _short(name: str) -> str:
    """The end of a path, so that a bar stays on one line."""
    last = name.rstrip("/").rpartition("/")[2]
    return last if len(last) <= LABEL_CHARACTERS else last[: LABEL_CHARACTERS - 3] + "..."


def main() -> None:
    cli.run(perplexity)
