"""The queue of reads, and which thread takes which.

Reads that are waited for go first. What is contiguous in a file is taken in pieces of RUN_BYTES,
one after another, by any thread: disks read a few large pieces at once as fast as they can, and
threads wait less for the GIL.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from toastkit.store.jobs import Filling, Job
from toastkit.store.raw import Span

NOW, AHEAD = 0, 1  # priorities
RUN_BYTES = 8 << 20  # that a thread takes of a run, or a little more, to read with one system call


class Flight:
    """A job under way. held: bytes of memory owned by the reader. run: of a request's flights that
    are contiguous in a file, the same. users: requests that want it. is_ahead: nobody waited for it
    when it began. read: bytes of the files. outcome: its bytes, uint8 (rows, columns), or True for
    a filling, or the exception."""

    def __init__(self, job: Job | Filling):
        self.job = job
        self.nbytes = job.nbytes
        self.held = 0 if isinstance(job, Filling) else job.nbytes
        self.run: object = None
        self.users = 0
        self.begun = self.is_ahead = False
        self.read = 0
        self.outcome: Any = None


class ReadQueue:
    """Flights not yet begun. Used under the reader's lock. wake(): lets another thread look for
    work."""

    def __init__(self, wake: Callable[[], None]):
        self._wake = wake
        self._queues: tuple[OrderedDict[Flight, None], ...] = (OrderedDict(), OrderedDict())

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
        return _taken(queue, next(iter(queue), None))

    def take_ahead(self, room: int) -> list[Flight]:
        """Take the next flights of read-ahead: the first that fits into `room` bytes."""
        queue = self._queues[AHEAD]
        found = _taken(queue, next((f for f in queue if f.held <= room), None), room)
        for flight in found:
            flight.is_ahead = True
        return found


def in_order(jobs: Mapping[Any, Job | Filling]) -> list[tuple[Any, Job | Filling]]:
    """Jobs for arrays in file order, fillings in the order given."""
    place = lambda item: item[1].spans[:1] if isinstance(item[1], Job) else ()  # noqa: E731
    return sorted(jobs.items(), key=place)


def find_runs(flights: Iterable[Flight]) -> None:
    """Group contiguous flights, given in file order, into runs. Not those to be widened: widening
    takes longer than reading, so threads share it."""
    end: Span | None = None
    run = object()
    for flight in flights:
        job = flight.job
        if flight.run is not None or flight.begun or not isinstance(job, Job) or job.widened:
            continue
        if end is None or not end.precedes(job.spans[0]):
            run = object()
        flight.run, end = run, job.spans[-1]


def _taken(
    waiting: OrderedDict[Flight, None], first: Flight | None, room: float = math.inf
) -> list[Flight]:
    """Take a flight from the queue, with all that interleave with it, or else with those after it
    in its run until they are RUN_BYTES; as far as they fit into `room`."""
    if first is None:
        return []
    found, size = [first], first.held
    if first.job.inside is not None:
        found += [f for f in waiting if f is not first and f.job.inside == first.job.inside]
        if sum(flight.held for flight in found) > room:
            found = [first]
    elif first.run is not None:
        for flight in waiting:
            if flight is first or flight.run is not first.run or flight.job.inside is not None:
                continue
            if size >= RUN_BYTES or size + flight.held > room:
                break
            size += flight.held
            found.append(flight)
    for flight in found:
        del waiting[flight]
    return found
