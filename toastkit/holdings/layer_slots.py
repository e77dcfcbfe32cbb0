"""The expert slots of one layer: the module that holds the experts, the table, the prefetches."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from toastkit.holdings.holding import Holding
from toastkit.holdings.slot_memory import Fetch, SlotMemory
from toastkit.holdings.slot_table import SlotTable
from toastkit.store.skeleton import holds_experts

if TYPE_CHECKING:
    from toastkit.holdings.holdings import Holdings

VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
PARENTS = ("SwitchGLU", "SwitchMLP")  # mlx_lm's modules that hold a layer's experts


class Switch(NamedTuple):
    """A module that holds a layer's experts. path: in the module tree. layer: its decoder layer.
    stacks: its matrices, (experts, rows, columns) each. experts: how many. block: the MoE block
    around it, with the router, if hidden states are its only argument. routing: the block's other
    modules."""

    path: str
    layer: int
    module: nn.Module
    stacks: list[Holding]
    experts: int
    block: nn.Module | None
    routing: list[Holding]


@dataclass
class SlotCounts:
    """Totals of all layers with slots. wanted: distinct experts needed, per layer and pass. hit:
    those of them that were in slots, or on their way. ahead: experts prefetched; right: those of
    them that the next pass of their layer needed. read: bytes of the files. wait: seconds that
    passes waited for experts. passes: of single layers. optimistic: steps that read no choice back
    before their end; retried: those of them that missed an expert and were run again, of which the
    other counts have the second run alone."""

    wanted: int = 0
    hit: int = 0
    ahead: int = 0
    right: int = 0
    read: int = 0
    wait: float = 0.0
    passes: int = 0
    optimistic: int = 0
    retried: int = 0

    def as_map(self) -> dict[str, Any]:
        """For a report."""
        return {**asdict(self), "wait": round(self.wait, 6)}


class LayerSlots:
    """The slots of one layer. coming: the prefetches under way, by expert; their slots are claimed.
    foreseen: experts prefetched for its next pass, under way or finished. choice: the experts of
    the last pass, in order of their last use. seen: the block's input in the last step, (B, 1, D);
    None after a pass that was no step, or if unwatched."""

    def __init__(self, switch: Switch, memory: SlotMemory, table: SlotTable, counts: SlotCounts):
        self.switch, self.memory, self.table, self._counts = switch, memory, table, counts
        self.parts = [holding.parts for holding in switch.stacks]
        self.coming: dict[int, Fetch] = {}
        self.foreseen: set[int] = set()
        self.choice: list[int] = []
        self.seen: mx.array | None = None
        self._slot_of = -1, mx.array(0)

    @property
    def is_stale(self) -> bool:
        """True if its memory has been taken out of the module tree."""
        return any(h.parts is not parts for h, parts in zip(self.switch.stacks, self.parts))

    def release(self) -> None:
        """Free its memory; it cannot be used afterwards."""
        self.parts = []
        self.memory.release()

    @property
    def slot_of(self) -> mx.array:
        """The slot of each expert, uint32 (experts,), on the device; 0 for those in none."""
        if self._slot_of[0] != self.table.changes:
            slots = mx.array(np.maximum(self.table.of, 0).astype(np.uint32))
            self._slot_of = self.table.changes, slots
        return self._slot_of[1]

    def claim(self, experts: Sequence[int], keep: Collection[int], spare: Collection[int]) -> dict:
        """Claim slots for experts that have none, as far as possible (see SlotTable.claim): slot by
        expert. Prefetches into these slots are cancelled."""
        found: dict[int, int] = {}
        keep, spare = frozenset(keep), frozenset(spare)
        for expert in experts:
            claimed = self.table.claim(expert, keep, spare)
            if claimed is None:
                break
            found[expert], gone = claimed
            self._cancel(gone)
        return found

    def leave_off(self, wanted: Collection[int]) -> list[int]:
        """Stop the unfinished prefetches of experts that are not wanted after all. Returns them, to
        be dropped: their slots will be free soon."""
        unwanted = [
            expert
            for expert in self.foreseen.difference(wanted)
            if expert in self.coming and not self.coming[expert].request.is_done
        ]
        for expert in unwanted:
            self.coming[expert].leave_off()
        return unwanted

    def drop(self, expert: int) -> None:
        """Mark an expert as neither in a slot nor on its way."""
        self._cancel(expert)
        if expert in self.table:
            self.table.drop(expert)

    def _cancel(self, expert: int) -> None:
        """Cancel an expert's prefetch, if there is one."""
        self.foreseen.discard(expert)
        if fetch := self.coming.pop(expert, None):
            fetch.cancel()
            self._counts.read += fetch.request.read

    def finish(self, fetch: Fetch) -> None:
        """SlotMemory.finish, counting the bytes read."""
        self.memory.finish(fetch)
        self._counts.read += fetch.request.read


def by_last_use(chosen: np.ndarray) -> list[int]:
    """The distinct experts of a choice, uint32 (..., K), in order of their last use."""
    return list(dict.fromkeys(chosen.reshape(-1)[::-1].tolist()))[::-1]


def is_switch(module: Any) -> bool:
    """True for mlx_lm's modules that hold a layer's experts, and classes derived from them."""
    return any(base.__name__ in PARENTS for base in type(module).__mro__)


def find_switches(holdings: Holdings) -> Iterable[Switch]:
    """Yield the switches in decoder layers whose parameters agree on the number of experts."""
    modules = dict(holdings.store.model.named_modules())
    for path, module in modules.items():
        if not is_switch(module):
            continue
        below = [h for p, h in holdings.modules.items() if p.startswith(f"{path}.")]
        stacks = [h for h in below if holds_experts(h.module)]
        layer = holdings.store.layer_of(f"{path}.")
        if stacks and layer is not None:
            counts = {holdings.store.shape(name)[0] for h in stacks for name in h.names}
            if len(counts) == 1:
                above = path.rpartition(".")[0]
                rest = [h for p, h in holdings.modules.items() if p.startswith(f"{above}.")]
                rest = [holding for holding in rest if holding not in stacks]
                around = modules.get(above)
                block = around if around is not None and _is_block(around) else None
                yield Switch(path, layer, module, stacks, counts.pop(), block, rest)


def _is_block(module: nn.Module) -> bool:
    """True if the module around a switch takes one argument: hidden states. (A decoder layer takes
    masks and caches as well.)"""
    _, *given = signature(type(module).__call__).parameters.values()
    return [(one.default, one.kind in VARIADIC) for one in given] == [(Parameter.empty, False)]
