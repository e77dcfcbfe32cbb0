"""The queue of reads, and which thread takes which.

Reads that are waited for go first. A contiguous run of a file is read sequentially by one thread,
while others start elsewhere: disks read that twice as fast as pieces shared among threads, and the
system's read-ahead works.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from toastkit.store.jobs import Filling, Job
from toastkit.store.raw import RawTensors, Span

NOW, AHEAD = 0, 1  # priorities
RUN_BYTES = 4 << 20  # that a thread takes of a run, to read with one system call


class Run:
    """Arrays of a request that are contiguous in a file. reader: the thread reading it."""

    def __init__(self) -> None:
        self.reader: int | None = None


class Flight:
    """A job under way. held: bytes of memory owned by the reader. run: that it is part of, if any.
    users: requests that want it. is_ahead: nobody waited for it when it began. read: bytes of the
    files. outcome: its bytes, uint8 (rows, columns), or True for a filling, or the exception."""

    def __init__(self, job: Job | Filling):
        self.job = job
        self.nbytes = job.nbytes
        self.held = 0 if isinstance(job, Filling) else job.nbytes
        self.run: Run | None = None
        self.users = 0
        self.begun = self.is_ahead = False
        self.read = 0
        self.outcome: Any = None


class ReadQueue:
    """Flights not yet begun. Used under the reader's lock. raw: the files. wake(): lets another
    thread look for work."""

    def __init__(self, raw: RawTensors, wake: Callable[[], None]):
        self._raw, self._wake = raw, wake
        self._queues: tuple[OrderedDict[Flight, None], ...] = (OrderedDict(), OrderedDict())
        self._own = threading.local()

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    @property
    def now_bytes(self) -> int:
        """Bytes that are waited for."""
        return sum(flight.nbytes for flight in self._queues[NOW])

    def add(self, flight: Flight, priority: int) -> None:
        """Append a flight to the queue of its priority."""
        self._queues[priority][flight] = None

    def drop(self, flight: Flight) -> None:
        """Remove a flight that nobody wants from its queue."""
        for queue in self._queues:
            queue.pop(flight, None)

    def hurry(self, flights: Collection[Flight]) -> None:
        """Move flights to the queue of those waited for, keeping their order."""
        for flight in [f for f in self._queues[AHEAD] if f in flights]:
            del self._queues[AHEAD][flight]
            self._queues[NOW][flight] = None
            self._wake()

    def take_now(self) -> list[Flight]:
        """Take the next flights for this thread, of those that are waited for."""
        queue = self._queues[NOW]
        return self._begin(queue, next(filter(self._may_take, queue), None))

    def take_ahead(self, room: int) -> list[Flight]:
        """Take the next flights of read-ahead: the first that fits into `room` bytes."""
        queue = self._queues[AHEAD]
        first = next((f for f in queue if f.held <= room and self._may_take(f)), None)
        found = self._begin(queue, first, room)
        for flight in found:
            flight.is_ahead = True
        return found

    def _may_take(self, flight: Flight) -> bool:
        """True if no other thread reads its run. What may stay in the page cache is mostly there
        already, so its runs are shared."""
        run = flight.run
        return run is None or self._raw.cached or run.reader in (None, threading.get_ident())

    def _begin(
        self, queue: OrderedDict[Flight, None], first: Flight | None, room: int | None = None
    ) -> list[Flight]:
        if first is None:
            return []
        if first.run is not getattr(self._own, "run", None):
            self.leave_run()
        if first.run is not None:
            # If a run is shared the last to join counts as its reader, and the first to leave ends
            # it.
            self._own.run, first.run.reader = first.run, threading.get_ident()
        return _taken(queue, first, room)

    def leave_run(self) -> None:
        """Leave this thread's run to another."""
        run, self._own.run = getattr(self._own, "run", None), None
        if run is not None:
            run.reader = None
            self._wake()


def in_order(jobs: Mapping[Any, Job | Filling]) -> list[tuple[Any, Job | Filling]]:
    """Jobs for arrays in file order, fillings in the order given."""
    place = lambda item: item[1].spans[:1] if isinstance(item[1], Job) else ()  # noqa: E731
    return sorted(jobs.items(), key=place)


def find_runs(flights: Iterable[Flight]) -> None:
    """Group contiguous flights, given in file order, into runs. Not those to be widened: widening
    takes longer than reading, so threads share it."""
    end: Span | None = None
    run = Run()
    for flight in flights:
        job = flight.job
        if flight.run is not None or flight.begun or not isinstance(job, Job) or job.widened:
            continue
        if end is None or not end.precedes(job.spans[0]):
            run = Run()
        flight.run, end = run, job.spans[-1]


def _taken(
    waiting: OrderedDict[Flight, None], first: Flight, room: int | None = None
) -> list[Flight]:
    """Take a flight from the queue, with all that interleave with it if they fit into `room`; or
    with those that follow it in its run, as far as they do, and RUN_BYTES at most."""
    found, left = [first], RUN_BYTES if room is None else min(room, RUN_BYTES)
    if first.job.inside is not None:
        found += [f for f in waiting if f is not first and f.job.inside == first.job.inside]
        if room is not None and sum(flight.held for flight in found) > room:
            found = [first]
    elif first.run is not None:
        left -= first.nbytes
        for flight in waiting:
            if flight is first or flight.run is not first.run or flight.job.inside is not None:
                continue
            left -= flight.nbytes
            if left < 0:
                break
            found.append(flight)
    for flight in found:
        del waiting[flight]
    return found
