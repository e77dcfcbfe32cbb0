"""`toast-feed`: send the tokens of a stream to decode, and pass them on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from toastkit.errors import DataError, RemoteError, ToastError
from toastkit.frames import End, Error, Frame, Head, Stats, Token, Tokens, Unknown
from toastkit.stages.jsonl import lines
from toastkit.stages.run.pipe_feed import PipeFeed
from toastkit.stages.run.protocol import Next
from toastkit.stages.streams import with_tokens


def feed_tokens(frames: Iterable[Frame], run: str | None, ignore_eos: bool) -> Iterator[Frame]:
    """Send each token frame to the run that the head names, or to `run`, and pass on what a
    detokenizer needs: head, tokens, token, end. End the run after an end-of-turn token, at the end
    of the stream, when the stream fails, and when nobody reads the output any more.
    Raises RemoteError at an error frame, DataError for logits of the run that waits for tokens, as
    nobody has sampled any."""
    feed = PipeFeed(insist=True)
    try:
        yield from _fed(frames, feed, run, ignore_eos)
    except BaseException as error:  # nobody else will tell decode that no more comes
        with suppress(ToastError):
            if run is not None and not feed.opened and isinstance(error, ToastError):
                feed.open(run)
            feed.close("error")
        raise
    finally:
        feed.finish()


def _fed(
    frames: Iterable[Frame], feed: PipeFeed, run: str | None, ignore_eos: bool
) -> Iterator[Frame]:
    head: Head | None = None
    count = 0
    for frame in with_tokens(frames, lambda: run is None):
        if isinstance(frame, Error):
            raise RemoteError(frame.code, frame.stage, frame.message, frame.hint)
        if isinstance(frame, Head):
            head, count = frame, 0
            feed.open(run or head.run)
            yield frame
        elif isinstance(frame, Token):
            if not feed.awaited:
                feed.open(run)
            count += 1
            eos = head is not None and frame.id in head.eos and not ignore_eos
            feed.send(frame.pos, Next(frame.id, "eos" if eos else None, frame.gear))
            if head is not None:
                yield frame
            if eos and head is not None:
                yield End("eos", count)
                head = None
                feed.finish()
        elif isinstance(frame, End) and head is not None:
            if run is None or not ignore_eos:  # or another answer may follow in the same run
                feed.close(frame.reason)
                feed.finish()
            yield End(frame.reason, count)
            head = None
        elif isinstance(frame, (Tokens, Stats, Unknown)) and head is not None:
            yield frame
    if run is not None and not feed.opened:  # report the end of the input, if nothing was sent
        feed.open(run)
    feed.close("stop")
    feed.finish()
    if head is not None:
        yield End("stop", count)


def bare_ids(source: Any) -> Iterator[Frame]:
    """Token frames from lines of decimal ids, without positions."""
    for number, line in enumerate(lines(source), 1):
        for word in line.split():
            token = token_id(word)
            if token is None:
                shown = word[:40].decode(errors="replace")
                raise DataError(f"cannot read line {number}: {shown!r} is not a token id")
            yield Token(-1, token)


def token_id(word: bytes) -> int | None:
    """Parse a decimal id; None if it is none."""
    # int() refuses thousands of digits, and takes superlinear time.
    digits = word.lstrip(b"0") or word[:1]
    if not digits.isdigit() or len(digits) > 10 or int(digits) >= 2**32:
        return None
    return int(digits)
