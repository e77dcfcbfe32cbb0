"""Account of device memory by owner."""

from __future__ import annotations

import threading
from collections.abc import Callable

EMBEDDING, OUTSIDE, EXPERTS, GEARS = "embedding", "outside", "experts", "gears"
CACHE, SESSIONS = "cache", "sessions"  # of active runs; of idle conversations
READING = "reading"  # read ahead, not yet taken


def layer_owner(index: int) -> str:
    """The owner of a decoder layer's weights."""
    return f"layer.{index}"


class Ledger:
    """Device bytes by owner: "embedding", "layer.7", "experts", "gears", "cache", "sessions",
    "reading", "outside". Always current: weights are entered as they come and go; what grows by
    itself, such as a cache, is measured on demand.

    lock: held while weights change. Reading takes no lock and never blocks.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._bytes: dict[str, int] = {}
        self._meters: dict[str, Callable[[], int]] = {}

    def add(self, owner: str, count: int) -> None:
        """Add bytes (negative: remove). Raises ValueError below zero."""
        with self.lock:
            total = self._bytes.get(owner, 0) + count
            if total < 0:
                raise ValueError(f"{owner} gives back more than it had")
            self._bytes[owner] = total

    def measure(self, owner: str, meter: Callable[[], int]) -> None:
        """Measure an owner's bytes with a function from now on, on top of those added."""
        self._meters[owner] = meter

    def of(self, owner: str) -> int:
        """Bytes of one owner."""
        meter = self._meters.get(owner)
        return self._bytes.get(owner, 0) + (meter() if meter is not None else 0)

    def total(self) -> int:
        """Bytes of all owners."""
        return sum(self.by_owner().values())

    def by_owner(self) -> dict[str, int]:
        """Bytes by owner, without zeros."""
        owners = dict.fromkeys([*self._bytes, *self._meters])
        return {owner: count for owner in owners if (count := self.of(owner))}
