"""The front's loop: the protocol, what closing a connection means, and descriptors."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from tests.unit.daemon_front import Client, FakeWorker, Front, eventually, front, open_descriptors
from toastkit import __version__
from toastkit.daemon import server as module
from toastkit.daemon.channel import Channel, encode
from toastkit.daemon.service_settings import Limits
from toastkit.wire import Peer


@pytest.fixture
def running() -> Iterator[Front]:
    with front() as made:
        yield made


@pytest.fixture
def client(running: Front) -> Client:
    return running.client()


def texts(replies: list[dict]) -> str:
    return "".join(reply.get("text", "") for reply in replies)


def test_an_answer(running: Front, client: Client) -> None:
    replies = client.send({"prompt": "hello"}).replies()
    assert texts(replies) == "hello"
    assert replies[-1] == {"end": {"reason": "eos", "n": 2, "text": "hello"}}
    request = running.worker.requests[0]
    assert (request.op, request.prompt) == ("generate", "hello")
    channel = running.worker.channels[0]
    assert channel.connection.peer == (os.geteuid(), os.getpid())
    for byte in json.dumps({"prompt": "ümlaut"}, ensure_ascii=False).encode() + b"\n":
        client.send(bytes([byte]))
    assert texts(client.replies()) == "ümlaut"


def test_the_id_comes_back_with_every_reply(client: Client) -> None:
    for identity in ("a", "", 0, 12345678901234567890):
        for request in ({"prompt": "hi"}, {"op": "status"}, {"op": "x"}, {"promt": "x"}):
            replies = client.send({"id": identity, **request}).replies()
            assert all(next(iter(reply.items())) == ("id", identity) for reply in replies)
        assert "id" not in client.ask({"id": [], "prompt": "hi"})
        assert "id" not in client.ask({"prompt": "hi"})


def test_after_an_error_the_connection_goes_on() -> None:
    bad = {
        65: [b"garbage", b"\xff", b"[]", b'{"messages": []}'],
        64: [b"{}", b'{"prompt": "x", "promt": 1}', b'{"prompt": "x", "options": {"top_p": 2}}'],
        70: [b'{"prompt": "boom"}'],
    }
    with front() as running:
        client = running.client()
        for refused, (code, line) in enumerate(((c, line) for c in bad for line in bad[c]), 1):
            error = client.ask(line + b"\n")["error"]
            assert set(error) == {"code", "message", "hint"} and error["code"] == code
            assert texts(client.send({"prompt": "hi"}).replies()) == "hi"
            assert client.ask({"op": "status"})["status"]["refused"] == refused


def test_pipelined_lines_are_answered_in_their_order(client: Client) -> None:
    lines = [{"id": n, "prompt": f"text {n}"} for n in range(200)]
    client.send(b"\n \n" + b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    for n in range(200):
        assert [reply["id"] for reply in client.replies()] == [n] * 3


def test_more_lines_than_one_turn_takes(client: Client) -> None:
    """Nothing else happens that would have the rest looked at."""
    client.send(b'{"op": "status"}\n' * (4 * module.LINES_PER_TURN))
    for _ in range(4 * module.LINES_PER_TURN):
        reply = client.line()
        assert reply is not None and "status" in reply


def test_status_and_control(running: Front, client: Client) -> None:
    assert client.ask({"op": "health"})["health"]["ok"] is True
    status = client.ask({"op": "status"})["status"]
    assert (status["pid"], status["version"]) == (os.getpid(), __version__)
    assert (status["socket"], status["connections"]) == (str(running.path), 1)
    assert (status["model"], status["served"], status["refused"]) == ("fake", 1, 0)
    assert 0 <= status["uptime"] < 60
    assert client.ask({"op": "reload"}) == {"reloading": True}
    assert client.ask({"op": "stop"}) == {"stopping": True}
    assert running.calls == ["reload", "stop"]


@pytest.mark.skipif(sys.platform != "linux", reason="abstract addresses are Linux's")
def test_the_status_names_an_abstract_socket_as_systemd_does() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0toasted {os.getpid()}")
        server = module.Server([listener], FakeWorker(), Limits(), print, print)
        assert server.status()["socket"] == f"@toasted {os.getpid()}"
        server.close()


def test_busy() -> None:
    with front(worker=FakeWorker(max_queue=1)) as running:
        first = running.client().send({"prompt": "hold"})
        eventually(lambda: running.worker.requests)
        second = running.client().send({"prompt": "second"})
        eventually(lambda: running.worker.status()["waiting"])
        third = running.client()
        assert "status" in third.ask({"op": "status"})
        assert third.ask({"id": 3, "prompt": "third"})["error"]["code"] == 75
        running.worker.release.set()
        assert texts(first.replies()) == "hold" and texts(second.replies()) == "second"
        assert texts(third.send({"prompt": "again"}).replies()) == "again"


@pytest.mark.parametrize("end", [b"\n", b"", b'\n{"prompt": "thi'])
def test_half_closed_and_still_answered(running: Front, client: Client, end: bytes) -> None:
    """Half a line at the end is an error."""
    client.send(b'{"prompt": "first"}\n{"prompt": "second"}' + end)
    client.socket.shutdown(socket.SHUT_WR)
    assert texts(client.replies()) == "first"
    assert texts(client.replies()) == "second"
    assert len(end) < 2 or client.replies()[-1]["error"]["code"] == 65
    assert client.line() is None
    eventually(lambda: running.connections == 0)


@pytest.mark.parametrize("half_first", [False, True])
def test_a_closed_connection_cancels(running: Front, half_first: bool) -> None:
    client = running.client().send({"id": 5, "prompt": "hold"})
    eventually(lambda: running.worker.requests)
    if half_first:
        client.socket.shutdown(socket.SHUT_WR)
        assert client.line() is not None
        assert not running.worker.channels[0].gone
    client.close()
    eventually(lambda: running.worker.channels[0].gone)
    eventually(lambda: running.worker.cancelled == [5])
    eventually(lambda: running.connections == 0)
    assert texts(running.client().send({"prompt": "next"}).replies()) == "next"


def test_closed_while_it_waits_its_turn(running: Front) -> None:
    held = running.client().send({"prompt": "hold"})
    eventually(lambda: running.worker.requests)
    client = running.client().send({"id": 2, "prompt": "never read"})
    eventually(lambda: running.worker.status()["waiting"])
    client.close()
    eventually(lambda: running.connections == 1)
    running.worker.release.set()
    eventually(lambda: running.worker.cancelled == [2])
    assert texts(held.replies()) == "hold"


def test_what_belongs_to_a_connection_ends_with_it() -> None:
    """The store outlives a request; on_close is called once, whatever one of them raises."""
    with front(Limits(idle_seconds=0.05)) as running:
        client = running.client()
        assert client.ask({"op": "commit"}) == {"attached": 0}
        store, called = running.worker.channels[0].connection.store, []

        def fail() -> None:
            called.append(threading.current_thread().name)
            raise ValueError("no")

        on_close = running.worker.channels[0].connection.on_close
        on_close += [fail, lambda: called.append("second")]
        store["state"] = 1
        other = running.client()  # it is idle, and goes; who has something in the store stays
        assert other.line() is None
        client.ask({"op": "release"})
        assert running.worker.channels[1].connection.store is store
        client.close()
        eventually(lambda: len(called) == 2)
        assert called[0] != threading.current_thread().name and called[1] == "second"
        assert any("ValueError: no" in line for line in running.said)


def test_a_bug_ends_one_connection(running: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    client, other = running.client(), running.client()
    assert "status" in client.ask({"op": "status"})

    def fail(*arguments) -> None:
        raise KeyError("bug")

    monkeypatch.setattr(module.Server, "_request", fail)
    client.send({"op": "status"})
    assert client.line() is None
    monkeypatch.undo()
    assert "status" in other.ask({"op": "status"})
    assert any("KeyError" in line for line in running.said)


def test_foreign_users_are_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "peer_of", lambda new: Peer(os.geteuid() + 1, 1))
    with front() as running:
        client = running.client()
        assert client.line() is None
        assert running.connections == 0
        monkeypatch.setattr(module, "peer_of", lambda new: Peer(0, 1))
        assert "status" in running.client().ask({"op": "status"})


def test_done_twice_and_replies_after_it_change_nothing(running: Front, client: Client) -> None:
    assert texts(client.send({"prompt": "one"}).replies()) == "one"
    late: Channel = running.worker.channels[0]
    eventually(lambda: late.over)
    late.reply({"text": "late"})
    late.done()
    assert texts(client.send({"prompt": "two"}).replies()) == "two"


def sent_with(client, line: bytes, count: int) -> list[int]:
    """Sends a line with descriptors of empty files; returns them."""
    fds = [os.memfd_create("t") if hasattr(os, "memfd_create") else os.dup(0) for _ in range(count)]
    socket.send_fds(client.socket, [line], fds)
    return fds


def test_descriptors_come_with_their_line(running: Front) -> None:
    before = open_descriptors()
    client = running.client()
    client.send(b'{"op": "commit"}\n{"op": "com')
    fds = sent_with(client, b'mit"}\n', 2)
    client.send({"op": "release"})
    replies = [client.replies()[0] for _ in range(3)]
    assert replies == [{"attached": 0}, {"attached": 2}, {"attached": 0}]
    received = running.worker.requests[1].fds
    assert len(received) == 2
    assert all(os.path.samestat(os.fstat(a), os.fstat(b)) for a, b in zip(fds, received))
    assert not any(os.get_inheritable(fd) for fd in received)
    for fd in [*fds, *received]:
        os.close(fd)
    client.close()
    eventually(lambda: open_descriptors() <= before)


def test_unwanted_descriptors_are_closed() -> None:
    lines = (b'{"op": "status"}\n', "status"), (b'{"prompt": "hi"}\n', "end"), (b"x\n", "error")
    with front() as running:
        client = running.client()
        client.ask({"op": "status"})
        before = open_descriptors()
        for line, key in (*lines, (b'{"op": "attach", "id": []}\n', "error")):
            for fd in sent_with(client, line, 2):
                os.close(fd)
            assert key in client.replies()[-1]
            eventually(lambda: open_descriptors() <= before)


def test_descriptors_of_a_line_that_never_ends_are_closed(running: Front) -> None:
    """Too many of them end the connection."""
    before = open_descriptors()
    client = running.client()
    for fd in sent_with(client, b'{"op": "att', 3):
        os.close(fd)
    eventually(lambda: open_descriptors() == before + 5)  # two ends of a connection, three fds
    client.close()
    eventually(lambda: open_descriptors() <= before)
    client = running.client()
    for fd in sent_with(client, b'{"op": "attach"}\n', 20):
        os.close(fd)
    assert client.line() is None
    client.close()
    eventually(lambda: open_descriptors() <= before)


@pytest.fixture(scope="module")
def shared():
    with front(Limits(line_bytes=1 << 16)) as running:
        yield running


# Hypothesis tries constants of modules that are loaded: one is the op that ends the daemon.
LINES = st.binary(max_size=60).filter(lambda line: b"stop" not in line) | st.sampled_from(
    [b'{"prompt": "x"}', b'{"op": "status"}', b'{"op": "health"}', b"{}", b'{"id": 1', b"\r", b" "]
)


@settings(max_examples=examples(50))
@given(st.lists(LINES, max_size=6), st.integers(1, 40))
def test_any_lines_get_an_answer(shared: Front, lines: list[bytes], size: int) -> None:
    """Each line that is not blank is answered once, however the bytes are cut; then it ends."""
    data = b"\n".join(lines)
    client = shared.client()
    for start in range(0, len(data), size):
        client.send(data[start : start + size])
    client.socket.shutdown(socket.SHUT_WR)
    wanted = sum(1 for line in data.split(b"\n") if line.strip())
    answered = 0
    while (reply := client.line()) is not None:
        answered += bool({"end", "error", "status", "health"} & set(reply))
    client.close()
    assert answered == wanted
    assert shared.failure is None


def test_a_reply_is_json_whatever_it_holds() -> None:
    """A reply that could not be written would leave its client waiting."""
    import numpy as np

    odd = {
        "a": float("-inf"), "b": [float("nan"), (1.5,)], "c": np.float32(0.5), "d": np.int64(3),
        "e": np.float64("inf"), "f": "\ud800", "g": {"h": object},
    }  # fmt: skip
    read = json.loads(encode(odd, "ü"))
    assert read.pop("g")["h"].startswith("<class")
    assert read == {
        "id": "ü", "a": None, "b": [None, [1.5]], "c": 0.5, "d": 3, "e": None, "f": "?",
    }  # fmt: skip
