"""The writer's lock, passed from one process to another without a gap."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from processes import start

from toastkit.errors import BusyError, DataError, UnavailableError
from toastkit.session.directory import Session
from toastkit.session.handover import ASK, HandoverClient, HandoverServer, decline
from toastkit.session.lock import WriterLock
from toastkit.session.run import RunDirectory
from toastkit.wire import Peer

MODEL = "ab" * 32


CLIENT = """
import sys
from pathlib import Path
from toastkit.session.handover import HandoverClient
from toastkit.session.directory import Session
run, session = Path(sys.argv[1]), Path(sys.argv[2])
client = HandoverClient(run, session)
print("connected", flush=True)
sys.stdin.readline()
lock = client.receive()
with Session.adopt(session, None, lock) as state:
    print("holds", state.n_past, flush=True)
    sys.stdin.readline()
    state.commit(state.tokens + [9], None, None)
client.close()
"""


def begin(path: Path, *tokens: int) -> tuple[Session, RunDirectory, HandoverServer]:
    """A session with these tokens, a run of it and the server of the run."""
    session = Session.open(path, MODEL)
    session.commit(list(tokens), None, None)
    run = RunDirectory.create(path)
    return session, run, HandoverServer(run.path, session.lock)


def start_client(run: RunDirectory, session: Path) -> subprocess.Popen:
    return start(CLIENT, run.path, session)


def tell(process: subprocess.Popen) -> None:
    process.stdin.write("go\n")
    process.stdin.flush()


def test_the_lock_passes_without_a_gap(tmp_path: Path):
    path = tmp_path / "session"
    session, run, server = begin(path, 1, 2, 3)
    taken = threading.Event()
    stop = threading.Event()

    def try_to_take() -> None:
        while not stop.is_set():
            with suppress(BusyError):
                WriterLock.acquire(path)
                return taken.set()

    thief = threading.Thread(target=try_to_take)
    thief.start()
    try:
        client = start_client(run, path)
        assert client.stdout.readline() == "connected\n"
        threading.Timer(0.05, tell, [client]).start()
        assert server.offer(0.01) is True  # connected, but has not asked yet
        assert not session.lock.held
        session.close()
        assert client.stdout.readline() == "holds 3\n"
        assert server.wait_done(0.05) is False
        with pytest.raises(BusyError, match=f"process {client.pid}"):
            WriterLock.acquire(path)
        assert not taken.is_set()
    finally:
        stop.set()
        thief.join()
    tell(client)
    assert server.wait_done(5) is True
    client.communicate()
    assert client.returncode == 0
    server.close()
    with Session.open(path, MODEL) as again:
        assert again.tokens == [1, 2, 3, 9]


def test_a_client_that_dies_leaves_the_lock_here(tmp_path: Path):
    path = tmp_path / ("s" + "x" * 120)  # for which there is no room in a socket's address
    session, run, server = begin(path, 1)
    first = start_client(run, path)
    assert first.stdout.readline() == "connected\n"
    first.kill()
    first.communicate()
    assert server.offer(0.05) is False and session.lock.held
    second = start_client(run, path)
    tell(second)
    assert server.offer(5) is True
    assert second.stdout.readline() == "connected\n" and second.stdout.readline() == "holds 1\n"
    second.kill()
    assert server.wait_done(5) is True
    second.communicate()
    session.close()
    WriterLock.acquire(path).release()


def decline_from(stdin: int, run: RunDirectory) -> None:
    """Says, as a process that reads a descriptor, that no client will come."""
    kept = os.dup(0)
    os.dup2(stdin, 0)
    decline(run.path)
    os.dup2(kept, 0)
    os.close(kept)


def test_an_offer_ends_when_the_reader_of_stdout_wants_nothing(tmp_path: Path):
    session, run, server = begin(tmp_path / "session", 1)
    (reading, writing), (other, tee) = os.pipe(), os.pipe()
    decline_from(other, run)  # as one of several that read what tee writes
    assert server.offer(0.05, watch_fd=writing) is False and not server.unwanted
    decline_from(reading, run)
    assert server.offer(0.05) is False and not server.unwanted  # whoever that was
    client = start_client(run, session.path)
    tell(client)
    assert server.offer(30, watch_fd=writing) is True
    client.communicate()
    server.close()
    session.close()

    with Session.open(session.path, MODEL) as again:
        later = RunDirectory.create(again.path)
        server = HandoverServer(later.path, again.lock)
        decline_from(reading, later)
        assert server.offer(30, watch_fd=writing) is False and server.unwanted and again.lock.held
        server.close()
        decline_from(reading, later)  # nobody listens: nothing happens
    for fd in (reading, writing, other, tee):
        os.close(fd)


def test_an_offer_ends_when_the_reader_of_stdout_goes(tmp_path: Path):
    session, run, server = begin(tmp_path / "session")
    reading, writing = os.pipe()
    threading.Timer(0.02, os.close, [reading]).start()
    assert server.offer(30, watch_fd=writing) is False and session.lock.held
    server.close()
    os.close(writing)


def test_a_client_waits_for_a_prefill_that_is_still_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("toastkit.session.handover.CONNECT_SECONDS", 60)
    path = tmp_path / "session"
    session = Session.open(path, MODEL)
    run = RunDirectory.create(path)
    with ThreadPoolExecutor() as pool:
        client = pool.submit(HandoverClient, run.path, path)
        time.sleep(0.05)
        assert not client.done()
        server = HandoverServer(run.path, session.lock)
        client.result(60).close()
    server.close()


@pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="no system tells who it is")
def test_another_user_is_given_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    session, run, server = begin(tmp_path / "session")
    other = Peer(os.geteuid() + 1, os.getpid())
    monkeypatch.setattr("toastkit.session.handover.peer_of", lambda connection: other)
    with ThreadPoolExecutor() as pool:
        client = pool.submit(HandoverClient(run.path, tmp_path / "session").receive)
        assert server.offer(0.05) is False and session.lock.held
        with pytest.raises(UnavailableError):
            client.result(60)
    server.close()


def test_a_client_that_gives_up_and_a_server_that_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "session"
    session = Session.open(path, MODEL)
    run = RunDirectory.create(path)
    monkeypatch.setattr("toastkit.session.handover.CONNECT_SECONDS", 0.01)
    with pytest.raises(UnavailableError):
        HandoverClient(run.path, path)
    server = HandoverServer(run.path, session.lock)
    client = HandoverClient(run.path, path)
    client._socket.sendall(ASK)
    client.close()
    assert server.offer(0.01) is False and session.lock.held
    with pytest.raises(BusyError):
        WriterLock.acquire(path)
    client = HandoverClient(run.path, path)
    timer = threading.Timer(0.02, server.close)
    timer.start()
    with pytest.raises(UnavailableError):
        client.receive()
    timer.join()
    assert not (run.path / "handover").exists()


def test_what_is_no_lock_is_refused(tmp_path: Path):
    (tmp_path / "lock").touch()
    (tmp_path / "other").touch()
    fd = os.open(tmp_path / "other", os.O_RDWR)
    with pytest.raises(DataError, match="not the lock"):
        WriterLock.from_fd(tmp_path, fd)
    with pytest.raises(OSError):
        os.fstat(fd)
