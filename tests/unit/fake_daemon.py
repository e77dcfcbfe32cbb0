"""A daemon that answers by heart: it listens on a real socket and does what a test wrote down."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

HOLD = "wait until the client hangs up"
DROP = "close the connection"
END = "be no more"
SECONDS = 30  # a wait that takes longer fails its test


@contextmanager
def signals_put_back() -> Iterator[None]:
    """What a test does to the handlers of signals is undone at its end."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    wakeup = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)


def answer(*pieces: str, reason: str = "eos", **stats: Any) -> list:
    """The replies of an answer that comes in pieces."""
    replies: list = [{"text": piece} for piece in pieces]
    seconds = {"queued": 0.0, "prefill": 0.1, "first": 0.25, "total": 0.75}
    told = {"model": "crumb", "prompt": 12, "cached": 8, "why": "the last message is new",
            "answer": 6, "seed": 7, "seconds": seconds}  # fmt: skip
    replies.append({"stats": {**told, **stats}})
    replies.append({"end": {"reason": reason, "n": 6, "text": "".join(pieces)}})
    return replies


def failure(code: int, message: str, hint: str | None = None) -> list:
    """The replies of a request that is refused."""
    return [{"error": {"code": code, "message": message, "hint": hint}}]


class FakeDaemon:
    """scripts: what each request in turn is answered with, the last one also all that follow. An
    item is a reply, raw bytes, HOLD, DROP or END.

    requests: what was asked, in order. gone: set when a client hung up during HOLD.
    """

    def __init__(self, *scripts: list):
        self._scripts = list(scripts)
        self._directory = tempfile.mkdtemp(prefix="t")  # a socket's path has to be short
        self.path = str(Path(self._directory) / "s")
        self.requests: list[dict] = []
        self.connections = 0
        self.gone = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(16)
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> FakeDaemon:
        return self

    def __exit__(self, *ignored: object) -> None:
        self.stop_listening()
        shutil.rmtree(self._directory)

    def stop_listening(self) -> None:
        """From now on nobody answers at the path, as after kill -9."""
        if self._listener.fileno() >= 0:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()

    @property
    def request(self) -> dict:
        """The only one."""
        (request,) = self.requests
        return request

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(SECONDS)
        with connection, connection.makefile("rb") as lines, suppress(OSError):
            for line in lines:  # until the client has what it wanted
                self.requests.append(json.loads(line))
                script = self._scripts[min(len(self.requests), len(self._scripts)) - 1]
                if not self._play(connection, script):
                    return

    def _play(self, connection: socket.socket, script: list) -> bool:
        """Whether the connection goes on."""
        for item in script:
            if item == HOLD:
                if _hung_up(connection):
                    self.gone.set()
                return False
            if item == END:
                self.stop_listening()
            if item in (DROP, END):
                return False
            data = item if isinstance(item, bytes) else json.dumps(item).encode() + b"\n"
            connection.sendall(data)
        return True


def _hung_up(connection: socket.socket) -> bool:
    """Waits for the client to close, or to say more."""
    try:
        return not connection.recv(1)
    except ConnectionError:  # it had not read everything
        return True
