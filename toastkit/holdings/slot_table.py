"""Which expert is in which slot of a layer, and which is evicted: the least used, with decayed
counts (LFU), the least recently used among equals. That hits a little more often than plain LRU
(docs/decisions.md)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

DECAY = 0.95  # of the counts, per pass
MAX_WEIGHT = 1e100  # beyond which the counts are rescaled


class SlotTable:
    """The assignment of one layer's experts to slots, without their contents.

    experts, slots: how many there are. of: the slot of each expert, int32 (experts,), -1 for none.
    uses: decayed count of the passes that needed each expert, in a growing unit. changes: how often
    `of` has changed.
    """

    def __init__(self, experts: int, slots: int):
        self.experts, self.slots = experts, slots
        self.of = np.full(experts, -1, np.int32)
        self.uses = [0.0] * experts
        self._weight = 1.0  # of the next pass: growing it decays all earlier counts
        self.changes = 0
        self._held: dict[int, int] = {}  # expert -> slot, least recently used first
        self._free = list(range(slots - 1, -1, -1))

    @classmethod
    def full(cls, experts: int) -> SlotTable:
        """A table in which each expert n is in slot n."""
        table = cls(experts, experts)
        for expert in range(experts):
            table.claim(expert, ())
        return table

    def resized(self, slots: int) -> tuple[SlotTable, list[int]]:
        """A table of that many slots that keeps the experts that would be evicted last; and their
        old slots, by new slot."""
        order = sorted(self._held, key=lambda expert: self.uses[expert])
        stay = set(order[max(0, len(order) - slots) :])
        table, rows = SlotTable(self.experts, slots), []
        table.uses[:], table._weight = self.uses, self._weight
        for expert, slot in self._held.items():
            if expert in stay:
                table.claim(expert, ())
                rows.append(slot)
        return table, rows

    def __contains__(self, expert: int) -> bool:
        return expert in self._held

    @property
    def held(self) -> list[int]:
        """The experts in slots, least recently used first."""
        return list(self._held)

    def use(self, experts: Iterable[int]) -> None:
        """Mark experts, all in slots, as used now, in this order."""
        for expert in experts:
            self._held[expert] = self._held.pop(expert)

    def count(self, experts: Sequence[int]) -> None:
        """Count the experts that a pass needs, hits or misses."""
        for expert in experts:
            self.uses[expert] += self._weight
        self._weight /= DECAY
        if self._weight > MAX_WEIGHT:
            self.uses = [uses / self._weight for uses in self.uses]
            self._weight = 1.0

    def claim(
        self, expert: int, keep: Collection[int], spare: Collection[int] = ()
    ) -> tuple[int, int] | None:
        """Give an expert that has none a slot: a free one, or that of the least used expert. It
        counts as the most recently used. Returns the slot and the evicted expert, -1 for none; None
        if no expert can be evicted. keep: never evicted. spare: evicted only if no other can be."""
        gone = -1
        if self._free:
            slot = self._free.pop()
        else:
            leaving = [other for other in self._held if other not in keep]
            if not leaving:
                return None
            first = [other for other in leaving if other not in spare] or leaving
            gone = min(first, key=self.uses.__getitem__)
            slot = self._held.pop(gone)
            self.of[gone] = -1
        self._held[expert] = slot
        self.of[expert] = slot
        self.changes += 1
        return slot, gone

    def drop(self, expert: int) -> None:
        """Free the slot of an expert."""
        self._free.append(self._held.pop(expert))
        self.of[expert] = -1
        self.changes += 1
