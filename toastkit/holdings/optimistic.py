"""A step that takes it on trust that all experts wanted are in slots, and looks once, at its end.

To know what a router has chosen, a careful step waits for the device in each layer. An optimistic
one looks slots up on the device, so that it is built without waiting, and evaluates its logits
together with the choices of all layers. Where one of these names an expert that is in no slot, the
step has to be taken back and run again, carefully. What its layers named is read ahead for that, as
of a pass of the little model that is lost (paper 002, section III-B): up to the first miss it is
what they will name again, and after it mostly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from toastkit.holdings.layer_slots import LayerSlots, by_last_use

if TYPE_CHECKING:
    from toastkit.holdings.expert_slots import ExpertSlots

# Steps without a miss before the first optimistic one, and the most that are waited for.
FIRST_PATIENCE, MOST_PATIENCE = 8, 64


class OptimisticSteps:
    """The optimistic steps of a model whose experts are in slots.

    patience: steps in a row that have to find all they want before optimistic ones begin, which
    then go on until one misses an expert. That doubles it, or halves it where as many had gone
    well. trusts: they have begun. is_running: an optimistic step is being built.
    """

    def __init__(self, slots: ExpertSlots):
        self._slots = slots
        self._chosen: list[tuple[LayerSlots, mx.array]] = []
        self._row = 0  # steps that found all: in a row before the optimistic ones, or of these
        self.trusts = False
        self.patience = FIRST_PATIENCE
        self.is_running = False

    def is_due(self) -> bool:
        """Whether the step that comes is to be optimistic: the last ones found all they wanted, and
        nothing is on its way into slots. Raises as ExpertSlots.settle."""
        slots = self._slots
        return self.trusts and bool(slots.layers) and not slots.foresight.is_told and slots.settle()

    def note(self, found: bool) -> None:
        """A step has run: whether all that it wanted was in slots."""
        self._row += found
        if self.trusts and not found:
            doubled = min(MOST_PATIENCE, 2 * self.patience)
            self.patience = doubled if self._row < self.patience else max(1, self.patience // 2)
            self.trusts = False
        if not self.trusts:
            self._row *= found
            if self._row >= self.patience:
                self._row, self.trusts = 0, True

    @contextmanager
    def running(self) -> Iterator[None]:
        """Steps that are built meanwhile are optimistic."""
        self._slots.foresight.forget()
        self._chosen, self.is_running = [], True
        try:
            yield
        finally:
            self.is_running = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A careful step runs meanwhile, and is noted."""
        counts = self._slots.counts
        before = counts.wanted - counts.hit
        yield
        if self._slots.layers:
            self.note(counts.wanted - counts.hit == before)

    def run(
        self, layer: LayerSlots, call: Callable[..., mx.array], x: mx.array, indices: mx.array
    ) -> mx.array:
        """As ExpertSlots.run, for x (B, 1, D) and a choice (B, 1, K) uint32, and nothing is waited
        for. In place of experts that are in no slot, it computes with whatever lies in another."""
        self._chosen.append((layer, indices))
        return call(x, layer.slot_of[indices])

    def look(self, logits: mx.array) -> bool:
        """Evaluates a step that was built in `running`: (B, vocab) float32. Whether all that it
        wanted was there; if so it is counted, else it is read ahead."""
        chosen, self._chosen = self._chosen, []
        mx.eval(logits, [indices for _, indices in chosen])
        choices = [(layer, by_last_use(np.array(indices))) for layer, indices in chosen]
        found = all(expert in layer.table for layer, wanted in choices for expert in wanted)
        self._slots.counts.optimistic += 1
        self.note(found)
        if found:
            for layer, wanted in choices:
                self._slots.count_hits(layer, wanted)
        else:
            self._slots.counts.retried += 1
            places = {layer: place for place, layer in enumerate(self._slots.layers)}
            named = {places[layer]: wanted for layer, wanted in choices}
            self._slots.foresight.tell(named)
        return found
