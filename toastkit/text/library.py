"""Calls into the `tokenizers` package, bounded in time and in output.

It is written in Rust and executes an untrusted tokenizer.json: it may panic, match a pattern for
hours, or make a text a thousand times as long.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from toastkit.errors import DataError

T = TypeVar("T")

SECONDS = 10.0  # for a piece of a text, which takes under one
MAX_ABANDONED = 2  # calls still running after their timeout
MAX_GROWTH = 64  # most that the rules may multiply a text's length
MAX_ADDED = 1 << 16  # most characters that they may prepend

_abandoned: list[threading.Thread] = []

_COMPOSED = 4  # most characters that NFC and NFKC compose into one
# Steps that drop nothing.
_KEEPING = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend", "ByteLevel")
_SPLITTING = ("ByteLevel", "Metaspace", "Digits", "Split", "Punctuation")


def call(doing: str, act: Callable[[], T], seconds: float | None = None) -> T:
    """Return what `act` returns. Raises DataError, beginning with `doing`, for what it raises,
    panics included, and if it takes longer than `seconds`.

    With `seconds` it runs on a thread of its own, which is abandoned at the timeout: a search that
    has begun cannot be stopped.
    """
    if seconds is None:
        with _stderr_silenced():
            value, error = _tried(act)
        return _outcome(doing, value, error)
    _abandoned[:] = [thread for thread in _abandoned if thread.is_alive()]
    if len(_abandoned) >= MAX_ABANDONED:
        raise DataError(f"{doing}: the tokenizer is busy with texts that take it too long")
    result: list[tuple[Any, BaseException | None]] = []
    thread = threading.Thread(target=lambda: result.append(_tried(act)), daemon=True)
    with _stderr_silenced():
        thread.start()
        thread.join(max(seconds, 0))
    if not result:
        _abandoned.append(thread)
        raise DataError(f"{doing}: it takes over {SECONDS:g} s")
    return _outcome(doing, *result[0])


@contextmanager
def _stderr_silenced() -> Iterator[None]:
    """Silence stderr, where the library reports a panic before we do. Only in the main thread,
    which waits: processes whose other threads may print, such as the daemon, use the library off
    the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _tried(act: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """Catch everything: a panic is a BaseException, of a class that nothing exports."""
    try:
        return act(), None
    except BaseException as error:
        return None, error


def _outcome(doing: str, value: Any, error: BaseException | None) -> Any:
    if error is None:
        return value
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        raise error
    reason = " ".join(str(error).split())
    raise DataError(f"{doing}: {reason[:200]}") from error


def load(data: bytes) -> Any:
    """Load the `tokenizers.Tokenizer` of a tokenizer.json, with truncation and padding off. Raises
    DataError for one that is broken, or whose rules make a text very much longer."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # or it warns after a fork
    os.environ["RUST_BACKTRACE"] = "0"  # if a panic is printed: two lines, no stack
    import tokenizers

    # Loading already runs the rules, over the added tokens; so check them first, without parsing.
    text = data.decode("utf-8", "replace")
    for found in re.finditer(r'"(normalizer|decoder)"\s*:\s*(?=\{)', text):
        try:
            _check_growth(json.JSONDecoder().raw_decode(text, found.end())[0], found[1])
        except (ValueError, RecursionError):
            continue  # the library reports what is wrong with it
    tokenizer = call("broken tokenizer.json", lambda: tokenizers.Tokenizer.from_buffer(data))
    for name in ("normalizer", "decoder"):  # as loaded, however the file spells them
        _check_growth(section(tokenizer, name), name)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def section(tokenizer: Any, name: str) -> dict | None:
    """Return a part of a tokenizer as in tokenizer.json: normalizer, pre_tokenizer, post_processor,
    decoder."""
    part = getattr(tokenizer, name)
    return None if part is None else json.loads(part.__getstate__())


def post_processor_fault(tokenizer: Any, add_special: bool) -> str | None:
    """Return what the post-processor's template refers to that does not exist, if anything: the
    library accepts such a template, and panics at the first text. add_special: its special tokens
    are added."""
    for step in steps(section(tokenizer, "post_processor")):
        for piece in step["single"] if step.get("type") == "TemplateProcessing" else ():
            token = piece.get("SpecialToken", {}).get("id")
            if add_special and token is not None and token not in step["special_tokens"]:
                return f"its post-processor adds {token[:100]!r}, which is not defined"
            if piece.get("Sequence", {}).get("id", "A") != "A":
                return "its post-processor puts in a second text where there is one"
    return None


# ------------------------------------------------------------------------------- a text's length


def _check_growth(part: Any, name: str) -> None:
    """Raise DataError for a normalizer or a decoder that makes a text very much longer. Unicode's
    normal forms are not counted: they are bounded, and not the file's choice."""
    times, added = 1.0, 0.0  # bounds of a text's length: a factor, and characters more
    for step in steps(part):
        if step.get("type") == "Replace":
            factor = _replace_growth(step.get("pattern"), step.get("content"))
            times, added = times * factor, added * factor
        elif step.get("type") == "Prepend":
            added += len(str(step.get("prepend")))
    if times > MAX_GROWTH or added > MAX_ADDED:
        much = f"{times:.3g} times as long" if times > MAX_GROWTH else f"{added:.3g} characters"
        raise DataError(f"broken tokenizer.json: its {name} makes a text {much}")


def _replace_growth(pattern: Any, content: Any) -> float:
    size, kind = len(str(content)), pattern if isinstance(pattern, dict) else {}
    text = kind.get("String")
    if isinstance(text, str) and text:
        return max(1.0, size / len(text))
    expression = str(kind.get("Regex", ""))
    try:
        # Lookaround may match the empty string, anywhere.
        empty = "(?" in expression or re.match(expression, "") is not None
    except (re.error, RecursionError, OverflowError):
        empty = True
    return 1.0 + size if empty else max(1.0, size)


def steps(part: Any) -> list[dict]:
    """Return the steps of a part (see `section`) in order, with sequences flattened."""
    if not isinstance(part, dict):
        return []
    if part.get("type") != "Sequence":
        return [part]
    names = ("normalizers", "pretokenizers", "processors", "decoders")
    lists = (part.get(name) for name in names)
    return [step for inner in lists for entry in inner or () for step in steps(entry)]


def reach(tokenizer: Any) -> int | None:
    """Return the most characters of a text that one token stands for; None if unbounded: if blanks
    are dropped, or any run of unknown characters becomes one token."""
    import tokenizers

    model = tokenizer.model
    vocab = tokenizer.get_vocab()
    splits = steps(section(tokenizer, "pre_tokenizer"))
    forms = steps(section(tokenizer, "normalizer"))
    added = tokenizer.get_added_tokens_decoder().values()
    if not isinstance(model, tokenizers.models.BPE) or not _spells_all(
        model, vocab, splits + forms
    ):
        return None
    if any(token.lstrip or token.rstrip for token in added):
        return None
    if any(s["type"] not in _SPLITTING or s.get("behavior") == "Removed" for s in splits):
        return None
    shrinks = 1.0
    for step in forms:
        pattern, content = step.get("pattern", {}).get("String"), step.get("content")
        if step["type"] == "Replace" and pattern and content:
            shrinks *= max(1.0, len(pattern) / len(content))
        elif step["type"] not in _KEEPING:
            return None
    if any(step["type"] in ("NFC", "NFKC") for step in forms):
        shrinks *= _COMPOSED
    return int(max(map(len, vocab), default=1) * shrinks) + 1


def _spells_all(model: Any, vocab: dict[str, int], steps: list[dict]) -> bool:
    """True if every character becomes at least one token of its own."""
    from toastkit.text.detokenizer import byte_alphabet

    if any(step["type"] == "ByteLevel" for step in steps):
        return all(character in vocab for character in byte_alphabet())
    if model.byte_fallback:
        return all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    return model.unk_token in vocab and not model.fuse_unk
