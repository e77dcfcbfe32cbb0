"""Several states that step together: one pass over the weights for all of them.

With native attention keys and values stay in each state's own arrays (native/batched_caches.py).
mlx_lm's batch caches, for all else, pad the shorter states on the left: a state that joins is
copied into the batch, one that leaves is copied out.

With MoBiLE (paper 002, algorithm 1) there is one little pass for all. The rows that it is not sure
of are run again by the big model, as a smaller batch; the others are not touched. If it is sure of
none, what both passes have in common is not recomputed; a smaller batch is rounded differently, and
is run as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from toastkit.engine.big_little import unsure_rows
from toastkit.engine.engine import Engine
from toastkit.engine.savepoints import (
    copy_caches,
    hold_no_views,
    redo_functions,
    restore_caches,
)
from toastkit.engine.state import ModelState, Passed
from toastkit.holdings.policy import NO_WISH
from toastkit.holdings.streams import arrays_in
from toastkit.native.batched_caches import ApartKVCache, can_stay_apart, merged
from toastkit.native.kv_caches import leaves

# Largest difference between a batch's logits and each state's alone, relative to their spread, for
# an architecture to count as batchable: rounding in float32, and in 16 bits.
TOLERANCE = 1e-3
COARSE_TOLERANCE = 5e-2
ROWS = ("keys", "values")  # of a cache, (B, H, positions, D)
# Of attention that chooses blocks of keys by their place in the cache (MiniMax M3): padding shifts
# them, which shows only once there are more blocks than it chooses, not in a trial.
CHOOSES_BLOCKS = "index_topk_blocks"


class Batch:
    """States that step together. apart: each with its own keys and values, see `can_be_apart`.
    members: in the order of the rows. caches: of all of them, one per layer. Empty at first."""

    def __init__(self, engine: Engine, apart: bool = False):
        self._engine, self._apart = engine, apart
        self.caches: Any = []
        self.members: list[ModelState] = []

    def join(self, states: Sequence[ModelState]) -> None:
        """Add states, each of which has read at least one token."""
        for state in states:
            state.take_back()
        added = [merged(layers, self._apart) for layers in zip(*(s.cache for s in states))]
        if self.members:
            for mine, theirs in zip(self.caches, added):
                mine.extend(theirs)
        else:
            self.caches = self._engine.counted(added)
        for state in states:
            state.cache = []  # in the batch from now on
        self.members += states
        mx.eval(arrays_in(self.caches))  # what is evaluated is changed in place

    def leave(self, states: Sequence[ModelState]) -> None:
        """Remove states, giving them their own caches back."""
        for state in states:
            row = self.members.index(state)
            state.cache = self._engine.counted(_extract_row(x, row) for x in self.caches)
            mx.eval(arrays_in(state.cache))
        gone = [i for i, member in enumerate(self.members) if member in states]
        rest = list(range(len(self.members)))
        for row in reversed(gone):  # the last one takes its place: the others do not move
            rest[row] = rest[-1]
            rest.pop()
        if rest:
            for layer in self.caches:
                layer.filter(mx.array(rest))
            mx.eval(arrays_in(self.caches))
        else:
            self.caches = []
        self.members = [self.members[i] for i in rest]

    def dissolve(self) -> None:
        """Drop the batch with its members' caches: they have to be prefilled again."""
        self.caches = []
        for state in self.members:
            state.cache = []

    def step(self, tokens: Sequence[int | mx.array]) -> None:
        """Run one more token of each member, in their order: ids, or device arrays () uint32. Sets
        each one's logits, float32 (vocab,), lazy unless they have to be judged. The caller
        maintains the token lists. If it raises, the batch has to be dissolved."""
        engine, experts = self._engine, self._engine.experts
        ids = mx.stack([mx.array(token, mx.uint32).reshape(1) for token in tokens])
        engine.decide(NO_WISH)
        engine.holdings.counted_experts()  # those of prompts since the last step
        passed = [None if experts is None else Passed(experts.k_now, False)] * len(tokens)
        if experts is None or experts.options.threshold is None:
            logits = list(engine.step_rows(ids, self.caches))
        else:
            experts.times.leave_out()  # equation 1 is about steps of one state
            before, kept = self.before_a_step(), experts.common.nothing_kept()
            with experts.common.recorded(kept):
                little = engine.step_rows(ids, self.caches)
            logits = list(little)
            unsure = unsure_rows(little, experts.options.threshold)
            experts.common.note(len(unsure) == len(tokens))
            if unsure:
                if len(unsure) < len(tokens):
                    kept = experts.common.nothing_kept()  # a smaller batch is rounded differently
                elif kept:
                    kept.forward = redo_functions(self.caches, kept.caches)
                with experts.again(unsure), experts.common.replayed(kept):
                    for row, own in zip(unsure, self.run_again(ids, before, unsure)):
                        logits[row], passed[row] = own, Passed(experts.k_now, True)
                experts.fallbacks += len(unsure)
        expert_report = engine.holdings.counted_experts()
        for row, state in enumerate(self.members):
            state.logits, state.passed, state.experts = logits[row], passed[row], expert_report
            engine.count_step()

    def before_a_step(self) -> list[Any]:
        """Save what `run_again` needs of the caches: all but keys and values. Those are not held,
        so not copied when written: a second run writes the same places, even over the oldest row of
        a ring."""
        kept = copy_caches(list(leaves(self.caches)))
        for leaf in kept:
            for name in ROWS:
                vars(leaf).pop(name, None)
        return kept

    def run_again(self, ids: mx.array, before: list[Any], rows: Sequence[int]) -> mx.array:
        """Roll the last pass back and run it again for some rows; return their logits, float32 (R,
        vocab), lazy. These rows are then, to the bit, as if it had not run; the others stay as it
        left them.

        ids: uint32 (B, 1), of all. before: of `before_a_step`, used up. rows: ascending.
        """
        if len(rows) == len(self.members):
            restore_caches(list(leaves(self.caches)), before)
            return self._engine.step_rows(ids, self.caches)
        which = mx.array(list(rows), mx.uint32)
        part = self._engine.counted(copy_caches(self.caches))
        restore_caches(list(leaves(part)), before)
        for leaf in leaves(part):
            vars(leaf).update(
                {name: _select_rows(value, which) for name, value in vars(leaf).items()}
            )
        logits = self._engine.step_rows(ids[which], part)
        for leaf, own in zip(leaves(self.caches), leaves(part)):
            _write_back(leaf, own, which)
        return logits


def _select_rows(value: Any, rows: mx.array) -> Any:
    """Select rows of what a batch's cache holds, along the first axis of its arrays."""
    if isinstance(value, list):
        return [_select_rows(item, rows) for item in value]
    return value[rows] if isinstance(value, mx.array) else value


def _write_back(layer: Any, own: Any, rows: mx.array) -> None:
    """Copy what a step of some rows wrote into a batch's cache. own: the cache of those rows."""
    if hasattr(layer, "cache"):  # recurrent states, convolutions
        for all_rows, some in zip(layer.cache, own.cache):
            if some is not None:
                all_rows[rows] = some
    elif layer.keys is not None:
        place = layer._idx - 1
        for name in ROWS:
            getattr(layer, name)[rows, :, place] = getattr(own, name)[:, :, place]


def _extract_row(layer: Any, row: int) -> Any:
    """Extract one state's cache from a batch's, which it does not hold on to."""
    own = layer.extract(row)
    hold_no_views([own])
    if getattr(own, "lengths", None) is not None or getattr(own, "left_padding", None) is not None:
        own.lengths = own.left_padding = None  # they describe the batch
    return own


def can_be_apart(engine: Engine) -> bool:
    """True if states of this model may be tried in a batch with keys and values of their own. Where
    rows fall back to the big model, they are run again by themselves, which takes merged caches."""
    experts = engine.experts
    falls = experts is not None and experts.options.threshold is not None
    return engine.dtype == "float32" and not falls and can_stay_apart(engine.new_cache())


def can_batch(engine: Engine, apart: bool = False) -> bool | None:
    """True if states of this model can step together: its caches can be merged, and two states of
    different lengths come out as they do alone, with MoBiLE also after one is run again. (An
    architecture may ignore the padding, in its caches or, as AFM 7, in its logits alone; that shows
    here.) None if the trial failed for a reason that may be transient. Runs some fifty tokens.
    apart: as of Batch; True only if native attention then reads all keys and values in place."""
    if not all(hasattr(layer, "merge") for layer in engine.new_cache()):
        return False
    if any(hasattr(module, CHOOSES_BLOCKS) for module in engine.model.modules()):
        return False
    most, experts = engine.vocab - 1, engine.experts
    right, wrong, last = (min(token, most) for token in (5, 9, 6))
    falls = experts is not None and experts.options.threshold is not None
    prompts = [[min(7 + 3 * i, most) for i in range(n)] for n in (4, 40)]
    try:
        together = _states(engine, prompts)
        caches = [engine.counted(copy_caches(state.cache)) for state in together]
        alone = [ModelState(c, s.tokens, s.logits) for c, s in zip(caches, together)]
        batch = Batch(engine, apart)
        batch.join(together)
        for _ in range(2):
            before = batch.before_a_step()
            first = mx.array([[right], [wrong if falls else right]], mx.uint32)
            together[0].logits, together[1].logits = engine.step_rows(first, batch.caches)
            if falls:
                both = mx.array([[right], [right]], mx.uint32)
                [together[1].logits] = batch.run_again(both, before, [1])
            for state in alone:
                state.logits = engine.step(right, state.cache)
        if not _alike(together, alone, engine):  # while one is padded
            return False
        if any(leaf.unread > 0 for leaf in leaves(batch.caches) if isinstance(leaf, ApartKVCache)):
            return False
        batch.leave([together[0]])
        for state in (together[0], alone[0]):
            state.logits = engine.step(last, state.cache)
        return _alike(together, alone, engine)
    except (ValueError, TypeError, AttributeError, IndexError, NotImplementedError):
        return False  # these caches, or this model, do not support it
    except Exception:
        return None  # e.g. the device failed


def _states(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[ModelState]:
    states = []
    for ids in prompts:
        cache = engine.new_cache()
        states.append(ModelState(cache, list(ids), engine.prefill(ids, cache)))
    return states


def _alike(some: list[ModelState], others: list[ModelState], engine: Engine) -> bool:
    return all(_close(a.logits, b.logits, engine) for a, b in zip(some, others))


def _close(a: Any, b: Any, engine: Engine) -> bool:
    tolerance = TOLERANCE if engine.dtype == "float32" else COARSE_TOLERANCE
    spread = (b.max() - b.min()).item()
    return bool(mx.abs(a - b).max().item() <= tolerance * max(spread, 1e-6))
