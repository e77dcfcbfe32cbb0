"""A read under way, as its requester sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import mlx.core as mx

if TYPE_CHECKING:
    from toastkit.store.reader import Reader
    from toastkit.store.waiting import Flight

Result = TypeVar("Result")


class CancelledError(Exception):
    """Not read: nobody wanted it any more, or the files were closed."""


class Request(Generic[Result]):
    """A read under way. nbytes: of its arrays. read: bytes of the files, once taken or cancelled.

    `result` can be taken once. If it is not, cancel the request, or use it in `with`.
    """

    def __init__(self, reader: Reader, flights: dict[Any, Flight], finish: Callable):
        self._reader, self._finish = reader, finish
        self._flights: dict[Any, Flight] | None = flights
        self._released: list[Flight] = []
        self._memory: list[mx.array] = []
        self.read = 0
        self.nbytes = sum(flight.nbytes for flight in flights.values())

    def result(self) -> Result:
        """Wait for the result, ahead of all read-ahead. Raises DataError, NoInputError, IOFailure
        if it cannot be read; CancelledError after `cancel` or `close`, or the second time."""
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
        """Return the memory for reuse once nobody needs it: allocating it anew for every layer that
        is streamed costs time."""
        memory, self._memory = self._memory, []
        self._reader.give_back(memory)

    def leave_off(self) -> None:
        """As `cancel`, without waiting: a read under way goes on for a moment."""
        flights, self._flights = self._flights or {}, None
        self._released += flights.values()
        self._memory += self._reader.release(flights.values())

    def cancel(self) -> None:
        """Withdraw. Caller-owned memory is not written to afterwards. Idempotent."""
        self.leave_off()
        self._end()
        self._memory = []

    def _end(self) -> None:
        released, self._released = self._released, []
        self._reader.wait_for_writes(released)
        self.read += sum(flight.read for flight in released)

    @property
    def is_done(self) -> bool:
        """True if the result needs no waiting."""
        return all(flight.outcome is not None for flight in (self._flights or {}).values())

    def __enter__(self) -> Request[Result]:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()
