"""toasted as a backend: lines over a socket, what cuts them short, and signals meanwhile."""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.unit.fake_daemon import DROP, END, HOLD, SECONDS, FakeDaemon, answer, failure
from toastkit import wire
from toastkit.client.socket_backend import SocketBackend, connect, control
from toastkit.errors import DataError, UnavailableError
from toastkit.interrupts import Signals
from toastkit.wire import Peer

ASK = {"messages": [{"role": "user", "content": "Hi!"}], "options": {}}


def test_requests_and_their_replies() -> None:
    """Each request has a connection of its own."""
    one, two = answer("I am", " crumb\u2028é.\n"), answer("two")
    with FakeDaemon(one, two) as daemon:
        backend = connect(daemon.path)
        assert backend is not None and backend.name == f"the daemon at {daemon.path}"
        assert list(backend.ask({**ASK, "session": "é"})) == one
        assert daemon.request == {**ASK, "session": "é"}
        assert list(backend.ask(ASK)) == two
        assert daemon.connections == 2
        backend.close()


def test_replies_in_pieces_and_together() -> None:
    whole = b'{"text": "a"}\n{"text": "b"}\n{"te'
    rest = b'xt": "c"}\n{"end": {"reason": "eos", "n": 3, "text": "abc"}}\n'
    with FakeDaemon([whole, rest]) as daemon:
        replies = list(SocketBackend(daemon.path).ask(ASK))
    assert [reply.get("text") for reply in replies] == ["a", "b", "c", None]


def test_a_long_request_and_a_long_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a socket's buffer, both ways; a reply over the limit is refused."""
    text = "x" * (4 << 20)
    with FakeDaemon(answer(text)) as daemon:
        asked = {**ASK, "messages": [{"role": "user", "content": text}]}
        replies = list(SocketBackend(daemon.path).ask(asked))
        assert daemon.request == asked and replies[-1]["end"]["text"] == text
        monkeypatch.setattr(wire, "MAX_REPLY", 1 << 20)
        with pytest.raises(DataError, match="a line of more than 1 MiB"):
            list(SocketBackend(daemon.path).ask(ASK))


def test_leaving_the_replies_cancels() -> None:
    """So does a reader of our output who goes."""
    with FakeDaemon([{"text": "a"}, HOLD]) as daemon:
        replies = SocketBackend(daemon.path).ask(ASK)
        assert next(replies) == {"text": "a"}
        replies.close()  # type: ignore[attr-defined]
        assert daemon.gone.wait(SECONDS)
        daemon.gone.clear()
        read, write = os.pipe()
        replies = SocketBackend(daemon.path, watch=write).ask(ASK)
        assert next(replies) == {"text": "a"}
        os.close(read)
        with pytest.raises(BrokenPipeError):
            next(replies)
        assert daemon.gone.wait(SECONDS)
        os.close(write)


@pytest.mark.parametrize(
    ("script", "message"),
    [([DROP], "the daemon at .* closed the connection"), ([END], "the daemon went away$"),
     ([{"text": "a"}, END], "went away in mid-answer"),
     ([{"progress": {"done": 1, "total": 9, "cached": 0}}, END], "the daemon went away$"),
     ([{"text": "a"}, b'{"text": "b', END], "went away in mid-answer"),
     ([{"text": "a"}, DROP], "broke the connection in mid-answer, as where too much of it waits")],
)  # fmt: skip
def test_a_daemon_that_goes_away(script: list, message: str) -> None:
    with FakeDaemon(script) as daemon, pytest.raises(UnavailableError, match=message):
        list(SocketBackend(daemon.path).ask(ASK))


def test_a_killed_daemon_whose_listener_is_closed_last() -> None:
    """As by the system, descriptor by descriptor: who connects meanwhile is never accepted."""
    with socket.socket(socket.AF_UNIX) as listener, FakeDaemon() as place:
        listener.bind(path := place.path + "x")
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            connection.sendall(b'{"text": "a"}\n')
            connection.close()
            time.sleep(0.05)
            listener.close()

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(UnavailableError, match="the daemon went away in mid-answer"):
            list(SocketBackend(path).ask(ASK))
        thread.join()


def test_what_is_no_reply() -> None:
    for line in (b"\n", b"hello\n", b"[]\n", b"\xff\n", b"[" * 100_000 + b"\n"):
        with FakeDaemon([line]) as daemon, pytest.raises(DataError, match="is not a reply"):
            list(SocketBackend(daemon.path).ask(ASK))
    asked = {**ASK, "messages": [{"role": "user", "content": "\udcff"}]}
    with FakeDaemon([DROP]) as daemon, pytest.raises(DataError, match="not UTF-8"):
        list(SocketBackend(daemon.path).ask(asked))


def test_silence_is_told_once(monkeypatch: pytest.MonkeyPatch, signals: Signals) -> None:
    """Of a daemon that does not take the connection, or gives no reply, and of no other."""
    monkeypatch.setattr(wire, "SILENCE_SECONDS", 0.05)
    told: list[str] = []
    with FakeDaemon([HOLD], [{"text": "a"}, HOLD]) as daemon, ExitStack() as waiting:
        for _ in range(2):
            backend = SocketBackend(daemon.path, None, signals, silent=lambda: told.append("s"))
            timer = threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGTERM])
            timer.start()
            list(backend.ask(ASK))
            timer.join()
            signals.forget()
        assert told == ["s"]
        listener = waiting.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(daemon.path + "x")
        listener.listen(0)
        waiting.enter_context(socket.socket(socket.AF_UNIX)).connect(daemon.path + "x")
        timer = threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGTERM])
        timer.start()
        backend = SocketBackend(daemon.path + "x", None, signals, silent=lambda: told.append("c"))
        assert list(backend.ask(ASK)) == [] and told == ["s", "c"]
        timer.join()


def test_what_the_daemon_said_before_it_closed_is_heard() -> None:
    """A busy daemon says so and closes, whether or not it has read what was asked."""

    def refuse(connection: socket.socket) -> None:
        connection.sendall(b'{"error": {"code": 75}}\n')
        connection.close()

    with FakeDaemon() as daemon:
        daemon._serve = refuse  # type: ignore[method-assign]
        asked = {**ASK, "messages": [{"role": "user", "content": "x" * (4 << 20)}]}
        assert list(SocketBackend(daemon.path).ask(asked)) == [{"error": {"code": 75}}]


def test_a_connection_that_was_closed_while_nobody_asked_is_made_again() -> None:
    with FakeDaemon(answer("hello")) as daemon:
        first, other = socket.socketpair()
        backend = SocketBackend(daemon.path, first)
        other.close()
        assert list(backend.ask(ASK))[0] == {"text": "hello"}


@pytest.mark.parametrize("kind", ["missing", "below a file", "a file", "nobody listens"])
def test_nobody_answers(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "s"
    if kind == "below a file":
        tmp_path.joinpath("f").touch()
        path = tmp_path / "f" / "s"
    elif kind == "a file":
        path.touch()
    elif kind == "nobody listens":
        with FakeDaemon() as daemon:
            daemon.stop_listening()
            assert Path(daemon.path).is_socket() and connect(daemon.path) is None
    assert connect(str(path)) is None
    with pytest.raises(UnavailableError, match=f"no daemon answers at {path}"):
        list(SocketBackend(str(path)).ask(ASK))
    with pytest.raises(UnavailableError, match=f"no daemon answers at {path}"):
        control(str(path), "status", SECONDS)


def test_whom_a_hint_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An action on a daemon cannot do without one."""

    def refuse(connection: socket.socket, path: str) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(wire, "_connected", refuse)
    for ask, hint in ((connect, "--no-daemon does without it"), (control, None)):
        with pytest.raises(UnavailableError, match="permission denied") as caught:
            ask("s", *(["status", SECONDS] if ask is control else []))
        assert caught.value.hint == hint


def test_what_another_user_listens_at_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toastkit.wire.peer_of", lambda connection: Peer(4711, 1))
    monkeypatch.setattr(os, "geteuid", lambda: 4712)
    with FakeDaemon() as daemon:
        with pytest.raises(UnavailableError, match=r"another user's \(uid 4711\)"):
            connect(daemon.path)
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
        assert connect(daemon.path) is not None
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        assert connect(daemon.path) is not None
    assert daemon.requests == []


def test_control() -> None:
    with FakeDaemon([{"progress": {"loading": "x"}}, {"status": {"pid": 5}}]) as daemon:
        assert control(daemon.path, "status", SECONDS) == {"status": {"pid": 5}}
        assert daemon.request == {"op": "status"}
    with FakeDaemon(failure(69, "the daemon is shutting down", "wait"), [DROP], [HOLD]) as daemon:
        with pytest.raises(UnavailableError, match="shutting down") as caught:
            control(daemon.path, "stop", SECONDS)
        assert caught.value.hint == "wait"
        with pytest.raises(UnavailableError, match="closed the conn"):
            control(daemon.path, "stop", SECONDS)
        with pytest.raises(UnavailableError, match="does not answer"):
            control(daemon.path, "health", timeout=0.05)
        assert daemon.gone.wait(SECONDS)


def test_a_signal_ends_the_replies(signals: Signals) -> None:
    with FakeDaemon([{"text": "a"}, HOLD]) as daemon:
        timer = threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGTERM])
        replies = SocketBackend(daemon.path, interrupts=signals).ask(ASK)
        assert next(replies) == {"text": "a"}
        timer.start()
        assert list(replies) == []
        assert signals.signal == signal.SIGTERM and signals.code == 143
        assert daemon.gone.wait(SECONDS)
        timer.join()
