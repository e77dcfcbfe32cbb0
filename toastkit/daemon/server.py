"""The event loop that serves all connections on one thread with poll(2), never blocking on a
client.

A connection has one request at a time; its next line is read when the previous request has ended
and its replies have been read. Requests go to the worker, which answers from its own thread; status
and stop requests are answered here.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from toastkit import __version__
from toastkit.daemon.channel import Channel, encode, error_reply
from toastkit.daemon.connection import Connection, close_all
from toastkit.daemon.listening import address_of
from toastkit.daemon.requests import ATTACH_OPS, Request, make_request, parse_object, request_id
from toastkit.daemon.service_settings import Limits
from toastkit.descriptors import GONE
from toastkit.errors import BusyError, ToastError, UnavailableError, as_toast_error, drop_frames
from toastkit.text.exact_numbers import are, counted
from toastkit.wire import may_connect, peer_of

if TYPE_CHECKING:
    from toastkit.daemon.worker import Worker

LINES_PER_TURN = 64  # of one connection, before the others get their turn
ACCEPTS_PER_TURN = 64
GOODBYE_SECONDS = 2.0  # for a dismissed client to read why
PAUSE_SECONDS = 0.2  # in accepting, when out of descriptors
_RUN_OUT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Server:
    """Listening sockets and connections.

    listeners: listening Unix sockets. on_stop, on_reload: handlers of these requests. debug: called
    with one line for every connection closed for a reason. wake_fd: wakes the loop when written to,
    for signal.set_wakeup_fd; non-blocking.
    """

    def __init__(
        self,
        listeners: Iterable[socket.socket],
        worker: Worker,
        limits: Limits,
        on_stop: Callable[[], None],
        on_reload: Callable[[], None],
        debug: Callable[[str], None] | None = None,
    ):
        self._worker = worker
        self._limits = limits
        self._on_stop, self._on_reload = on_stop, on_reload
        self._debug = debug or (lambda line: None)
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._where = [address_of(listener) for listener in self._listeners.values()]
        self._connections: dict[int, Connection] = {}
        self._attention: deque[Connection] = deque()
        self._accept_after: float | None = None
        self._sweep_at: float | None = None
        self._started = time.monotonic()
        self._served = self._refused = 0
        self._wake_read, self.wake_fd = os.pipe()
        self._awake = False
        self._poll = select.poll()
        for end in (self._wake_read, self.wake_fd):
            os.set_blocking(end, False)
        self._poll.register(self._wake_read, select.POLLIN)
        for fd, listener in self._listeners.items():
            listener.setblocking(False)
            self._poll.register(fd, select.POLLIN)

    # ------------------------------------------------------------------- for other threads

    def wake(self) -> None:
        """Wake the loop. From any thread."""
        if not self._awake:
            self._awake = True
            with suppress(OSError):  # full: it wakes in any case; closed: there is nobody to wake
                os.write(self.wake_fd, b"!")

    def _attend(self, connection: Connection) -> None:
        self._attention.append(connection)
        self.wake()

    # ----------------------------------------------------------------------------- the loop

    @property
    def connected(self) -> bool:
        """True if any client is connected."""
        return bool(self._connections)

    @property
    def unsent(self) -> bool:
        """True if any client has unsent replies."""
        return any(connection.outbox.pending for connection in self._connections.values())

    @property
    def attached(self) -> bool:
        """True if the worker has data of any client's connection."""
        return any(connection.store for connection in self._connections.values())

    def step(self, timeout_seconds: float | None = None) -> None:
        """Wait for events, up to the timeout, and handle them."""
        accepting = False
        for fd, events in self._poll.poll(self._milliseconds(timeout_seconds)):
            if fd == self._wake_read:
                with suppress(BlockingIOError):
                    while len(os.read(fd, 4096)) == 4096:
                        pass
            elif fd in self._listeners:
                accepting = True
            elif fd in self._connections:
                self._guarded(self._connections[fd], self._happened, events)
        self._awake = False
        for _ in range(len(self._attention)):
            self._guarded(self._attention.popleft(), self._on_change)
        now = time.monotonic()
        if self._accept_after is not None and now >= self._accept_after:
            self._pause(None)
        elif accepting:
            self._accept()
        if self._sweep_at is not None and now >= self._sweep_at:
            self._sweep(now)

    def _milliseconds(self, timeout: float | None) -> float | None:
        """Timeout for poll: no later than the next deadline."""
        if self._attention:
            return 0
        now = time.monotonic()
        due = [t - now for t in (self._accept_after, self._sweep_at) if t is not None]
        if timeout is not None:
            due.append(timeout)
        return max(min(due), 0) * 1000 + 1 if due else None

    def _guarded(self, connection: Connection, action: Callable[..., None], *arguments) -> None:
        """Confine a failure to its connection, which ends."""
        try:
            action(connection, *arguments)
        except Exception as error:
            self._close(connection, f"{type(error).__name__}: {error}")

    # ------------------------------------------------------------------------- new connections

    def _accept(self) -> None:
        for listener in list(self._listeners.values()):
            for _ in range(ACCEPTS_PER_TURN):
                try:
                    new, _ = listener.accept()
                except BlockingIOError:
                    break
                except ConnectionAbortedError:
                    continue
                except OSError as error:
                    self._debug(f"cannot accept a connection: {error.strerror}")
                    if error.errno in _RUN_OUT:
                        # It would be reported again and again: open connections have to end first.
                        self._pause(time.monotonic() + PAUSE_SECONDS)
                    return
                self._welcome(new)

    def _pause(self, until: float | None) -> None:
        """Stop accepting until a time; None: resume."""
        self._accept_after = until
        for fd in self._listeners:
            self._poll.modify(fd, select.POLLIN if until is None else 0)

    def _welcome(self, new: socket.socket) -> None:
        try:
            peer = peer_of(new)
        except OSError:
            new.close()
            return
        crowd = len(self._connections)
        if not may_connect(peer) or crowd >= 2 * self._limits.connections:
            self._refused += 1
            self._debug(f"process {peer.pid} of user {peer.uid} is not let in")
            new.close()
            return
        connection = Connection(new, peer, self._limits.line_bytes, self._attend)
        self._connections[connection.fileno()] = connection
        if crowd >= self._limits.connections:
            limit = self._limits.connections
            many = f"busy: there {are(limit)} {counted(limit, 'connection')}"
            self._dismiss(connection, BusyError(many, hint="try again later"))
        else:
            self._sweep_by(connection.touched + self._limits.idle_seconds)
        self._watch(connection)

    def _dismiss(self, connection: Connection, error: ToastError) -> None:
        """Tell the client why, and give it a moment to read that."""
        self._refused += 1
        connection.outbox.put(encode(error_reply(error), None))
        connection.say_goodbye(GOODBYE_SECONDS)
        self._sweep_by(time.monotonic() + GOODBYE_SECONDS)

    # ------------------------------------------------------------------------- one connection

    def _happened(self, connection: Connection, events: int) -> None:
        if events & GONE:
            connection.outbox.hang_up()
        elif events & select.POLLOUT:
            connection.outbox.flush()
            connection.touched = time.monotonic()
        if events & select.POLLIN and not connection.outbox.gone:
            with suppress(BlockingIOError):
                connection.read()
        self._on_change(connection)

    def _on_change(self, connection: Connection) -> None:
        """Handle a change: bytes received or sent, the request or the connection ended; or go on
        with the lines that one turn has left."""
        if connection.channel is not None and connection.channel.over:
            connection.channel = None
            connection.touched = time.monotonic()
            self._served += 1
        if connection.outbox.gone:  # or closed already
            self._close(connection)
        else:
            self._advance(connection)

    def _advance(self, connection: Connection) -> None:
        """Process the available lines, as far as one turn allows."""
        for _ in range(LINES_PER_TURN):
            if connection.busy:
                break
            try:
                line = connection.next_line()
            except ToastError as error:
                self._dismiss(connection, error)
                break
            if line is None:
                break
            if not line[0].strip():
                close_all(line[1])
            else:
                self._request(connection, *line)
        else:
            self._attention.append(connection)
        ended = connection.eof and (connection.ends is not None or not connection.buffered)
        if ended and connection.channel is None and not connection.outbox.pending:
            self._close(connection)
        else:
            self._watch(connection)

    def _request(self, connection: Connection, line: bytes, fds: list[int]) -> None:
        """Answer a line, or hand it to the worker."""
        channel = Channel(connection)
        kept = False
        try:
            document = parse_object(line)
            channel.identity = request_id(document)
            request = make_request(document, fds)
            if not self._answered(request, channel):
                kept = request.op in ATTACH_OPS
                connection.channel = channel  # before it may be done
                self._worker.submit(request, channel)
        except Exception as error:
            kept, connection.channel = False, None
            self._refused += 1
            told = as_toast_error(error)
            channel.reply(error_reply(told))
            if told is not error:
                self._debug(told.message)
            drop_frames(error)  # they hold the line and what was made of it, and `told` them
        finally:
            if not kept:
                close_all(fds)

    def _answered(self, request: Request, channel: Channel) -> bool:
        """Answer a request that is for the daemon rather than the model; False if it is not."""
        if request.op == "status":
            channel.reply({"status": self.status()})
        elif request.op == "stop":
            self._on_stop()
            channel.reply({"stopping": True})
        elif request.op == "reload":
            if not self._listeners:
                raise UnavailableError("the daemon is shutting down")
            self._on_reload()
            channel.reply({"reloading": True})
        else:
            return False
        self._served += 1
        return True

    def status(self) -> dict[str, Any]:
        """The daemon's status: the worker's part and the front's."""
        return {
            "pid": os.getpid(),
            "version": __version__,
            "uptime": round(time.monotonic() - self._started, 3),
            "socket": self._where[0] if len(self._where) == 1 else self._where,
            "connections": len(self._connections),
            "served": self._served,
            "refused": self._refused,
            **self._worker.status(),
        }

    def _watch(self, connection: Connection) -> None:
        """Register the connection's events with poll."""
        events = connection.events()
        if connection.watched is None:
            self._poll.register(connection.fileno(), events)
        elif events != connection.watched:
            self._poll.modify(connection.fileno(), events)
        connection.watched = events

    def _close(self, connection: Connection, *why: str) -> None:
        fd, reasons = connection.fileno(), list(why)
        if self._connections.get(fd) is connection:
            del self._connections[fd]
            if connection.watched is not None:
                self._poll.unregister(fd)
        try:
            connection.close()
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}")
        for reason in reasons:
            self._debug(f"connection of process {connection.peer.pid} closed: {reason}")

    # ----------------------------------------------------------------------------- time and end

    def _sweep_by(self, when: float) -> None:
        self._sweep_at = when if self._sweep_at is None else min(when, self._sweep_at)

    def _sweep(self, now: float) -> None:
        """Close connections past their deadline, and schedule the next sweep."""
        self._sweep_at = None
        for connection in list(self._connections.values()):
            ends = connection.ends
            if ends is None:
                at_work = connection.channel is not None or bool(connection.store)
                ends = (now if at_work else connection.touched) + self._limits.idle_seconds
            if now >= ends:
                self._close(connection, "its time is over")
            else:
                self._sweep_by(ends)

    def fail_all(self, error: ToastError) -> None:
        """End all running requests with an error."""
        for connection in self._connections.values():
            if connection.channel is not None and not connection.channel.over:
                connection.channel.reply(error_reply(error))
                connection.channel.done()

    def stop_listening(self) -> None:
        """Close the listening sockets; connections stay, new ones are refused."""
        for fd, listener in self._listeners.items():
            self._poll.unregister(fd)
            listener.close()
        self._listeners = {}
        self._accept_after = None

    def close(self) -> None:
        """Close everything."""
        self.stop_listening()
        for connection in list(self._connections.values()):
            self._close(connection)
        for end in (self._wake_read, self.wake_fd):
            os.close(end)
        self._wake_read = self.wake_fd = -1
