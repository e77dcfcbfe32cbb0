"""Which expert is in which slot of a layer, and which one leaves: the least recently used."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np


class SlotTable:
    """The slots of one layer's experts; says nothing of what lies in them.

    experts, slots: how many there are. of: the slot of each expert, int32 (experts,), -1 without.
    """

    def __init__(self, experts: int, slots: int):
        self.experts, self.slots = experts, slots
        self.of = np.full(experts, -1, np.int32)
        self._held: dict[int, int] = {}  # expert -> slot, the longest unused first
        self._free = list(range(slots - 1, -1, -1))

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

    def claim(
        self, expert: int, keep: Collection[int], spare: Collection[int] = ()
    ) -> tuple[int, int] | None:
        """A slot for an expert that has none, which is now the last one used, and the expert that
        leaves it, -1 for none: a free slot, or that of the longest unused. keep: experts that are
        not to leave. spare: those that leave only where no other can. None where nobody can."""
        gone = -1
        if self._free:
            slot = self._free.pop()
        else:
            leaving = [other for other in self._held if other not in keep]
            if not leaving:
                return None
            gone = next((other for other in leaving if other not in spare), leaving[0])
            slot = self._held.pop(gone)
            self.of[gone] = -1
        self._held[expert] = slot
        self.of[expert] = slot
        return slot, gone

    def drop(self, expert: int) -> None:
        """What is in its slot is not it."""
        self._free.append(self._held.pop(expert))
        self.of[expert] = -1
