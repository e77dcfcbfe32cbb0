"""A client connection on the front's thread: bytes in, lines and descriptors out.

A descriptor (SCM_RIGHTS) belongs to the line it was sent with. Linux ends a recvmsg(2) with the
segment that carries descriptors, so that is the line of the last byte received. Elsewhere later
bytes may be included; so a client that sends descriptors waits for the reply to that line before it
sends the next.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from toastkit.daemon.channel import Channel, Outbox
from toastkit.errors import DataError
from toastkit.wire import Peer

READ_BYTES = 1 << 16
MAX_FDS = 8  # per recvmsg, and pending per connection
_INT = struct.Struct("i")


class Connection:
    """peer: its credentials. store: the worker's per-connection data; while it is not empty the
    connection is not closed for being idle. on_close: called once on closing, on the front's
    thread; a request may still be running then. channel: of the running request, if any. eof: the
    client sends no more. touched: time.monotonic() of the last activity. ends: deadline for
    closing, once it has been told to go; its input is discarded until then."""

    def __init__(
        self,
        connection: socket.socket,
        peer: Peer,
        max_line: int,
        attend: Callable[[Connection], None],
    ):
        connection.setblocking(False)
        self.peer = peer
        self.attend = lambda: attend(self)  # has the loop handle it; thread-safe
        self.outbox = Outbox(connection, self.attend)
        self.store: dict[str, Any] = {}
        self.on_close: list[Callable[[], None]] = []
        self.channel: Channel | None = None
        self.eof = False
        self.ends: float | None = None
        self.touched = time.monotonic()
        self.watched: int | None = None  # the events that the loop polls for, once it does
        self._socket = connection
        self._fd = connection.fileno()
        self._max_line = max_line
        self._input = bytearray()
        self._scanned = 0  # bytes of it known to hold no newline
        self._received = 0  # bytes, in total
        self._taken = 0
        self._fds: list[tuple[int, list[int]]] = []  # with the end of the segment they came with

    def fileno(self) -> int:
        """The descriptor, also after closing: the loop's key for the connection."""
        return self._fd

    @property
    def busy(self) -> bool:
        """True if the next line must wait, for the current request or for the client to read."""
        return self.channel is not None or self.outbox.pending > 0 or self.ends is not None

    @property
    def buffered(self) -> int:
        """Bytes received that are not yet processed."""
        return len(self._input)

    def events(self) -> int:
        """The events to poll for; a hang-up is reported in any case."""
        wanted = select.POLLOUT if self.outbox.pending else 0
        if not self.eof and (self.ends is not None or len(self._input) <= self._max_line):
            wanted |= select.POLLIN
        return wanted

    def read(self) -> None:
        """Receive once. Raises OSError, and DataError for descriptors that cannot be taken."""
        if self.ends is not None:
            self.eof = not self._socket.recv(READ_BYTES)  # the kernel drops descriptors
            return
        size = socket.CMSG_SPACE(MAX_FDS * _INT.size)
        flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        data, messages, flags, _ = self._socket.recvmsg(READ_BYTES, size, flags)
        fds = _descriptors(messages)
        self._received += len(data)
        if fds:
            self._fds.append((self._received, fds))
        if flags & socket.MSG_CTRUNC or sum(len(some) for _, some in self._fds) > MAX_FDS:
            raise DataError(f"more than {MAX_FDS} descriptors, or none free here")
        self.eof = not data
        self.touched = time.monotonic()
        self._input += data

    def next_line(self) -> tuple[bytes, list[int]] | None:
        """The next complete line without its newline, and its descriptors; None if there is none
        yet. The last line before EOF may lack the newline.

        Raises DataError for a line over the limit; nothing can be read after that.
        """
        end = self._input.find(b"\n", self._scanned)
        if end < 0:
            self._scanned = end = len(self._input)
            if end <= self._max_line and not (self.eof and end):
                return None
        if end > self._max_line:
            raise DataError(
                f"request: the line is longer than {self._max_line} bytes",
                hint="toasted --max-line sets the limit",
            )
        with memoryview(self._input) as view:
            line = bytes(view[:end])
        del self._input[: end + 1]
        self._taken, self._scanned = self._taken + end + 1, 0
        fds: list[int] = []
        while self._fds and self._fds[0][0] <= self._taken:
            fds += self._fds.pop(0)[1]
        return line, fds

    def say_goodbye(self, seconds: float) -> None:
        """Send nothing more, and discard input for some time. Closing at once would reset the
        connection, and a client that is still writing would lose the reply."""
        self.outbox.finish()
        self.ends = time.monotonic() + seconds
        self._drop_input()

    def close(self) -> None:
        """Close, drop what is unsent, and call on_close callbacks. Idempotent. Raises what they
        raise, after all have been called."""
        self.outbox.close()
        self._drop_input()
        failure: Exception | None = None
        while self.on_close:
            try:
                self.on_close.pop(0)()
            except Exception as error:
                failure = error
        if failure is not None:
            raise failure

    def _drop_input(self) -> None:
        self._input = bytearray()
        self._scanned = 0
        for _, fds in self._fds:
            close_all(fds)
        self._fds = []


def _descriptors(messages: list[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors in the ancillary data of a recvmsg."""
    fds: list[int] = []
    for level, kind, data in messages:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds += (fd for (fd,) in _INT.iter_unpack(data[: len(data) // _INT.size * _INT.size]))
    for fd in fds:
        os.set_inheritable(fd, False)  # for systems where recvmsg's flag does not
    return fds


def close_all(fds: list[int]) -> None:
    """Close descriptors that came with a line."""
    for fd in fds:
        with suppress(OSError):  # already closed by whoever took it
            os.close(fd)
