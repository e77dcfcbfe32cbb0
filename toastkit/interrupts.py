"""Signals: Ctrl-C, SIGTERM and SIGHUP ask to stop, SIGUSR1 warns of low memory. Cheap to import."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def held() -> Iterator[None]:
    """Hold signals that ask to stop until the end of the block, for the import of MLX: where a
    handler raises while its library is initialised, that aborts the process or fails."""
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run on the main thread
        return
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in STOPS}
    for number, handler in handlers.items():
        if callable(handler):
            signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if callable(handler):
                signal.signal(number, handler)
        for again in came:
            signal.raise_signal(again)


class Interrupt:
    """Whether a signal asked to stop. `signal` is its number, 0 for none.

    A stage that can stop cleanly checks it between steps. One that waits in poll(2) has `fileno`
    wake it, and then asks `noted`.
    """

    signal: int = 0

    def __bool__(self) -> bool:
        return self.signal != 0

    @property
    def code(self) -> int:
        """The exit code for the noted signal, 0 for none."""
        return 128 + self.signal if self.signal else 0

    def fileno(self) -> int:
        """A descriptor that becomes readable on a signal, of any kind; -1 if there is none."""
        return -1

    def noted(self) -> bool:
        """Whether a signal asked to stop. `fileno` is then readable, and only then."""
        return bool(self)


class Signals(Interrupt):
    """Signal handlers. Until `graceful` is set a signal ends the current work at once: Ctrl-C as
    KeyboardInterrupt, the others as SystemExit. After that the first one is only noted, so that a
    run can be committed or a partial answer kept; the second one ends the process."""

    def __init__(self) -> None:
        self.graceful = False
        self._warn: Callable[[], None] | None = None
        self._warned = False
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        # At once, by the system's handler. One that comes just before poll(2), or on another
        # thread, does not interrupt it, and Python's handlers run after it.
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in STOPS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, background jobs
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal and self.graceful:
            raise SystemExit(self.code)
        self.signal = number  # even if raised: where objects are finalised, exceptions are lost
        with suppress(BlockingIOError):  # full: it is readable
            os.write(self._write, bytes([number]))
        if not self.graceful:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(self.code)

    def fileno(self) -> int:
        return self._read

    def noted(self) -> bool:
        found = b""
        while not self.signal:
            try:
                found += os.read(self._read, 64)
            except BlockingIOError:
                break
        return bool(self) or any(number in found for number in STOPS)

    def on_memory_warning(self, warn: Callable[[], None] | None = None) -> None:
        """Call `warn` on SIGUSR1 from now on, which then does not end the process. warn: must be
        safe in a signal handler; without one the signal is noted for the next `warn`."""
        self._warn = warn
        if warn is not None and self._warned:
            self._warned = False
            warn()
        if signal.getsignal(signal.SIGUSR1) is not signal.SIG_IGN:
            signal.signal(signal.SIGUSR1, self._note_memory)

    def _note_memory(self, number: int, frame: FrameType | None) -> None:
        if self._warn is None:
            self._warned = True
        else:
            self._warn()

    def forget(self) -> None:
        """Forget the noted signal: the next one is the first again."""
        self.signal = 0
        self.noted()


def die_by_sigpipe() -> NoReturn:
    """End this process as a closed pipe ends any Unix filter: silently, by SIGPIPE."""
    if bars := sys.modules.get("tqdm.std"):
        for bar in list(bars.tqdm._instances):
            bar.close()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGPIPE)
    os._exit(141)  # if SIGPIPE is blocked
