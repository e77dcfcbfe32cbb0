"""Several states that take their steps together: one pass over the weights for all of them.

mlx_lm's caches for this pad the shorter states on the left. A state that joins is copied into the
batch, one that leaves is copied out; in between its own caches are out of date.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from toastkit.engine.engine import Engine
from toastkit.engine.state import ModelState, Passed
from toastkit.holdings.policy import NO_WISH

# How far the logits of a batch may be from those of each state alone, of their spread, for the
# architecture to count as one that can be batched: rounding in float32, and in 16 bits.
TOLERANCE = 1e-3
COARSE_TOLERANCE = 5e-2


class Batch:
    """States that step together. members: their order is that of the rows. Empty at first."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._caches: Any = []
        self.members: list[ModelState] = []

    def join(self, states: Sequence[ModelState]) -> None:
        """Takes states in, each of which has read at least one token."""
        for state in states:
            state.take_back()
        added = [type(layers[0]).merge(list(layers)) for layers in zip(*(s.cache for s in states))]
        if self.members:
            for mine, theirs in zip(self._caches, added):
                mine.extend(theirs)
        else:
            self._caches = self._engine.counted(added)
        for state in states:
            state.cache = []  # in the batch from now on
        self.members += states

    def leave(self, states: Sequence[ModelState]) -> None:
        """Gives states their own caches back."""
        for state in states:
            row = self.members.index(state)
            state.cache = self._engine.counted(_extracted(x, row) for x in self._caches)
            mx.eval([layer.state for layer in state.cache])
        rest = [i for i, member in enumerate(self.members) if member not in states]
        if rest:
            for layer in self._caches:
                layer.filter(mx.array(rest))
        else:
            self._caches = []
        self.members = [self.members[i] for i in rest]

    def dissolve(self) -> None:
        """Gives the batch up, and with it the caches of its members: they are to be read anew."""
        self._caches = []
        for state in self.members:
            state.cache = []

    def step(self, tokens: Sequence[int | mx.array]) -> None:
        """Runs one more token of each member, in their order: ids, or device arrays () uint32. Sets
        each one's logits, float32 (vocab,), lazy. The token lists are the caller's to keep."""
        ids = mx.stack([mx.array(token, mx.uint32).reshape(1) for token in tokens])
        self._engine.decide(NO_WISH)
        logits = self._engine.step_rows(ids, self._caches)
        experts = self._engine.experts
        for row, state in enumerate(self.members):
            state.logits = logits[row]
            state.passed = None if experts is None else Passed(experts.k_now, False)
            self._engine.count_step()


def _extracted(layer: Any, row: int) -> Any:
    """One state's cache of a batch's."""
    own = layer.extract(row)
    if getattr(own, "lengths", None) is not None or getattr(own, "left_padding", None) is not None:
        own.lengths = own.left_padding = None  # of the batch
    return own


def can_batch(engine: Engine) -> bool | None:
    """Whether states of this model can step together: its caches can be merged, and two states of
    different lengths come out as they do alone. (An architecture may ignore the padding; that shows
    here.) None where the trial failed for a reason that may pass. Runs some sixty tokens."""
    if not all(hasattr(layer, "merge") for layer in engine.new_cache()):
        return False
    most = engine.vocab - 1
    prompts = [[min(7 + 3 * i, most) for i in range(n)] for n in (4, 40)]
    try:
        together, alone = _states(engine, prompts), _states(engine, prompts)
        batch = Batch(engine)
        batch.join(together)
        for _ in range(2):
            batch.step([min(5, most)] * 2)
            for state in alone:
                engine.consume(state, min(5, most))
        batch.leave([together[0]])
        engine.consume(together[0], min(6, most))
        engine.consume(alone[0], min(6, most))
        return all(_close(a.logits, b.logits, engine) for a, b in zip(together, alone))
    except (ValueError, TypeError, AttributeError, IndexError, NotImplementedError):
        return False  # these caches, or this model, are not made for it
    except Exception:
        return None  # of the device, say


def _states(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[ModelState]:
    states = []
    for ids in prompts:
        cache = engine.new_cache()
        states.append(ModelState(cache, list(ids), engine.prefill(ids, cache)[1]))
    return states


def _close(a: Any, b: Any, engine: Engine) -> bool:
    tolerance = TOLERANCE if engine.dtype == "float32" else COARSE_TOLERANCE
    spread = (b.max() - b.min()).item()
    return bool(mx.abs(a - b).max().item() <= tolerance * max(spread, 1e-6))
