"""Optimistic steps: assume that all experts needed are in slots, and verify once, at the end.

A careful step waits for the device in each layer, to read the router's choice. An optimistic step
looks slots up on the device, so that it is built without waiting, and evaluates its logits together
with the choices of all layers. If one of these missed, the step has to be rolled back and run
again, carefully. Its choices are prefetched for that, as those of a lost pass of the little model
are (paper 002, section III-B): up to the first miss they are exact, and after it mostly right.
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

# Steps in a row without a miss before optimistic ones: to begin with, and at most.
FIRST_PATIENCE, MAX_PATIENCE = 8, 64


class OptimisticSteps:
    """The optimistic steps of a model with expert slots.

    patience: steps in a row without a miss before optimistic ones begin, which go on until one
    misses an expert. A miss doubles patience, or halves it if at least as many optimistic steps had
    succeeded. trusts: optimistic steps have begun. is_running: one is being built.
    """

    def __init__(self, slots: ExpertSlots):
        self._slots = slots
        self._chosen: list[tuple[LayerSlots, mx.array]] = []
        self._streak = 0  # steps without a miss, counted anew from the first optimistic one
        self.trusts = False
        self.patience = FIRST_PATIENCE
        self.is_running = False

    def is_due(self) -> bool:
        """True if the next step is to be optimistic: the last ones had no miss, and no prefetch is
        under way. Raises as ExpertSlots.settle."""
        slots = self._slots
        return self.trusts and bool(slots.layers) and not slots.foresight.is_told and slots.settle()

    def note(self, found: bool) -> None:
        """Record a step. found: it had no miss."""
        self._streak += found
        if self.trusts and not found:
            doubled = min(MAX_PATIENCE, 2 * self.patience)
            self.patience = doubled if self._streak < self.patience else max(1, self.patience // 2)
            self.trusts = False
        if not self.trusts:
            self._streak *= found
            if self._streak >= self.patience:
                self._streak, self.trusts = 0, True

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context in which the step that is built is optimistic."""
        self._slots.foresight.forget()
        self._chosen, self.is_running = [], True
        try:
            yield
        finally:
            self.is_running = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which a careful step runs, to be recorded."""
        counts = self._slots.counts
        before = counts.wanted - counts.hit
        yield
        if self._slots.layers:
            self.note(counts.wanted - counts.hit == before)

    def run(
        self, layer: LayerSlots, call: Callable[..., mx.array], x: mx.array, indices: mx.array
    ) -> mx.array:
        """As ExpertSlots.run, for x (B, 1, D) and a choice (B, 1, K) uint32, without waiting. A
        missing expert is computed with whatever is in slot 0."""
        self._chosen.append((layer, indices))
        return call(x, layer.slot_of[indices])

    def look(self, logits: mx.array) -> bool:
        """Evaluate and verify a step that was built in `running`; logits: (B, vocab) float32. True
        if it had no miss: then it is counted; else its experts are prefetched."""
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
