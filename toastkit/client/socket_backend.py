"""toasted as a backend: one connection a request, closed when its replies have been read. Closing
it sooner cancels the request, and that is all there is to cancelling."""

from __future__ import annotations

import socket
import time
from collections.abc import Generator
from typing import Any

from toastkit.errors import BusyError, UnavailableError
from toastkit.interrupts import Signals
from toastkit.wire import Wire, remote_error
from toastkit.wire import connect as connect_socket

LAST = ("end", "error", "health", "status", "stopping", "reloading")  # what ends a request


class SocketBackend:
    """The daemon that listens at `path`. connection: an open one, for the first request.
    interrupts, watch: as of wire.Wire."""

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

    def ask(self, request: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The replies to a request, up to the last one, or up to a signal.

        Raises UnavailableError where the daemon is not there or goes away, DataError for what is no
        reply, BrokenPipeError once nobody reads what is written.
        """
        wire = Wire(self._connect(), self.path, self._interrupts, self._watch)
        if self._interrupts is not None:
            self._interrupts.patient = True
        try:
            wire.send(request)
            begun = False
            while (reply := wire.reply()) is not None:
                yield reply
                if not reply.keys().isdisjoint(LAST):
                    return
                begun = True
            if self._interrupts is None or not self._interrupts.signal:
                closed = f"{self.name} closed the connection"
                raise UnavailableError("the daemon went away in mid-answer" if begun else closed)
        finally:
            wire.close()

    def memory_warning(self) -> None:
        """Nothing: the weights are the daemon's."""

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
        return connection or _connected(self.path)


def connect(
    path: str, interrupts: Signals | None = None, watch: int | None = None
) -> SocketBackend | None:
    """The daemon at a path, connected; None where nobody answers.

    Raises UnavailableError where somebody does but may not be asked.
    """
    connection = connect_socket(path)
    return None if connection is None else SocketBackend(path, connection, interrupts, watch)


def control(
    path: str, op: str, timeout: float | None = None, to_end: bool = False
) -> dict[str, Any]:
    """What a daemon replies to `op`: status, stop, health, reload.

    timeout: seconds, None waits as long as it takes. to_end: until the daemon has closed the
    connection, which it does last of all. Raises the error that the daemon replies with, and
    UnavailableError where none answers, or not in time; to_end: BusyError.
    """
    connection = _connected(path)
    deadline = None if timeout is None else time.monotonic() + timeout
    wire = Wire(connection, path, deadline=deadline)
    last: dict[str, Any] | None = None
    try:
        wire.send({"op": op})
        while (last is None or to_end) and (reply := wire.reply()) is not None:
            if "error" in reply:
                raise remote_error(reply["error"])
            if not reply.keys().isdisjoint(LAST):
                last = reply
    except TimeoutError as error:
        if to_end:
            what = "does not answer" if last is None else "is still finishing requests"
            raise BusyError(f"{wire.name} {what}", hint="wait, or kill it") from error
        raise UnavailableError(f"{wire.name} does not answer") from error
    finally:
        wire.close()
    if last is None:
        raise UnavailableError(f"{wire.name} closed the connection")
    return last


def _connected(path: str) -> socket.socket:
    connection = connect_socket(path)
    if connection is None:
        raise UnavailableError(f"no daemon answers at {path}")
    return connection


def _is_over(connection: socket.socket) -> bool:
    """Whether the other end has closed a connection, and left nothing to read."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
