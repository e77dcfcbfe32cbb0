"""Reading: a few threads bring bytes of the files straight into arrays.

What somebody waits for goes before what is read ahead. Who asks for what is being read already
joins that read. What nobody wants any more is dropped; what has begun is left off between two
system calls, and asked for again it is read anew.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from operator import itemgetter
from typing import Any

import mlx.core as mx

from toastkit.store.direct import unwritten
from toastkit.store.jobs import Filling, Job, Piece, host_writes
from toastkit.store.raw import RawTensors, Span
from toastkit.store.request import CancelledError, Request, Result
from toastkit.store.waiting import NOW, Flight, Waiting, find_runs, in_order

AHEAD_BYTES = 1 << 30
THREADS = 3
LITTLE_BYTES = 32 << 20
WIDENED_BYTES = 1 << 20  # of the file at a time
IDLE_SECONDS = 5.0  # after which a thread ends; the next request starts one


class Reader:
    """The threads, which start when there is something to read. An array has the shape of its job,
    such as (rows, columns), and the dtype.

    raw: the files. threads: at most. ahead_bytes: reading ahead begins with nothing more while
    that many bytes lie in memory and nobody has taken them.
    bytes_read: from the files, since the beginning; device_bytes: what they are as arrays;
    busy_seconds: during which something was being read. held_bytes: how many lie so, and memory
    that was given back and waits for its next use.
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
        self._waiting = Waiting(raw, self._work.notify)
        self._running: set[threading.Thread] = set()
        self._idle = 0
        # Arrays begin as these: pages that nobody has written to, and so take no memory.
        self._zeros = memoryview(bytearray())
        self._own = threading.local()
        self._spare: list[mx.array] = []  # to read into once more, the longest unused first
        self._closed = False
        # Makes memory to read into, see Library.memory; None: as MLX makes it.
        self.make_memory: Callable[[int, int, int, mx.array | None], mx.array] | None = None

    @property
    def ahead_bytes(self) -> int:
        """Most bytes that may be held."""
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
        """Begins to read and returns at once. finish: makes the result of the arrays, by the keys
        of the jobs, in the thread that asks for it; a filling has none. at_once: that is done
        next, and little is read there: to wake another thread would take longer, unless it is a
        disk that is waited for. Raises CancelledError where this is closed."""
        with self._work:
            if self._closed:
                raise CancelledError("the files are closed")
            joined = {key: self._join(job, priority) for key, job in in_order(jobs)}
            find_runs(joined.values())
            flights = {key: joined[key] for key in jobs}
            fresh = len(self._waiting)
            if at_once and self._raw.cached and self._waiting.now_bytes <= LITTLE_BYTES:
                fresh = 0
            self._work.notify(fresh)
            for _ in range(min(fresh - self._idle, self._threads - len(self._running))):
                thread = threading.Thread(target=self._run, name="reader", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # there are no more of this user: who waits reads too
                    break
                self._running.add(thread)
        return Request(self, flights, finish)

    def _join(self, job: Job | Filling, priority: int) -> Flight:
        flight = self._flights.get(job)
        if flight is None:
            flight = self._flights[job] = Flight(job)
            self._waiting.add(flight, priority)
        elif priority == NOW:
            self._waiting.hurry([flight])
        flight.users += 1
        return flight

    def _next(self) -> list[Flight]:
        """The flights that this thread is to read next."""
        spare = sum(array.nbytes for array in self._spare)  # makes room where it does not fit
        room = self.ahead_bytes - self.held_bytes + spare
        return self._waiting.take_now() or self._waiting.take_ahead(room)

    def _run(self) -> None:
        with self._work:
            while not self._closed:
                flights = self._next()
                if flights:
                    self._fly(flights)
                    del flights  # with their arrays
                    continue
                self._waiting.leave_run()
                self._idle += 1
                woken = self._work.wait(IDLE_SECONDS)
                self._idle -= 1
                if not woken and not len(self._waiting):
                    break
            self._running.discard(threading.current_thread())

    def _fly(self, flights: list[Flight]) -> None:
        """Reads what lies together; the lock is given back meanwhile."""
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
                self._forget(flight)  # asked for again, it is tried again
            else:
                self.device_bytes += flight.nbytes
            if not flight.users:
                self._drop(flight)
        self._done.notify_all()

    def _count_busy(self, change: int) -> None:
        """One thread more reads, or one less."""
        now = time.perf_counter()
        self.busy_seconds += now - self._since if self._busy else 0.0
        self._busy, self._since = self._busy + change, now

    def _take_spare(self, size: int) -> mx.array | None:
        """Memory of that size that was given back; else lets some go, where there would be too much
        of it."""
        if not size:
            return None
        found = next((i for i, array in enumerate(self._spare) if array.nbytes == size), None)
        if found is not None:
            self._hold(-size)
            return self._spare.pop(found)
        self._shrink(size)
        return None

    def _shrink(self, size: int) -> None:
        """Makes room for so many bytes, as far as memory that waits for its next use goes."""
        while self._spare and self.held_bytes + size > self.ahead_bytes:
            self._hold(-self._spare.pop(0).nbytes)

    def _read(
        self, flights: Sequence[Flight], spares: Sequence[mx.array | None]
    ) -> list[mx.array | bool | CancelledError]:
        """The outcomes: the bytes of the arrays."""
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
                pieces.append(Piece(job.spans, job.dtype, view, job.widened))
            found.append(memory)
        stopped = lambda: self._closed or not any(flight.users for flight in flights)  # noqa: E731
        # Somebody's memory is wanted back soon if it is not this that is to be there.
        short_calls = all(f.is_ahead and isinstance(f.job, Filling) for f in flights)
        read = self._fill(pieces, stopped, short_calls)
        if stopped():
            flights[0].read = read
            # Not raised: what has a traceback would hold the memory until it is collected.
            return [CancelledError("the files are closed, or nobody wants it") for _ in flights]
        for flight in flights:
            flight.read = flight.job.stored_bytes
        return [_on_device(made) for made in found]

    def _memory(self, job: Job, spare: mx.array | None) -> mx.array | memoryview:
        """Memory of its size, uint8 (rows, columns), (0,) of nothing: MLX's dimensions have
        31 bits."""
        size = job.nbytes
        if not size:
            return mx.array([], mx.uint8)
        columns = min(size & -size, 1 << 20)
        # Evaluated, and made without a stream: a stream belongs to the thread that made it.
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
        """Memory of this thread, WIDENED_BYTES, that the system need not make anew."""
        if not hasattr(self._own, "scratch"):
            self._own.scratch = unwritten(WIDENED_BYTES)
        return self._own.scratch

    def _fill(self, pieces: Iterable[Piece], stopped: Callable[[], bool], short_calls: bool) -> int:
        """Reads into memory, in the order of the files, as RawTensors.fill. What is to be widened
        is read WIDENED_BYTES at a time, and widened while the processor has it at hand."""
        reads: list[tuple[Span, memoryview]] = []
        narrow: list[tuple[memoryview, str, memoryview]] = []
        used = read = 0
        for span, view, dtype in sorted(_places(pieces), key=itemgetter(0)):
            if dtype is None:
                reads.append((span, view))
                continue
            size = span.stop - span.start
            if used + size > WIDENED_BYTES:
                read += self._fill_and_widen(reads, narrow, stopped, short_calls)
                reads, narrow, used = [], [], 0
            floats = self._scratch()[used : used + size]
            reads.append((span, floats))
            narrow.append((floats, dtype, view))
            used += size
        return read + self._fill_and_widen(reads, narrow, stopped, short_calls)

    def _fill_and_widen(
        self,
        reads: Iterable[tuple[Span, memoryview]],
        narrow: Iterable[tuple[memoryview, str, memoryview]],
        stopped: Callable[[], bool],
        short_calls: bool,
    ) -> int:
        """narrow: of what was read 16-bit floats, their dtype, and where they are to be as float32,
        which represents all of them."""
        read = self._raw.fill(reads, stopped, short_calls)
        if narrow and not stopped():
            _widen(narrow)
        return read

    def _hold(self, count: int) -> None:
        self.held_bytes += count
        if count < 0:
            self._work.notify_all()  # there is room again

    def _forget(self, flight: Flight) -> None:
        if self._flights.get(flight.job) is flight:
            del self._flights[flight.job]

    def _drop(self, flight: Flight) -> None:
        """Forgets a flight that no request wants: it is not begun, or its memory is let go."""
        self._forget(flight)
        self._waiting.drop(flight)
        if flight.outcome is not None:
            flight.outcome = CancelledError()
            self._hold(-flight.held)

    def take(self, flights: Iterable[Flight]) -> list[Any]:
        """Waits for all, and helps. Raises the first error among them."""
        flights = list(flights)
        with self._done, ExitStack() as stack:
            stack.callback(self._waiting.leave_run)
            self._waiting.hurry(set(flights))
            arrays = []
            for flight in flights:
                while flight.outcome is None and not self._closed:
                    if found := self._waiting.take_now():  # rather than wait, this thread reads too
                        self._fly(found)
                    else:
                        self._waiting.leave_run()
                        self._done.wait()
                if flight.outcome is None or isinstance(flight.outcome, BaseException):
                    raise flight.outcome or CancelledError("the files are closed")
                arrays.append(flight.job.array(flight.outcome))
            return arrays

    def release(self, flights: Iterable[Flight]) -> list[mx.array]:
        """One request wants them no longer. Returns the memory that nobody else reads from."""
        memory = []
        with self._done:
            for flight in flights:
                flight.users -= 1
                if flight.users:
                    continue
                if flight.begun and flight.outcome is None:
                    self._forget(flight)  # it is being left off: nobody can join any more
                    continue
                if isinstance(flight.outcome, mx.array):
                    memory.append(flight.outcome)
                self._drop(flight)
        return memory

    def leave_alone(self, flights: Iterable[Flight]) -> None:
        """Waits until nothing is read any more into somebody's memory, of what was released."""
        with self._done:
            for flight in flights:
                while isinstance(flight.job, Filling) and flight.begun and flight.outcome is None:
                    self._done.wait()

    def give_back(self, memory: Iterable[mx.array]) -> None:
        """Takes memory, uint8 (rows, columns), to read into again. Nothing may be computed any more
        of what was read there."""
        if not host_writes():
            return
        with self._work:
            for array in memory:
                if 0 < array.nbytes <= self.ahead_bytes - self.held_bytes:
                    self._spare.append(array)
                    self._hold(array.nbytes)

    def drop_spare(self) -> None:
        """Lets the memory go that was given back."""
        with self._work:
            while self._spare:
                self._hold(-self._spare.pop().nbytes)

    def close(self) -> None:
        """Drops what has not begun, stops what has, and waits for the threads. May be called
        again; who waits for a result is told CancelledError."""
        with self._work:
            self._closed = True
            running = list(self._running)
            self._work.notify_all()
            self._done.notify_all()
        for thread in running:
            thread.join()


def _on_device(made: Any) -> Any:
    """What was read into memory of the host becomes an array."""
    return mx.array(made) if isinstance(made, memoryview) else made  # type: ignore[arg-type]


def _widen(narrow: Iterable[tuple[memoryview, str, memoryview]]) -> None:
    """16-bit floats, their dtype, and where they are to be as float32."""
    import numpy as np

    for floats, dtype, view in narrow:
        into = np.frombuffer(view, np.float32)
        if dtype == "BF16":
            bits = np.frombuffer(floats, "<u2")
            np.left_shift(bits, 16, out=into.view(np.uint32), dtype=np.uint32)
        else:
            into[...] = np.frombuffer(floats, "<f2")


def _places(pieces: Iterable[Piece]) -> Iterator[tuple[Span, memoryview, str | None]]:
    """What is read of the files, and into which memory; of what is to be widened the dtype, and at
    most WIDENED_BYTES at a time."""
    for spans, dtype, view, widened in pieces:
        done = 0
        for path, start, stop in spans:
            step = WIDENED_BYTES if widened else stop - start
            for first in range(start, stop, step or 1):
                span = Span(path, first, min(first + step, stop))
                size = (span.stop - first) * (2 if widened else 1)
                yield span, view[done : done + size], dtype if widened else None
                done += size
