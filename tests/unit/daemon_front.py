"""The front of the daemon without a model: a worker that answers as it is told, a server on a
thread, and a client that speaks lines."""

from __future__ import annotations

import gc
import json
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from toastkit.daemon.channel import Channel
from toastkit.daemon.listening import SocketFile
from toastkit.daemon.requests import ATTACH_OPS, Request
from toastkit.daemon.server import Server
from toastkit.daemon.service_settings import Limits
from toastkit.errors import BusyError, UnavailableError

PATIENCE = 60.0  # seconds, of a machine that does much else; most tests need milliseconds
PIECE = "x" * 65536


def eventually(condition: Callable[[], Any]) -> Any:
    """The first value of the condition that is true. Fails when that takes too long."""
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.002)
    return value


@contextmanager
def short_directory() -> Iterator[Path]:
    """A private directory whose path leaves room for that of a socket."""
    path = tempfile.mkdtemp(prefix="t")
    try:
        yield Path(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)


class FakeWorker:
    """Answers one request at a time, from a thread. What it does depends on the prompt:

    hold    waits for `release`, or for the client to go
    flood   sends text for as long as somebody may read it
    boom    submit fails with what is no ToastError
    other   two pieces of text
    """

    def __init__(self, max_queue: int = 64):
        self.failure: BaseException | None = None
        self.notify: Callable[[], None] = lambda: None
        self.release = threading.Event()
        self.cancel = threading.Event()
        self.requests: list[Request] = []
        self.channels: list[Channel] = []
        self.cancelled: list[Any] = []
        self.calls: list[str] = []
        self._max_queue = max_queue
        self._waiting: list[tuple[Request, Channel]] = []
        self._active = False
        self._draining = self._closing = False
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request, channel: Channel) -> None:
        """Queues a request."""
        if request.prompt == "boom":
            raise ValueError("boom")
        with self._condition:
            if self._draining:
                raise UnavailableError("the daemon is shutting down")
            if len(self._waiting) >= self._max_queue:
                raise BusyError(f"busy: {len(self._waiting)} requests are waiting")
            self._waiting.append((request, channel))
            self._condition.notify()

    def status(self) -> dict[str, Any]:
        return {"model": "fake", "device": "cpu", "waiting": len(self._waiting)}

    def drain(self) -> None:
        """Refuses those that wait."""
        self.calls.append("drain")
        with self._condition:
            self._draining = True
            waiting, self._waiting = self._waiting, []
        for _, channel in waiting:
            channel.reply({"error": {"code": 69, "message": "shutting down", "hint": None}})
            channel.done()

    def idle(self) -> bool:
        return self._draining and not self._active and not self._waiting

    def cancel_all(self) -> None:
        self.calls.append("cancel_all")
        self.cancel.set()

    def reload(self) -> None:
        self.calls.append("reload")

    def memory_warning(self) -> None:
        self.calls.append("memory_warning")

    def close(self) -> None:
        """Ends the thread."""
        self.calls.append("close")
        with self._condition:
            self._closing = True
            self._condition.notify()
        self.release.set()
        self.cancel.set()
        if self._thread.ident is not None:
            self._thread.join(PATIENCE)

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._waiting and not self._closing:
                    self._condition.wait()
                if self._closing:
                    return
                request, channel = self._waiting.pop(0)
                self._active = True
            self.requests.append(request)
            self.channels.append(channel)
            self._answer(request, channel)
            self._active = False
            channel.done()
            self.notify()

    def _answer(self, request: Request, channel: Channel) -> None:
        if request.op == "health":
            channel.reply({"health": {"ok": True, "loaded": True, "seconds": 0.0}})
        elif request.op in ATTACH_OPS:
            channel.connection.store["fds"] = request.fds
            channel.reply({"attached": len(request.fds)})
        else:
            text = request.prompt or "?"
            if text == "hold":
                while not (self.release.wait(0.005) or self.cancel.is_set() or channel.gone):
                    channel.reply({"progress": {"done": 1, "total": 2, "cached": 0}})
            while text == "flood" and not channel.gone:
                channel.reply({"text": PIECE})
            if channel.gone:
                self.cancelled.append(request.id)
            if request.stream:
                channel.reply({"text": text[:1]})
                channel.reply({"text": text[1:]})
            channel.reply({"end": {"reason": "eos", "n": 2, "text": text}})


class Client:
    """A connection to a daemon, line by line."""

    def __init__(self, path: str | Path):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(str(path))  # waits while the queue is full, as a timeout would not
        self.socket.settimeout(PATIENCE)
        self._data = b""

    def send(self, *requests: Any) -> Client:
        """Sends lines: bytes as they are, anything else as JSON."""
        for request in requests:
            whole = request if isinstance(request, bytes) else json.dumps(request).encode() + b"\n"
            self.socket.sendall(whole)
        return self

    def line(self) -> dict | None:
        """The next reply; None at the end."""
        while b"\n" not in self._data:
            try:
                piece = self.socket.recv(1 << 16)
            except ConnectionError:
                piece = b""
            if not piece:
                assert not self._data, "half a line"
                return None
            self._data += piece
        line, _, self._data = self._data.partition(b"\n")
        return json.loads(line)

    def replies(self) -> list[dict]:
        """Replies up to the one that ends a request, progress left out."""
        found = []
        while True:
            reply = self.line()
            assert reply is not None, f"the connection ended after {found}"
            if "progress" not in reply:
                found.append(reply)
            if {"end", "error", "health", "status", "stopping", "reloading", "attached"} & set(
                reply
            ):
                return found

    def ask(self, request: Any) -> dict:
        """The last reply to a request."""
        return self.send(request).replies()[-1]

    def close(self) -> None:
        self.socket.close()


class Front:
    """A server on a thread of its own, with a fake worker behind it."""

    def __init__(self, directory: Path, limits: Limits, worker: FakeWorker):
        self.worker = worker
        self.path = directory / "s"
        self.said: list[str] = []
        self.calls: list[str] = []
        self.failure: BaseException | None = None
        self.file = SocketFile.make(str(self.path))
        self.server = Server(
            [self.file.socket], worker, limits, lambda: self.calls.append("stop"),
            lambda: self.calls.append("reload"), self.said.append,
        )  # fmt: skip
        worker.notify = self.server.wake
        worker.start()
        self._ending = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._ending:
                self.server.step()
        except BaseException as error:
            self.failure = error

    def client(self) -> Client:
        """A new connection."""
        return Client(self.path)

    @property
    def connections(self) -> int:
        return self.server.status()["connections"]

    def close(self) -> None:
        """Ends both; fails if the loop has failed."""
        self._ending = True
        self.server.wake()
        self._thread.join(PATIENCE)
        self.worker.close()
        self.server.close()
        self.file.remove()
        assert self.failure is None, self.failure


@contextmanager
def front(limits: Limits | None = None, worker: FakeWorker | None = None) -> Iterator[Front]:
    """A running front."""
    with short_directory() as directory:
        running = Front(directory, limits or Limits(), worker or FakeWorker())
        try:
            yield running
        finally:
            running.close()


def open_descriptors() -> int:
    """How many descriptors this process has, without those of what is only garbage."""
    gc.collect()
    return len(os.listdir("/dev/fd"))
