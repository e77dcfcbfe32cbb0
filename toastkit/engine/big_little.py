"""Steps by the big or the little model, and with MoBiLE by both (paper 002, section III, algorithm
1): the little one runs; if its top probability is at most gamma, its step is rolled back and the
big one runs it again, except what comes before the first router, which is the same in both. That
leaves the state, to the bit, as if only the big model had run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from toastkit.engine.lookahead import Lookahead
from toastkit.engine.run_again import run_or_again
from toastkit.engine.savepoints import take_savepoint
from toastkit.engine.state import ModelState, Passed
from toastkit.holdings.policy import NO_WISH
from toastkit.native.operations import distribution
from toastkit.session.savepoints import Savepoint

if TYPE_CHECKING:
    from toastkit.experts.common_part import Recording
    from toastkit.experts.experts_policy import ExpertsPolicy

Step = Callable[[int | mx.array, list], mx.array]


def confidence(logits: mx.array) -> mx.array:
    """Return the probability of the likeliest token before temperature, float32 (...), lazy.
    logits: float32 (..., vocab)."""
    # exp(0) is one of the summands: never over 1, however the sum is rounded.
    return mx.exp(-distribution(logits)[1])


def unsure_rows(logits: mx.array, gamma: float) -> list[int]:
    """Return the rows, ascending, of a little pass that are rejected: states whose likeliest token
    has at most probability gamma, or whose logits are not numbers. logits: float32 (B, vocab). One
    synchronisation."""
    kept: Any = (confidence(logits) > gamma).tolist()
    return [row for row, sure in enumerate(kept) if not sure]


def look_ahead(
    experts: ExpertsPolicy | None, step: Step, state: ModelState, sure: bool = False
) -> Lookahead:
    """Build the next step of a state, by the model that a step begins with, and with what is needed
    to roll it back. step(token, cache): builds the graph of logits (vocab,) float32. sure: it is
    rolled back only at the end of a run."""
    if experts is None:
        return Lookahead(step, state.cache, sure=sure)
    experts.decide(NO_WISH)  # the last pass may have been a prefill
    point, kept = _point(experts, state), experts.common.nothing_kept()
    if point is None:
        return Lookahead(step, state.cache)
    with experts.common.recorded(kept):
        return Lookahead(step, state.cache, point, kept)


def _point(experts: ExpertsPolicy, state: ModelState) -> Savepoint | None:
    if experts.options.threshold is None:
        return None
    return take_savepoint(state.cache, len(state.tokens), one_step=True)


def take_step(
    experts: ExpertsPolicy, step: Step, state: ModelState, token: int | mx.array
) -> mx.array:
    """Return logits float32 (vocab,) after one more token of a state, whose caches count it from
    now on. Lazy, unless they have to be judged.

    step(token, cache): a pass. token: an id, or a device array () uint32. Raises what a pass
    raises; the caches are then as they were.
    """
    gamma = experts.options.threshold
    if state.ahead is not None and not isinstance(token, int):
        state.take_back()
    point = _point(experts, state) if state.ahead is None else state.ahead.point
    k, start = experts.k_now, time.perf_counter()
    built = state.ahead.seconds if state.ahead else 0.0
    if gamma is None or point is None:
        logits = state.next_logits(step, token)
        state.passed = Passed(k, False)
        return logits

    kept = experts.common.nothing_kept() if state.ahead is None else state.ahead.kept

    def little() -> mx.array:
        with nullcontext() if state.ahead else experts.common.recorded(kept):
            return state.next_logits(step, token)

    def is_sure(logits: mx.array) -> bool:
        unsure = unsure_rows(logits[None], gamma)
        experts.times.add("little", start, time.perf_counter(), built)
        return not unsure

    logits, fallback = run_or_again(
        little,
        lambda: _fall_back(experts, step, state, token, kept),
        is_sure,
        state.cache,
        point,
        kept,
    )
    experts.common.note(fallback)
    state.passed = Passed(experts.k if fallback else k, fallback)
    return logits


def _fall_back(
    experts: ExpertsPolicy, step: Step, state: ModelState, token: int | mx.array, kept: Recording
) -> mx.array:
    """Run the same step by the big model. kept: of the little one's pass."""
    start = time.perf_counter()
    with experts.again(), experts.common.replayed(kept):
        logits = step(token, state.cache)
    experts.fallbacks += 1
    if experts.waits:  # synchronises after every layer but the last anyway
        mx.eval(logits)
        experts.times.add("again", start, time.perf_counter())
    return logits


@contextmanager
def whole_step(experts: ExpertsPolicy | None) -> Iterator[None]:
    """Time the reading of a prompt's last token, which is waited for; it counts as a step of the
    whole model if K was not reduced."""
    start = time.perf_counter()
    yield
    if experts is not None and experts.k_now == experts.k:
        experts.times.add("whole", start, time.perf_counter())
