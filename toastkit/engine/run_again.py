"""Speculative steps: a step runs, is judged, and if rejected is rolled back and run again. For
steps that the little model is not sure of (big_little) and those that missed an expert
(holdings.optimistic).

Rollback is exact: keys and values are trimmed, a recurrent state is restored. A rejected run leaves
the state, to the bit, as if it had not happened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from toastkit.engine.savepoints import redo_functions, roll_back, take_savepoint
from toastkit.session.savepoints import Savepoint

if TYPE_CHECKING:
    from toastkit.experts.common_part import Recording
    from toastkit.holdings.holdings import Holdings

Step = Callable[[], mx.array]


def run_or_again(
    first: Step,
    again: Step,
    is_kept: Callable[[mx.array], bool],
    caches: Sequence[Any],
    point: Savepoint,
    common: Recording | None = None,
) -> tuple[mx.array, bool]:
    """Run a step of one token a row; return its logits, float32 (..., vocab), and True if they are
    of the second run.

    first(), again(): run it. is_kept(logits): accepts the first run; may evaluate them. point:
    savepoint of the caches before the step, of `one_step`. common: what the second run reuses of
    the first. Raises what these raise; if `is_kept` does, the caches are as they were.
    """
    logits = first()
    try:
        kept = is_kept(logits)
    except BaseException:
        roll_back(caches, point.count + 1, point)
        raise
    if kept:
        return logits, False
    del logits  # it holds cache arrays, which MLX would otherwise copy
    if common:
        common.evaluate()
        common.forward = redo_functions(caches, common.caches, point)
    roll_back(caches, point.count + 1, point)
    return again(), True


def run_step(holdings: Holdings, run: Step, caches: Sequence[Any]) -> mx.array:
    """Run a step of one token a row of these caches; return its logits, float32 (B, vocab):
    optimistic if experts are in slots and that is due, else lazy. run(): the pass, (B, 1, vocab).
    Raises what it raises, and as ExpertSlots.settle."""
    if not holdings.has_slots:
        return run()[:, -1].astype(mx.float32)
    optimistic = holdings.slots.optimistic

    def first() -> mx.array:
        with optimistic.running():
            return run()[:, -1].astype(mx.float32)

    def again() -> mx.array:
        with optimistic.watching():
            return run()[:, -1].astype(mx.float32)

    # Streamed layers synchronise anyway: optimism would gain nothing.
    if holdings.streams.layers or not optimistic.is_due():
        return again()
    point = take_savepoint(caches, 0, one_step=True)
    return run_or_again(first, again, optimistic.look, caches, point)[0]
