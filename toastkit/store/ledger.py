"""The one account of bytes on the device, by who keeps them there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

EMBEDDING, OUTSIDE, EXPERTS, GEARS = "embedding", "outside", "experts", "gears"
CACHE, SESSIONS = "cache", "sessions"  # of runs under way; of finished conversations


def layer_owner(index: int) -> str:
    """The owner of a decoder layer's weights."""
    return f"layer.{index}"


class Ledger:
    """Device bytes by owner: "embedding", "layer.7", "experts", "gears", "cache",
    "sessions", "outside".

    An entry says what its owner keeps now; a policy that drops something says so.
    """

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}

    def put(self, owner: str, arrays: Iterable[Any]) -> None:
        """Makes these arrays all that an owner keeps. They need not be evaluated yet."""
        self.put_bytes(owner, sum(array.nbytes for array in arrays))

    def put_bytes(self, owner: str, count: int) -> None:
        """As put, where the size is known."""
        if count:
            self._bytes[owner] = count
        else:
            self._bytes.pop(owner, None)

    def add(self, owner: str, count: int) -> None:
        """Adds bytes (negative: takes them away). Raises ValueError below zero."""
        total = self._bytes.get(owner, 0) + count
        if total < 0:
            raise ValueError(f"{owner} gives back more than it had")
        self.put_bytes(owner, total)

    def of(self, owner: str) -> int:
        """Bytes of one owner."""
        return self._bytes.get(owner, 0)

    def total(self) -> int:
        """Bytes of all owners."""
        return sum(self._bytes.values())

    def by_owner(self) -> dict[str, int]:
        """A copy of the account."""
        return dict(self._bytes)
