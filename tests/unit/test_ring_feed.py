"""A run: its directory, logits ring and feed."""

from __future__ import annotations

import os
import resource
import select
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path

import msgpack
import numpy as np
import pytest
from hand_made import draw
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from processes import start

from tests.conftest import examples
from toastkit.errors import CannotCreateError, DataError, IOFailure, NoInputError
from toastkit.frames import End, Head, Logits, Reference, Token
from toastkit.sampling.sampling_options import SamplingOptions
from toastkit.session.feed import FeedMessage, FeedReader, FeedWriter
from toastkit.session.ring import (
    HEADER,
    LINE_BYTES,
    MAGIC,
    VERSION,
    RingReader,
    RingWriter,
    Summary,
)
from toastkit.session.run import RunDirectory, feed_of, ring_of, sweep
from toastkit.stages.run.pipe_feed import PipeFeed
from toastkit.stages.run.protocol import Next


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
    max_examples=examples(20),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(vocab=st.integers(1, 300), slots=st.integers(1, 5), steps=st.integers(1, 12))
def test_ring_keeps_the_last_steps(tmp_path: Path, vocab: int, slots: int, steps: int):
    path = tmp_path / "logits"
    path.unlink(missing_ok=True)
    writer, reader = RingWriter(path, vocab, slots), RingReader(path)
    written = []
    for step in range(steps):
        logits = np.random.default_rng(step).normal(size=vocab).astype(np.float32)
        summary = Summary(step / 3, -step / 7, step) if step % 2 else None
        written.append((writer.write(logits, lambda known=summary: known), logits, summary))
    for step, (reference, logits, summary) in enumerate(written):
        if step >= steps - slots:
            assert np.array_equal(reader.read(reference), logits)
            assert reader.summary(reference) == summary
        else:
            for read in (reader.read, reader.summary):
                with pytest.raises(DataError, match=f"logits of step {step + 1} are gone"):
                    read(reference)
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
        for read in (reader.read, reader.summary):
            with pytest.raises(DataError) as caught:
                read(bad)
            assert caught.value.hint == "use --inline to save a stream"
    for logits in (array("f", range(9)), array("d", range(5)), np.zeros(20, np.float16)):
        with pytest.raises(ValueError):
            writer.write(logits)


@pytest.mark.parametrize(
    "chain, top, known", [({}, 0, True), ({}, 2, False), ({"logit_bias": [(1, 0.5)]}, 0, False),
                          ({"temperature": 1e-6}, 0, False)],
)  # fmt: skip
def test_the_likeliest_token_is_the_one_that_decode_found(
    run: RunDirectory, chain: dict, top: int, known: bool
):
    """Told otherwise than the logits say, as no decode does, to see who is believed."""
    writer = RingWriter(ring_of(run.path), 4)
    told = Logits(5, writer.write(array("f", [0, 9, 0, 0]), lambda: Summary(1.0, -0.25, 2)))
    found = Logits(6, writer.write(array("f", [0, 9, 0, 0])))
    stream = [Head("m", "f", 4, [], run=str(run.path)), told, found, End("stop", 2)]
    options = SamplingOptions(**{"temperature": 0, **chain})
    tokens = [f for f in draw(stream, options=options, top=top) if isinstance(f, Token)]
    assert [token.id for token in tokens] == [2 if known else 1, 1]
    assert (tokens[0].logprob == -0.25) is known


def test_an_open_ring_outlives_its_directory(run: RunDirectory):
    writer = RingWriter(ring_of(run.path), 4, slots=1)
    reader = RingReader(ring_of(run.path))
    assert reader.read(writer.write(array("f", [1, 2, 3, 4]))).tolist() == [1, 2, 3, 4]
    run.remove()
    assert reader.read(writer.write(array("f", [5, 6, 7, 8]))).tolist() == [5, 6, 7, 8]
    with pytest.raises(DataError, match="are gone"):
        RingReader(ring_of(run.path))


WRITER = """
import sys
from array import array
from toastkit.session.ring import RingWriter, Summary
writer = RingWriter(sys.argv[1], 50_000, slots=1)
print("ready", flush=True)
for step in range(1, 10**6):
    writer.write(array("f", [step % 1000]) * 50_000, lambda: Summary(float(step), 0, 0))
"""


def test_ring_while_it_is_written(tmp_path: Path):
    """A copy is of one step or an error, never of two: another process overwrites the only slot."""
    path = tmp_path / "logits"
    child = start(WRITER, path)
    try:
        assert child.stdout.readline() == "ready\n"
        reader = RingReader(path)
        whole = stale = 0
        while (whole < 50 or stale < 50) and child.poll() is None:
            number = int.from_bytes(path.read_bytes()[64:72], "little") or 1
            reference = Reference(0, number, "float32", (50_000,))
            try:
                if number % 2:
                    assert reader.summary(reference).entropy == number
                logits = reader.read(reference)
            except DataError:
                stale += 1
                continue
            assert (logits == number % 1000).all()
            whole += 1
    finally:
        child.kill()
        child.communicate()
    assert whole and stale


NO_SLOTS = HEADER.pack(MAGIC, VERSION, 10, 0, 0).ljust(LINE_BYTES, b"\0")


@pytest.mark.parametrize("damage", [b"", b"x" * 200, NO_SLOTS, None])
def test_a_file_that_is_no_ring(tmp_path: Path, damage: bytes | None):
    path = tmp_path / "logits"
    RingWriter(path, 10).close()
    path.write_bytes(path.read_bytes()[:-1] if damage is None else damage)
    with pytest.raises(DataError, match="logits ring"):
        RingReader(path)


@pytest.mark.parametrize("left", [0, 100, 64 + 64 + 4 * 1024 * 5])
def test_a_ring_that_is_cut_short(tmp_path: Path, left: int):
    """By another program, under its reader and its writer: an error in both, and no SIGBUS."""
    path = tmp_path / "logits"
    writer = RingWriter(path, 10240)
    reference = writer.write(array("f", [1]) * 10240)
    reader = RingReader(path)
    os.truncate(path, left)
    with pytest.raises(DataError, match="logits of step 1 are gone"):
        reader.read(reference)
    with pytest.raises(IOFailure, match="cut it short"):
        writer.write(array("f", [2]) * 10240)


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
    reader = FeedReader(feed_of(run.path))
    assert reader.read_available() == []
    writer = FeedWriter(feed_of(run.path))
    writer.send(3, 17)
    writer.send(4, 2**32 - 1, gear="low", expected="mid")
    assert select.select([reader], [], [], 1)[0]
    wanted = [FeedMessage(3, 17), FeedMessage(4, 2**32 - 1, "low", expected="mid")]
    assert reader.read_available() == wanted
    writer.send(5, None, end=True)
    writer.close()
    assert reader.read_available() == [FeedMessage(5, None, None, True)]
    assert not select.select([reader], [], [], 0)[0]  # no end of file, no spinning
    again = FeedWriter([feed_of(run.path)])
    again.send(6, 1)
    again.close()
    assert reader.read_available() == [FeedMessage(6, 1)]
    reader.close()


def test_one_sampler_feeds_two_decodes(tmp_path: Path):
    runs = [RunDirectory.create(tmp_path / name) for name in ("a", "b")]
    readers = [FeedReader(feed_of(run.path)) for run in runs]
    writer = FeedWriter([feed_of(run.path) for run in runs])
    writer.send(0, 5)
    assert [reader.read_available() for reader in readers] == [[FeedMessage(0, 5)]] * 2
    readers[0].close()
    with pytest.raises(BrokenPipeError):
        writer.send(1, 6)
    assert readers[1].read_available() == [FeedMessage(1, 6)]


def test_feed_without_a_reader(run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("toastkit.session.feed.OPEN_SECONDS", 0.02)
    with pytest.raises(NoInputError, match="no decode is reading"):
        FeedWriter(feed_of(run.path))
    with pytest.raises(NoInputError):
        FeedWriter(tmp_path / "nothing")
    with pytest.raises(NoInputError):
        FeedReader(tmp_path / "nothing")
    (tmp_path / "file").touch()
    for end in (FeedReader, FeedWriter):
        with pytest.raises(DataError, match="file is a regular file"):
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
    assert reader.read_available() == [FeedMessage(1, 2)]


messages = st.builds(
    FeedMessage,
    st.integers(0, 2**53 - 1),
    st.integers(0, 2**32 - 1),
    st.sampled_from([None, "low", "mid", "high"]),
    st.booleans(),
    st.sampled_from([None, "low", "mid", "high"]),
)


@settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(sent=st.lists(messages, max_size=8), cuts=st.lists(st.integers(0, 200), max_size=4))
def test_partial_messages_are_kept(run: RunDirectory, sent: list[FeedMessage], cuts: list[int]):
    data = b"".join(msgpack.packb({**m._asdict(), "unknown": 1}) for m in sent)
    reader = FeedReader(feed_of(run.path))
    fd = os.open(feed_of(run.path), os.O_WRONLY)
    got = []
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for first, last in zip(edges, edges[1:]):
        os.write(fd, data[first:last])
        got += reader.read_available()
    assert got == sent
    os.close(fd)
    reader.close()


@settings(
    max_examples=examples(50),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    data=st.binary(min_size=1, max_size=300)
    | st.dictionaries(
        st.sampled_from(["pos", "id", "gear", "end", "x"]),
        st.none() | st.integers(-2, 2**40) | st.text(max_size=3) | st.booleans() | st.floats(),
    ).map(msgpack.packb)
)
def test_garbage_on_the_feed(run: RunDirectory, data: bytes):
    reader = FeedReader(feed_of(run.path))
    fd = os.open(feed_of(run.path), os.O_WRONLY)
    os.write(fd, data)
    try:
        for message in reader.read_available():
            assert message.pos is None or type(message.pos) is int
            assert type(message.id) is int or message.end
    except DataError as error:
        assert error.message.startswith("cannot read the feed: ")
    finally:
        os.close(fd)
        reader.close()


@pytest.mark.parametrize(
    "data", [b"hello\n", b"\xc1", b"\x80", msgpack.packb({"pos": 1, "id": -1}), b"\xde\xff\xff" * 9]
)
def test_garbage_is_an_error(run: RunDirectory, data: bytes):
    reader = FeedReader(feed_of(run.path))
    fd = os.open(feed_of(run.path), os.O_WRONLY)
    os.write(fd, data)
    with pytest.raises(DataError):
        reader.read_available()


def test_nothing_but_messages_can_be_sent(run: RunDirectory):
    reader = FeedReader(feed_of(run.path))
    writer = FeedWriter(feed_of(run.path))
    for arguments in ((1, -1), (-1, 1), (1, None), (1, 2, "fast")):
        with pytest.raises(DataError):
            writer.send(*arguments)
    assert reader.read_available() == []


def test_a_sampler_goes_on_for_the_decodes_that_are_left(tmp_path: Path) -> None:
    runs = [RunDirectory.create(tmp_path / name) for name in ("a", "b")]
    readers = [FeedReader(feed_of(run.path)) for run in runs]
    feed = PipeFeed()
    feed.begin(Head("m", "ab" * 16, 4, [], run=[str(run.path) for run in runs]))
    feed.send(1, Next(7))
    readers[0].close()
    feed.send(2, Next(8))
    feed.send(3, Next(9, "length"))
    assert [(m.id, m.end) for m in readers[1].read_available()] == [
        (7, False),
        (8, False),
        (9, True),
    ]
    readers[1].close()
    feed.finish()
    for run in runs:
        run.remove()
