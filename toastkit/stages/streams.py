"""What every stage requires of its input: whole runs, and upstream errors raised here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack

from toastkit.errors import DataError, RemoteError
from toastkit.frames import End, Error, Frame, Head, Logits, Prefilled, Text, Token, Tokens

BEGIN = "begin the pipeline with toast-tokenize"  # a hint
OF_A_STEP = (Logits, Token, Text)
OF_A_RUN = (Tokens, Prefilled, Logits, Token, Text, End)
Stage = Callable[[Iterable[Frame]], Iterator[Frame]]


def whole_runs(frames: Iterable[Frame], closes: Callable[[Frame], bool]) -> Iterator[Frame]:
    """Pass frames on and check that the stream consists of whole runs.

    closes(frame): True if the frame completes a run for this stage. Recorded frames of the run
    after that are dropped, up to its end.
    Raises RemoteError at an error frame, DataError if a run is cut off
    (its writer was killed, say), does not begin with a head, or if there is no run at all; and at
    the end of the stream if a run ended in an error that no frame has reported.
    """
    seen = inside = ended = failed = False
    for frame in frames:
        if inside and isinstance(frame, OF_A_STEP):
            yield frame
            continue
        if isinstance(frame, Error):
            raise RemoteError(frame.code, frame.stage, frame.message, frame.hint)
        if isinstance(frame, Head):
            if inside:
                raise DataError("a run begins before the last one has ended")
            seen = inside = True
        elif not seen:
            raise DataError("the stream does not begin with a head frame")
        elif not inside:
            if isinstance(frame, OF_A_RUN):
                if ended and not isinstance(frame, End):
                    raise DataError("frames follow the end of a run, and no head")
                ended, failed = ended or isinstance(frame, End), failed or _failed(frame)
                continue
        elif closes(frame):
            inside, ended = False, isinstance(frame, End)
        failed = failed or _failed(frame)
        yield frame
    if inside:
        hint = _missing(frame) if closes is ends_run else None
        raise DataError("input ended in the middle of a run", hint)
    if not seen:
        raise DataError("no frames on input", hint=BEGIN)
    if failed:
        raise DataError("a run ended in an error, and no error frame says in which")


def _missing(last: Frame) -> str | None:
    """Hint at the stage that should have followed the last frame of a stream."""
    if isinstance(last, Prefilled):
        return "is toast-decode missing?"
    written = isinstance(last, Tokens) and last.final
    return "are toast-prefill and toast-decode missing?" if written else None


def _failed(frame: Frame) -> bool:
    return isinstance(frame, End) and frame.reason == "error"


def with_logits(frames: Iterable[Frame], hint: str) -> Iterator[Frame]:
    """Whole runs for a stage that reads logits. Raises DataError if tokens come without any."""
    seen = False
    for frame in frames:
        if isinstance(frame, Logits):
            seen = True
        elif isinstance(frame, Head):
            seen = False
        elif isinstance(frame, Token) and not seen:
            raise DataError("tokens come, but no logits", hint)
        yield frame


def with_tokens(frames: Iterable[Frame], awaited: Callable[[], bool]) -> Iterator[Frame]:
    """Whole runs for a stage that reads tokens. awaited: whether a decode waits for them.

    Raises DataError if there are none, though the model took steps: at the first logits if decode
    waits, since no more would ever come; else at the run's end.
    """
    logits = tokens = False
    for frame in frames:
        undrawn = False
        if isinstance(frame, Head):
            logits = tokens = False
        elif isinstance(frame, Token):
            tokens = True
        elif isinstance(frame, Logits):
            logits = True
            undrawn = awaited()
        elif isinstance(frame, End) and not tokens:
            undrawn = frame.n > 0 or (logits and frame.reason == "length")
        if undrawn:
            what = "logits come, but no tokens" if logits else "an answer comes without its tokens"
            raise DataError(what, hint="is toast-sample missing?")
        yield frame


def ends_run(frame: Frame) -> bool:
    """True if a frame is the end of a run."""
    return isinstance(frame, End)


def compose(frames: Iterable[Frame], *stages: Stage) -> Iterator[Frame]:
    """Chain stages in this process, as a pipe would. When the result is closed, so is each, the
    last one first, and what one raises then is raised: Python only prints what a generator raises
    that it closes by itself."""
    with ExitStack() as made:
        for stage in stages:
            frames = stage(frames)
            made.callback(frames.close)  # type: ignore[attr-defined]  # all stages are generators
        yield from frames
