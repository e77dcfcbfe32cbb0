"""Which expert is in which slot of a layer, and which one leaves: the one used least, recent passes
counting more, and among equals the longest unused. That finds a few more experts in their slots
than recent use alone does (docs/decisions.md)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

DECAY = 0.95  # a pass, of how often an expert was used
MOST_WEIGHT = 1e100


class SlotTable:
    """The slots of one layer's experts; says nothing of what lies in them.

    experts, slots: how many there are. of: the slot of each expert, int32 (experts,), -1 without.
    uses: passes that wanted each expert, the last one counting most, by some unit. changes: of
    `of`, so far.
    """

    def __init__(self, experts: int, slots: int):
        self.experts, self.slots = experts, slots
        self.of = np.full(experts, -1, np.int32)
        self.uses = [0.0] * experts
        self._weight = 1.0  # of the pass that comes: it grows, instead of all that was before
        self.changes = 0
        self._held: dict[int, int] = {}  # expert -> slot, the longest unused first
        self._free = list(range(slots - 1, -1, -1))

    @classmethod
    def full(cls, experts: int) -> SlotTable:
        """With a slot for each expert, of its number."""
        table = cls(experts, experts)
        for expert in range(experts):
            table.claim(expert, ())
        return table

    def resized(self, slots: int) -> tuple[SlotTable, list[int]]:
        """A table of so many slots in which those experts stay that would have left last; and the
        slots that they have had, by the slots that they have now."""
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
        """The experts that have a slot, the longest unused first."""
        return list(self._held)

    def use(self, experts: Iterable[int]) -> None:
        """They are used now, in this order; each has a slot."""
        for expert in experts:
            self._held[expert] = self._held.pop(expert)

    def count(self, experts: Sequence[int]) -> None:
        """A pass wants these, there or not."""
        for expert in experts:
            self.uses[expert] += self._weight
        self._weight /= DECAY
        if self._weight > MOST_WEIGHT:
            self.uses = [uses / self._weight for uses in self.uses]
            self._weight = 1.0

    def claim(
        self, expert: int, keep: Collection[int], spare: Collection[int] = ()
    ) -> tuple[int, int] | None:
        """A slot for an expert that has none, which is now the last one used, and the expert that
        leaves it, -1 for none: a free slot, or that of the one used least. keep: experts that are
        not to leave. spare: those that leave only where no other can. None where nobody can."""
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
        """What is in its slot is not it."""
        self._free.append(self._held.pop(expert))
        self.of[expert] = -1
        self.changes += 1
