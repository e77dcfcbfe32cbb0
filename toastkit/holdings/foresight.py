"""Foresight: predicts the experts of the layers ahead, to prefetch them.

Two predictors: an earlier run of the same token, with fewer experts say, gives the choice of every
layer at once (paper 002, section III-B); and the routers of the layers ahead, applied to the hidden
state that the current layer sees, choose nearly as they will later, as the hidden state changes
little from layer to layer. Neither has to be right: misses are fetched.

A router is asked by calling the block around it, and leaving the call where it passes on its
choice: so this module knows no architecture, and the block's own rules (groups, biases, K) hold.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from toastkit.holdings.derived import extend, restore
from toastkit.holdings.layer_slots import LayerSlots

if TYPE_CHECKING:
    from toastkit.holdings.expert_slots import ExpertSlots

MAX_AHEAD = 3  # layers
SMOOTHING = 0.1  # weight of the last layer's time in the average
RIGHT_SMOOTHING = 1 / 32  # weight of the last choice in how often a place in it is right


class _Answered(Exception):
    """Raised to leave a block that has chosen. indices: (..., K) uint32, lazy."""

    def __init__(self, indices: mx.array):
        self.indices = indices


class Places:
    """How often a predicted expert is needed, by its place in the choice. A router that partitions
    its scores puts the least likely expert last in some architectures, first in others. The
    likeliest is read first."""

    def __init__(self) -> None:
        self._right: dict[tuple[int, int], float] = {}  # moving average, by K and place

    def ordered(self, choice: Sequence[int]) -> list[int]:
        """A choice of K experts, the likeliest first; ties in their order."""
        k = len(choice)
        places = sorted(range(k), key=lambda place: -self._right.get((k, place), 0.0))
        return [choice[place] for place in places]

    def note(self, choice: Sequence[int], wanted: Collection[int]) -> None:
        """Compare a predicted choice with the experts that were needed."""
        for place, expert in enumerate(choice):
            key = len(choice), place
            before = self._right.setdefault(key, 0.0)
            self._right[key] += RIGHT_SMOOTHING * ((expert in wanted) - before)


class Foresight:
    """The predictions from which ExpertSlots prefetches.

    depth: how many layers ahead routers are asked; "auto" for as many as reading takes, None for
    none.
    """

    def __init__(self, slots: ExpertSlots):
        self._slots = slots
        self._watched: list[LayerSlots] = []  # whose blocks record their inputs
        self._asking = False
        self._told: dict[int, list[int]] = {}  # choices of the next pass, by place
        self._told_depth = MAX_AHEAD
        self._reached = 0  # the last place whose router was asked in this pass
        self._named: dict[int, list[int]] = {}  # predicted choices of layers ahead, by place
        self._places = Places()
        self._loaded_at: float | None = None  # when the last layer had its experts
        self._compute = 0.0  # seconds between two layers, averaged
        self.depth: str | int | None = None
        self._watching = False

    @property
    def is_told(self) -> bool:
        """True if the choices of the next pass are known (`tell`)."""
        return bool(self._told)

    @property
    def can_ask(self) -> bool:
        """True if the routers of all layers can be asked."""
        return all(switch.block is not None for switch in self._slots.switches)

    def watch(self) -> None:
        """Start recording the inputs of the blocks, which asking their routers needs."""
        self._watching = True
        self.follow()

    def follow(self) -> None:
        """Update the watched blocks after a change of the layers with slots."""
        self._told, self._named, self._reached = {}, {}, 0
        for layer in self._watched:
            restore(layer.switch.block)
        layers = self._slots.layers if self._watching else ()
        blocks = {id(block): layer for layer in layers if (block := layer.switch.block) is not None}
        self._watched = list(blocks.values())
        for layer in self._watched:
            extend(layer.switch.block, _Watched, _foresight=self, _layer=layer)

    # ------------------------------------------------------------------------------ asking routers

    def see(self, layer: LayerSlots, x: mx.array) -> None:
        """Keep the input of a block, x (B, N, D) of any dtype, if the pass is a step (N = 1)."""
        if not self._asking:
            layer.seen = x if x.ndim > 1 and x.shape[-2] == 1 else None

    def answer(self, indices: mx.array) -> None:
        """Called with a block's choice, (..., K) uint32; leaves the block if it was only asked."""
        if self._asking:
            raise _Answered(indices)

    def choice(self, layer: LayerSlots, x: mx.array) -> mx.array | None:
        """The choice of a layer's router for hidden states x (B, N, D): (B, N, K) uint32, lazy.
        None if it cannot be asked: it cannot be called alone, or is streamed with its layer."""
        switch = layer.switch
        if switch.block is None or any(holding.form.away for holding in switch.routing):
            return None
        self._asking = True
        try:
            switch.block(x)
        except _Answered as answered:
            return answered.indices
        finally:
            self._asking = False
        return None

    def last_choices(self, rows: Sequence[int] | None = None) -> dict[int, list[int]]:
        """The routers' choices for the inputs of the last step, with the current K of their blocks,
        by place among the layers with slots, unordered: the experts that the same token needs when
        it is run again with more of them. rows: of a batch that are run again, None for all. One
        synchronisation. Without the layers whose last pass was no step, that were not watched, or
        whose router is streamed.

            foresight.watch()
            (a step with few experts; then the blocks get their full K)
            foresight.tell(foresight.last_choices())
            (the same step again)
        """
        found = {}
        for place, layer in enumerate(self._slots.layers):
            if layer.seen is None:
                continue
            seen = layer.seen if rows is None else layer.seen[mx.array(list(rows))]
            choice = self.choice(layer, seen)
            if choice is not None:
                found[place] = choice
        mx.eval(list(found.values()))
        return {place: _experts(choice) for place, choice in found.items()}

    # ------------------------------------------------------------------------------- reading ahead

    def tell(self, choices: Mapping[int, Sequence[int]], depth: int = MAX_AHEAD) -> None:
        """Set the choices of the next pass: experts by place among the layers with slots. Starts
        prefetching the first `depth` layers at once, and stays as far ahead of the current layer.
        Valid for one pass."""
        self._told = {place: list(experts) for place, experts in choices.items()}
        self._told_depth = depth
        for place in range(min(depth, len(self._slots.layers))):
            self._slots.prefetch(self._slots.layers[place], self._told.get(place, ()))

    def ask(self, layer: LayerSlots) -> dict[int, mx.array]:
        """The choices of the routers of layers ahead for the current layer's input, by place:
        (B, 1, K) uint32, lazy. To be evaluated with its own choice, and passed to `go_on`."""
        self._time()
        if self.depth is None or self._told or layer.seen is None:
            return {}
        place, layers = self._slots.layers.index(layer), self._slots.layers
        depth = self._measured_depth() if self.depth == "auto" else int(self.depth)
        if place == 0:
            self._reached = 0
        found = {}
        for ahead in range(max(place, self._reached) + 1, min(place + depth + 1, len(layers))):
            choice = self.choice(layers[ahead], layer.seen)
            if choice is not None:
                found[ahead] = choice
            self._reached = ahead
        return found

    def go_on(self, layer: LayerSlots, asked: Mapping[int, mx.array]) -> None:
        """Prefetch for layers ahead, once a layer's own experts have been requested. asked: from
        `ask`, uint32 (B, 1, K), evaluated."""
        layers = self._slots.layers
        here = layers.index(layer)
        self._places.note(self._named.pop(here, ()), layer.choice)
        for place, choice in asked.items():
            self._named[place] = _experts(choice)
            self._slots.prefetch(layers[place], self._places.ordered(self._named[place]))
        if self._told:
            place = here + self._told_depth
            if place < len(layers):
                self._slots.prefetch(layers[place], self._told.get(place, ()))

    def leave(self, layer: LayerSlots) -> None:
        """Called when a layer has its experts, before it is computed."""
        if layer is self._slots.layers[-1]:
            self._told = {}
        self._loaded_at = time.perf_counter()

    def forget(self) -> None:
        """Discard all predictions of the next pass."""
        self._told, self._named, self._reached, self._loaded_at = {}, {}, 0, None

    def _time(self) -> None:
        """Measure the time since the previous layer had its experts."""
        if self._loaded_at is not None:
            seconds = time.perf_counter() - self._loaded_at
            self._compute += SMOOTHING * (seconds - self._compute)
            self._loaded_at = None

    def _measured_depth(self) -> int:
        """How many layers one layer's reading takes to compute, rounded up; 1 to begin with."""
        counts, reader = self._slots.counts, self._slots.reader
        if not self._compute or not reader.bytes_read:
            return 1
        reading = reader.busy_seconds * counts.read / reader.bytes_read / counts.passes
        return max(1, min(MAX_AHEAD, math.ceil(reading / self._compute)))


def _experts(choice: mx.array) -> list[int]:
    """The distinct experts of an evaluated choice, uint32 (..., K)."""
    return list(dict.fromkeys(np.array(choice).reshape(-1).tolist()))


class _Watched:
    """Mixin for the class of a block around experts: records its input."""

    _foresight: Foresight
    _layer: LayerSlots

    def __call__(self, x: mx.array, *rest: Any, **more: Any) -> Any:
        self._foresight.see(self._layer, x)
        return super().__call__(x, *rest, **more)  # type: ignore[misc]
