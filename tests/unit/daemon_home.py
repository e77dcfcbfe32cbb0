"""Daemons in processes and directories of their own, with a worker that has no model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.daemon_front import PATIENCE, Client, eventually, short_directory
from toastkit.commands.toasted import toasted

ROOT = Path(__file__).parents[2]
DRIVER = [sys.executable, "-m", "tests.unit.daemon_driver"]


class Home:
    """Directories of one daemon's own, and how to start it."""

    def __init__(self, directory: Path):
        self.socket = directory / "toastkit" / "toasted.sock"
        self.pidfile = directory / "toastkit" / "toasted.pid"
        self.state = directory / "state" / "toastkit"
        self.started: list[subprocess.Popen] = []
        self.in_background = False
        self._places = {
            "XDG_RUNTIME_DIR": str(directory), "XDG_STATE_HOME": str(directory / "state"),
        }  # fmt: skip
        self.env = {**os.environ, "PYTHONPATH": str(ROOT), **self._places}

    def start(self, *arguments: str, ready: bool = True, **env: str) -> subprocess.Popen:
        """A daemon in the foreground; ready: waits until it says so."""
        process = subprocess.Popen(
            [*DRIVER, *arguments], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env={**self.env, **env},
        )  # fmt: skip
        self.started.append(process)
        if ready:
            line = process.stderr.readline()
            assert "listening on" in line, line + process.stderr.read()
        return process

    def run(self, *arguments: str) -> subprocess.CompletedProcess:
        """A command that ends by itself."""
        self.in_background = self.in_background or "--daemon" in arguments
        return subprocess.run(
            [*DRIVER, *arguments], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=PATIENCE, env=self.env,
        )  # fmt: skip

    def act(self, *arguments: str) -> None:
        """What `toasted ARGUMENTS` does that asks a daemon something, in this process."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self._places.items():
                patch.setenv(name, value)
            toasted.main(list(arguments), standalone_mode=False)

    def client(self) -> Client:
        """A connection, as soon as somebody listens; FileNotFoundError where there is no socket."""
        return eventually(self._connected)

    def _connected(self) -> Client | None:
        try:
            return Client(self.socket)
        except ConnectionRefusedError:
            return None  # between bind and listen

    def held(self, prompt: str = "hold") -> Client:
        """A client whose request is under way, until it is let go."""
        client = self.client().send({"prompt": prompt})
        assert "progress" in client.line()
        return client

    def is_clean(self) -> bool:
        """Whether nothing is left of the daemon."""
        return not (self.socket.exists() or self.pidfile.exists())


@pytest.fixture
def home() -> Iterator[Home]:
    """Directories for a daemon; none is left running."""
    with short_directory() as directory:
        made = Home(directory)
        yield made
        for process in made.started:
            process.kill()
            process.communicate()
        if made.pidfile.exists() and made.in_background:
            os.kill(int(made.pidfile.read_text()), signal.SIGKILL)
