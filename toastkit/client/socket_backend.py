"""toasted as a backend: one connection per request, closed when its replies have been read. Closing
it earlier is how a request is cancelled."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Generator
from typing import Any

from toastkit.errors import BusyError, UnavailableError
from toastkit.interrupts import Signals
from toastkit.wire import Waiter, Wire, remote_error
from toastkit.wire import connect as connect_socket

PROBE_SECONDS = 0.2  # for a killed daemon's listener to be closed
LAST = ("end", "error", "health", "status", "stopping", "reloading")  # replies that end a request


class SocketBackend:
    """The daemon that listens at `path`. connection: an open one, for the first request.
    interrupts, watch, silent: as in wire.Waiter."""

    def __init__(
        self,
        path: str,
        connection: socket.socket | None = None,
        interrupts: Signals | None = None,
        watch: int | None = None,
        silent: Callable[[], None] | None = None,
    ):
        self.path = path
        self.name = f"the daemon at {path}"
        self._connection = connection
        self._interrupts = interrupts
        self._watch = watch
        self._silent = silent

    def ask(self, request: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The replies to a request, up to the last one, or up to a signal.

        Raises UnavailableError if the daemon is not there or goes away, DataError for an invalid
        reply, BrokenPipeError once nobody reads the output.
        """
        waiter = Waiter(self._interrupts, self._watch, silent=self._silent)
        try:
            wire = Wire(self._connect(waiter), self.path, waiter)
        except InterruptedError:
            return
        if self._interrupts is not None:
            self._interrupts.graceful = True
        try:
            wire.send(request)
            begun = False
            while (reply := wire.reply()) is not None:
                yield reply
                if not reply.keys().isdisjoint(LAST):
                    return
                begun = "progress" not in reply
            if self._interrupts is None or not self._interrupts.signal:
                raise self._closed(begun)
        finally:
            wire.close()

    def _closed(self, begun: bool) -> UnavailableError:
        """The error for a connection that ended too early, in mid-answer if that had begun."""
        if not _serves_on(self.path):
            return UnavailableError(f"the daemon went away{' in mid-answer' if begun else ''}")
        if not begun:
            return UnavailableError(f"{self.name} closed the connection")
        reason = "as where too much of it waits to be read"  # see channel.py
        return UnavailableError(f"the daemon broke the connection in mid-answer, {reason}")

    def memory_warning(self) -> None:
        """Nothing: the weights are the daemon's."""

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self, waiter: Waiter) -> socket.socket:
        """The open connection or, for a later request, a new one."""
        connection, self._connection = self._connection, None
        if connection is not None and _is_over(connection):  # it was open for long: a chat
            connection.close()
            connection = None
        return connection or _connected(self.path, waiter)


def connect(
    path: str,
    interrupts: Signals | None = None,
    watch: int | None = None,
    silent: Callable[[], None] | None = None,
) -> SocketBackend | None:
    """Connect to the daemon at a path; None if nobody answers.

    Raises UnavailableError if somebody does but permission is denied.
    """
    connection = connect_socket(path, waiter=Waiter(interrupts, watch, silent=silent))
    if connection is None:
        return None
    return SocketBackend(path, connection, interrupts, watch, silent)


class SilentError(UnavailableError):
    """A daemon that does not answer: it is stopped, or hangs."""


def control(path: str, op: str, timeout: float, to_end: bool = False) -> dict[str, Any]:
    """The daemon's reply to `op`: status, stop, health, reload.

    timeout: seconds. to_end: wait until the daemon has closed the connection, which it does last of
    all. Raises the error that the daemon replies with, UnavailableError if none is there,
    SilentError if it does not answer in time, BusyError if it has not ended then.
    """
    waiter = Waiter(deadline=time.monotonic() + timeout)
    last: dict[str, Any] | None = None
    wire: Wire | None = None
    try:
        try:
            connection = _connected(path, waiter)
        except UnavailableError as error:
            error.hint = None  # it is for who could do without a daemon
            raise
        wire = Wire(connection, path, waiter)
        wire.send({"op": op})
        while (last is None or to_end) and (reply := wire.reply()) is not None:
            if "error" in reply:
                raise remote_error(reply["error"])
            if not reply.keys().isdisjoint(LAST):
                last = reply
    except TimeoutError as error:
        hint = _killing_hint(path)
        if last is None:
            raise SilentError(f"the daemon at {path} does not answer", hint=hint) from error
        message = f"the daemon at {path} is still finishing requests"
        raise BusyError(message, hint=hint) from error
    finally:
        if wire is not None:
            wire.close()
    if last is None:
        raise UnavailableError(f"the daemon at {path} closed the connection")
    return last


def _killing_hint(path: str) -> str:
    from toastkit.daemon.pidfile import process_at

    number = process_at(path)
    return "wait, or kill it" if number is None else f"wait, or kill it: it is process {number}"


def _connected(path: str, waiter: Waiter) -> socket.socket:
    connection = connect_socket(path, waiter=waiter)
    if connection is None:
        raise UnavailableError(f"no daemon answers at {path}")
    return connection


def _serves_on(path: str) -> bool:
    """True if a daemon still takes connections. One that is being killed may seem to for a moment:
    the system closes its descriptors one after the other, the listener not always first."""
    try:
        again = connect_socket(path, waiter=Waiter(deadline=time.monotonic() + PROBE_SECONDS))
    except TimeoutError:
        return True  # it is there, and busy or stopped
    if again is None:
        return False
    with again:
        ended = select.select([again], [], [], PROBE_SECONDS)[0]
        return not (ended and _is_over(again))


def _is_over(connection: socket.socket) -> bool:
    """True if the other end has closed a connection, and left nothing to read."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
