"""Reader threads that bring bytes of the files straight into arrays.

What is waited for comes before read-ahead. A request for something already being read joins that
read. What nobody wants any more is dropped; a read under way stops between two system calls, and
starts anew if requested again.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import mlx.core as mx

from toastkit.store.direct import unwritten
from toastkit.store.jobs import Filling, Job, Piece, host_writes
from toastkit.store.raw import RawTensors, Span
from toastkit.store.request import CancelledError, Request, Result
from toastkit.store.waiting import NOW, Flight, ReadQueue, find_runs, in_order
from toastkit.threads import start_optional

AHEAD_BYTES = 1 << 30
THREADS = 3
LITTLE_BYTES = 32 << 20
WIDENED_BYTES = 1 << 20  # of the file at a time
IDLE_SECONDS = 5.0  # before an idle thread ends; the next request starts one
Read = tuple[Span, memoryview]
Narrow = tuple[memoryview, str, memoryview]  # 16-bit floats, their dtype, memory for float32
_open: weakref.WeakSet[Reader] = weakref.WeakSet()
os.register_at_fork(after_in_child=_open.clear)  # it has no such threads


class Reader:
    """The reader threads, started on demand. An array has the shape of its job, such as
    (rows, columns), and its dtype.

    raw: the files. threads: at most. ahead_bytes: no more read-ahead starts while that many bytes
    are in memory and not yet taken. bytes_read: from the files, in total; device_bytes: of the
    arrays; busy_seconds: while anything was being read. held_bytes: not yet taken, or returned for
    reuse.
    """

    def __init__(self, raw: RawTensors, threads: int = THREADS, ahead_bytes: int = AHEAD_BYTES):
        self._raw, self._threads = raw, threads
        self._ahead_bytes = ahead_bytes
        self.bytes_read = self.device_bytes = self.held_bytes = 0
        self.busy_seconds = 0.0
        self._busy, self._since = 0, 0.0
        lock = threading.RLock()
        self._work, self._done = threading.Condition(lock), threading.Condition(lock)
        self._flights: dict[Job | Filling, Flight] = {}
        self._queue = ReadQueue(self._work.notify)
        self._running: set[threading.Thread] = set()
        self._idle = 0
        # Arrays are initialised from these: untouched pages, which take no memory.
        self._zeros = memoryview(bytearray())
        self._own = threading.local()
        self._spare: list[mx.array] = []  # returned memory, least recently used first
        self._closed = False
        _open.add(self)
        # Allocates memory to read into, see Library.memory; None: MLX does.
        self.make_memory: Callable[[int, int, int, mx.array | None], mx.array] | None = None

    @property
    def ahead_bytes(self) -> int:
        """Limit of held_bytes."""
        return self._ahead_bytes

    @ahead_bytes.setter
    def ahead_bytes(self, count: int) -> None:
        with self._work:
            self._ahead_bytes = count
            self._shrink(0)

    def request(
        self,
        jobs: Mapping[Any, Job | Filling],
        finish: Callable[[dict[Any, mx.array]], Result],
        priority: int,
        at_once: bool = False,
    ) -> Request[Result]:
        """Start reading and return at once. finish: makes the result of the arrays, by the keys of
        the jobs, in the thread that asks for it; a filling has none. at_once: the result is wanted
        next and little is read: waking another thread would take longer, unless the disk is waited
        for. Raises CancelledError if closed."""
        with self._work:
            if self._closed:
                raise CancelledError("the files are closed")
            joined = {key: self._join(job, priority) for key, job in in_order(jobs)}
            find_runs(joined.values())
            flights = {key: joined[key] for key in jobs}
            fresh = len(self._queue)
            if at_once and self._raw.cached and self._queue.now_bytes <= LITTLE_BYTES:
                fresh = 0
            self._work.notify(fresh)
            for _ in range(min(fresh - self._idle, self._threads - len(self._running))):
                if (thread := start_optional(self._run, "reader")) is None:
                    break  # whoever waits reads
                self._running.add(thread)
        return Request(self, flights, finish)

    def _join(self, job: Job | Filling, priority: int) -> Flight:
        flight = self._flights.get(job)
        if flight is None:
            flight = self._flights[job] = Flight(job)
            self._queue.add(flight, priority)
        elif priority == NOW:
            self._queue.hurry([flight])
        flight.users += 1
        return flight

    def _next(self) -> list[Flight]:
        """The flights for this thread to read next."""
        spare = sum(array.nbytes for array in self._spare)  # released if room is needed
        room = self.ahead_bytes - self.held_bytes + spare
        return self._queue.take_now() or self._queue.take_ahead(room)

    def _run(self) -> None:
        with self._work:
            while not self._closed:
                flights = self._next()
                if flights:
                    self._perform(flights)
                    del flights  # and their arrays
                    continue
                self._idle += 1
                woken = self._work.wait(IDLE_SECONDS)
                self._idle -= 1
                if not woken and not len(self._queue):
                    break
            self._running.discard(threading.current_thread())

    def _perform(self, flights: list[Flight]) -> None:
        """Read flights together, with the lock released."""
        spares = []
        for flight in flights:
            flight.begun = True
            spares.append(self._take_spare(flight.held))
            self._hold(flight.held)
        self._count_busy(1)
        self._work.release()
        try:
            outcomes: list[Any] = self._read(flights, spares)
        except BaseException as error:
            outcomes = [error] * len(flights)
        finally:
            self._work.acquire()
        self._count_busy(-1)
        for flight, outcome in zip(flights, outcomes):
            flight.outcome = outcome
            self.bytes_read += flight.read
            if isinstance(outcome, BaseException):
                self._forget(flight)  # requested again, it is retried
            else:
                self.device_bytes += flight.nbytes
            if not flight.users:
                self._drop(flight)
        self._done.notify_all()

    def _count_busy(self, change: int) -> None:
        """Count a thread more, or less, that reads."""
        now = time.perf_counter()
        self.busy_seconds += now - self._since if self._busy else 0.0
        self._busy, self._since = self._busy + change, now

    def _take_spare(self, size: int) -> mx.array | None:
        """Reuse returned memory of that size; if there is none, release some to stay within the
        limit."""
        if not size:
            return None
        found = next((i for i, array in enumerate(self._spare) if array.nbytes == size), None)
        if found is not None:
            self._hold(-size)
            return self._spare.pop(found)
        self._shrink(size)
        return None

    def _shrink(self, size: int) -> None:
        """Make room for `size` bytes, as far as releasing memory kept for reuse can."""
        while self._spare and self.held_bytes + size > self.ahead_bytes:
            self._hold(-self._spare.pop(0).nbytes)

    def _read(
        self, flights: Sequence[Flight], spares: Sequence[mx.array | None]
    ) -> list[mx.array | bool | CancelledError]:
        """Return the outcomes: the bytes of the arrays."""
        found: list[Any] = []
        pieces: list[Piece] = []
        for flight, spare in zip(flights, spares):
            job = flight.job
            if isinstance(job, Filling):
                pieces += job.pieces
                found.append(True)
                continue
            memory: Any = self._memory(job, spare)
            if job.nbytes:
                view = memoryview(memory).cast("B")
                pieces.append(Piece(job.spans, view, job.dtype if job.widened else None))
            found.append(memory)
        stopped = lambda: self._closed or not any(flight.users for flight in flights)  # noqa: E731
        # Unless this is what is waited for, the owner soon wants the memory back.
        short_calls = all(f.is_ahead and isinstance(f.job, Filling) for f in flights)
        read = self._fill(pieces, stopped, short_calls)
        if stopped():
            flights[0].read = read
            # Not raised: a traceback would hold the memory until it is collected.
            return [CancelledError("the files are closed, or nobody wants it") for _ in flights]
        for flight in flights:
            flight.read = flight.job.stored_bytes
        return [_on_device(made) for made in found]

    def _memory(self, job: Job, spare: mx.array | None) -> mx.array | memoryview:
        """Allocate memory for a job, uint8 (rows, columns), or (0,): MLX's dimensions have 31
        bits."""
        size = job.nbytes
        if not size:
            return mx.array([], mx.uint8)
        columns = min(size & -size, 1 << 20)
        # Evaluated, and made without a stream: streams belong to threads.
        if not host_writes():
            return unwritten(size).cast("B", (size // columns, columns))
        if self.make_memory is not None:
            return self.make_memory(size // columns, columns, job.spans[0].start, spare)
        if spare is not None:
            return spare
        zeros = self._zeros
        if zeros.nbytes < size:
            self._zeros = zeros = unwritten(size)
        whole: Any = zeros[:size].cast("B", (size // columns, columns))
        return mx.array(whole)

    def _scratch(self) -> memoryview:
        """This thread's scratch buffer, WIDENED_BYTES, allocated once."""
        if not hasattr(self._own, "scratch"):
            self._own.scratch = unwritten(WIDENED_BYTES)
        return self._own.scratch

    def _fill(self, pieces: Iterable[Piece], stopped: Callable[[], bool], short_calls: bool) -> int:
        """Read into memory in file order, as RawTensors.fill, and widen what is to be."""
        read = 0
        for reads, narrow in self._batches(pieces):
            read += self._raw.fill(reads, stopped, short_calls)
            if narrow and not stopped():
                _widen(narrow)
        return read

    def _batches(self, pieces: Iterable[Piece]) -> Iterator[tuple[list[Read], list[Narrow]]]:
        """Yield what to read and then to widen: WIDENED_BYTES of the latter at a time, so that it
        is still in the CPU cache."""
        reads: list[Read] = []
        narrow: list[Narrow] = []
        used = 0
        for span, view, dtype in sorted(_places(pieces), key=itemgetter(0)):
            if dtype is None:
                reads.append((span, view))
                continue
            if used + span.size > WIDENED_BYTES:
                yield reads, narrow
                reads, narrow, used = [], [], 0
            floats = self._scratch()[used : used + span.size]
            reads.append((span, floats))
            narrow.append((floats, dtype, view))
            used += span.size
        yield reads, narrow

    def _hold(self, count: int) -> None:
        self.held_bytes += count
        if count < 0:
            self._work.notify_all()  # there is room again

    def _forget(self, flight: Flight) -> None:
        if self._flights.get(flight.job) is flight:
            del self._flights[flight.job]

    def _drop(self, flight: Flight) -> None:
        """Forget a flight that no request wants, and release its memory."""
        self._forget(flight)
        self._queue.drop(flight)
        if flight.outcome is not None:
            flight.outcome = CancelledError()
            self._hold(-flight.held)

    def take(self, flights: Iterable[Flight]) -> list[Any]:
        """Wait for all, reading meanwhile. Raises the first error among them."""
        flights = list(flights)
        with self._done:
            self._queue.hurry(set(flights))
            arrays = []
            for flight in flights:
                while flight.outcome is None and not self._closed:
                    if found := self._queue.take_now():  # read instead of waiting
                        self._perform(found)
                    else:
                        self._done.wait()
                if flight.outcome is None or isinstance(flight.outcome, BaseException):
                    raise flight.outcome or CancelledError("the files are closed")
                arrays.append(flight.job.array(flight.outcome))
            return arrays

    def release(self, flights: Iterable[Flight]) -> list[mx.array]:
        """Release one request's claim. Return the memory that no other request reads from."""
        memory = []
        with self._done:
            for flight in flights:
                flight.users -= 1
                if flight.users:
                    continue
                if flight.begun and flight.outcome is None:
                    self._forget(flight)  # it is being stopped: nobody can join any more
                    continue
                if isinstance(flight.outcome, mx.array):
                    memory.append(flight.outcome)
                self._drop(flight)
        return memory

    def wait_for_writes(self, flights: Iterable[Flight]) -> None:
        """Wait until nothing is read into the caller-owned memory of released flights."""
        with self._done:
            for flight in flights:
                while isinstance(flight.job, Filling) and flight.begun and flight.outcome is None:
                    self._done.wait()

    def give_back(self, memory: Iterable[mx.array]) -> None:
        """Take memory, uint8 (rows, columns), for reuse. No computation may still need what was
        read there."""
        if not host_writes():
            return
        with self._work:
            for array in memory:
                if 0 < array.nbytes <= self.ahead_bytes - self.held_bytes:
                    self._spare.append(array)
                    self._hold(array.nbytes)

    def drop_spare(self) -> None:
        """Release the memory kept for reuse."""
        with self._work:
            while self._spare:
                self._hold(-self._spare.pop().nbytes)

    def close(self) -> None:
        """Drop what has not begun, stop what has, and join the threads. Idempotent; whoever waits
        for a result gets CancelledError."""
        _open.discard(self)
        with self._work:
            self._closed = True
            running = list(self._running)
            self._work.notify_all()
            self._done.notify_all()
        for thread in running:
            thread.join()


@atexit.register
def _close_all() -> None:
    """Stop reading before Python ends: a thread that was in MLX then would end the process."""
    for reader in list(_open):
        reader.close()


def _on_device(made: Any) -> Any:
    """Turn host memory into an array."""
    return mx.array(made) if isinstance(made, memoryview) else made  # type: ignore[arg-type]


def _widen(narrow: Iterable[Narrow]) -> None:
    """Convert 16-bit floats to float32, which represents them exactly."""
    import numpy as np

    for floats, dtype, view in narrow:
        into = np.frombuffer(view, np.float32)
        if dtype == "BF16":
            bits = np.frombuffer(floats, "<u2")
            np.left_shift(bits, 16, out=into.view(np.uint32), dtype=np.uint32)
        else:
            into[...] = np.frombuffer(floats, "<f2")


def _places(pieces: Iterable[Piece]) -> Iterator[tuple[Span, memoryview, str | None]]:
    """Yield spans to read with their memory; if they are to be widened, with their dtype, and
    WIDENED_BYTES at a time."""
    for spans, view, dtype in pieces:
        done = 0
        for path, start, stop in spans:
            step = stop - start if dtype is None else WIDENED_BYTES
            for first in range(start, stop, step or 1):
                span = Span(path, first, min(first + step, stop))
                size = span.size * (1 if dtype is None else 2)
                yield span, view[done : done + size], dtype
                done += size
