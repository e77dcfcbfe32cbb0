"""A daemon for tests and benchmarks: started, asked, killed, in directories of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.forked import Process, run_to_end, start
from tests.native_library import own_cache

PATIENCE = 120.0  # seconds until a daemon answers, at the worst


class Answer(NamedTuple):
    """text, stats, end, tokens: as the daemon told. first, total: seconds from the request to the
    first text, and to the end, seen from outside."""

    text: str
    stats: dict[str, Any]
    end: str
    tokens: list[int]
    first: float
    total: float


class Refused(Exception):
    """An error reply. code, message: its fields."""

    def __init__(self, error: dict[str, Any]):
        super().__init__(f"{error['code']}: {error['message']}")
        self.code, self.message = error["code"], error["message"]


class Daemon:
    """toasted on a model, with directories of its own. arguments: more of its options."""

    def __init__(self, model: str | Path = "crumb", *arguments: str):
        self.home = Path(tempfile.mkdtemp(prefix="t"))  # short: a socket's path has to be
        self.socket = self.home / "s"
        self.environment = {**os.environ, "TOAST_SOCKET": str(self.socket)}
        for name in ("STATE_HOME", "RUNTIME_DIR"):
            folder = self.home / name.lower()
            folder.mkdir(mode=0o700)
            self.environment[f"XDG_{name}"] = str(folder)
        self.environment["XDG_CACHE_HOME"] = str(own_cache(self.home / "cache_home"))
        self.arguments = ["-q", "-m", str(model), *arguments]
        self.errors = self.home / "stderr"
        self.process: subprocess.Popen | Process | None = None
        self.start()

    def start(self, *arguments: str) -> None:
        """Starts it, and waits until it answers."""
        with open(self.errors, "ab") as errors:
            self.process = start(
                "toasted", *self.arguments, *arguments, env=self.environment, stderr=errors,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        deadline = time.monotonic() + PATIENCE
        while True:
            assert self.process.poll() is None, self.errors.read_text()
            try:
                self.control("health")
                return
            except OSError:
                assert time.monotonic() < deadline, "the daemon does not answer"
                time.sleep(0.02)

    def connect(self) -> socket.socket:
        """A new connection."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(str(self.socket))  # blocking: it waits where many connect at once
        connection.settimeout(PATIENCE)
        return connection

    def send(self, request: dict[str, Any]) -> socket.socket:
        """A connection on which a request has been sent."""
        connection = self.connect()
        connection.sendall(json.dumps(request).encode() + b"\n")
        return connection

    def replies(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Asks, and gives the replies as they come."""
        with self.send(request) as connection, connection.makefile("rb") as lines:
            for line in lines:
                reply = json.loads(line)
                yield reply
                if not reply.keys().isdisjoint(("end", "error", request.get("op", ""))):
                    return
        raise OSError("the daemon went away")

    def control(self, op: str) -> dict[str, Any]:
        """What it answers to `status`, `health` and the like."""
        return list(self.replies({"op": op}))[-1][op]

    def ask(self, **request: Any) -> Answer:
        """Asks, and reads the whole answer. Raises Refused for an error."""
        start, first = time.perf_counter(), 0.0
        stats: dict[str, Any] = {}
        tokens: list[int] = []
        for reply in self.replies(request):
            now = time.perf_counter() - start
            if "error" in reply:
                raise Refused(reply["error"])
            if not first and ("text" in reply or "token" in reply):
                first = now
            if "token" in reply:
                tokens.append(reply["token"]["id"])
            stats = reply.get("stats", stats)
        end = reply["end"]
        return Answer(end["text"], stats, end["reason"], tokens, first or now, now)

    def toast(self, name: str, *arguments: str, stdin: bytes | None = None):
        """Runs an executable beside this daemon; its CompletedProcess with bytes."""
        return run_to_end(name, *arguments, stdin=stdin, timeout=PATIENCE, env=self.environment)

    def kill(self) -> None:
        """kill -9."""
        self.signal(signal.SIGKILL)

    def signal(self, number: int) -> int:
        """Sends a signal that ends it, and waits for the end; how it ended."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.signal(signal.SIGTERM)
        shutil.rmtree(self.home, ignore_errors=True)
