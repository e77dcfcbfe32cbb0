"""What `toast-feed` does: sends the tokens of a stream to decode, and passes them on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from toastkit.errors import DataError, RemoteError
from toastkit.frames import End, Error, Frame, Head, Token, Tokens
from toastkit.session.feed import FeedWriter
from toastkit.session.run import feed_of
from toastkit.stages.jsonl import lines
from toastkit.stages.streams import with_tokens


def feed_tokens(frames: Iterable[Frame], run: str | None, ignore_eos: bool) -> Iterator[Frame]:
    """Sends each token frame to the run that the head names, or to `run`, and passes on what a
    detokenizer needs: head, tokens, token, end. After an end-of-turn token, or where the stream
    stops without one, the run is ended; so it is at an error frame, which raises RemoteError.
    Raises DataError for logits of the run that waits for tokens: nobody has drawn any.
    """
    writer: FeedWriter | None = None
    head: Head | None = None
    count = 0
    for frame in with_tokens(frames, lambda: run is None):
        if isinstance(frame, Error):
            if writer is not None:
                _send(writer, None, None, True)
            raise RemoteError(frame.code, frame.stage, frame.message, frame.hint)
        if isinstance(frame, Head):
            head, count = frame, 0
            writer = _open(run or head.run)
            yield frame
        elif isinstance(frame, Token):
            writer = writer or _open(run)
            count += 1
            eos = head is not None and frame.id in head.eos and not ignore_eos
            _send(writer, _position(frame, head), frame.id, eos, frame.gear)
            if head is not None:
                yield frame
            if eos and head is not None:
                yield End("eos", count)
                head, writer = None, _close(writer)
        elif isinstance(frame, End) and head is not None:
            yield End(frame.reason, count)
            head, writer = None, _close(writer)
        elif isinstance(frame, Tokens) and head is not None:
            yield frame
    if writer is not None:
        _send(writer, None, None, True)
        writer.close()
    if head is not None:
        yield End("stop", count)


def _open(run: Any) -> FeedWriter:
    if not run:
        raise DataError("no run to feed: the stream has no head that names one")
    runs = [run] if isinstance(run, str) else run
    return FeedWriter(map(feed_of, runs))


def _position(frame: Token, head: Head | None) -> int | None:
    """What to tell decode of a token's position: nothing where the source does not know it, or
    where several decodes with prompts of their own are fed."""
    several = head is not None and isinstance(head.run, list)
    return None if several or frame.pos < 0 else frame.pos


def _send(
    writer: FeedWriter, pos: int | None, token: int | None, end: bool, gear: str | None = None
) -> None:
    try:
        writer.send(pos, token, gear, end)
    except BrokenPipeError:
        pass  # decode has ended by itself, and says so in the stream


def _close(writer: FeedWriter | None) -> FeedWriter | None:
    """Lets a feed go; gives the None to remember it by."""
    if writer is not None:
        writer.close()
    return None


def bare_ids(source: Any) -> Iterator[Frame]:
    """Token frames from lines of decimal ids; their position is left to decode."""
    for number, line in enumerate(lines(source), 1):
        for word in line.split():
            token = token_id(word)
            if token is None:
                shown = word[:40].decode(errors="replace")
                raise DataError(f"cannot read line {number}: {shown!r} is not a token id")
            yield Token(-1, token)


def token_id(word: bytes) -> int | None:
    """The id that a decimal word stands for, None where it stands for none."""
    # int() takes no thousands of digits, and its time is more than the number's length.
    digits = word.lstrip(b"0") or word[:1]
    if not digits.isdigit() or len(digits) > 10 or int(digits) >= 2**32:
        return None
    return int(digits)
