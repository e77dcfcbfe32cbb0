"""toasted as a backend: one connection a request, closed when its replies have been read. Closing
it sooner cancels the request, and that is all there is to cancelling."""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import time
from collections.abc import Iterator
from typing import Any

from toastkit.client.backend import remote_error
from toastkit.errors import DataError, UnavailableError
from toastkit.interrupts import Signals

MAX_REPLY = 64 << 20  # bytes of a line; the longest is an `end` with the whole answer
NOBODY = (errno.ENOENT, errno.ENOTDIR, errno.ECONNREFUSED)
GONE = select.POLLERR | select.POLLHUP | select.POLLNVAL
LAST = ("end", "error", "health", "status", "stopping", "reloading")  # what ends a request


class SocketBackend:
    """The daemon that listens at `path`. connection: an open one, for the first request.

    interrupts: where given, a signal ends the replies. watch: a pipe or a socket, such as stdout;
    once nobody reads there any more, asking ends with BrokenPipeError.
    """

    def __init__(
        self,
        path: str,
        connection: socket.socket | None = None,
        interrupts: Signals | None = None,
        watch: int | None = None,
    ):
        self.path = path
        self.name = f"the daemon at {path}"
        self._connection = connection
        self._interrupts = interrupts
        self._watch = watch

    def ask(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The replies to a request, up to the last one, or up to a signal.

        Raises UnavailableError where the daemon is not there or goes away, DataError for what is no
        reply, BrokenPipeError once nobody reads what is written.
        """
        wire = Wire(self._connect(), self._interrupts, self._watch)
        if self._interrupts is not None:
            self._interrupts.patient = True
        try:
            wire.send(encode(request))
            begun = False
            while (line := wire.line()) is not None:
                reply = _decoded(line, self.name)
                yield reply
                if not reply.keys().isdisjoint(LAST):
                    return
                begun = True
            if self._interrupts is None or not self._interrupts.signal:
                raise _lost(begun, self.name)
        finally:
            wire.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self) -> socket.socket:
        """The connection that is there, or, for a later request, another one."""
        connection, self._connection = self._connection, None
        if connection is not None and _is_over(connection):  # it was open for long: a chat
            connection.close()
            connection = None
        connection = connection or _connected(self.path)
        if connection is None:
            raise UnavailableError(f"no daemon answers at {self.path}")
        return connection


class Wire:
    """Lines to and from a connected socket, without ever waiting where a signal would not help."""

    def __init__(
        self,
        connection: socket.socket,
        interrupts: Signals | None = None,
        watch: int | None = None,
        deadline: float | None = None,
    ):
        connection.setblocking(False)
        self._socket = connection
        self._interrupts = interrupts
        self._deadline = deadline
        self._watch = watch
        self._poll = select.poll()
        if interrupts is not None:
            self._poll.register(interrupts.fileno(), select.POLLIN)
        if watch is not None:
            self._poll.register(watch, 0)
        self._buffer = bytearray()
        self._searched = 0

    def send(self, data: bytes) -> None:
        """Sends all of it, or as much as the other end takes before it closes: what it had to say
        about the rest can still be read."""
        view = memoryview(data)
        while view.nbytes:
            try:
                view = view[self._socket.send(view) :]
            except BlockingIOError:
                if not self._wait(select.POLLOUT):
                    return
            except OSError:
                return

    def line(self) -> bytes | None:
        """The next line; None at the end, or after a signal. Raises DataError for one over
        MAX_REPLY bytes, TimeoutError past the deadline, BrokenPipeError where nobody reads us."""
        while (end := self._buffer.find(b"\n", self._searched)) < 0:
            self._searched = len(self._buffer)
            if self._searched > MAX_REPLY:
                raise DataError(f"the daemon sent a line of more than {MAX_REPLY >> 20} MiB")
            if not self._fill():
                return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._searched = 0
        return line

    def close(self) -> None:
        self._socket.close()

    def _fill(self) -> bool:
        while self._wait(select.POLLIN):
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                continue
            except OSError:
                return False
            self._buffer += data
            return bool(data)
        return False

    def _wait(self, events: int) -> bool:
        """Until the socket is ready for `events`; False if a signal came first."""
        self._poll.register(self._socket, events)
        while True:
            left = None if self._deadline is None else self._deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            ready = dict(self._poll.poll(None if left is None else left * 1000))
            if self._interrupts is not None and self._interrupts.signal:
                return False
            if self._watch is not None and ready.get(self._watch, 0) & GONE:
                raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
            if self._socket.fileno() in ready:
                return True


def connect(
    path: str, interrupts: Signals | None = None, watch: int | None = None
) -> SocketBackend | None:
    """The daemon at a path, connected; None where nobody answers.

    Raises UnavailableError where somebody does but may not be asked.
    """
    connection = _connected(path)
    return None if connection is None else SocketBackend(path, connection, interrupts, watch)


def control(path: str, op: str, timeout: float | None = None) -> dict[str, Any]:
    """What a daemon replies to `op`: status, stop, health, reload.

    timeout: seconds, None waits as long as it takes. Raises the error that the daemon replies with,
    and UnavailableError where none answers, or not in time.
    """
    connection = _connected(path)
    if connection is None:
        raise UnavailableError(f"no daemon answers at {path}")
    name = f"the daemon at {path}"
    wire = Wire(connection, deadline=None if timeout is None else time.monotonic() + timeout)
    try:
        wire.send(encode({"op": op}))
        while (line := wire.line()) is not None:
            reply = _decoded(line, name)
            if "error" in reply:
                raise remote_error(reply["error"])
            if not reply.keys().isdisjoint(LAST):
                return reply
    except TimeoutError as error:
        raise UnavailableError(f"{name} does not answer") from error
    finally:
        wire.close()
    raise UnavailableError(f"{name} closed the connection")


def encode(request: dict[str, Any]) -> bytes:
    """The line of a request. Raises DataError for text that is not UTF-8, as an argument may be."""
    try:
        return json.dumps(request, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except UnicodeEncodeError as error:
        raise DataError("the request is not UTF-8") from error


def _lost(begun: bool, name: str) -> UnavailableError:
    if begun:
        return UnavailableError(
            "the daemon went away in mid-answer", hint="toast -c goes on from the last turn"
        )
    return UnavailableError(f"{name} closed the connection")


def _is_over(connection: socket.socket) -> bool:
    """Whether the other end has closed a connection, and left nothing to read."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _decoded(line: bytes, name: str) -> dict[str, Any]:
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError):  # not UTF-8 is a ValueError too
        reply = None
    if not isinstance(reply, dict):
        raise DataError(f"what {name} sent is not a reply", hint="is it toasted?")
    return reply


def _connected(path: str) -> socket.socket | None:
    """A connected socket, None where nobody listens. The listener has to be us or root: anybody
    else would read what is asked."""
    from toastkit.daemon.peer import peer_of

    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
        owner = peer_of(connection).uid
    except OSError as error:
        connection.close()
        if error.errno in NOBODY:
            return None
        reason = (error.strerror or str(error)).lower()
        raise UnavailableError(
            f"cannot reach the daemon at {path}: {reason}", hint="--no-daemon does without it"
        ) from error
    except BaseException:
        connection.close()
        raise
    if os.geteuid() not in (0, owner) and owner != 0:
        connection.close()
        raise UnavailableError(f"what listens at {path} is another user's (uid {owner})")
    return connection
