"""Experts that are read before it is known that they are wanted.

Two who know: somebody who has run the token before, with fewer experts say, and names the choice of
every layer at once (paper 002, section III-B); and the routers of the layers that come, applied to
what the layer that runs now sees. The hidden state changes little from layer to layer, so that they
choose much the same of it. Neither has to be right: what is wanted and not there is fetched.

To ask a router, the block around it is called, and left where it hands on its choice: so no
architecture is known here, and what a block makes of its scores (groups, biases, K) holds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from toastkit.holdings.derived import derived
from toastkit.holdings.layer_slots import LayerSlots

if TYPE_CHECKING:
    from toastkit.holdings.expert_slots import ExpertSlots

MOST_AHEAD = 3  # layers
SMOOTHING = 0.1  # weight of the last layer's time in the average
RIGHT_SMOOTHING = 1 / 32  # weight of the last choice in how often a place in it is right


class _Answered(Exception):
    """A block has chosen. indices: (..., K) uint32, lazy."""

    def __init__(self, indices: mx.array):
        self.indices = indices


class Places:
    """How often what a router names in advance is wanted, by its place in the choice: of those that
    it partitions its scores for, the least likely one comes last in some architectures, and first
    in others. What is wanted most often is read first."""

    def __init__(self) -> None:
        self._right: dict[tuple[int, int], float] = {}  # by K and place

    def ordered(self, choice: Sequence[int]) -> list[int]:
        """A choice of K experts, the likeliest first; else as it is."""
        k = len(choice)
        places = sorted(range(k), key=lambda place: -self._right.get((k, place), 0.0))
        return [choice[place] for place in places]

    def note(self, choice: Sequence[int], wanted: Collection[int]) -> None:
        """What became of a choice."""
        for place, expert in enumerate(choice):
            key = len(choice), place
            before = self._right.setdefault(key, 0.0)
            self._right[key] += RIGHT_SMOOTHING * ((expert in wanted) - before)


class Foresight:
    """What ExpertSlots reads ahead.

    depth: layers ahead that routers are asked, "auto" for as many as reading takes, None to ask
    none.
    """

    def __init__(self, slots: ExpertSlots):
        self._slots = slots
        self._own: dict[int, tuple[nn.Module, type]] = {}  # the classes that the blocks had
        self._asking = False
        self._told: dict[int, list[int]] = {}  # choices of the pass that comes, by place
        self._told_depth = MOST_AHEAD
        self._reached = 0  # the last place that was looked at in this pass
        self._named: dict[int, list[int]] = {}  # choices of layers that come, by place
        self._places = Places()
        self._left: float | None = None
        self._compute = 0.0  # seconds between two layers, averaged
        self.depth: str | int | None = None
        self._watching = False

    @property
    def is_told(self) -> bool:
        """Whether somebody has said what the pass that comes will want."""
        return bool(self._told)

    @property
    def can_ask(self) -> bool:
        """Whether the routers of all layers can be asked."""
        return all(switch.block is not None for switch in self._slots.switches)

    def watch(self) -> None:
        """Has what the blocks are called with noted from now on, which asking them needs."""
        self._watching = True
        self.follow()

    def follow(self) -> None:
        """Takes note of which layers have slots now."""
        self._told, self._named, self._reached = {}, {}, 0
        blocks = {id(layer.switch.block): layer for layer in self._slots.layers}
        blocks.pop(id(None), None)
        for key in set(self._own).difference(blocks if self._watching else ()):
            module, cls = self._own.pop(key)
            module.__class__ = cls  # type: ignore[assignment]
            for name in ("_foresight", "_layer"):
                vars(module).pop(name)
        for key, layer in blocks.items() if self._watching else ():
            block = layer.switch.block
            assert block is not None  # it was left out above
            if key not in self._own:
                self._own[key] = block, type(block)
                block.__class__ = derived(_Watched, type(block))
            vars(block).update(_foresight=self, _layer=layer)

    # ------------------------------------------------------------------------------ asking routers

    def see(self, layer: LayerSlots, x: mx.array) -> None:
        """A block is called with x, (B, N, D) of any dtype: kept for whoever asks about a step."""
        if not self._asking:
            layer.seen = x if x.ndim > 1 and x.shape[-2] == 1 else None

    def answer(self, indices: mx.array) -> None:
        """A block has chosen, (..., K) uint32. Ends the call, where it was only asked."""
        if self._asking:
            raise _Answered(indices)

    def choice(self, layer: LayerSlots, x: mx.array) -> mx.array | None:
        """What a layer's router chooses of hidden states x, (B, N, D): (B, N, K) uint32, lazy; None
        where it cannot be asked: it is not called alone, or comes and goes with its layer."""
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
        """What the routers choose of what their layers saw in the last step, with the K that their
        blocks have now, by place among the layers with slots and in no order: what the same token
        wants when it is run again with more experts. rows: of a batch that are run again, None for
        all. One synchronisation. Layers are missing whose last pass was no step, that were not
        watched, or whose router comes and goes.

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

    def tell(self, choices: Mapping[int, Sequence[int]], depth: int = MOST_AHEAD) -> None:
        """Says what the pass that comes will want: experts by place among the layers with slots.
        Begins with the first `depth` layers at once, and stays as far ahead of the layer that runs.
        It holds for one pass."""
        self._told = {place: list(experts) for place, experts in choices.items()}
        self._told_depth = depth
        for place in range(min(depth, len(self._slots.layers))):
            self._slots.prefetch(self._slots.layers[place], self._told.get(place, ()))

    def ask(self, layer: LayerSlots) -> dict[int, mx.array]:
        """The choices, lazy, by place, that the routers of layers ahead make of what a layer that
        runs now sees, (B, 1, K) uint32. They are to be evaluated with its own, and given to
        `go_on`."""
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
        """What a layer wants has been asked for: begins to read what layers ahead want. asked: as
        `ask` gave them, uint32 (B, 1, K), evaluated."""
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
        """A layer has its experts, and is computed."""
        if layer is self._slots.layers[-1]:
            self._told = {}
        self._left = time.perf_counter()

    def forget(self) -> None:
        """Nothing is known of the pass that comes."""
        self._told, self._named, self._reached, self._left = {}, {}, 0, None

    def _time(self) -> None:
        """A layer begins: how long after the one before it had its experts."""
        if self._left is not None:
            seconds = time.perf_counter() - self._left
            self._compute += SMOOTHING * (seconds - self._compute)
            self._left = None

    def _measured_depth(self) -> int:
        """Layers whose reading takes as long as one computes, rounded up; 1 to begin with."""
        counts, reader = self._slots.counts, self._slots.reader
        if not counts.passes or not self._compute or not reader.bytes_read:
            return 1
        reading = reader.busy_seconds * counts.read / reader.bytes_read / counts.passes
        return max(1, min(MOST_AHEAD, math.ceil(reading / self._compute)))


def _experts(choice: mx.array) -> list[int]:
    """The experts in a choice, uint32 (..., K), evaluated; each once."""
    return list(dict.fromkeys(np.array(choice).reshape(-1).tolist()))


class _Watched:
    """What a block around experts does in addition to its own."""

    _foresight: Foresight
    _layer: LayerSlots

    def __call__(self, x: mx.array, *rest: Any, **more: Any) -> Any:
        self._foresight.see(self._layer, x)
        return super().__call__(x, *rest, **more)  # type: ignore[misc]
