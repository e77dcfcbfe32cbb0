"""A program at a terminal of its own, where a test types and reads."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import subprocess
import termios
import time
from collections.abc import Mapping

SECONDS = 30  # a wait that takes longer fails its test


class Terminal:
    """A command at a terminal that controls it. screen: what came after what was expected. env:
    variables besides those of this process. settings: others, of subprocess.Popen."""

    def __init__(self, *command: str, env: Mapping[str, str] | None = None, **settings):
        self.screen = b""
        self._main, tty = pty.openpty()
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), tty)
        self._process = subprocess.Popen(
            command, **{**streams, **settings}, start_new_session=True,
            env={**os.environ, "TERM": "dumb", "INPUTRC": os.devnull, **(env or {})},
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(tty)

    def type(self, keys: str | bytes) -> None:
        os.write(self._main, keys if isinstance(keys, bytes) else keys.encode())

    def expect(self, text: str) -> str:
        """Waits for text after what was expected before; what came ahead of it."""
        deadline = time.monotonic() + SECONDS
        while text.encode() not in self.screen:
            assert time.monotonic() < deadline, self.screen
            assert self._read(0.1), self.screen
        before, _, self.screen = self.screen.partition(text.encode())
        return before.decode(errors="replace")

    def insist(self, keys: str, text: str) -> None:
        """Types keys until text comes. A signal between two reads of readline is noticed only with
        the next key, in any Python program: nobody types that fast but a test."""
        for _ in range(SECONDS):
            self.type(keys)
            patience = time.monotonic() + 1
            while time.monotonic() < patience and text.encode() not in self.screen:
                assert self._read(0.1), self.screen
            if text.encode() in self.screen:
                break
        self.expect(text)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self, keys: str = "") -> int:
        """Types keys and waits for the end; the exit code."""
        self.type(keys)
        deadline = time.monotonic() + SECONDS
        while self._read(0.05) and time.monotonic() < deadline:
            pass
        return self._process.wait(SECONDS)

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.wait()
        os.close(self._main)

    def _read(self, seconds: float) -> bool:
        """Whether the terminal is still there."""
        if select.select([self._main], [], [], seconds)[0]:
            try:
                data = os.read(self._main, 4096)
            except OSError:  # Linux: nobody has the other side open any more
                return False
            self.screen += data
            return bool(data)
        return True
