"""Something that is being read, as whoever asked for it sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import mlx.core as mx

if TYPE_CHECKING:
    from toastkit.store.reader import Reader
    from toastkit.store.waiting import Flight

Result = TypeVar("Result")


class CancelledError(Exception):
    """It was not read: nobody wanted it any more, or the files were closed."""


class Request(Generic[Result]):
    """Something that is being read. nbytes: of the arrays that are read for it. read: bytes of the
    files, once it was taken or cancelled.

    `result` can be taken once. One that is not taken has to be cancelled, or used in `with`.
    """

    def __init__(self, reader: Reader, flights: dict[Any, Flight], finish: Callable):
        self._reader, self._finish = reader, finish
        self._flights: dict[Any, Flight] | None = flights
        self._released: list[Flight] = []
        self._memory: list[mx.array] = []
        self.read = 0
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
            self.leave_off()
            self._end()

    def give_back(self) -> None:
        """What was read there is not needed any more, by nobody who took it: its memory is to be
        used again, which spares the system to make it anew for every layer that passes."""
        memory, self._memory = self._memory, []
        self._reader.give_back(memory)

    def leave_off(self) -> None:
        """As `cancel`, and waits for nobody: what is being read goes on for a moment."""
        flights, self._flights = self._flights or {}, None
        self._released += flights.values()
        self._memory += self._reader.release(flights.values())

    def cancel(self) -> None:
        """Wants it no longer. Memory of somebody's is left alone from now on. May be called
        again."""
        self.leave_off()
        self._end()
        self._memory = []

    def _end(self) -> None:
        released, self._released = self._released, []
        self._reader.leave_alone(released)
        self.read += sum(flight.read for flight in released)

    @property
    def is_done(self) -> bool:
        """Whether nothing of it has to be waited for."""
        return all(flight.outcome is not None for flight in (self._flights or {}).values())

    def __enter__(self) -> Request[Result]:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()
