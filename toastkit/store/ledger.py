"""The one account of bytes on the device, by who keeps them there."""

from __future__ import annotations

import threading
from collections.abc import Callable

EMBEDDING, OUTSIDE, EXPERTS, GEARS = "embedding", "outside", "experts", "gears"
CACHE, SESSIONS = "cache", "sessions"  # of runs under way; of finished conversations
READING = "reading"  # what is being read ahead


def layer_owner(index: int) -> str:
    """The owner of a decoder layer's weights."""
    return f"layer.{index}"


class Ledger:
    """Device bytes by owner: "embedding", "layer.7", "experts", "gears", "cache", "sessions",
    "reading", "outside". True at every moment: weights are entered as they come and go, and what
    grows by itself, such as caches, is measured when somebody asks.

    lock: held while weights change. To read the account takes none: whoever asks never waits.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._bytes: dict[str, int] = {}
        self._meters: dict[str, Callable[[], int]] = {}

    def add(self, owner: str, count: int) -> None:
        """Adds bytes (negative: takes them away). Raises ValueError below zero."""
        with self.lock:
            total = self._bytes.get(owner, 0) + count
            if total < 0:
                raise ValueError(f"{owner} gives back more than it had")
            self._bytes[owner] = total

    def measure(self, owner: str, meter: Callable[[], int]) -> None:
        """Has an owner's bytes measured by a function from now on, beside what was added."""
        self._meters[owner] = meter

    def of(self, owner: str) -> int:
        """Bytes of one owner."""
        meter = self._meters.get(owner)
        return self._bytes.get(owner, 0) + (meter() if meter is not None else 0)

    def total(self) -> int:
        """Bytes of all owners."""
        return sum(self.by_owner().values())

    def by_owner(self) -> dict[str, int]:
        """Bytes of each owner that keeps any."""
        owners = dict.fromkeys([*self._bytes, *self._meters])
        return {owner: count for owner in owners if (count := self.of(owner))}
