"""Replies to clients. They come from the worker's thread and from the front's; neither ever blocks
on a client.

What the socket does not take at once is buffered, and sent by the front's loop. A client with more
than UNSENT_LIMIT unsent is cut off at the next reply, so its buffer is bounded by the limit plus
one reply.
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

UNSENT_LIMIT = 16 << 20  # bytes: some 500,000 tokens as text, 3,000 with their 100 alternatives
SEND_BYTES = 1 << 18  # per send(2)
_FLAGS = getattr(socket, "MSG_DONTWAIT", 0) | getattr(socket, "MSG_NOSIGNAL", 0)


class Outbox:
    """The unsent bytes of one client; any thread may add to them.

    connection: non-blocking; closed only by close(), so that no thread ever sends to a reused
    descriptor. wake(): called when the loop has work here. gone: nobody will read any more.
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
        """Number of unsent bytes."""
        return len(self._waiting)

    def put(self, data: bytes) -> None:
        """Send, buffer, or cut the client off. Never blocks, never raises."""
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
        """Send what the socket takes in one call, so that other clients get their turn."""
        with self._lock:
            if self._waiting and not self.gone:
                with memoryview(self._waiting) as view:
                    sent = self._send(view[:SEND_BYTES])
                del self._waiting[:sent]
            self._finish_if_sent()

    def finish(self) -> None:
        """Close the sending side once everything is sent."""
        with self._lock:
            self._finishing = True
            self._finish_if_sent()

    def hang_up(self) -> None:
        """The peer is gone: drop what is unsent and whatever is added."""
        with self._lock:
            self._give_up()

    def close(self) -> None:
        """Close the socket. Idempotent."""
        with self._lock:
            self._give_up()
            if not self._closed:
                self._closed = True
                self._socket.close()

    def _send(self, data: bytes | memoryview) -> int:
        """Return the bytes sent; note if the peer is gone."""
        try:
            return self._socket.send(data, _FLAGS)
        except BlockingIOError:
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
    """The replies to one request. connection: it came from. identity: the request's id, repeated in
    every reply."""

    def __init__(self, connection: Connection):
        self.connection = connection
        self.identity: str | int | None = None
        self.over = False

    @property
    def gone(self) -> bool:
        """True if nobody will read the answer: the request is cancelled."""
        return self.connection.outbox.gone

    def reply(self, message: dict[str, Any]) -> None:
        """Send one reply, from any thread. Never blocks, never raises; dropped after done(), when
        the connection belongs to the next request."""
        if not self.over:
            self.connection.outbox.put(encode(message, self.identity))

    def done(self) -> None:
        """End the request, so that the connection's next line is read. Call once."""
        if not self.over:
            self.over = True
            self.connection.attend()


def error_reply(error: ToastError) -> dict[str, Any]:
    """The reply that ends a request with an error."""
    return {"error": {"code": error.code, "message": error.message, "hint": error.hint}}


def encode(message: dict[str, Any], identity: str | int | None) -> bytes:
    """Encode a reply as a line. What JSON cannot express is approximated: raising here would leave
    the client waiting for ever."""
    if identity is not None:
        message = {"id": identity, **message}
    try:
        text = json.dumps(message, ensure_ascii=False, allow_nan=False, default=_plain)
    except ValueError:
        text = json.dumps(_finite(message), ensure_ascii=False, default=_plain)
    return text.encode("utf-8", "replace") + b"\n"


def _plain(value: Any) -> Any:
    """Convert for json: numpy and MLX scalars to numbers, anything else to text."""
    item = getattr(value, "item", None)
    return _finite(item()) if callable(item) else str(value)


def _finite(value: Any) -> Any:
    """Replace infinity and NaN, which JSON lacks, with null."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
