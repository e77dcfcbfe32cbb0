"""toast-perplexity: how well a model predicts texts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from toastkit.commands import cli, options, policy_flags, run_reports
from toastkit.commands.progress import ProgressBar, last_part, watched
from toastkit.commands.score_reports import Gearing, JsonReport, Report, Text, TextReport, line
from toastkit.commands.sizes import IntegerRange
from toastkit.errors import DataError, UsageError
from toastkit.frames import Head
from toastkit.text.exact_numbers import counted

if TYPE_CHECKING:
    from toastkit.engine.engine import Engine
    from toastkit.engine.geared import Chooser
    from toastkit.engine.perplexity import Scores, Totals
    from toastkit.model.files import ModelFiles
    from toastkit.text.tokenizer import Tokenizer

WINDOW = 1024  # tokens, unless the model's context is shorter
STDIN = "-"


@cli.command("perplexity")
@click.argument("files", nargs=-1, type=click.Path(allow_dash=True))
@options.model("crumb")
@click.option(
    "--context", "window_tokens", type=IntegerRange(1), metavar="N",
    help=f"Most tokens that a token is predicted from (default: {WINDOW}).",
)  # fmt: skip
@click.option("--chunk", type=IntegerRange(1), metavar="N", help="Tokens of a window per pass.")
@click.option(
    "--limit", type=IntegerRange(1), metavar="N", help="Score the first N tokens of each text."
)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object per token.")
@policy_flags.scoring_policies
@options.engine
def perplexity(files: tuple[str, ...], **flags) -> int:
    from toastkit.commands.engines import load, open_unloaded
    from toastkit.interrupts import Signals
    from toastkit.model.config import load_config
    from toastkit.text.tokenizer import Tokenizer

    _check(flags)
    policies = policy_flags.policy_options(flags)
    signals = Signals()  # SIGTERM and SIGHUP end a run as Ctrl-C does
    if policies.gives_up:
        signals.on_memory_warning()
    checkpoint = options.checkpoint(flags)
    config = load_config(checkpoint)
    window = _window(flags["window_tokens"], config.context)
    tokenizer = Tokenizer(checkpoint)
    # All of them before the model is loaded: a missing file costs nothing.
    texts = [_tokenize(name, tokenizer, flags["limit"]) for name in _names(files, flags)]
    chooser_for = _choosers(checkpoint, config.vocab, flags) if flags["gear"] == "auto" else None
    engine = load(open_unloaded(checkpoint, flags, policies, signals), flags, prompts=False)
    gearing, settings = None, policies.gear_options
    if settings is not None:
        bits = None if engine.gears is None else engine.gears.bits
        gearing = Gearing(settings.mode, settings.scope, settings.bits, bits)
    if engine.gears is not None and engine.gears.options.fixed is not None:
        engine.shift(engine.gears.options.fixed)  # now, so that scoring is not charged for it
    report = JsonReport(tokenizer, window, gearing) if flags["as_json"] else TextReport(gearing)
    scoring = Scoring(engine, window, flags, gearing, chooser_for)
    _score_all(scoring, texts, report)
    return 0


def _check(flags: dict[str, Any]) -> None:
    """Raise UsageError for options without effect, or that make no sense."""
    if flags["gear"] == "auto":
        cli.typed_wins(flags, "gear", "chunk")
    if flags["experts"] is not None and flags["experts"].mode == "mobile":
        cli.typed_wins(flags, "experts", "chunk")
    policy_flags.reject_unused(flags)
    if flags["experts"] is not None and flags["experts"].mode == "mobile":
        cli.refuse_together("and --experts mobile exclude each other", "chunk")
    if flags["gear"] != "auto":
        return
    cli.refuse_together("and --gear auto exclude each other", "chunk")
    policy_flags.gear_rules(flags)


def _window(wanted: int | None, context: int | None) -> int:
    if wanted is None:
        return min(WINDOW, context or WINDOW)
    if context is not None and wanted > context:
        said = f"{cli.spelled('window_tokens')} {wanted}"
        raise UsageError(f"{said} is more than the model's context of {context}")
    return wanted


def _names(files: tuple[str, ...], flags: dict[str, Any]) -> tuple[str, ...]:
    """The files to read; stdin if none is named."""
    names = files or (STDIN,)
    if names.count(STDIN) > 1:
        raise UsageError(f"{STDIN} is standard input, which can be read only once")
    if STDIN in names and sys.stdin.isatty() and not flags["quiet"]:
        cli.say("reading the text from the terminal, up to Ctrl-D")
    return names


def _tokenize(name: str, tokenizer: Tokenizer, limit: int | None) -> Text:
    """Read a whole text and tokenise it, so that no cut changes a token.

    limit: tokens to score. Raises NoInputError, DataError.
    """
    from toastkit.commands.stdin import not_utf8, read_input

    label = "standard input" if name == STDIN else name
    data = read_input(name, label)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise not_utf8(f"{label} is", error) from error
    if not text:
        raise DataError(f"{label}: empty text")
    del data
    behind = tokenizer.appended
    most = None if limit is None else limit + 1 + behind
    ids = tokenizer.encode_prompt(text, templated=False, most=most)
    if behind and (most is None or len(ids) < most):  # to the end of the text
        ids = ids[:-behind]
    if len(ids) < 2:
        what = "one token, and nothing before it to predict it from" if ids else "no token"
        raise DataError(f"{label}: a text of {what}")
    whole = len(ids)
    ids = ids[: whole if limit is None else limit + 1]
    return Text(name, ids, _scored_bytes(tokenizer, text, ids, len(ids) < whole))


def _scored_bytes(tokenizer: Tokenizer, text: str, ids: list[int], cut: bool) -> int:
    """UTF-8 bytes of all ids but the first. cut: they are not all of the text."""
    from toastkit.text.detokenizer import count_bytes

    before = 0  # ids that the tokenizer has prepended
    while ids[before : before + 1] and ids[before] in tokenizer.special_ids:
        if text.startswith(tokenizer.decode([ids[before]], keep_special=True)):
            break
        before += 1
    size = count_bytes(tokenizer, ids[before:]) if cut else len(text.encode())
    return size if before else max(size - count_bytes(tokenizer, ids[:1]), 0)


def _choosers(checkpoint: ModelFiles, vocab: int, flags: dict[str, Any]) -> Callable[[], Chooser]:
    """A selector per window: nothing carries over to the next. Raises DataError for stored
    thresholds that cannot be read."""
    from toastkit.engine.geared import by_selector
    from toastkit.gears.selector import GearSelector
    from toastkit.model.config import fingerprint
    from toastkit.stages.follow import selector_for

    said: list[str] = []
    head = Head(checkpoint.name, fingerprint(checkpoint), vocab, eos=[])
    options = selector_for(head, policy_flags.gear_rules(flags, said.append)).options
    if flags["verbose"]:
        cli.say(said[0])  # about thresholds; there is no prompt to report on
    return lambda: by_selector(GearSelector(vocab, options))


@dataclass(frozen=True)
class Scoring:
    """How texts are scored. chooser_for: for gears that change, None otherwise."""

    engine: Engine
    window: int
    flags: dict[str, Any]
    gearing: Gearing | None
    chooser_for: Callable[[], Chooser] | None

    def parts(self, text: Text) -> Iterator[Scores]:
        """The scores of a text."""
        from toastkit.engine.geared import falls_back, score_in_gear, score_in_gears, score_in_steps
        from toastkit.engine.perplexity import score

        if self.chooser_for is not None:
            return score_in_gears(self.engine, text.ids, self.window, self.chooser_for)
        if falls_back(self.engine):
            return score_in_steps(self.engine, text.ids, self.window)
        chunk = self.flags["chunk"]
        if self.gearing is not None:
            return score_in_gear(self.engine, text.ids, self.window, self.gearing.mode, chunk)
        return score(self.engine, text.ids, self.window, chunk)

    def told(self) -> dict[str, Any]:
        """What residency, experts and slots did for the last text, by name."""
        from toastkit.engine.geared import falls_back

        reports = self.engine.run_report()
        if "experts" in reports and not falls_back(self.engine):
            for name in ("steps", "fallbacks", "ratio"):
                del reports["experts"][name]  # a pass covers many tokens: no decode steps
        return {
            name: reports[name] for name in ("residency", "experts", "slots") if name in reports
        }

    def say(self, text: Text) -> None:
        """Announce what is about to be done, with -v."""
        if self.flags["verbose"]:
            count = len(text.ids) - 1
            said = f"{counted(count, 'token')}, {counted(-(-count // self.window), 'window')}"
            cli.say(f"{text.name}: {said} of {self.window}")


def _score_all(scoring: Scoring, texts: list[Text], report: Report) -> None:
    """Score the texts one after another; print a line for all of them if there are several."""
    from toastkit.engine.perplexity import Totals

    overall = Totals()
    for text in texts:
        scoring.say(text)
        totals = Totals()
        scoring.engine.begin_run()
        try:
            with closing(_scores(scoring, text, totals)) as parts:
                for scores in parts:
                    report.tokens(text, scores)
        except (KeyboardInterrupt, SystemExit):
            _report_part(text, totals, scoring.gearing)
            raise
        totals.bytes = text.bytes
        overall.include(totals)
        told = scoring.told()
        report.total(text, totals, told)
        if scoring.flags["verbose"]:
            run_reports.tell(told)
    if len(texts) > 1:
        report.total(len(texts), overall)


def _scores(scoring: Scoring, text: Text, totals: Totals) -> Generator[Scores, None, None]:
    """The scores of a text, added to totals, with a progress bar if a person may be waiting."""
    from toastkit.engine.perplexity import timed

    bar = None
    if watched(scoring.flags) and not (scoring.flags["as_json"] and sys.stdout.isatty()):
        bar = ProgressBar(last_part(text.name))
        bar(0, len(text.ids) - 1)
    try:
        for scores in timed(scoring.parts(text), totals):
            yield scores
            if bar is not None:
                bar(totals.tokens, len(text.ids) - 1, f"perplexity {totals.perplexity:.4f}")
    except DataError as error:
        raise DataError(f"{text.name}: {error.message}", error.hint) from error
    finally:
        if bar is not None:
            bar.close()


def _report_part(text: Text, totals: Totals, gearing: Gearing | None) -> None:
    """Report on stderr how far an interrupted text got."""
    if totals.tokens:
        cli.say(f"interrupted at token {totals.tokens} of {len(text.ids) - 1}")
        print(line(text.name, totals, gearing), file=sys.stderr, flush=True)


def main() -> None:
    cli.run(perplexity)
