"""A Unix socket between a client and the daemon: peer credentials, and lines of JSON.

Peer credentials come from the kernel and cannot be forged. Linux has SO_PEERCRED; macOS
LOCAL_PEERCRED and LOCAL_PEERPID, written from its headers and not yet run there. Elsewhere they are
unknown, and the modes of socket and directory have to suffice.
"""

from __future__ import annotations

import errno
import json
import math
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from toastkit.descriptors import GONE
from toastkit.errors import DataError, ToastError, UnavailableError
from toastkit.interrupts import Interrupt

MAX_REPLY = 64 << 20  # bytes of a line; the longest is an answer's whole text, or a step's logits
NOBODY = (errno.ENOENT, errno.ENOTDIR, errno.ECONNREFUSED)
SILENCE_SECONDS = 5.0  # without a reply, until that is told
GRACE_SECONDS = 5.0  # for each reply, once nobody reads the output: a step, and the commit
RETRY_SECONDS = 0.02  # between attempts to connect where too many wait for the listener

_UCRED = struct.Struct("iII")  # Linux: pid, uid, gid
_XUCRED = struct.Struct("IIh2x16I")  # macOS: version, uid, number of groups, groups
_SOL_LOCAL, _LOCAL_PEERCRED, _LOCAL_PEERPID = 0, 1, 2


class Peer(NamedTuple):
    """uid: the user who connected. pid: the process that did, 0 if unknown."""

    uid: int
    pid: int


def peer_of(connection: socket.socket) -> Peer:
    """Return the peer of a connected Unix socket. Raises OSError if it has gone already."""
    if hasattr(socket, "SO_PEERCRED"):
        data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        pid, uid, _ = _UCRED.unpack(data)
        return Peer(uid, pid)
    if sys.platform == "darwin":
        data = connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED.size)
        pid = connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERPID)
        return Peer(_XUCRED.unpack(data.ljust(_XUCRED.size, b"\0"))[1], pid)
    return Peer(os.geteuid(), 0)


def may_connect(peer: Peer) -> bool:
    """True for the daemon's own user and root, whom alone it serves."""
    return peer.uid in (os.geteuid(), 0)


class Waiter:
    """Waits for one daemon, never blocking where a signal would not help.

    interrupts: if given, a signal ends the waiting. watch: a pipe or a socket, such as stdout; once
    it has no reader, waiting ends with BrokenPipeError, unless the socket is ready within `grace`
    seconds. deadline: of time.monotonic; past it, waiting ends with TimeoutError. silent: called
    once if nothing has come after SILENCE_SECONDS.
    """

    def __init__(
        self,
        interrupts: Interrupt | None = None,
        watch: int | None = None,
        deadline: float | None = None,
        silent: Callable[[], None] | None = None,
        grace: float = 0.0,
    ):
        self._interrupts = interrupts
        self._watch = watch
        self._grace, self._gone = grace, False
        self._deadline = math.inf if deadline is None else deadline
        self._silent = silent
        self._tell_at = math.inf if silent is None else time.monotonic() + SILENCE_SECONDS
        self._poll = select.poll()
        if interrupts is not None:
            self._poll.register(interrupts.fileno(), select.POLLIN)
        if watch is not None:
            self._poll.register(watch, 0)

    def heed_no_more(self) -> None:
        """Leave signals to others from now on."""
        if self._interrupts is not None:
            self._poll.unregister(self._interrupts.fileno())
            self._interrupts = None

    def heard(self) -> None:
        """Note that something has come: silence after that is not told."""
        self._tell_at = math.inf

    def ready(self, connection: socket.socket, events: int) -> bool:
        """Wait until a socket is ready for `events`; False if a signal came first."""
        self._poll.register(connection, events)
        patient_until = time.monotonic() + self._grace
        while (found := self._look(patient_until if self._gone else math.inf)) is not None:
            if connection.fileno() in found:
                return True
            if self._gone and time.monotonic() >= patient_until:
                raise _no_reader()
        return False

    def pause(self, seconds: float) -> bool:
        """Wait for so long; False if a signal came first."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._look(until) is None:
                return False
            if self._gone:
                raise _no_reader()
        return True

    def _look(self, until: float = math.inf) -> dict[int, int] | None:
        """Poll once, up to a time at most; the events by descriptor, None for a signal."""
        now = time.monotonic()
        if now >= self._deadline:
            raise TimeoutError
        if self._silent is not None and now >= self._tell_at:
            self._tell_at = math.inf
            self._silent()
        left = min(until, self._deadline, self._tell_at) - now
        found = dict(self._poll.poll(None if left == math.inf else max(left, 0) * 1000))
        interrupts = self._interrupts
        if interrupts is not None and interrupts.fileno() in found and interrupts.noted():
            return None
        if self._watch is not None and found.get(self._watch, 0) & GONE:
            if not self._grace:
                raise _no_reader()
            self._poll.unregister(self._watch)
            self._watch, self._gone = None, True
        return found


def _no_reader() -> BrokenPipeError:
    return BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def connect(path: str, own: bool = False, waiter: Waiter | None = None) -> socket.socket | None:
    """Return a connected socket, None if nobody listens. Raises UnavailableError if the listener
    cannot be reached, or is neither this user nor root and so could read the requests. Root may
    connect to anybody, except with `own`.

    Where too many connections wait for the listener, it is tried again, up to what ends the
    waiter's waiting; a signal raises InterruptedError.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    waiter = waiter or Waiter()
    try:
        connection.setblocking(False)
        while not _connected(connection, path):
            if not waiter.pause(RETRY_SECONDS):
                raise InterruptedError
        peer = peer_of(connection)
    except (BrokenPipeError, InterruptedError, TimeoutError):
        connection.close()
        raise
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
    if may_connect(peer) or (os.geteuid() == 0 and not own):
        return connection
    connection.close()
    raise UnavailableError(f"what listens at {path} is another user's (uid {peer.uid})")


def _connected(connection: socket.socket, path: str) -> bool:
    """Connect a non-blocking socket; False if the listener's backlog is full. (Blocking, connect(2)
    waits until the listener accepts, for ever if it is stopped.)"""
    try:
        connection.connect(path)
    except BlockingIOError:
        return False
    return True


class Wire:
    """Requests to the daemon at `path` and its replies, over a connected socket. waiter: waits for
    them. refusal: raised for what is no reply. over: the connection has ended.
    """

    def __init__(
        self,
        connection: socket.socket,
        path: str,
        waiter: Waiter | None = None,
        refusal: type[ToastError] = DataError,
    ):
        connection.setblocking(False)
        self.name = f"the daemon at {path}"
        self._socket = connection
        self._waiter = waiter or Waiter()
        self._refusal = refusal
        self._buffer = bytearray()
        self.over = False

    def send(self, request: dict[str, Any], fd: int | None = None) -> None:
        """Send a request, or as much as the peer takes before it closes: its reply can still be
        read. fd: a descriptor to pass with it. Raises DataError for text that is not UTF-8, as an
        argument may be."""
        try:
            line = json.dumps(request, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        except UnicodeEncodeError as error:
            raise DataError("the request is not UTF-8") from error
        view = memoryview(line)
        while view.nbytes and not self.over:
            try:
                if fd is None:
                    view = view[self._socket.send(view) :]
                else:
                    view, fd = view[socket.send_fds(self._socket, [view], [fd]) :], None
            except BlockingIOError:
                if not self._waiter.ready(self._socket, select.POLLOUT):
                    return
            except OSError:
                return

    def reply(self) -> dict[str, Any] | None:
        """Return the next reply; None at the end, or after a signal. Nothing follows a refusal."""
        line = self._line()
        if line is None:
            return None
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):  # invalid UTF-8 is a ValueError too
            reply = None
        return reply if isinstance(reply, dict) else self.refuse()

    def refuse(self) -> NoReturn:
        """Raise the error for what is no reply."""
        self.over = True
        self._buffer.clear()
        raise self._refusal(f"what {self.name} sent is not a reply", hint="is it toasted?")

    def close(self) -> None:
        """Close the connection, which ends whatever the daemon was doing for it."""
        self._socket.close()

    def _line(self) -> bytes | None:
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if searched > MAX_REPLY:
                self.over = True
                raise self._refusal(f"the daemon sent a line of more than {MAX_REPLY >> 20} MiB")
            if not self._fill():
                return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def _fill(self) -> bool:
        while not self.over and self._waiter.ready(self._socket, select.POLLIN):
            try:
                data = self._socket.recv(1 << 18)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            self._buffer += data
            self._waiter.heard()
            self.over = not data
            return bool(data)
        return False


def remote_error(error: Any) -> ToastError:
    """Return the ToastError for an `error` reply: its code, message and hint."""
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return ToastError("the daemon failed without saying why")
    code, hint = error.get("code"), error.get("hint")
    # RemoteError, which has no code of its own, takes more than a message and a hint.
    kinds = {kind.code: kind for kind in ToastError.__subclasses__() if "code" in vars(kind)}
    kind = kinds.get(code, ToastError) if isinstance(code, int) else ToastError
    return kind(error["message"], hint if isinstance(hint, str) else None)
