"""Signals that ask a stage to stop, while it waits in poll(2) and before; how else it waits."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.unit.fake_daemon import signals_put_back
from toastkit.commands.pipes import WatchedInput
from toastkit.interrupts import Signals

# An executable that gets Ctrl-C as soon as it imports a module that takes time.
INTERRUPTED = """
import _signal, os, sys
class Finder:
    def find_spec(name, path, target=None):
        if name in ("signal", "typing"):
            os.kill(os.getpid(), _signal.SIGINT)
sys.meta_path.insert(0, Finder)
sys.argv[0] = "toast-sample"
for name in ("signal", "typing"):
    sys.modules.pop(name, None)
from toastkit.commands.sample import main
"""


@contextmanager
def piped_in() -> Iterator[int]:
    """The writing end of a pipe that is stdin meanwhile."""
    read, write = os.pipe()
    saved = os.dup(0)
    os.dup2(read, 0)
    try:
        yield write
    finally:
        os.dup2(saved, 0)
        for fd in (read, write, saved):
            os.close(fd)


def test_a_signal_on_another_thread_ends_a_wait(signals: Signals) -> None:
    """As one does that comes between Python's look for signals and the system call: the call is not
    interrupted, and Python's handler runs when it is over."""
    signals.graceful = True
    poll = select.poll()
    poll.register(signals.fileno(), select.POLLIN)
    send = threading.Timer(0.02, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM))
    send.start()
    assert poll.poll(10_000) == [(signals.fileno(), select.POLLIN)]
    send.join()
    assert signals.noted() and signals.code == 143


def test_other_signals_end_no_wait(
    signals: Signals, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    """A warning of low memory wakes a reader, which goes on to read."""
    warned: list[int] = []
    signals.on_memory_warning(lambda: warned.append(1))
    with piped_in() as write:
        source = WatchedInput(signals=signals)
        os.kill(os.getpid(), signal.SIGUSR1)
        threading.Timer(0.05, lambda: os.write(write, b"x")).start()
        assert source.read1(1) == b"x" and warned == [1]
        assert not signals.noted() and not signals
        poll = select.poll()
        poll.register(signals.fileno(), select.POLLIN)
        assert poll.poll(0) == []  # it would spin


@pytest.mark.parametrize("rest, taken", [(0.0, b"c"), (0.5, b"cd")])
def test_what_comes_fast_is_taken_together(rest: float, taken: bytes) -> None:
    """A stream that has shown that it is fast; nothing waits before."""
    with piped_in() as write:
        source = WatchedInput(rest=rest)
        for part in (b"a", b"b"):
            os.write(write, part)
            assert source.read1(9) == part
        os.write(write, b"c")
        later = threading.Timer(0.1, lambda: os.write(write, b"d"))
        later.start()
        assert source.read1(9) == taken
        later.join()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_whose_exception_is_lost_is_noted(signals: Signals) -> None:
    """Python drops what is raised while an object is finalised."""

    class Last:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    Last()
    assert signals.noted() and signals.code == 143
    signals.forget()
    assert not signals.noted()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_second_one_ends_the_process(signals: Signals, number: int) -> None:
    signals.graceful = True
    os.kill(os.getpid(), number)
    assert signals.signal == number
    with pytest.raises(SystemExit) as end:
        os.kill(os.getpid(), signal.SIGINT)
    assert end.value.code == 128 + number


def test_the_first_one_ends_at_once_what_is_not_graceful(signals: Signals) -> None:
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(SystemExit) as ended:
        signal.raise_signal(signal.SIGHUP)
    assert ended.value.code == signals.code == 129
    signals.forget()
    assert signals.code == 0


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    with signals_put_back():
        Signals()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    signal.signal(signal.SIGHUP, before)


def test_an_interrupt_during_the_first_imports_leaves_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")
