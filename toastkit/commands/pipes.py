"""The two ends of a filter: stdin that notices when stdout's reader is gone, and the loop between a
reader and a writer."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from toastkit.commands.cli import print_error, program
from toastkit.descriptors import GONE
from toastkit.errors import (
    FrameError,
    RemoteError,
    ToastError,
    UsageError,
    as_toast_error,
    from_os_error,
)
from toastkit.frames import End, Error, Frame, FrameReader, FrameWriter, Head, Token, starts_frames
from toastkit.interrupts import Signals, die_by_sigpipe
from toastkit.stages.streams import BEGIN

INPUT = [(0, select.POLLIN)]  # nothing but input
GRACE = 1.0  # seconds to wait for the end of a run after a signal, which decode got too


class WatchedInput:
    """stdin as a binary stream whose reads end with BrokenPipeError once stdout's reader is gone,
    which a filter waiting for input would otherwise never notice. signals: shortly after the first,
    the stream ends. rest: seconds between two reads of a stream whose parts come faster, to take
    several at once."""

    def __init__(self, first: bytes = b"", signals: Signals | None = None, rest: float = 0):
        self._first = first
        self._rest = rest
        self._read_at = self._next_at = 0.0
        self.began = first[:1]  # the first byte of the stream, once read
        self._poll = select.poll()
        self._poll.register(0, select.POLLIN)
        self._signals = signals
        self._until: float | None = None
        if signals is not None:
            self._poll.register(signals.fileno(), select.POLLIN)
        if not os.isatty(1):
            self._poll.register(1, 0)

    def read1(self, size: int) -> bytes:
        """Up to `size` bytes, b"" at the end."""
        if self._first:
            first, self._first = self._first, b""
            return first
        if self._rest:
            time.sleep(max(self._next_at - time.monotonic(), 0))
        while True:
            left = None if self._until is None else (self._until - time.monotonic()) * 1000
            if left is not None and left <= 0:
                return b""
            events = self._poll.poll(left)
            if events == INPUT:
                return self._read(size)
            ready = dict(events)
            if ready.get(1, 0) & GONE:
                raise BrokenPipeError
            signals = self._signals
            if signals is not None and signals.fileno() in ready and signals.noted():
                self._poll.unregister(signals.fileno())
                self._until = time.monotonic() + GRACE
            if 0 in ready:
                return self._read(size)

    read = read1

    def _read(self, size: int) -> bytes:
        data = os.read(0, size)
        self.began = self.began or data[:1]
        if self._rest:
            before, self._read_at = self._read_at, time.monotonic()
            fast = self._read_at - before < 1.5 * self._rest
            self._next_at = self._read_at + self._rest if fast else 0.0
        return data


def frame_writer() -> FrameWriter:
    """A writer of frames to stdout. Raises UsageError if that is a terminal."""
    if os.isatty(1):
        raise UsageError(
            "frames are not for a terminal",
            hint="pipe them into the next stage, or into toast-frames --json",
        )
    out = sys.stdout.buffer
    return _ToNext(getattr(out, "raw", out))


class _ToNext(FrameWriter):
    def write(self, frame: Frame) -> None:
        try:
            super().write(frame)
        except UnicodeEncodeError as error:  # a path, as the system encodes it
            path = repr(error.object)
            raise UsageError(
                f"the next command cannot be told of {path}: it is not UTF-8"
            ) from error


def frames_in(
    first: bytes = b"", signals: Signals | None = None, rest: float = 0
) -> Iterator[Frame]:
    """The frames on stdin, see WatchedInput. first: bytes of them that were read already. Raises
    UsageError if stdin is a terminal."""
    if not first and os.isatty(0):
        raise UsageError("frames are not read from a terminal", hint=BEGIN)
    source = WatchedInput(first, signals, rest)
    try:
        yield from FrameReader(source)
    except FrameError as error:
        if source.began and not starts_frames(source.began):
            json = source.began == b"{"
            error.hint = "toast-frames --from-json makes frames of JSON lines" if json else BEGIN
        raise


def run_filter(
    build: Callable[[Iterable[Frame], Signals], Iterator[Frame]],
    first: bytes = b"",
    write: Callable[[Frame], None] | None = None,
    heeds: bool = False,
    rest: float = 0,
) -> int:
    """Run a stage between stdin and stdout and return the exit code.

    build(frames, signals): the stage's generator. first: bytes of stdin that were read already.
    write(frame): handles each frame; by default it goes to stdout. heeds: the stage handles signals
    itself; for others a signal ends the run. rest: see WatchedInput. A failure is also sent on as
    an error frame, so that the stages downstream end with the same code.
    """
    signals = Signals()
    sends_frames = write is None
    put = write or frame_writer().write
    frames = frames_in(first, None if heeds else signals, rest)
    stage = build(_patiently(frames, signals, heeds), signals)
    interrupted = False
    try:
        for frame in stage:
            put(frame)
            interrupted = interrupted or (isinstance(frame, End) and frame.reason == "interrupt")
    except BrokenPipeError:
        _close(stage)
        if signals:
            return signals.code
        die_by_sigpipe()
    except BaseException as error:
        _close(stage)
        told = from_os_error(error, "i/o") if isinstance(error, OSError) else error
        if sends_frames and isinstance(told, Exception):
            send_error(as_toast_error(told), program())
        if told is error:
            raise
        raise told from error
    return signals.code or (130 if interrupted else 0)


def _patiently(frames: Iterable[Frame], signals: Signals, heeds: bool) -> Iterator[Frame]:
    """Pass frames on. From the first on signals are noted, no more; unless the stage heeds them,
    the run ends if one cuts the stream short."""
    tokens: int | None = None  # of the open run
    try:
        for frame in frames:
            signals.graceful = True
            kind = type(frame)
            if kind is Token and tokens is not None:
                tokens += 1
            elif kind is Head:
                tokens = 0
            elif kind is End:
                tokens = None
            yield frame
    except FrameError:  # cut off in the middle of a frame
        if heeds or not signals:
            raise
    if not heeds and signals and tokens is not None:
        yield End("interrupt", tokens)


def _close(stage: Iterator[Frame]) -> None:
    """Let the stage commit and clean up; a second failure there must not hide the first."""
    try:
        stage.close()  # type: ignore[attr-defined]  # all stages are generators
    except ToastError as error:
        print_error(error, program())


def send_error(error: ToastError, name: str) -> None:
    """Send an error down the pipe as the stream's last frame. name: the command's."""
    stage = error.stage if isinstance(error, RemoteError) and error.stage else name
    error.sent = True
    with suppress(OSError):  # nobody is reading
        FrameWriter(sys.stdout.buffer).write(Error(error.code, stage, error.message, error.hint))
