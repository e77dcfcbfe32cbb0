"""Signals while the executable's side of an attached run waits for a daemon that is silent."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

import pytest

from tests.unit.fake_daemon import HOLD, FakeDaemon
from tests.unit.test_attach import FULL, HELLO, MODEL, VOCAB, attached, restored
from toastkit.engine import remote
from toastkit.engine.remote import attach
from toastkit.interrupts import Interrupt
from toastkit.session.directory import Session


class Noted(Interrupt):
    """A signal that came while nobody answered, or none."""

    def __init__(self, signal: int = 0) -> None:
        self.signal, self.ends = signal, os.pipe()
        os.write(self.ends[1], bytes([signal] if signal else []))

    def fileno(self) -> int:
        return self.ends[0]


def test_a_signal_ends_the_wait_for_a_silent_daemon(tmp_path: Path) -> None:
    with FakeDaemon(HOLD) as daemon, pytest.raises(SystemExit) as ended:
        attach(daemon.path, MODEL, "auto", None, None, interrupts=Noted(15))
    assert ended.value.code == 143
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as other:
        listener.bind(path := str(tmp_path / "s"))
        listener.listen(0)
        other.connect(path)  # and no more can
        with pytest.raises(SystemExit) as ended:
            attach(path, MODEL, "auto", None, None, interrupts=Noted(15))
    assert ended.value.code == 143
    with FakeDaemon([HELLO]) as daemon:  # a run is for its stage to end
        engine = attach(daemon.path, MODEL, "auto", None, None, interrupts=Noted())
        assert engine is not None and engine.vocab == VOCAB


def test_a_silent_daemon_is_not_waited_for_once_nobody_reads(tmp_path: Path, monkeypatch) -> None:
    """Nor is the commit; one that answers in time is, as the session is to be kept."""
    monkeypatch.setattr(remote, "GRACE_SECONDS", 0.05)
    here, there = os.pipe()
    scripts = [HELLO], restored(1, FULL), [HOLD]
    with FakeDaemon(*scripts) as daemon, Session.open(tmp_path / "s", MODEL) as session:
        engine = attach(daemon.path, MODEL, "auto", None, None, watch=there)
        assert engine is not None
        os.close(here)
        state, _ = engine.restore(session, [5])
        state.step(1)
        with pytest.raises(BrokenPipeError):
            state.values()
        state.commit()
        state.close()
    os.close(there)


def test_a_second_signal_ends_a_run_whose_daemon_is_silent(tmp_path: Path, signals) -> None:
    """Nothing is committed then, since that would be waited for too."""
    scripts = [HELLO], restored(1, FULL), [HOLD]
    with FakeDaemon(*scripts) as daemon, Session.open(tmp_path / "s", MODEL) as session:
        state, _ = attached(daemon).restore(session, [5])
        state.step(1)
        signals.graceful = True
        for after in (0.1, 0.2):
            threading.Timer(after, os.kill, [os.getpid(), signal.SIGTERM]).start()
        with pytest.raises(SystemExit) as ended:
            state.values()
        state.commit()
        state.close()
    assert ended.value.code == 143
