"""Something that is being read, as whoever asked for it sees it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import mlx.core as mx

if TYPE_CHECKING:
    from toastkit.store.reader import Reader
    from toastkit.store.waiting import Flight

Result = TypeVar("Result")


class Request(Generic[Result]):
    """Something that is being read. nbytes: of the arrays that are read for it.

    `result` can be taken once. One that is not taken has to be cancelled, or used in `with`.
    """

    def __init__(self, reader: Reader, flights: dict[Any, Flight], finish: Callable):
        self._reader, self._finish = reader, finish
        self._flights: dict[Any, Flight] | None = flights
        self._memory: list[mx.array] = []
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
            self._flights = None
            self._memory = self._reader.release(flights.values())

    def give_back(self) -> None:
        """What was read there is not needed any more, by nobody who took it: its memory is to be
        used again, which spares the system to make it anew for every layer that passes."""
        memory, self._memory = self._memory, []
        self._reader.give_back(memory)

    def cancel(self) -> None:
        """Wants it no longer. May be called again."""
        flights, self._flights = self._flights, None
        self._reader.release((flights or {}).values())

    @property
    def is_waiting(self) -> bool:
        """Whether nothing of it has been begun."""
        return not any(flight.begun for flight in (self._flights or {}).values())

    @property
    def is_done(self) -> bool:
        """Whether nothing of it has to be waited for."""
        return all(flight.outcome is not None for flight in (self._flights or {}).values())

    def __enter__(self) -> Request[Result]:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()
