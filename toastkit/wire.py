"""A Unix socket between a client and the daemon: peer credentials, and lines of JSON.

Peer credentials come from the kernel and cannot be forged. Linux has SO_PEERCRED; macOS
LOCAL_PEERCRED and LOCAL_PEERPID, written from its headers and not yet run there. Elsewhere they are
unknown, and the modes of socket and directory have to suffice.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import struct
import sys
import time
from typing import Any, NamedTuple, NoReturn

from toastkit.descriptors import GONE
from toastkit.errors import DataError, ToastError, UnavailableError
from toastkit.interrupts import Interrupt

MAX_REPLY = 64 << 20  # bytes of a line; the longest is an answer's whole text, or a step's logits
NOBODY = (errno.ENOENT, errno.ENOTDIR, errno.ECONNREFUSED)

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


def connect(path: str, own: bool = False) -> socket.socket | None:
    """Return a connected socket, None if nobody listens. Raises UnavailableError if the listener
    cannot be reached, or is neither this user nor root and so could read the requests. Root may
    connect to anybody, except with `own`."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
        peer = peer_of(connection)
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


class Wire:
    """Requests to the daemon at `path` and its replies, over a connected socket, never blocking
    where a signal would not help.

    interrupts: if given, a signal ends the replies. watch: a pipe or a socket, such as stdout; once
    it has no reader, waiting ends with BrokenPipeError. deadline: of time.monotonic; past it,
    waiting ends with TimeoutError. refusal: raised for what is no reply. over: the connection has
    ended.
    """

    def __init__(
        self,
        connection: socket.socket,
        path: str,
        interrupts: Interrupt | None = None,
        watch: int | None = None,
        deadline: float | None = None,
        refusal: type[ToastError] = DataError,
    ):
        connection.setblocking(False)
        self.name = f"the daemon at {path}"
        self._socket = connection
        self._interrupts = interrupts
        self._watch = watch
        self._deadline = deadline
        self._refusal = refusal
        self._poll = select.poll()
        if interrupts is not None:
            self._poll.register(interrupts.fileno(), select.POLLIN)
        if watch is not None:
            self._poll.register(watch, 0)
        self._buffer = bytearray()
        self.over = False

    def heed_no_more(self) -> None:
        """Leave signals to others from now on."""
        if self._interrupts is not None:
            self._poll.unregister(self._interrupts.fileno())
            self._interrupts = None

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
                if not self._wait(select.POLLOUT):
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
        while not self.over and self._wait(select.POLLIN):
            try:
                data = self._socket.recv(1 << 18)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            self._buffer += data
            self.over = not data
            return bool(data)
        return False

    def _wait(self, events: int) -> bool:
        """Wait until the socket is ready for `events`; False if a signal came first."""
        self._poll.register(self._socket, events)
        while True:
            left = None if self._deadline is None else self._deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            ready = dict(self._poll.poll(None if left is None else left * 1000))
            interrupts = self._interrupts
            if interrupts is not None and interrupts.fileno() in ready and interrupts.noted():
                return False
            if self._watch is not None and ready.get(self._watch, 0) & GONE:
                raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
            if self._socket.fileno() in ready:
                return True


def remote_error(error: Any) -> ToastError:
    """Return the ToastError for an `error` reply: its code, message and hint."""
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return ToastError("the daemon failed without saying why")
    code, hint = error.get("code"), error.get("hint")
    # RemoteError, which has no code of its own, takes more than a message and a hint.
    kinds = {kind.code: kind for kind in ToastError.__subclasses__() if "code" in vars(kind)}
    kind = kinds.get(code, ToastError) if isinstance(code, int) else ToastError
    return kind(error["message"], hint if isinstance(hint, str) else None)
