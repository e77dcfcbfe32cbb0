"""What slots take on the device, and how many fit: the same for a run and for its plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from toastkit.errors import UsageError
from toastkit.holdings.holdings import Holdings


class Room(NamedTuple):
    """What slots can have of the device's memory where the options do not say. size(): bytes, now.
    available(): bytes that are free, None where nobody has to look: a budget says what there is.
    with_layers: whether a layer that has all its experts may come and go with them. caches():
    whether the system's cache of files can hold, now, what is read again and again."""

    size: Callable[[], int]
    available: Callable[[], int] | None
    with_layers: bool
    caches: Callable[[], bool]


class SlotSizes:
    """Of a model of which nothing is loaded. least: slots of a layer, as many as a token chooses
    experts there. experts: of a layer; where layers differ, of the one with the most. Raises
    UsageError for a model without experts."""

    def __init__(self, holdings: Holdings):
        self._holdings = holdings
        self.switches = holdings.slots.switches
        if not self.switches:
            raise UsageError(
                f"--expert-slots: {holdings.store.files.name} is a dense model: it has no experts"
            )
        self.of = {h.path: switch for switch in self.switches for h in switch.stacks}
        self.experts = max(switch.experts for switch in self.switches)
        self.least = _chosen_experts(holdings)

    def slot_bytes(self, bits: int = 0) -> int:
        """Bytes of one slot of every layer. bits: of a packed weight, 0 for originals."""
        return sum(self._stack_bytes(path, bits) // s.experts for path, s in self.of.items())

    def _stack_bytes(self, path: str, bits: int) -> int:
        loaded = self._holdings.loaded
        size = loaded.stack_bytes(path)
        if bits and self._holdings.modules[path].weight is not None:
            size += loaded.packed_bytes(path, bits) - loaded.matrix_bytes(path)
        return size

    def within(self, size: int, bits: int = 0) -> int:
        """Slots of a layer, where those of all layers together have so many bytes; the least where
        that is not enough for it."""
        return max(self.least, size // self.slot_bytes(bits))

    def held(self, count: int, bits: int = 0) -> int:
        """Bytes of so many slots in each layer; where a layer has no more experts, of them all."""
        return sum(
            self._stack_bytes(path, bits) // switch.experts * min(count, switch.experts)
            for path, switch in self.of.items()
        )

    def set_slots(self, count: int) -> None:
        """Has the stacks known as slotted, or whole where there are as many slots as experts: sizes
        of the model are then what they will be."""
        for path, switch in self.of.items():
            self._holdings.modules[path].slots = count if count < switch.experts else 0

    def plan(self, room: int) -> SlotPlan:
        """What so many bytes for slots come to."""
        count = min(self.within(room), self.experts)
        return SlotPlan(
            slots=count, experts=self.experts, chosen=self.least, layers=len(self.switches),
            size=self.held(count), miss=self.slot_bytes() // len(self.switches), room=room,
        )  # fmt: skip


@dataclass(frozen=True)
class SlotPlan:
    """slots: of a layer, of how many experts; a token chooses so many of them. layers: that have
    experts. size: bytes of all slots on the device. miss: of an expert that is fetched, the mean
    over layers. room: bytes that there were for slots."""

    slots: int
    experts: int
    chosen: int
    layers: int
    size: int
    miss: int
    room: int

    @property
    def token_misses(self) -> int:
        """Bytes that a token fetches which finds none of its experts."""
        return self.chosen * self.layers * self.miss

    @property
    def chunk_misses(self) -> int:
        """Bytes that a chunk of a prompt fetches which wants all experts, and finds none."""
        return self.experts * self.layers * self.miss


def _chosen_experts(holdings: Holdings) -> int:
    """How many experts a token chooses, in the layer where it chooses most. A pass over a token is
    built and not computed, of a model of which nothing is loaded."""
    found: list[int] = []
    classes: list[tuple[nn.Module, type]] = []
    model: Any = holdings.store.model
    with holdings.shapes_only():
        try:
            for switch in holdings.slots.switches:
                classes.append((switch.module, type(switch.module)))
                switch.module.__class__ = _asking(type(switch.module), found)
            model(mx.zeros((1, 1), mx.uint32), cache=holdings.new_caches())
        finally:
            for module, cls in classes:
                module.__class__ = cls  # type: ignore[assignment]
    return max(found, default=1)


def _asking(base: type, found: list[int]) -> type:
    """`base`, noting how many experts are chosen."""

    def call(self: Any, x: mx.array, indices: mx.array) -> mx.array:
        found.append(indices.shape[-1])
        return base.__call__(self, x, indices)

    return type(f"Asking{base.__name__}", (base,), {"__call__": call})
