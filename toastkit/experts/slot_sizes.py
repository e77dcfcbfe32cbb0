"""The sizes of expert slots on the device, and how many fit: for runs and for plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from toastkit.errors import UsageError
from toastkit.experts.routers import is_experts
from toastkit.holdings.derived import extend, restore
from toastkit.holdings.holdings import Holdings
from toastkit.store.skeleton import MISFITS, cannot_run

DENSE = "is a dense model: it has no experts"


class Room(NamedTuple):
    """The memory for slots, if the options do not say. size(): bytes, now. available(): bytes that
    are free; None if there is a budget, so that nothing has to be watched. with_layers: true if a
    layer with all its experts may be streamed together with them. caches(): true if the page cache
    can now hold what is read repeatedly."""

    size: Callable[[], int]
    available: Callable[[], int] | None
    with_layers: bool
    caches: Callable[[], bool]


class SlotSizes:
    """Slot sizes of a model of which nothing is loaded. least: the fewest slots per layer, as many
    as a token chooses experts. experts: per layer; if layers differ, of the one with the most.
    Raises UsageError for a model without experts, DataError if mlx_lm cannot run it."""

    def __init__(self, holdings: Holdings):
        self._holdings = holdings
        self.switches = holdings.slots.switches
        if not self.switches:
            other = any(map(is_experts, holdings.store.model.modules()))
            why = "holds its experts otherwise than slots do" if other else DENSE
            raise UsageError(f"--expert-slots: {holdings.store.files.name} {why}")
        self.of = {h.path: switch for switch in self.switches for h in switch.stacks}
        self.experts = max(switch.experts for switch in self.switches)
        self.least = _chosen_experts(holdings)

    def slot_bytes(self, bits: int = 0) -> int:
        """Bytes of one slot in each layer, summed. bits: of a packed weight, 0 for originals."""
        return self.held(1, bits)

    def within(self, size: int, bits: int = 0) -> int:
        """Slots per layer that fit into size bytes for all layers; at least `least`."""
        return max(self.least, size // self.slot_bytes(bits))

    def held(self, count: int, bits: int = 0) -> int:
        """Bytes of that many slots in each layer, or of all its experts if it has fewer."""
        loaded, total = self._holdings.loaded, 0
        for path, switch in self.of.items():
            size = loaded.stack_bytes(path)
            if bits and self._holdings.modules[path].weight is not None:
                size += loaded.packed_bytes(path, bits) - loaded.matrix_bytes(path)
            total += size // switch.experts * min(count, switch.experts)
        return total

    def set_slots(self, count: int) -> None:
        """Mark the stacks as slotted, or whole if there are as many slots as experts, so that the
        model's sizes are what they will be."""
        for path, switch in self.of.items():
            self._holdings.modules[path].slots = count if count < switch.experts else 0

    def plan(self, room: int) -> SlotPlan:
        """The plan for slots in room bytes."""
        count = min(self.within(room), self.experts)
        return SlotPlan(
            slots=count, experts=self.experts, chosen=self.least, layers=len(self.switches),
            size=self.held(count), miss=self.slot_bytes() // len(self.switches), room=room,
        )  # fmt: skip


@dataclass(frozen=True)
class SlotPlan:
    """slots, experts: per layer; chosen: experts per token. layers: that have experts. size: bytes
    of all slots on the device. miss: bytes of a fetched expert, the mean over layers. room: bytes
    available for slots."""

    slots: int
    experts: int
    chosen: int
    layers: int
    size: int
    miss: int
    room: int

    @property
    def token_misses(self) -> int:
        """Bytes fetched by a token all of whose experts are misses."""
        return self.chosen * self.layers * self.miss

    @property
    def chunk_misses(self) -> int:
        """Bytes fetched by a prefill chunk that needs all experts, if all are misses."""
        return self.experts * self.layers * self.miss


def _chosen_experts(holdings: Holdings) -> int:
    """How many experts a token chooses, in the layer where it chooses most. Builds a pass over a
    token without computing it; nothing of the model needs to be loaded. Raises DataError if mlx_lm
    cannot run it."""
    found: list[int] = []
    model: Any = holdings.store.model
    with holdings.shapes_only():
        for switch in holdings.slots.switches:
            extend(switch.module, _Counting, _found=found)
        try:
            model(mx.zeros((1, 1), mx.uint32), cache=holdings.new_caches())
        except MISFITS as error:
            raise cannot_run(holdings.store.files.name, error) from error
        finally:
            for switch in holdings.slots.switches:
                restore(switch.module)
    return max(found, default=1)


class _Counting:
    """Mixin for the class of a switch: records how many experts are chosen."""

    _found: list[int]

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        self._found.append(indices.shape[-1])
        return super().__call__(x, indices)  # type: ignore[misc]
