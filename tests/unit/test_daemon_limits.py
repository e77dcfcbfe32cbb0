"""What one client may cost the others: long lines, many connections, readers that do not read."""

from __future__ import annotations

import errno
import gc
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.unit.daemon_front import PIECE, FakeWorker, eventually, front, open_descriptors
from toastkit.daemon import server as module
from toastkit.daemon.channel import UNSENT_LIMIT, Outbox
from toastkit.daemon.service_settings import Limits
from toastkit.errors import ToastError

MB = 1 << 20


def test_a_slow_reader_is_cut_off_and_the_others_are_served() -> None:
    """The worker is never held up: it has long gone on when the reader looks again."""
    with front() as running:
        slow = running.client().send({"id": 1, "prompt": "flood"})
        eventually(lambda: running.worker.channels)
        eventually(lambda: running.worker.cancelled == [1])
        assert running.worker.channels[0].gone
        assert running.client().ask({"prompt": "quick"})["end"]["text"] == "quick"
        eventually(lambda: running.connections == 0)
        received = 0
        with pytest.raises(AssertionError, match="half a line"):
            while slow.line() is not None:
                received += 1
        assert received * len(PIECE) < 2 * UNSENT_LIMIT + MB


def test_a_reader_that_takes_its_time_gets_all() -> None:
    with front() as running:
        client = running.client()
        lines = [{"id": n, "prompt": "y" * 30_000} for n in range(100)]
        sender = threading.Thread(target=client.send, args=lines)
        sender.start()
        time.sleep(0.05)  # what has been said by now is more than the socket takes
        for n in range(100):
            assert client.replies()[-1]["id"] == n
        sender.join()
        client.send({"prompt": "z" * (5 * MB), "stream": False})
        time.sleep(0.05)  # one large reply is no reason to cut off either
        assert len(client.replies()[-1]["end"]["text"]) == 5 * MB


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Python's collector, which ends circles, has run and does not run again."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def memory() -> int:
    """Bytes of this process in memory, at their highest so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_what_the_socket_does_not_take_keeps_its_place() -> None:
    """Also when there is room again before it has been sent; the loop hears that it is there."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    woken: list[int] = []
    outbox = Outbox(ours, lambda: woken.append(outbox.pending))
    outbox.put(b"first")
    assert not woken
    outbox.put(bytes(4 * MB))
    assert woken == [outbox.pending] != [0]
    with theirs:
        found = bytearray(theirs.recv(MB))
        outbox.put(b"last")
        while outbox.pending:
            outbox.flush()
            found += theirs.recv(MB)
        outbox.close()
        while data := theirs.recv(MB):
            found += data
    assert found == b"first" + bytes(4 * MB) + b"last"


def test_a_line_of_100_mb() -> None:
    limit = 4 * MB
    with front(Limits(line_bytes=limit)) as running:
        client = running.client()
        before = memory()
        piece, sent = b"[" * MB, 0
        with suppress(OSError):  # it is not read for ever
            for _ in range(100):
                client.send(piece)
                sent += MB
        assert sent > limit
        reply = client.replies()[-1]
        assert reply["error"]["code"] == 65 and str(limit) in reply["error"]["message"]
        assert client.line() is None
        assert memory() - before < 4 * limit
        client.close()
        eventually(lambda: running.connections == 0)
        assert running.client().ask({"prompt": "next"})["end"]["text"] == "next"


def test_the_limit_is_that_of_the_line_without_its_newline() -> None:
    with front(Limits(line_bytes=5000)) as running:
        for over in (0, 1):
            line = b'{"prompt": "%s"}'
            line %= b"x" * (5000 + over - len(line) + 2)
            assert ("error" in running.client().ask(line + b"\n")) == bool(over)


def test_a_long_line_behind_a_running_request() -> None:
    """Input is not read without limit while a request runs, and none of it is lost."""
    limit = 100_000
    with front(Limits(line_bytes=limit)) as running:
        client = running.client().send({"prompt": "hold"})
        eventually(lambda: running.worker.requests)
        client.socket.settimeout(0.1)
        sent = 0
        with pytest.raises(TimeoutError):
            while sent < 50 * MB:
                sent += client.socket.send(b'{"op": "health"}\n' * 1000)
        assert sent < 10 * limit + MB
        client.socket.settimeout(20)
        running.worker.release.set()
        assert client.replies()[-1]["end"]["text"] == "hold"
        assert "health" in client.replies()[0]


def test_too_many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is told, and nothing else is done for it."""
    monkeypatch.setattr(module, "GOODBYE_SECONDS", 600)
    with front(Limits(connections=3)) as running:
        clients = [running.client() for _ in range(3)]
        assert all("status" in client.ask({"op": "status"}) for client in clients)
        fourth = running.client()
        fourth.send({"prompt": "who asks before it reads"})
        reply = fourth.line()
        assert reply is not None and reply["error"]["code"] == 75
        assert fourth.line() is None and running.connections == 4  # it may be writing still
        fourth.close()
        clients.pop().close()
        eventually(lambda: running.connections == 2)
        assert running.client().ask({"prompt": "hi"})["end"]["text"] == "hi"
        assert [request.prompt for request in running.worker.requests] == ["hi"]


def test_a_dismissed_client_that_stays_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GOODBYE_SECONDS", 0.05)
    with front(Limits(connections=1)) as running:
        clients = [running.client() for _ in range(2)]
        assert clients[1].line()
        eventually(lambda: running.connections == 1)
        assert "status" in clients[0].ask({"op": "status"})


def test_many_connections_leave_nothing() -> None:
    with front() as running:
        before = open_descriptors()
        for n in range(300):
            client = running.client()
            if n % 3:
                client.send([b'{"prompt": "x"', b'{"prompt": "hi"}\n'][n % 2])
            client.close()
        eventually(lambda: running.connections == 0)
        eventually(lambda: open_descriptors() <= before)
        assert running.client().ask({"prompt": "hi"})["end"]["text"] == "hi"


def test_refused_requests_leave_nothing_for_the_collector(no_collector: None) -> None:
    """Lines of up to 16 MiB would stay in memory until it runs, which goes by objects, not bytes:
    120 of 10 MB took 2.4 GB."""

    def refusals() -> int:
        return sum(isinstance(each, (ToastError, ValueError)) for each in gc.get_objects())

    before = refusals()
    bad = [b"garbage", b"\xff", b"[]", b"{}", b'{"prompt": "x", "promt": 1}', b'{"prompt": "boom"}']
    with front() as running:
        client = running.client()
        for line in bad * 3:
            assert "error" in client.ask(line + b"\n")
        eventually(lambda: refusals() <= before)


def test_many_cancelled_requests() -> None:
    with front() as running:
        clients = [running.client().send({"id": n, "prompt": "hold"}) for n in range(20)]
        eventually(lambda: running.worker.status()["waiting"] >= 19)
        for client in clients:
            client.close()
        eventually(lambda: len(running.worker.cancelled) == 20)
        eventually(lambda: running.connections == 0)


def test_idle_connections_are_closed() -> None:
    with front(Limits(idle_seconds=0.1)) as running:
        busy = running.client().send({"prompt": "hold"})
        idle, half = running.client(), running.client().send(b'{"prompt": ')
        assert idle.line() is None and half.line() is None
        running.worker.release.set()
        assert busy.replies()[-1]["end"]["text"] == "hold"


def test_garbage_without_end_does_not_hold_up_the_others() -> None:
    with front() as running:
        client = running.client()

        def talk() -> None:
            with suppress(OSError):
                while True:
                    client.send(b"x\n" * 10_000)

        def listen() -> None:
            while client.line() is not None:
                pass

        threads = [threading.Thread(target=talk), threading.Thread(target=listen)]
        for thread in threads:
            thread.start()
        for _ in range(5):
            assert running.client().ask({"prompt": "hi"})["end"]["text"] == "hi"
        client.socket.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Accepting fails for want of descriptors once for each of these; the list shrinks."""
    accept, left = socket.socket.accept, []

    def scarce(listener: socket.socket):
        if left:
            left.pop()
            raise OSError(errno.EMFILE, "too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", scarce)
    return left


def test_running_out_of_descriptors_is_survived(
    failures: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.05)
    failures += [1, 2, 3]
    with front(worker=FakeWorker()) as running:
        assert running.client().ask({"prompt": "hi"})["end"]["text"] == "hi"
        assert not failures


def test_nobody_is_accepted_again_at_once_when_out_of_descriptors(
    failures: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listening socket stays readable: it would be tried in each turn of the loop."""
    monkeypatch.setattr(module, "PAUSE_SECONDS", 3600)
    with front() as running:
        known = running.client()
        assert known.ask({"prompt": "hi"})["end"]["text"] == "hi"
        failures += range(100)
        running.client()
        for _ in range(20):
            assert known.ask({"prompt": "hi"})["end"]["text"] == "hi"
        assert len(failures) == 99
