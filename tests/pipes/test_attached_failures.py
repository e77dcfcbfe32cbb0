"""Attached programs and their daemon when one of them dies, is interrupted, or is told to end."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.daemons import Daemon
from tests.pipes.pipelines import STORY, TIMEOUT, WHO, WHO_ANSWER, Pipeline, begin
from tests.pipes.test_failures import stored
from tests.unit.daemon_front import eventually
from tests.unpack import unpack

ENDLESS = ["--ignore-eos", "--temp", "0"]
LONG = "Tell me a story. " * 400
GONE = ["toast-decode: the daemon went away", "  hint: --no-daemon does without it"]


@pytest.fixture
def nearby(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    """That daemon, found by every executable."""
    monkeypatch.setenv("TOAST_SOCKET", str(daemon.socket))
    return daemon


def attached(daemon: Daemon) -> int:
    """Runs that have a state in the daemon."""
    return daemon.control("status")["attached"]


# -------------------------------------------------------------------------- the executable ends


def test_killed_in_mid_answer_it_leaves_nothing_behind(nearby: Daemon, tmp_path: Path, toast):
    session = str(tmp_path / "session")
    process = begin("decode", *ENDLESS, "--session", session, STORY)
    assert process.stdout.read1(20)
    assert attached(nearby) == 1 and nearby.control("status")["ledger"]["cache"] > 0
    process.kill()
    process.communicate()
    eventually(lambda: attached(nearby) == 0)
    assert "cache" not in nearby.control("status")["ledger"]
    assert len(stored(Path(session))[0]) == 19  # the prompt's commit
    done = toast("decode", "-v", "--session", session, WHO)
    assert (done.returncode, done.stdout) == (0, WHO_ANSWER), done.stderr
    assert b"using the weights" in done.stderr


def test_killed_in_mid_prefill_it_frees_its_session(nearby: Daemon, tmp_path: Path, toast):
    session = tmp_path / "session"
    process = begin("decode", "--chunk", "8", "--session", str(session), LONG)
    eventually(lambda: attached(nearby))
    process.kill()
    process.communicate()
    eventually(lambda: attached(nearby) == 0)
    done = toast("decode", "--session", str(session), WHO)
    assert (done.returncode, done.stdout) == (0, WHO_ANSWER), done.stderr


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGPIPE, -13)], ids=["ctrl-c", "no-reader"]
)
def test_stopped_it_commits_and_frees_its_session_before_it_ends(
    nearby: Daemon, tmp_path: Path, number: int, status: int
):
    session = tmp_path / "session"
    process = begin("decode", *ENDLESS, "--session", str(session), STORY)
    # Several tokens, so that some were read by the model and not only shown.
    assert process.stdout.read(40)
    if number == signal.SIGINT:
        process.send_signal(number)
        _, errors = process.communicate(timeout=TIMEOUT)
    else:
        process.stdout.close()
        errors = process.stderr.read()
    assert (process.wait(TIMEOUT), errors) == (status, b"")
    assert len(stored(session)[0]) > 19  # takes the lock, at once
    assert attached(nearby) == 0


def test_interrupted_in_mid_prefill_it_commits_what_was_read(nearby: Daemon, tmp_path: Path):
    session = tmp_path / "session"
    settings = {"prefill": ["--chunk", "8", "--session", str(session)]}
    pipeline = Pipeline(LONG, settings, ("tokenize", "prefill"))
    eventually(lambda: attached(nearby))
    pipeline.signal_all(signal.SIGINT)
    result = pipeline.finish()
    assert result.statuses == [0, 130] and result.errors == []
    assert attached(nearby) == 0
    from toastkit.session.directory import Session

    with Session.open(session, None, create=False) as held:
        assert held.n_past % 8 == 0


# ------------------------------------------------------------------------------- the daemon ends


def test_the_daemon_is_killed_in_mid_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, toast):
    room = 1 << 20  # for so many tokens that nobody's answer ends
    model = str(unpack(tmp_path / "model", max_position_embeddings=room))
    monkeypatch.setenv("TOAST_MODEL", model)
    session, other = str(tmp_path / "session"), str(tmp_path / "other")
    with Daemon(model, "--no-audit", "--spill", "0") as daemon:
        monkeypatch.setenv("TOAST_SOCKET", str(daemon.socket))
        pipeline = Pipeline(STORY, {"sample": ["--ignore-eos"], "prefill": ["--session", session]})
        text = begin("decode", *ENDLESS, "--session", other, STORY)
        reading = begin("decode", "--chunk", "8", "--session", str(tmp_path / "unborn"), LONG * 5)
        pipeline.first_output()
        assert text.stdout.read1(20)
        eventually(lambda: attached(daemon) == 3)
        daemon.kill()
        result = pipeline.finish()
        assert result.statuses == [0, 0, 69, 69, 69, 69]
        assert result.errors == GONE
        for process in (text, reading):
            _, errors = process.communicate(timeout=TIMEOUT)
            assert (process.returncode, errors.decode().splitlines()) == (69, GONE)
    assert not (tmp_path / "unborn").exists()
    for place in (session, other):
        assert len(stored(Path(place))[0]) == 19
    done = toast("decode", "-v", "--session", session, WHO)  # its socket lies there still
    assert done.stdout == WHO_ANSWER and f"loaded {model}".encode() in done.stderr


def test_the_daemon_is_told_to_end_at_once_in_mid_run(tmp_path: Path, monkeypatch):
    session = tmp_path / "session"
    with Daemon("crumb", "--no-audit", "--spill", "0") as daemon:
        monkeypatch.setenv("TOAST_SOCKET", str(daemon.socket))
        process = begin("decode", *ENDLESS, "--session", str(session), STORY)
        assert process.stdout.read(40)
        daemon.process.terminate()
        eventually(lambda: not daemon.socket.exists())  # the first signal has been seen
        daemon.process.terminate()
        _, errors = process.communicate(timeout=TIMEOUT)
        assert daemon.process.wait(TIMEOUT) == 0
    assert (process.returncode, errors) == (69, b"toast-decode: the daemon is shutting down\n")
    assert len(stored(session)[0]) > 19


def test_an_idle_daemon_unloads_and_a_run_goes_on(monkeypatch: pytest.MonkeyPatch):
    """The model leaves the memory while a run waits for its token; a drain waits for the run."""
    with Daemon("crumb", "--no-audit", "--spill", "0", "--idle-unload", "300ms") as daemon:
        monkeypatch.setenv("TOAST_SOCKET", str(daemon.socket))
        pipeline = Pipeline(WHO, {"sample": ["-n", "40", *ENDLESS]})
        first = pipeline.first_output()
        sampler = pipeline.process("sample")
        sampler.send_signal(signal.SIGSTOP)
        eventually(lambda: not daemon.control("status")["loaded"])
        assert pipeline.process("decode").poll() is None
        sampler.send_signal(signal.SIGCONT)
        result = pipeline.finish()
        assert result.statuses == [0] * 6, result.errors
        assert (first + result.out).startswith(WHO_ANSWER.rstrip(b"\n"))

        text = begin("decode", "-n", "40", *ENDLESS, WHO)
        some = text.stdout.read1(20)
        daemon.process.send_signal(signal.SIGTERM)
        eventually(lambda: not daemon.socket.exists())
        rest, errors = text.communicate(timeout=TIMEOUT)
        assert (text.returncode, errors) == (0, b"")
        assert some + rest == first + result.out
        assert daemon.process.wait(TIMEOUT) == 0
