"""Reading: a few threads bring bytes of the files straight into arrays.

What somebody waits for goes before what is read ahead. Who asks for what is being read already
joins that read. What has not begun can be dropped; what has begun ends and is thrown away.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import mlx.core as mx
import numpy as np

from toastkit.store.raw import DTYPES, RawTensors, Span

NOW, AHEAD = 0, 1  # priorities
AHEAD_BYTES = 1 << 30
THREADS = 4
LITTLE_BYTES = 32 << 20
IDLE_SECONDS = 5.0  # after which a thread ends; the next request starts one
Result = TypeVar("Result")


def host_writes() -> bool:
    """Whether the device computes on memory that the host can write: the CPU and Metal do."""
    return mx.default_device() == mx.Device(mx.cpu) or mx.metal.is_available()


@dataclass(frozen=True)
class Job:
    """One array to be read. spans: of the files, in the order of its bytes. dtype: as safetensors
    names it."""

    spans: tuple[Span, ...]
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(span.stop - span.start for span in self.spans)


class _Flight:
    """A job under way. users: requests that want it. outcome: the array or what was raised."""

    def __init__(self, job: Job):
        self.job = job
        self.nbytes = job.nbytes
        self.users = 0
        self.begun = False
        self.outcome: Any = None


class Reader:
    """The threads, which start when there is something to read. An array has the shape of its job,
    such as (rows, columns), and the dtype.

    raw: the files. threads: at most. ahead_bytes: reading ahead begins with nothing more while
    that many bytes lie in memory and nobody has taken them. watch: is told, after every change, how
    many bytes lie so; it is called from any thread and must not call back.
    bytes_read: from the files, since the beginning. held_bytes: what `watch` was told last.
    """

    def __init__(self, raw: RawTensors, threads: int = THREADS, ahead_bytes: int = AHEAD_BYTES):
        self._raw, self._threads = raw, threads
        self.ahead_bytes = ahead_bytes
        self.watch: Callable[[int], None] = lambda held: None
        self.bytes_read = self.held_bytes = 0
        lock = threading.RLock()
        self._work, self._done = threading.Condition(lock), threading.Condition(lock)
        self._flights: dict[tuple[Span, ...], _Flight] = {}
        self._waiting: tuple[OrderedDict[_Flight, None], ...] = (OrderedDict(), OrderedDict())
        self._running: set[threading.Thread] = set()
        self._idle = 0
        # Arrays begin as these: pages that nobody has written to, and so take no memory.
        self._zeros = np.zeros(0, np.uint8)
        self._closed = False

    def request(
        self,
        jobs: dict[Any, Job],
        finish: Callable[[dict[Any, mx.array]], Result],
        priority: int,
        at_once: bool = False,
    ) -> Request[Result]:
        """Begins to read and returns at once. finish: makes the result of the arrays, by the keys
        of the jobs, in the thread that asks for it. at_once: that is done next, and little is read
        there: to wake another thread would take longer. Raises CancelledError where this is
        closed."""
        with self._work:
            if self._closed:
                raise CancelledError("the files are closed")
            flights = {key: self._join(job, priority) for key, job in jobs.items()}
            fresh = sum(len(waiting) for waiting in self._waiting)
            if at_once and sum(flight.nbytes for flight in self._waiting[NOW]) <= LITTLE_BYTES:
                fresh = 0
            self._work.notify(fresh)
            for _ in range(min(fresh - self._idle, self._threads - len(self._running))):
                thread = threading.Thread(target=self._run, name="reader", daemon=True)
                self._running.add(thread)
                thread.start()
        return Request(self, flights, finish)

    def _join(self, job: Job, priority: int) -> _Flight:
        flight = self._flights.get(job.spans)
        if flight is None:
            flight = self._flights[job.spans] = _Flight(job)
            self._waiting[priority][flight] = None
        elif priority == NOW:
            self._raise(flight)
        flight.users += 1
        return flight

    def _raise(self, flight: _Flight) -> None:
        """What was read ahead is waited for now."""
        if flight in self._waiting[AHEAD]:
            del self._waiting[AHEAD][flight]
            self._waiting[NOW][flight] = None
            self._work.notify()

    def _next(self) -> _Flight | None:
        """What to begin with: of what is read ahead, the first that has room."""
        now, ahead = self._waiting
        if now:
            return now.popitem(last=False)[0]
        room = self.ahead_bytes - self.held_bytes
        for flight in ahead if room > 0 else ():
            if flight.nbytes <= room:
                del ahead[flight]
                return flight
        return None

    def _run(self) -> None:
        with self._work:
            while not self._closed:
                flight = self._next()
                if flight is not None:
                    self._fly(flight)
                    del flight  # with its array
                    continue
                self._idle += 1
                woken = self._work.wait(IDLE_SECONDS)
                self._idle -= 1
                if not woken and not any(self._waiting):
                    break
            self._running.discard(threading.current_thread())

    def _fly(self, flight: _Flight) -> None:
        """Reads; the lock is given back meanwhile."""
        flight.begun = True
        self._hold(flight.nbytes)
        self._work.release()
        try:
            outcome: Any = self._read(flight.job)
        except BaseException as error:
            outcome = error
        finally:
            self._work.acquire()
        flight.outcome = outcome
        if isinstance(outcome, BaseException):
            self._forget(flight)  # asked for again, it is tried again
        else:
            self.bytes_read += flight.nbytes
        if not flight.users:
            self._drop(flight)
        self._done.notify_all()

    def _read(self, job: Job) -> mx.array:
        # Evaluated, and made without a stream: a stream belongs to the thread that made it.
        kind, size, zeros = DTYPES[job.dtype][0], job.nbytes, self._zeros
        array: Any
        if host_writes():
            if zeros.nbytes < size:
                self._zeros = zeros = np.zeros(size, np.uint8)
            array = mx.array(zeros[:size].view(kind).reshape(job.shape))
        else:
            array = np.empty(job.shape, kind)
        if size:
            self._raw.fill(memoryview(array).cast("B"), job.spans, lambda: self._closed)
        if self._closed:
            raise CancelledError("the files are closed")
        return array if isinstance(array, mx.array) else mx.array(array)

    def _hold(self, count: int) -> None:
        self.held_bytes += count
        self.watch(self.held_bytes)
        if count < 0:
            self._work.notify_all()  # there is room again

    def _forget(self, flight: _Flight) -> None:
        if self._flights.get(flight.job.spans) is flight:
            del self._flights[flight.job.spans]

    def _drop(self, flight: _Flight) -> None:
        """Nobody wants it: it is not begun, or thrown away."""
        self._forget(flight)
        for waiting in self._waiting:
            waiting.pop(flight, None)
        if flight.outcome is not None:
            flight.outcome = CancelledError()
            self._hold(-flight.nbytes)

    def take(self, flights: Iterable[_Flight]) -> list[mx.array]:
        """Waits for all, and helps. Raises the first error among them."""
        flights = list(flights)
        with self._done:
            for flight in flights:
                self._raise(flight)
            arrays = []
            for flight in flights:
                while flight.outcome is None and not self._closed:
                    if self._waiting[NOW]:  # rather than wait, this thread reads too
                        self._fly(self._waiting[NOW].popitem(last=False)[0])
                    else:
                        self._done.wait()
                if not isinstance(flight.outcome, mx.array):
                    raise flight.outcome or CancelledError("the files are closed")
                # In the dtype that numpy may not have; an array of its own for each who asks.
                arrays.append(flight.outcome.view(DTYPES[flight.job.dtype][1]))
            return arrays

    def release(self, flights: Iterable[_Flight]) -> None:
        """One request wants them no longer."""
        with self._work:
            for flight in flights:
                flight.users -= 1
                if not flight.users and (flight.outcome is not None or not flight.begun):
                    self._drop(flight)

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


class Request(Generic[Result]):
    """Something that is being read. nbytes: of the arrays that are read for it.

    `result` can be taken once. One that is not taken has to be cancelled, or used in `with`.
    """

    def __init__(self, reader: Reader, flights: dict[Any, _Flight], finish: Callable):
        self._reader, self._finish = reader, finish
        self._flights: dict[Any, _Flight] | None = flights
        self.nbytes = sum(flight.nbytes for flight in flights.values())

    def result(self) -> Result:
        """Waits for what was asked for, before all that is read ahead. Raises DataError,
        NoInputError, IOFailure where it cannot be read; CancelledError after `cancel` or `close`,
        or the second time."""
        flights = self._flights
        if flights is None:
            raise CancelledError("it was taken or cancelled")
        try:
            arrays = self._reader.take(flights.values())
            return self._finish(dict(zip(flights, arrays)))
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Wants it no longer. May be called again."""
        flights, self._flights = self._flights, None
        self._reader.release((flights or {}).values())

    def __enter__(self) -> Request[Result]:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()
