"""What waits to be read, and which thread takes what of it.

What somebody waits for goes first. What lies in one piece of a file is read by one thread, one
after another, and another thread begins elsewhere: a disk gives that twice as fast as pieces that
several threads share, and the system reads ahead.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from toastkit.store.jobs import Filling, Job
from toastkit.store.raw import RawTensors, Span

NOW, AHEAD = 0, 1  # priorities


class Run:
    """Arrays of a request that follow one another in a file. reader: the thread that is at it."""

    def __init__(self) -> None:
        self.reader: int | None = None


class Flight:
    """A job under way. held: bytes of memory that are the reader's. run: that it is a part of, if
    any. users: requests that want it. is_ahead: nobody waited for it when it was begun. read: bytes
    of the files. outcome: its bytes, uint8 (rows, columns), or True for a filling, or what was
    raised."""

    def __init__(self, job: Job | Filling):
        self.job = job
        self.nbytes = job.nbytes
        self.held = 0 if isinstance(job, Filling) else job.nbytes
        self.run: Run | None = None
        self.users = 0
        self.begun = self.is_ahead = False
        self.read = 0
        self.outcome: Any = None


class Waiting:
    """Flights that nobody has begun with. Used under the reader's lock. raw: the files. wake():
    has another thread look for something to do."""

    def __init__(self, raw: RawTensors, wake: Callable[[], None]):
        self._raw, self._wake = raw, wake
        self._queues: tuple[OrderedDict[Flight, None], ...] = (OrderedDict(), OrderedDict())
        self._own = threading.local()

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    @property
    def now_bytes(self) -> int:
        """Bytes that somebody waits for."""
        return sum(flight.nbytes for flight in self._queues[NOW])

    def add(self, flight: Flight, priority: int) -> None:
        """Puts a flight last into the queue of its priority."""
        self._queues[priority][flight] = None

    def drop(self, flight: Flight) -> None:
        """Takes a flight that nobody wants out of its queue."""
        for queue in self._queues:
            queue.pop(flight, None)

    def hurry(self, flights: Collection[Flight]) -> None:
        """Somebody waits for these from now on, in the order that they have."""
        for flight in [f for f in self._queues[AHEAD] if f in flights]:
            del self._queues[AHEAD][flight]
            self._queues[NOW][flight] = None
            self._wake()

    def take_now(self) -> list[Flight]:
        """The flights that this thread is to read next, of those that somebody waits for."""
        queue = self._queues[NOW]
        return self._begin(queue, next(filter(self._may_take, queue), None))

    def take_ahead(self, room: int) -> list[Flight]:
        """The same of what is read ahead: the first that there is room for, in bytes."""
        queue = self._queues[AHEAD]
        first = next((f for f in queue if f.held <= room and self._may_take(f)), None)
        found = self._begin(queue, first, room)
        for flight in found:
            flight.is_ahead = True
        return found

    def _may_take(self, flight: Flight) -> bool:
        """Whether no other thread is at its run. What may stay in the system's cache lies there
        most of the time, and is shared."""
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
            # In what is shared the last who came counts, and who leaves it first ends it.
            self._own.run, first.run.reader = first.run, threading.get_ident()
        return _taken(queue, first, room)

    def leave_run(self) -> None:
        """This thread is no longer at a run, and another may be."""
        run, self._own.run = getattr(self._own, "run", None), None
        if run is not None:
            run.reader = None
            self._wake()


def in_order(jobs: Mapping[Any, Job | Filling]) -> list[tuple[Any, Job | Filling]]:
    """Jobs for arrays in the order of the files; fillings as they come."""
    place = lambda item: item[1].spans[:1] if isinstance(item[1], Job) else ()  # noqa: E731
    return sorted(jobs.items(), key=place)


def find_runs(flights: Iterable[Flight]) -> None:
    """Puts together what follows one another, of flights in the order of the files. To widen what
    was read takes a thread longer than to read it: that is shared."""
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
    """Takes a flight off those that wait, with all that alternate with it, or that there is room
    for."""
    found = [first]
    if first.job.inside is not None:
        found += [f for f in waiting if f is not first and f.job.inside == first.job.inside]
    if room is not None and sum(flight.held for flight in found) > room:
        found = [first]
    for flight in found:
        del waiting[flight]
    return found
