"""Ctrl-C, SIGTERM and SIGHUP while an answer is on its way."""

from __future__ import annotations

import os
import signal
from types import FrameType


class Interrupts:
    """Until `patient` is set a signal ends what is being done at once: Ctrl-C as KeyboardInterrupt,
    the others as SystemExit. After it the first one is only noted, in `signal`, and wakes who polls
    `fileno()`, so that an answer's beginning can be kept; the second one ends the process."""

    def __init__(self) -> None:
        self.patient = False
        self.signal = 0
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, background jobs
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        again = bool(self.signal)
        if self.patient and not again:
            self.signal = number
            os.write(self._write, b"!")
        elif number == signal.SIGINT and not again:
            raise KeyboardInterrupt
        else:
            raise SystemExit(128 + (self.signal or number))

    def fileno(self) -> int:
        return self._read

    @property
    def code(self) -> int:
        """The exit code that the noted signal gives, 0 where there was none."""
        return 128 + self.signal if self.signal else 0

    def forget(self) -> None:
        """The next signal is the first one again."""
        self.signal = 0
        try:
            os.read(self._read, 16)
        except BlockingIOError:
            pass
