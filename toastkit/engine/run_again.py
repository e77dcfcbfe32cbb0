"""A step that is looked at when it has run, and taken back and run again where it is not kept: of
which the little model is not sure (big_little), or that missed an expert (holdings.optimistic).

Taking back is exact: keys and values are cut off again, a recurrent state is the one that was
there. So the first run leaves the state, to the bit, as if it had never been.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from toastkit.engine.savepoints import roll_back, take_savepoint, ways_forward
from toastkit.session.savepoints import Savepoint

if TYPE_CHECKING:
    from toastkit.experts.common_part import Kept
    from toastkit.holdings.holdings import Holdings

Step = Callable[[], mx.array]


def run_or_again(
    first: Step,
    again: Step,
    is_kept: Callable[[mx.array], bool],
    caches: Sequence[Any],
    point: Savepoint,
    common: Kept | None = None,
) -> tuple[mx.array, bool]:
    """The logits, float32 (..., vocab), of a step of one token a row, and whether they are of its
    second run.

    first(), again(): run it. is_kept(logits): may evaluate them. point: of the caches before it, of
    `one_step`. common: what is kept of the first for the second. Raises what these raise; where
    `is_kept` does, the caches are as they were.
    """
    logits = first()
    try:
        kept = is_kept(logits)
    except BaseException:
        roll_back(caches, point.count + 1, point)
        raise
    if kept:
        return logits, False
    del logits  # with what it holds of the caches, or MLX would copy that
    if common:
        common.evaluate()
        common.forward = ways_forward(caches, common.caches, point)
    roll_back(caches, point.count + 1, point)
    return again(), True


def run_step(holdings: Holdings, run: Step, caches: Sequence[Any]) -> mx.array:
    """The logits, float32 (B, vocab), of a step of one token a row of these caches: optimistic
    where experts are in slots and that is due, else lazy. run(): the pass, (B, 1, vocab). Raises
    what it raises, and as ExpertSlots.settle."""
    if not holdings.has_slots:
        return run()[:, -1].astype(mx.float32)
    optimistic = holdings.slots.optimistic

    def first() -> mx.array:
        with optimistic.running():
            return run()[:, -1].astype(mx.float32)

    def again() -> mx.array:
        with optimistic.watching():
            return run()[:, -1].astype(mx.float32)

    # Layers that come and go wait by themselves: nothing would be gained.
    if holdings.streams.layers or not optimistic.is_due():
        return again()
    point = take_savepoint(caches, 0, one_step=True)
    return run_or_again(first, again, optimistic.look, caches, point)[0]
