"""One layer's experts: the module that holds them, the slots, what is on its way into them."""

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
    stacks: its matrices, (experts, rows, columns) each. experts: how many. block: the module around
    it, with the router, where that can be called with nothing but a layer's hidden states. routing:
    what else is in it."""

    path: str
    layer: int
    module: nn.Module
    stacks: list[Holding]
    experts: int
    block: nn.Module | None
    routing: list[Holding]


@dataclass
class SlotCounts:
    """Of all layers with slots, since the beginning. wanted: experts, each once a layer and pass.
    hit: of them, those that were in their slots, or on their way. ahead: experts that were read
    because somebody foresaw them; right: of them, those that the next pass of their layer wanted.
    read: bytes of the files. wait: seconds that passes waited for experts. passes: of one layer.
    optimistic: steps that read no choice back before they ended; retried: of them, those that
    missed an expert and were run again; of these, nothing else is counted but what ran again."""

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
    """The slots of one layer. coming: fetches of experts that are read ahead, one each; they have
    their slots. foreseen: those of them, or of those that came, that nobody has wanted yet.
    choice: the experts that the last pass wanted, the last one used last. seen: what its block was
    called with in the last step, (B, 1, D); None after another pass, and where nobody watches."""

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
        """Whether its memory has been taken out of the tree."""
        return any(h.parts is not parts for h, parts in zip(self.switch.stacks, self.parts))

    def release(self) -> None:
        """Lets its memory go. It is of no more use."""
        self.parts = []
        self.memory.release()

    @property
    def slot_of(self) -> mx.array:
        """The slot of each expert, uint32 (experts,), on the device; 0 without one."""
        if self._slot_of[0] != self.table.changes:
            slots = mx.array(np.maximum(self.table.of, 0).astype(np.uint32))
            self._slot_of = self.table.changes, slots
        return self._slot_of[1]

    def claim(self, experts: Sequence[int], keep: Collection[int], spare: Collection[int]) -> dict:
        """Slots for experts that have none, by expert, as many as there are to be had: see
        SlotTable.claim. What was being read into them is not any more."""
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
        """Nothing more is read of what was foreseen and is not wanted, unless all of it is there.
        Returns the experts, which are to be dropped: their slots are free soon."""
        wrong = [
            expert
            for expert in self.foreseen.difference(wanted)
            if expert in self.coming and not self.coming[expert].request.is_done
        ]
        for expert in wrong:
            self.coming[expert].leave_off()
        return wrong

    def drop(self, expert: int) -> None:
        """Marks an expert as neither in its slot nor on its way."""
        self._cancel(expert)
        if expert in self.table:
            self.table.drop(expert)

    def _cancel(self, expert: int) -> None:
        """Nothing is to come of reading it ahead."""
        self.foreseen.discard(expert)
        if fetch := self.coming.pop(expert, None):
            fetch.cancel()
            self._counts.read += fetch.request.read

    def finish(self, fetch: Fetch) -> None:
        """See SlotMemory.finish; counts what was read."""
        self.memory.finish(fetch)
        self._counts.read += fetch.request.read


def by_last_use(chosen: np.ndarray) -> list[int]:
    """The experts in a choice, uint32 (..., K), each once, the last one used last."""
    return list(dict.fromkeys(chosen.reshape(-1)[::-1].tolist()))[::-1]


def is_switch(module: Any) -> bool:
    """Whether a module is one of mlx_lm's that hold a layer's experts, whatever else it does."""
    return any(base.__name__ in PARENTS for base in type(module).__mro__)


def find_switches(holdings: Holdings) -> Iterable[Switch]:
    """Those whose matrices are all stacks of experts, in a decoder layer."""
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
    """Whether the one argument of the module around a switch is what a router looks at. (A layer
    would be called with masks and caches.)"""
    _, *given = signature(type(module).__call__).parameters.values()
    return [(one.default, one.kind in VARIADIC) for one in given] == [(Parameter.empty, False)]
