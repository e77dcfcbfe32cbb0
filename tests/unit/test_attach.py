"""The executable's side of an attached run: its requests to a daemon, and their replies."""

from __future__ import annotations

import base64
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.fake_daemon import DROP, HOLD, SECONDS, FakeDaemon, failure
from toastkit import wire
from toastkit.engine.remote import Operations, RemoteEngine, attach
from toastkit.errors import (
    CannotCreateError,
    IOFailure,
    NoInputError,
    ToastError,
    UnavailableError,
    UsageError,
)
from toastkit.session.directory import Session

MODEL = "ab" * 16
VOCAB = 4
HELLO = {"attached": {"vocab": VOCAB, "context": 100, "device": "cpu", "dtype": None, "chunk": 3}}
FLAGS = {
    "no_daemon": False, "device": "auto", "dtype": None, "kv_bits": None, "verbose": True,
    "quiet": False,
}  # fmt: skip


def logits(*values: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


FULL = logits(1, 2, 3, 4)


def attached(daemon: FakeDaemon) -> RemoteEngine:
    engine = attach(daemon.path, MODEL, "auto", None, None)
    assert engine is not None
    return engine


def running(daemon: FakeDaemon, ids: list[int]) -> tuple[RemoteEngine, Any]:
    """An engine and the state of a run that has just begun."""
    engine = attached(daemon)
    return engine, engine.restore(None, ids)[0]


def restored(count: int = 0, values: str | None = None) -> list:
    return [{"restored": {"cached": count, "logits": values}}]


def held(count: int, values: str | None = None) -> list:
    return [{"read": {"held": count, "logits": values}}]


# --------------------------------------------------------------------------------- finding one


CHECK = """
import sys
from toastkit.commands.engines import attach
flags = {"no_daemon": False, "device": "auto", "dtype": None, "kv_bits": None, "verbose": True}
before = set(sys.modules)
assert attach(flags, lambda: 1 / 0) is None
print(*sorted(set(sys.modules) - before))
"""


def test_without_a_daemon_nothing_is_imported_and_nothing_said() -> None:
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    few = {
        "toastkit.daemon", "toastkit.daemon.paths", "toastkit.base_directories",
        "toastkit.private_files", "fcntl", "stat",
    }  # fmt: skip
    assert set(done.stdout.split()) <= few


def test_where_a_daemon_is_looked_for(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    from toastkit.commands import engines
    from toastkit.daemon import paths

    with FakeDaemon([HELLO]) as daemon:
        monkeypatch.setenv("TOAST_SOCKET", daemon.path)
        assert engines.attach({**FLAGS, "no_daemon": True}, lambda: MODEL) is None
        assert daemon.connections == 0
        engine = engines.attach(FLAGS, lambda: MODEL)
        assert engine.vocab == VOCAB
        engine.close()
        assert f"using the weights of the daemon at {daemon.path}\n" in capsys.readouterr().err
    monkeypatch.setenv("TOAST_SOCKET", "x" * 200)
    with pytest.raises(UsageError):
        engines.attach(FLAGS, lambda: MODEL)

    def refuse() -> str:
        raise CannotCreateError("it belongs to another user")

    monkeypatch.setattr(paths, "socket_path", refuse)
    assert engines.attach(FLAGS, lambda: MODEL) is None


def test_the_attach_request() -> None:
    said: list[str] = []
    with FakeDaemon([HELLO]) as daemon:
        engine = attach(daemon.path, MODEL, "gpu", "float16", 16, said.append)
        assert engine is not None
        engine.close()
        asked = {"fingerprint": MODEL, "device": "gpu", "dtype": "float16", "kv_bits": 16}
        assert daemon.request == {"op": "attach", **asked}
        assert said == [f"using the weights of the daemon at {daemon.path}"]
    assert (engine.vocab, engine.context, engine.chunk) == (VOCAB, 100, 3)
    assert (engine.device, engine.dtype) == ("cpu", None)


@pytest.mark.parametrize("has", ["all", "50%", None])
def test_a_residency_that_is_insisted_on(has: str | None) -> None:
    """A daemon that says nothing of it is of a version that has none."""
    hello = [{"attached": {**HELLO["attached"], **({} if has is None else {"resident": has})}}]
    with FakeDaemon(hello) as daemon:
        for wanted in (None, has or "all"):
            engine = attach(daemon.path, MODEL, "auto", None, None, None, wanted)
            assert engine is not None and engine.resident == (has or "all")
            engine.close()
        said: list[str] = []
        with pytest.raises(UsageError) as caught:
            attach(daemon.path, MODEL, "auto", None, None, said.append, "12 --placement last")
        error = caught.value
        assert said == [] and error.hint == "--no-daemon loads the model here"
        assert error.message == (
            f"the daemon at {daemon.path} runs with --resident {has or 'all'}, "
            "not --resident 12 --placement last"
        )


NO_REPLY = "what the daemon at {path} sent is not a reply"


@pytest.mark.parametrize(
    ("script", "line"),
    [(failure(66, "the daemon runs another"), "the daemon runs another"),
     (failure(69, "the daemon is shutting down"), "the daemon is shutting down"),
     (failure(64, "op: unknown 'attach'"), "op: unknown 'attach'"),
     ([DROP], "the daemon went away"), ([b"HTTP/1.1 400 Bad Request\r\n"], NO_REPLY),
     ([b"\xff\xfe\n"], NO_REPLY),
     ([b"[]\n"], NO_REPLY), ([{"attached": None}], NO_REPLY),
     ([{"attached": {"vocab": True, "chunk": 3}}], NO_REPLY),
     ([{"attached": {"vocab": 4, "chunk": 0}}], NO_REPLY)],
)  # fmt: skip
def test_a_daemon_that_refuses_or_talks_nonsense_is_left_alone(script: list, line: str) -> None:
    said: list[str] = []
    with FakeDaemon(script) as daemon:
        assert attach(daemon.path, MODEL, "auto", None, None, said.append) is None
        assert len(said) == 1 and said[0].startswith(line.format(path=daemon.path))
        assert said[0].endswith(": loading the model here")


def test_nobody_serves_the_socket_or_another_user_does(tmp_path: Path, monkeypatch) -> None:
    said: list[str] = []
    with FakeDaemon([HELLO]) as daemon:
        daemon.stop_listening()
        assert attach(daemon.path, MODEL, "auto", None, None, said.append) is None
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / ("x" * 200)):
        assert attach(str(path), MODEL, "auto", None, None, said.append) is None
    assert said == []
    monkeypatch.setattr(wire, "peer_of", lambda connection: wire.Peer(os.geteuid() + 1, 1))
    with FakeDaemon([HELLO]) as daemon:
        assert attach(daemon.path, MODEL, "auto", None, None) is None
        assert daemon.requests == []


# ------------------------------------------------------------------------------------- one run


def test_a_run_from_its_prompt_to_its_end() -> None:
    scripts = [[HELLO], restored(1), held(4), held(5), held(7, FULL)]
    scripts += [[{"step": {"logits": logits(0, 0, 0, 9)}}], [{"released": {}}]]
    with FakeDaemon(*scripts) as daemon:
        engine = attached(daemon)
        state, cached = engine.restore(None, [5, 6, 7, 8, 9, 10, 11])
        assert cached == 1 and state.tokens == [5] and state.logits is None
        sizes = iter([None, 2, None])
        reading = engine.reading(state, [5, 6, 7, 8, 9, 10, 11], lambda: next(sizes))
        assert list(reading) == [4, 5, 7]
        assert state.tokens == [5, 6, 7, 8, 9, 10, 11]
        assert state.values().tolist() == [1, 2, 3, 4]
        engine.consume(state, 3)
        assert state.tokens[-1] == 3
        assert state.values().tolist() == [0, 0, 0, 9] == state.logits.tolist()
        state.commit()  # it has no session
        state.close()
        state.close()
        engine.close()
        assert daemon.requests[1:] == [
            {"op": "restore", "session": None, "source": None, "ids": [5, 6, 7, 8, 9, 10, 11]},
            {"op": "read", "ids": [6, 7, 8]},
            {"op": "read", "ids": [9, 10]},
            {"op": "read", "ids": [10, 11]},
            {"op": "step", "token": 3},
            {"op": "release"},
        ]
        assert daemon.connections == 1


def test_a_step_is_waited_for_when_its_logits_are_wanted() -> None:
    """A prompt all of which is stored is not read."""
    with FakeDaemon([HELLO], restored(2, FULL), [HOLD]) as daemon:
        engine, state = running(daemon, [5, 6])
        assert list(engine.reading(state, [5, 6])) == []
        assert state.values().tolist() == [1, 2, 3, 4]
        engine.consume(state, 1)
        state.submit()
        engine.look_ahead(state)
        assert len(state.tokens) == 3
        state.close()  # the daemon is at work on it: closing must not wait for that
        engine.close()
        assert daemon.gone.wait(SECONDS)


def test_a_commit_waits_for_the_steps_before_it(tmp_path: Path) -> None:
    step = [{"step": {"logits": FULL}}]
    scripts = [[HELLO], restored(1, FULL), step, step, [{"committed": {}}], [{"released": {}}]]
    with FakeDaemon(*scripts) as daemon, Session.open(tmp_path / "s", MODEL) as session:
        engine = attached(daemon)
        state, _ = engine.restore(session, [5])
        engine.consume(state, 1)
        engine.consume(state, 2)
        state.commit()
        engine.close()
        assert [r["op"] for r in daemon.requests[2:]] == ["step", "step", "commit", "release"]
        assert daemon.requests[1]["session"] == str(tmp_path / "s")


def test_an_engine_releases_the_states_that_are_open() -> None:
    """A daemon that does not count is not asked to."""
    with FakeDaemon([HELLO], restored(), [{"released": {}}]) as daemon:
        engine, state = running(daemon, [5])
        engine.begin_run()
        engine.close()
        assert daemon.requests[-1] == {"op": "release"}
        state.close()
        assert len(daemon.requests) == 3 and engine.run_report() == {}


def test_the_daemons_counts_are_reported() -> None:
    """Of what one of another version tells, only what a policy may have said."""
    hello = {"attached": {**HELLO["attached"], "counts": ["residency"]}}
    scripts = [[hello], restored(), [{"counting": {}}], [{"released": {"residency": {"read": 5}}}]]
    with FakeDaemon(*scripts, restored(), [{"released": {"residency": 1}}]) as daemon:
        engine = attached(daemon)
        engine.begin_run()  # before there is a run
        state, _ = engine.restore(None, [5])
        engine.begin_run()
        assert engine.run_report() == {}
        state.close()
        assert engine.run_report() == {"residency": {"read": 5}}
        engine.begin_run()  # it is over
        assert engine.run_report() == {}
        engine.restore(None, [5])[0].close()
        assert engine.run_report() == {}
        asked = [request["op"] for request in daemon.requests]
        assert asked == ["attach", "restore", "count", "release", "restore", "release"]


def test_closing_a_state_closes_its_session(tmp_path: Path) -> None:
    with FakeDaemon([HELLO], restored(), [DROP], [HELLO]) as daemon:
        session = Session.open(tmp_path / "s", MODEL)
        state, _ = attached(daemon).restore(session, [5])
        state.close()  # the daemon has gone: that is no reason to keep the session
        assert session.lock is not None and not session.lock.held and state.session is None
        assert not (tmp_path / "s").exists()
        with Session.open(tmp_path / "\udcff", MODEL) as session, pytest.raises(UsageError):
            attached(daemon).restore(session, [5])  # JSON cannot say its path
        assert len(daemon.requests) == 4


# ------------------------------------------------------------------------------------- descriptors


@pytest.mark.parametrize("count", [1, 400_000])
def test_the_lock_goes_along(tmp_path: Path, count: int) -> None:
    """Also with a line that is longer than the socket takes at once."""
    here, there = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            data, fds, _, _ = socket.recv_fds(there, 1 << 16, 4)
            while not data.endswith(b"\n"):
                data += there.recv(1 << 16)
            code = 0 if len(fds) == 1 and os.fstat(fds[0]).st_size > 0 else 2
            there.sendall(b'{"restored": {"cached": 0, "logits": null}}\n')
        finally:
            os._exit(code)
    with here, there, Session.open(tmp_path / "s", MODEL) as session:
        engine = RemoteEngine(Operations(here, "x"), HELLO["attached"])
        engine.restore(session, [5] * count)
        assert os.waitpid(pid, 0)[1] == 0
        assert session.lock is not None and session.lock.held


# ------------------------------------------------------------------------------------ failures


@pytest.mark.parametrize(
    ("script", "kind"),
    [(failure(74, "cannot save session s: no space left on device"), IOFailure),
     (failure(66, "no such session: s"), NoInputError), ([DROP], UnavailableError),
     ([b'{"read": {"held": 2', DROP], UnavailableError), ([b"nonsense\n"], UnavailableError),
     ([{"step": {"held": 2}}], UnavailableError), (held(0), UnavailableError),
     (held(5), UnavailableError), ([{"read": {"held": "2", "logits": None}}], UnavailableError),
     ([{"read": {"held": 2, "logits": 7}}], UnavailableError),
     ([{"read": {"held": 2, "logits": "?"}}], UnavailableError),
     ([{"read": {"held": 2, "logits": logits(1, 2, 3)}}], UnavailableError), (held(2), None)],
)  # fmt: skip
def test_replies_that_are_no_answer(script: list, kind: type | None) -> None:
    with FakeDaemon([HELLO], restored(), script, [DROP]) as daemon:
        engine, state = running(daemon, [5, 6])
        if kind is None:
            assert list(engine.reading(state, [5, 6])) == [2]
            with pytest.raises(UnavailableError):
                state.values()  # the prompt is read, and there are no logits
            return
        with pytest.raises(ToastError) as raised:
            list(engine.reading(state, [5, 6]))
        assert type(raised.value) is kind and "\n" not in raised.value.message


def test_once_gone_it_stays_gone() -> None:
    with FakeDaemon([HELLO], restored(1, FULL), [DROP]) as daemon:
        engine, state = running(daemon, [5])
        engine.consume(state, 1)
        for ask in (state.values, state.values, lambda: engine.restore(None, [5])):
            with pytest.raises(UnavailableError) as raised:
                ask()
            assert raised.value.message == "the daemon went away"
            assert raised.value.hint == "--no-daemon does without it"
        state.close()
        engine.close()


def test_an_answer_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toastkit.wire.MAX_REPLY", 1000)
    with FakeDaemon([HELLO], [b"x" * 3000, HOLD]) as daemon:
        engine = attached(daemon)
        with pytest.raises(UnavailableError):
            engine.restore(None, [5])
        engine.close()


def test_more_than_there_is_cannot_be_cached() -> None:
    counts: list[Any] = [-1, 3, None, True, 1.0]
    for count in counts:
        with FakeDaemon([HELLO], restored(count)) as daemon, pytest.raises(UnavailableError):
            running(daemon, [5, 6])
