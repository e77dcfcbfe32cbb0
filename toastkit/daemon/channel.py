"""The way back to a client. Replies come from the worker's thread and from the front's; neither
ever waits for a reader.

What the socket does not take at once is kept, and the front's loop sends it on. Who lets more than
UNSENT_LIMIT wait, and is to get yet another reply, is cut off: what may wait is bounded by the
limit and one reply.
"""

from __future__ import annotations

import json
import math
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from toastkit.errors import ToastError

if TYPE_CHECKING:
    from toastkit.daemon.connection import Connection

UNSENT_LIMIT = 1 << 20  # bytes
SEND_BYTES = 1 << 18  # a single send(2)
_FLAGS = getattr(socket, "MSG_DONTWAIT", 0) | getattr(socket, "MSG_NOSIGNAL", 0)


class Outbox:
    """The bytes on their way to one client; any thread may put some in.

    connection: non-blocking; it is closed by close() and by nothing else, so that no thread ever
    sends to a descriptor that has become another's. wake(): called when the loop is to look.
    gone: nobody will read any more.
    """

    def __init__(self, connection: socket.socket, wake: Callable[[], None]):
        self._socket = connection
        self._wake = wake
        self._lock = threading.Lock()
        self._waiting = bytearray()
        self._closed = self._finishing = False
        self.gone = False

    @property
    def pending(self) -> int:
        """Number of bytes that wait to be sent."""
        return len(self._waiting)

    def put(self, data: bytes) -> None:
        """Sends, or keeps, or cuts the client off. Never waits, never raises."""
        with self._lock:
            if self.gone:
                return
            if len(self._waiting) > UNSENT_LIMIT:
                self._give_up()
            elif self._waiting:
                self._waiting += data
                return
            else:
                sent = self._send(data)
                if not self.gone and sent < len(data):
                    self._waiting += memoryview(data)[sent:]
            wake = self.gone or bool(self._waiting)
        if wake:
            self._wake()

    def flush(self) -> None:
        """Sends what waits, as far as the socket takes it: once, so that others get their turn."""
        with self._lock:
            if self._waiting and not self.gone:
                with memoryview(self._waiting) as view:
                    sent = self._send(view[:SEND_BYTES])
                del self._waiting[:sent]
            self._finish_if_sent()

    def finish(self) -> None:
        """Nothing comes after what waits: the client sees the end once it has read that."""
        with self._lock:
            self._finishing = True
            self._finish_if_sent()

    def hang_up(self) -> None:
        """The peer has gone: what waits is dropped, what comes is too."""
        with self._lock:
            self._give_up()

    def close(self) -> None:
        """Closes the socket. May be called again."""
        with self._lock:
            self._give_up()
            if not self._closed:
                self._closed = True
                self._socket.close()

    def _send(self, data: bytes | memoryview) -> int:
        """Bytes sent; where the peer has gone, that is noted."""
        try:
            return self._socket.send(data, _FLAGS)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self.gone = True
            return 0

    def _finish_if_sent(self) -> None:
        if self._finishing and not self._waiting and not self.gone:
            try:
                self._socket.shutdown(socket.SHUT_WR)
            except OSError:
                self.gone = True

    def _give_up(self) -> None:
        self.gone = True
        self._waiting = bytearray()


class Channel:
    """The way back of one request. connection: that it came by. identity: of the request, which
    comes with every reply."""

    def __init__(self, connection: Connection):
        self.connection = connection
        self.identity: str | int | None = None
        self.over = False

    @property
    def gone(self) -> bool:
        """Whether nobody will read the answer: the request is cancelled."""
        return self.connection.outbox.gone

    def reply(self, message: dict[str, Any]) -> None:
        """Sends one reply, from any thread. Never waits, never raises; after done() it is dropped,
        since the connection belongs to the next request."""
        if not self.over:
            self.connection.outbox.put(encode(message, self.identity))

    def done(self) -> None:
        """The request is over: the connection's next line may be read. To be called once."""
        if not self.over:
            self.over = True
            self.connection.attend()


def error_reply(error: ToastError) -> dict[str, Any]:
    """The reply that ends a request with an error."""
    return {"error": {"code": error.code, "message": error.message, "hint": error.hint}}


def encode(message: dict[str, Any], identity: str | int | None) -> bytes:
    """A reply as a line. What JSON cannot say becomes what comes nearest: a reply that raised would
    leave its client waiting for ever."""
    if identity is not None:
        message = {"id": identity, **message}
    try:
        text = json.dumps(message, ensure_ascii=False, allow_nan=False, default=_plain)
    except ValueError:
        text = json.dumps(_finite(message), ensure_ascii=False, default=_plain)
    return text.encode("utf-8", "replace") + b"\n"


def _plain(value: Any) -> Any:
    """What json cannot write: numbers of numpy and MLX as numbers, all else as text."""
    item = getattr(value, "item", None)
    return _finite(item()) if callable(item) else str(value)


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: they become null."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
