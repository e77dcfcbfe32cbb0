"""The feed: tokens from `sample` back to `decode`, over the FIFO `feed` of a run.

A message is one msgpack map, see toast-frames(5), written in one piece of less than PIPE_BUF bytes,
so that messages of several writers never mix.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from toastkit.errors import DataError, NoInputError, from_os_error
from toastkit.frames import GEARS
from toastkit.private_files import Descriptor, open_private
from toastkit.session.run import is_over

READ_BYTES = 1 << 16
OPEN_SECONDS = 5.0
RETRY_SECONDS = 0.002
ASKED = (None, *GEARS)

_pack = msgpack.Packer().pack  # its buffer is a megabyte: make it once


class FeedMessage(NamedTuple):
    """One message. pos: index of the token, None for the next. id: None only with end. gear: for
    the pass that consumes it. expected: the gear that is likely to be requested soon."""

    pos: int | None
    id: int | None
    gear: str | None = None
    end: bool = False
    expected: str | None = None


class FeedReader(Descriptor):
    """Decode's end of the FIFO. It never sees end of file: it keeps a writing end open itself, so
    that writers may come and go. Raises NoInputError, DataError if the file is no FIFO."""

    def __init__(self, path: Path | str):
        super().__init__(path, _open_fifo(path, os.O_RDWR))
        self._unpacker = msgpack.Unpacker(
            max_buffer_size=1 << 17, max_map_len=16, strict_map_key=True
        )

    def fileno(self) -> int:
        """The descriptor, for poll."""
        return self._fd

    def read_available(self) -> list[FeedMessage]:
        """The messages received, without blocking; a partial one is kept until it is complete.
        Raises DataError for anything that is not a message."""
        messages: list[FeedMessage] = []
        while True:
            try:
                data = os.read(self._fd, READ_BYTES)
            except BlockingIOError:
                return messages
            except OSError as error:
                raise from_os_error(error, "cannot read the feed") from error
            messages += self._decode(data)
            if len(data) < READ_BYTES:
                return messages

    def _decode(self, data: bytes) -> list[FeedMessage]:
        try:
            self._unpacker.feed(data)
            return [_message(fields) for fields in self._unpacker]
        except DataError:
            raise
        except Exception as error:  # msgpack raises ValueError, StackError, UnicodeDecodeError, ...
            raise DataError("cannot read the feed: not msgpack") from error


def _message(fields: Any) -> FeedMessage:
    if type(fields) is not dict:
        raise DataError(f"cannot read the feed: not a map but a {type(fields).__name__}")
    pos, token = fields.get("pos"), fields.get("id")
    gear, end = fields.get("gear"), fields.get("end", False)
    if pos is not None and (type(pos) is not int or not 0 <= pos < 2**53):
        raise DataError("cannot read the feed: pos is not a position")
    if type(end) is not bool:
        raise DataError("cannot read the feed: end is not true or false")
    if not (type(token) is int and 0 <= token < 2**32) and not (end and token is None):
        raise DataError("cannot read the feed: id is not a token id")
    expected = fields.get("expected")
    if gear not in ASKED or expected not in ASKED:
        raise DataError("cannot read the feed: gear is not low, mid or high")
    return FeedMessage(pos, token, gear, end, expected)


class FeedWriter:
    """The writing end: one FIFO, or several if one sampler feeds several decodes.

    Waits up to OPEN_SECONDS for them to exist and have readers. Raises NoInputError if that does
    not happen, or cannot as the run is over; DataError if the file is no FIFO.
    """

    def __init__(self, paths: Path | str | Iterable[Path | str]):
        self._fds: list[int] = []
        deadline = time.monotonic() + OPEN_SECONDS
        try:
            for path in [paths] if isinstance(paths, (str, Path)) else paths:
                self._fds.append(_wait_for_reader(path, deadline))
        except BaseException:
            self.close()
            raise

    def send(
        self,
        pos: int | None,
        id: int | None,
        gear: str | None = None,
        end: bool = False,
        expected: str | None = None,
    ) -> None:
        """Send one message to every FIFO. Raises BrokenPipeError if a reader has gone
        (the others still get it), DataError for invalid fields."""
        fields = {"pos": pos, "id": id, "gear": gear, "end": end, "expected": expected}
        _message(fields)
        data = _pack({k: v for k, v in fields.items() if v is not None and v is not False})
        gone: BrokenPipeError | None = None
        for fd in self._fds:
            try:
                os.write(fd, data)
            except BrokenPipeError as error:
                gone = error
            except OSError as error:
                raise from_os_error(error, "cannot write the feed", creating=True) from error
        os.sched_yield()  # decode was woken, and may be waiting for this processor
        if gone is not None:
            raise gone

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())


def _wait_for_reader(path: Path | str, deadline: float) -> int:
    """A writing descriptor; writes block while the pipe is full."""
    run = Path(path).parent
    was_there = run.exists()
    while True:
        try:
            fd = _open_fifo(path, os.O_WRONLY)
            os.set_blocking(fd, True)
            return fd
        except NoInputError:
            ended = is_over(run) or (was_there and not run.exists())
            if ended or time.monotonic() >= deadline:
                raise
        time.sleep(RETRY_SECONDS)


def _open_fifo(path: Path | str, mode: int) -> int:
    """A non-blocking descriptor. Raises NoInputError if there is no FIFO or (ENXIO) no reader."""
    try:
        return open_private(path, mode, kind=stat.S_IFIFO)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise NoInputError(f"no decode is reading the feed {path}") from None
        raise from_os_error(error, f"cannot open the feed {path}") from error
