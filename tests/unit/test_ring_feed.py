"""A run: its directory, logits ring, feed and the hand-over of the lock, between processes."""

from __future__ import annotations

import os
import resource
import select
import signal
import subprocess
import sys
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toastkit.errors import (
    BusyError,
    CannotCreateError,
    DataError,
    IOFailure,
    NoInputError,
    UnavailableError,
)
from toastkit.frames import Reference
from toastkit.session.directory import Session
from toastkit.session.feed import FeedMessage, FeedReader, FeedWriter
from toastkit.session.handover import HandoverClient, HandoverServer
from toastkit.session.lock import WriterLock
from toastkit.session.ring import RingReader, RingWriter
from toastkit.session.run import RunDirectory, sweep

MODEL = "ab" * 32


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    directory = RunDirectory.create(tmp_path / "session")
    yield directory
    directory.remove()


# -------------------------------------------------------------------------------- run directory


def test_run_directory(tmp_path: Path):
    session = tmp_path / "session"
    first = RunDirectory.create(session)
    assert first.path.parent == session / "runs" and first.path.stat().st_mode & 0o777 == 0o700
    assert all(p.stat().st_mode & 0o777 == 0o600 for p in first.path.iterdir())
    joined = RunDirectory.join(first.path)
    first.close()
    first.close()
    second = RunDirectory.create(session)  # sweeps: joined still holds the first
    assert first.path.exists()
    joined.close()
    sweep(session)
    assert not first.path.exists() and second.path.exists()
    with pytest.raises(NoInputError, match="has ended"):
        RunDirectory.join(first.path)
    second.remove()
    assert list((session / "runs").iterdir()) == []
    sweep(tmp_path / "nowhere")


def test_run_in_a_place_that_is_a_file(tmp_path: Path):
    (tmp_path / "session").mkdir()
    (tmp_path / "session" / "runs").touch()
    with pytest.raises(CannotCreateError):
        RunDirectory.create(tmp_path / "session")


# ------------------------------------------------------------------------------------------ ring


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(vocab=st.integers(1, 300), slots=st.integers(1, 5), steps=st.integers(1, 12))
def test_ring_keeps_the_last_steps(tmp_path: Path, vocab: int, slots: int, steps: int):
    path = tmp_path / "logits"
    path.unlink(missing_ok=True)
    writer, reader = RingWriter(path, vocab, slots), RingReader(path)
    written = []
    for step in range(steps):
        logits = np.random.default_rng(step).normal(size=vocab).astype(np.float32)
        written.append((writer.write(logits), logits))
    for step, (reference, logits) in enumerate(written):
        if step >= steps - slots:
            assert np.array_equal(reader.read(reference), logits)
        else:
            with pytest.raises(DataError, match=f"logits of step {step + 1} are gone"):
                reader.read(reference)
    writer.close()
    reader.close()


def test_ring_refuses_what_does_not_fit(tmp_path: Path):
    writer = RingWriter(tmp_path / "logits", 10)
    good = writer.write(array("f", range(10)))
    reader = RingReader(tmp_path / "logits")
    assert reader.read(good).tolist() == list(range(10))
    for bad in (
        Reference(9, 1, "float32", (10,)),
        Reference(0, 1, "float32", (11,)),
        Reference(0, 1, "float16", (10,)),
        Reference(-1, 1, "float32", (10,)),
        Reference(0, 0, "float32", (10,)),
        Reference(1, 0, "float32", (10,)),
        Reference(0, 2, "float32", (10,)),
        Reference(1, 1, "float32", (10,)),
    ):
        with pytest.raises(DataError) as caught:
            reader.read(bad)
        assert caught.value.hint == "use --inline to save a stream"
    for logits in (array("f", range(9)), array("d", range(5)), np.zeros(20, np.float16)):
        with pytest.raises(ValueError):
            writer.write(logits)


def test_a_copy_stays_and_an_open_ring_outlives_its_directory(run: RunDirectory):
    writer = RingWriter(run.ring, 4, slots=1)
    reader = RingReader(run.ring)
    first = reader.read(writer.write(array("f", [1, 2, 3, 4])))
    run.remove()
    second = reader.read(writer.write(array("f", [5, 6, 7, 8])))
    assert first.tolist() == [1, 2, 3, 4] and second.tolist() == [5, 6, 7, 8]
    with pytest.raises(DataError, match="are gone"):
        RingReader(run.ring)


def test_ring_while_it_is_written(tmp_path: Path):
    """Every read is of one step or an error, never of two."""
    vocab = 20_000
    writer, reader = (
        RingWriter(tmp_path / "logits", vocab, slots=2),
        RingReader(tmp_path / "logits"),
    )
    latest = [writer.write(np.full(vocab, 1, np.float32))]

    def write() -> None:
        for step in range(2, 3000):
            latest[0] = writer.write(np.full(vocab, step, np.float32))

    thread = threading.Thread(target=write)
    thread.start()
    seen = set()
    while thread.is_alive():
        reference = latest[0]
        try:
            logits = reader.read(reference)
        except DataError:
            continue
        assert (logits == reference.seq).all()
        seen.add(reference.seq)
    thread.join()
    assert reader.read(latest[0])[0] == 2999 and seen


@pytest.mark.parametrize("damage", [b"", b"x" * 200, None])
def test_a_file_that_is_no_ring(tmp_path: Path, damage: bytes | None):
    path = tmp_path / "logits"
    RingWriter(path, 10).close()
    path.write_bytes(path.read_bytes()[:-1] if damage is None else damage)
    with pytest.raises(DataError, match="logits ring"):
        RingReader(path)


def test_ring_on_a_full_disk(tmp_path: Path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(IOFailure, match="cannot make the logits ring"):
            RingWriter(tmp_path / "logits", 4096)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "logits").exists()
    RingWriter(tmp_path / "logits", 4096).close()


# ------------------------------------------------------------------------------------------ feed


def test_feed_between_two_ends(run: RunDirectory):
    reader = FeedReader(run.feed)
    assert reader.read_available() == []
    writer = FeedWriter(run.feed)
    writer.send(3, 17)
    writer.send(4, 2**32 - 1, gear="low")
    assert select.select([reader], [], [], 1)[0]
    assert reader.read_available() == [(3, 17, None, False), (4, 2**32 - 1, "low", False)]
    writer.send(5, None, end=True)
    writer.close()
    assert reader.read_available() == [FeedMessage(5, None, None, True)]
    assert not select.select([reader], [], [], 0)[0]  # no end of file, no spinning
    with FeedWriterOf(run) as again:
        again.send(6, 1)
    assert reader.read_available() == [(6, 1, None, False)]
    reader.close()


class FeedWriterOf(FeedWriter):
    """A FeedWriter for a with statement."""

    def __init__(self, run: RunDirectory):
        super().__init__([run.feed])

    def __enter__(self) -> FeedWriterOf:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def test_one_sampler_feeds_two_decodes(tmp_path: Path):
    runs = [RunDirectory.create(tmp_path / name) for name in ("a", "b")]
    readers = [FeedReader(run.feed) for run in runs]
    writer = FeedWriter([run.feed for run in runs])
    writer.send(0, 5)
    assert [reader.read_available() for reader in readers] == [[(0, 5, None, False)]] * 2
    readers[0].close()
    with pytest.raises(BrokenPipeError):
        writer.send(1, 6)
    assert readers[1].read_available() == [(1, 6, None, False)]


def test_feed_without_a_reader(run: RunDirectory, tmp_path: Path):
    with pytest.raises(NoInputError, match="no decode is reading"):
        FeedWriter(run.feed, wait_seconds=0.02)
    with pytest.raises(NoInputError):
        FeedWriter(tmp_path / "nothing", wait_seconds=0)
    with pytest.raises(NoInputError):
        FeedReader(tmp_path / "nothing")
    (tmp_path / "file").touch()
    for end in (FeedReader, FeedWriter):
        with pytest.raises(DataError, match="not a feed"):
            end(tmp_path / "file")


def test_feed_waits_for_its_reader(tmp_path: Path):
    session = tmp_path / "session"
    path = session / "feed"
    opened = []
    thread = threading.Thread(target=lambda: opened.append(FeedWriter(path)))
    thread.start()
    session.mkdir()
    os.mkfifo(path)
    reader = FeedReader(path)
    thread.join()
    opened[0].send(1, 2)
    assert reader.read_available() == [(1, 2, None, False)]


messages = st.builds(
    FeedMessage,
    st.integers(0, 2**53 - 1),
    st.integers(0, 2**32 - 1),
    st.sampled_from([None, "low", "mid", "high"]),
    st.booleans(),
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(sent=st.lists(messages, max_size=8), cuts=st.lists(st.integers(0, 200), max_size=4))
def test_partial_messages_are_kept(run: RunDirectory, sent: list[FeedMessage], cuts: list[int]):
    data = b"".join(msgpack.packb({**m._asdict(), "unknown": 1}) for m in sent)
    reader = FeedReader(run.feed)
    fd = os.open(run.feed, os.O_WRONLY)
    got = []
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, stop in zip(edges, edges[1:]):
        os.write(fd, data[start:stop])
        got += reader.read_available()
    assert got == sent
    os.close(fd)
    reader.close()


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    data=st.binary(min_size=1, max_size=300)
    | st.dictionaries(
        st.sampled_from(["pos", "id", "gear", "end", "x"]),
        st.none() | st.integers(-2, 2**40) | st.text(max_size=3) | st.booleans() | st.floats(),
    ).map(msgpack.packb)
)
def test_garbage_on_the_feed(run: RunDirectory, data: bytes):
    reader = FeedReader(run.feed)
    fd = os.open(run.feed, os.O_WRONLY)
    os.write(fd, data)
    try:
        for message in reader.read_available():
            assert type(message.pos) is int and (type(message.id) is int or message.end)
    except DataError as error:
        assert error.message.startswith("cannot read the feed: ")
    finally:
        os.close(fd)
        reader.close()


@pytest.mark.parametrize(
    "data", [b"hello\n", b"\xc1", b"\x80", msgpack.packb({"pos": 1, "id": -1}), b"\xde\xff\xff" * 9]
)
def test_garbage_is_an_error(run: RunDirectory, data: bytes):
    reader = FeedReader(run.feed)
    fd = os.open(run.feed, os.O_WRONLY)
    os.write(fd, data)
    with pytest.raises(DataError):
        reader.read_available()


def test_nothing_but_messages_can_be_sent(run: RunDirectory):
    reader = FeedReader(run.feed)
    writer = FeedWriter(run.feed)
    for arguments in ((1, -1), (-1, 1), (1, None), (1, 2, "fast")):
        with pytest.raises(DataError):
            writer.send(*arguments)
    assert reader.read_available() == []


# -------------------------------------------------------------------------------------- handover

CLIENT = """
import sys, time
from pathlib import Path
from toastkit.session.handover import HandoverClient
from toastkit.session.directory import Session
run, session, wait = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "wait"
client = HandoverClient(run, session)
print("connected", flush=True)
sys.stdin.readline()
lock = client.receive(5)
with Session.adopt(session, None, lock) as state:
    print("holds", state.n_past, flush=True)
    sys.stdin.readline()
    state.commit(state.tokens + [9], None, None)
client.close()
"""


def start_client(run: RunDirectory, session: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", CLIENT, str(run.path), str(session), "wait"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def tell(process: subprocess.Popen) -> None:
    process.stdin.write("go\n")
    process.stdin.flush()


@pytest.mark.parametrize("depth", [0, 120])
def test_the_lock_passes_without_a_gap(tmp_path: Path, depth: int):
    path = tmp_path / ("s" + "x" * depth)  # the longer one has no room in a socket's address
    session = Session.open(path, MODEL)
    session.commit([1, 2, 3], None, None)
    run = RunDirectory.create(path)
    server = HandoverServer(run.path, session.lock)
    taken = threading.Event()
    stop = threading.Event()

    def try_to_take() -> None:
        while not stop.is_set():
            try:
                WriterLock.acquire(path)
                taken.set()
                return
            except BusyError:
                pass

    thief = threading.Thread(target=try_to_take)
    thief.start()
    try:
        client = start_client(run, path)
        assert client.stdout.readline() == "connected\n"
        assert server.offer(0.05) is False and session.lock.held  # connected, but has not asked
        tell(client)
        assert server.offer(5) is True
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
    assert client.wait(5) == 0
    server.close()
    with Session.open(path, MODEL) as again:
        assert again.tokens == [1, 2, 3, 9]
    client.stdin.close()
    client.stdout.close()


def test_a_client_that_dies_leaves_the_lock_here(tmp_path: Path):
    path = tmp_path / "session"
    session = Session.open(path, MODEL)
    session.commit([1], None, None)
    run = RunDirectory.create(path)
    server = HandoverServer(run.path, session.lock)
    first = start_client(run, path)
    assert first.stdout.readline() == "connected\n"
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert server.offer(0.05) is False and session.lock.held
    second = start_client(run, path)
    tell(second)
    assert server.offer(5) is True
    assert second.stdout.readline() == "connected\n" and second.stdout.readline() == "holds 1\n"
    second.send_signal(signal.SIGKILL)
    assert server.wait_done(5) is True
    second.wait()
    session.close()
    WriterLock.acquire(path).release()
    for client in (first, second):
        client.stdin.close()
        client.stdout.close()


def test_an_offer_ends_when_the_reader_of_stdout_goes(tmp_path: Path):
    session = Session.open(tmp_path / "session", MODEL)
    run = RunDirectory.create(session.path)
    server = HandoverServer(run.path, session.lock)
    reading, writing = os.pipe()
    threading.Timer(0.02, os.close, [reading]).start()
    assert server.offer(None, watch_fd=writing) is False and session.lock.held
    server.close()
    os.close(writing)


def test_a_server_that_dies(tmp_path: Path):
    path = tmp_path / "session"
    session = Session.open(path, MODEL)
    run = RunDirectory.create(path)
    with pytest.raises(UnavailableError):
        HandoverClient(run.path, path, wait_seconds=0.01)
    server = HandoverServer(run.path, session.lock)
    client = HandoverClient(run.path, path)
    threading.Timer(0.02, server.close).start()
    with pytest.raises(UnavailableError):
        client.receive(5)
    assert not (run.path / "handover").exists()


def test_a_client_that_gives_up(tmp_path: Path):
    path = tmp_path / "session"
    session = Session.open(path, MODEL)
    run = RunDirectory.create(path)
    server = HandoverServer(run.path, session.lock)
    client = HandoverClient(run.path, path)
    with pytest.raises(UnavailableError, match="in time"):
        client.receive(0.01)
    assert server.offer(0.01) is False and session.lock.held
    with pytest.raises(BusyError):
        WriterLock.acquire(path)


def test_what_is_no_lock_is_refused(tmp_path: Path):
    (tmp_path / "lock").touch()
    (tmp_path / "other").touch()
    fd = os.open(tmp_path / "other", os.O_RDWR)
    with pytest.raises(DataError, match="not the lock"):
        WriterLock.from_fd(tmp_path, fd)
    with pytest.raises(OSError):
        os.fstat(fd)
