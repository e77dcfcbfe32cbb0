"""Reading by threads: in which order, how much, and once for all who ask. Counted, not timed."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import mlx.core as mx
import pytest

from tests.model.checkpoints import open_model, open_store, same
from tests.model.published import write_published
from toastkit.gears.gear_options import GearOptions
from toastkit.holdings.policy import Wish
from toastkit.model.locate import locate
from toastkit.store import reader, waiting
from toastkit.store.jobs import Job
from toastkit.store.ledger import READING
from toastkit.store.raw import RawTensors
from toastkit.store.reader import Reader
from toastkit.store.request import CancelledError
from toastkit.store.waiting import AHEAD, NOW

SECONDS = 60  # for what would otherwise wait for ever


class Gate:
    """The files, of which nothing is read until `open`. order: in which reads began. cached: as of
    RawTensors."""

    def __init__(self, raw: RawTensors):
        self.raw, self.cached = raw, True
        self.order: list[str] = []
        self.began = threading.Semaphore(0)
        self._open = threading.Event()
        self._names = {raw.spans(name)[0]: name for name in raw.below("model.")}

    def fill(self, wanted, stopped, short_calls) -> int:
        self.order.append(self._names[wanted[0][0]])
        self.began.release()
        while not self._open.wait(0.01) and not stopped():
            pass
        return self.raw.fill(wanted, stopped, short_calls)

    def open(self) -> None:
        self._open.set()

    def wait(self, count: int = 1) -> None:
        for _ in range(count):
            assert self.began.acquire(timeout=SECONDS)


@pytest.fixture
def gate(model: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """One tensor is read at a time."""
    monkeypatch.setattr(waiting, "RUN_BYTES", 0)
    return Gate(RawTensors(locate(str(model))))


def jobs_of(gate: Gate) -> dict[str, Job]:
    """One a tensor, of one size: the matrices of the heads, in the order of the file."""
    raw, found = gate.raw, {}
    for name in sorted(raw.below("model."), key=raw.spans):
        if name.endswith(("q_proj.weight", "o_proj.weight")):
            _, entry = raw.place(name)
            found[name] = Job(raw.spans(name), entry.dtype, entry.shape)
    assert len(found) >= 6 and len({job.nbytes for job in found.values()}) == 1
    return found


def ask(reader: Reader, jobs: dict[str, Job], names, priority: int = NOW):
    return reader.request({name: jobs[name] for name in names}, dict, priority)


def test_what_is_waited_for_goes_first(gate: Gate) -> None:
    reader, jobs = Reader(gate, threads=1), jobs_of(gate)
    a, b, c, d, e, f = list(jobs)[:6]
    ahead = ask(reader, jobs, (a, b, c, d), AHEAD)
    gate.wait()  # a has begun
    now = ask(reader, jobs, (e, c))  # c is raised
    further = ask(reader, jobs, (f,), AHEAD)
    gate.open()
    gate.wait(5)  # who waits for a result would read too
    assert list(now.result()) == [e, c]
    assert list(ahead.result()) == [a, b, c, d] and list(further.result()) == [f]
    assert gate.order == [a, c, e, b, d, f]
    reader.close()


def test_a_read_is_joined(gate: Gate) -> None:
    """By whoever asks for it while it waits, runs, or lies there; afterwards it is read anew."""
    reader, jobs = Reader(gate, threads=1), jobs_of(gate)
    a, b = list(jobs)[:2]
    first, waiting = ask(reader, jobs, (a, b)), ask(reader, jobs, (b, a))
    gate.wait()
    running = ask(reader, jobs, (a,))
    gate.open()
    found = [first.result(), waiting.result()]
    lying = ask(reader, jobs, (a,))
    found += [running.result(), lying.result()]
    assert all(same(one[a], found[0][a]) for one in found)
    assert gate.order == [a, b] and reader.bytes_read == 2 * jobs[a].nbytes
    assert reader.held_bytes == 0
    ask(reader, jobs, (a,)).result()
    assert gate.order == [a, b, a]
    reader.close()


def two_runs(gate: Gate) -> tuple[list[str], list[str], dict[str, Job]]:
    """Names of tensors that follow one another in the file, twice, with something between; jobs."""
    raw = gate.raw
    names = sorted(raw.below("model."), key=raw.spans)
    ends = [n for n in range(1, 9) if raw.spans(names[n - 1])[0].precedes(raw.spans(names[n])[0])]
    assert ends == [*range(1, 9)]
    places = {name: raw.place(name)[1] for name in names}
    jobs = {name: Job(raw.spans(name), e.dtype, e.shape) for name, e in places.items()}
    return names[:3], names[5:8], jobs


@pytest.mark.parametrize("cached", [True, False])
def test_threads_share_what_lies_together(gate: Gate, cached: bool) -> None:
    gate.cached = cached
    a, _, jobs = two_runs(gate)
    reader = Reader(gate, threads=3)
    request = ask(reader, jobs, a, AHEAD)
    gate.wait(3)
    gate.open()
    assert set(request.result()) == set(gate.order) == set(a)
    reader.close()


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("limit", ["run", "room", None])
def test_what_lies_together_is_read_together(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, limit: str | None, cached: bool
) -> None:
    """Up to RUN_BYTES, and what there is room for; in order, and each tensor gets its own."""
    gate.cached = cached
    a, _, jobs = two_runs(gate)
    two = jobs[a[0]].nbytes + jobs[a[1]].nbytes
    monkeypatch.setattr(waiting, "RUN_BYTES", two if limit == "run" else 4 << 20)
    reader = Reader(gate, threads=1, ahead_bytes=two if limit == "room" else 1 << 30)
    before = ask(reader, jobs, [a[2]]) if limit is None else None  # then it is not read twice
    request = ask(reader, jobs, a, AHEAD)
    gate.wait()
    gate.open()
    found, stored = request.result(), gate.raw.load()
    assert gate.order == ([a[2], a[0]] if before else [a[0], a[2]])
    assert all(same(found[name], stored[name]) for name in a)
    if before:
        before.result()
    assert (reader.held_bytes, reader.bytes_read) == (0, sum(jobs[n].nbytes for n in a))
    reader.close()


@pytest.mark.parametrize("cached", [True, False])
def test_a_little_wakes_threads_where_a_disk_gives_it(gate: Gate, cached: bool) -> None:
    gate.cached = cached
    reader, names = Reader(gate, threads=2), list(jobs_of(gate))[:2]
    jobs = {name: jobs_of(gate)[name] for name in names}
    request = reader.request(jobs, dict, NOW, at_once=True)
    assert gate.began.acquire(timeout=0.05 if cached else SECONDS) != cached
    gate.open()
    assert list(request.result()) == names
    reader.close()


def test_a_run_is_left_for_what_is_waited_for(gate: Gate) -> None:
    gate.cached = False
    a, b, jobs = two_runs(gate)
    reader = Reader(gate, threads=1)
    ahead = ask(reader, jobs, a, AHEAD)
    gate.wait()
    now = ask(reader, jobs, b)
    gate.open()
    gate.wait(4)  # the rest of it once b is there
    assert list(now.result()) == b and set(ahead.result()) == set(a)
    assert gate.order == [a[0], *b, a[1], a[2]]
    assert reader.held_bytes == 0
    reader.close()


def test_cancelling_drops_what_has_not_begun(gate: Gate) -> None:
    """What has is left off, unless another wants it; asked for again, it is read anew."""
    reader, jobs = Reader(gate, threads=1), jobs_of(gate)
    a, b, c = list(jobs)[:3]
    with ask(reader, jobs, (a, b, c), AHEAD) as request:
        assert request.nbytes == 3 * jobs[a].nbytes
        gate.wait()
        other = ask(reader, jobs, (c,), AHEAD)
    request.cancel()  # may be called again
    anew = ask(reader, jobs, (a,), AHEAD)
    gate.wait()  # c, which is wanted by another, though nothing could be read of a
    assert reader.bytes_read == request.read == 0
    joined = ask(reader, jobs, (c,), AHEAD)
    other.cancel()
    gate.open()
    assert list(joined.result()) == [c] and list(anew.result()) == [a] and gate.order == [a, c, a]
    for taken in (request, other, joined):
        with pytest.raises(CancelledError):
            taken.result()
    reader.close()
    assert (reader.held_bytes, reader.bytes_read, joined.read) == (0, 2 * joined.read, anew.read)


def test_reading_ahead_goes_up_to_its_limit(gate: Gate) -> None:
    jobs = jobs_of(gate)
    names, size = list(jobs)[:5], jobs[next(iter(jobs))].nbytes
    reader = Reader(gate, threads=2, ahead_bytes=5 * size // 2)
    held: list[int] = []
    fill = gate.fill
    gate.fill = lambda *read: held.append(reader.held_bytes) or fill(*read)  # type: ignore
    gate.open()
    ahead = ask(reader, jobs, names[:4], AHEAD)
    gate.wait(2)
    assert not gate.began.acquire(timeout=0.05)
    assert gate.order == names[:2] or gate.order == names[1::-1]
    now = ask(reader, jobs, names[4:])  # needs no room
    assert list(now.result()) == names[4:]
    assert max(held) == 3 * size
    assert list(ahead.result()) == names[:4]  # which no limit holds up
    assert (reader.held_bytes, reader.bytes_read) == (0, 5 * size)
    small = Reader(gate, threads=1, ahead_bytes=size - 1)
    assert list(ask(small, jobs, names[:1], AHEAD).result()) == names[:1]
    small.close()
    reader.close()


def test_closing_ends_it(gate: Gate) -> None:
    before = set(threading.enumerate())
    reader, jobs = Reader(gate, threads=2), jobs_of(gate)
    request = ask(reader, jobs, jobs)
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            request.result()
        except BaseException as error:
            failed.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    gate.wait(3)  # who waits reads too
    reader.close()
    reader.close()
    waiter.join(SECONDS)
    assert [type(error) for error in failed] == [CancelledError]
    assert len(gate.order) == 3 and set(threading.enumerate()) <= before
    with pytest.raises(CancelledError):
        ask(reader, jobs, jobs)


UNCLOSED = """
import sys, types
from toastkit.store.jobs import Job
from toastkit.store.reader import Reader
from toastkit.store.raw import Span
from toastkit.store.waiting import AHEAD

def fill(wanted, stopped, short_calls):
    began.set()
    while not stopped():
        pass
    print("stopped")
    return 0

import threading
from pathlib import Path
began = threading.Event()
reader = Reader(types.SimpleNamespace(fill=fill, cached=False))
request = reader.request({0: Job((Span(Path("x"), 0, 8),), "U8", (8,))}, dict, AHEAD)
began.wait()
"""


def test_a_program_that_ends_without_closing_stops_reading() -> None:
    """A thread that was in MLX as Python ended aborted the process."""
    done = subprocess.run(
        [sys.executable, "-c", UNCLOSED], capture_output=True, text=True, timeout=SECONDS
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "stopped\n", "")


# ------------------------------------------------------------------------------------- of a store


def test_a_request_may_be_taken_in_another_thread(tmp_path: Path, mlx_started) -> None:
    """What is computed of the files is computed where it is taken; any thread may use it."""
    with open_store(write_published(tmp_path / "m", "qwen3_next")) as store:
        whole = store.load()
        mx.eval(whole)
        request = store.request(store.layer_names(1), AHEAD)
        found: list[dict] = []
        thread = threading.Thread(target=lambda: found.append(request.result()))
        thread.start()
        thread.join(SECONDS)
        assert found[0].keys() == set(store.layer_names(1))
        assert all(same(array, whole[name]) for name, array in found[0].items())


def test_a_device_that_the_host_cannot_write_to(model: Path, monkeypatch) -> None:
    with open_store(model) as store:
        expected = store.layer(1)
        monkeypatch.setattr(reader, "host_writes", lambda: False)
        assert all(same(array, expected[name]) for name, array in store.layer(1).items())


def test_preparing_for_high_gear_reads_the_managed_matrices(model: Path) -> None:
    options = GearOptions("auto", "all")
    engine = open_model(model, gear_options=options)
    engine.shift("low")
    reader = engine.holdings.store.reader
    before = reader.bytes_read
    for _ in range(10):
        engine.prepare(Wish(expected="high"))
    engine.shift("high")
    assert engine.gears is not None
    assert reader.bytes_read - before == engine.gears.originals_bytes // 2  # stored as 16 bits
    assert reader.held_bytes == engine.ledger.of(READING) == 0
    engine.shift("low")
    engine.prepare(Wish(expected="high"))
    engine.prepare(Wish(expected="mid"))  # it is not needed after all
    engine.close()
    assert reader.held_bytes == 0
