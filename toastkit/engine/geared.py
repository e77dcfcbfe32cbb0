"""Scores a text in gears: one gear throughout, or gears that change from token to token.

The entropy of the logits at one position selects the gear of the next pass, whose entropy selects
again: so a text is read token by token, as if it were being generated. A window begins with an
empty cache and in high gear, because nothing is known before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np

from toastkit.engine.engine import Engine
from toastkit.engine.perplexity import Scores, checked, default_chunk, score, score_window, windows
from toastkit.engine.state import ModelState
from toastkit.gears.monitor import EntropyMeter
from toastkit.gears.selector import GearSelector
from toastkit.holdings.policy import NO_WISH, Wish
from toastkit.model.config import check_ids

FIRST = "high"  # gear of a window's first pass
DIGITS = 6  # of an entropy that selects a gear, as in frames, so that all paths agree


# Given the entropy in bits of the logits that predict a token, the gear of the pass that consumes
# it. Called once for every pass except a window's first.
Chooser = Callable[[float], Wish]


def by_selector(selector: GearSelector) -> Chooser:
    """The gears of a selector, as in toast-decode. Raises DataError for an entropy that is not
    finite."""

    def choose(entropy: float) -> Wish:
        decision = selector.update(entropy)
        return Wish(decision.gear, decision.expected)

    return choose


def score_in_gear(
    engine: Engine, ids: Sequence[int], window: int, gear: str, chunk: int | None = None
) -> Iterator[Scores]:
    """Score as perplexity.score, in one gear throughout. The engine stays in it."""
    engine.shift(gear)
    for part in score(engine, ids, window, chunk):
        yield replace(part, gears=[gear] * len(part.ids))


def score_in_gears(
    engine: Engine, ids: Sequence[int], window: int, chooser_for: Callable[[], Chooser]
) -> Iterator[Scores]:
    """Score the tokens ids[1:], in order, each with the gear of the pass that predicted it.

    window: most tokens of context for a token. chooser_for(): called for a chooser at the beginning
    of each window; it may return the same one again. Entropies are rounded to 6 digits, as the
    chooser sees them. The engine stays in the gear of the last pass. If it cannot shift
    (engine.gears is None) gears are selected all the same, and a pass takes several tokens. Raises
    DataError for an id that the model does not have, and for logits that are not numbers; what
    Engine.decide raises.
    """
    check_ids(ids, engine.vocab)
    for start, part in windows(ids, window):
        if engine.gears is None and not falls_back(engine):
            yield from _in_chunks(engine, start, part, chooser_for())
        else:
            yield from _stepping(engine, start, part, chooser_for())


def score_in_steps(engine: Engine, ids: Sequence[int], window: int) -> Iterator[Scores]:
    """Score as perplexity.score, in the engine's current gear, a token at a time: each is predicted
    by the pass that counts if a step may take two (see engine.big_little)."""
    check_ids(ids, engine.vocab)
    for start, part in windows(ids, window):
        yield from _stepping(engine, start, part, None)


def falls_back(engine: Engine) -> bool:
    """True if a step may take two passes, so that several tokens cannot share a pass."""
    return engine.experts is not None and engine.experts.options.threshold is not None


def _stepping(
    engine: Engine, start: int, part: Sequence[int], chooser: Chooser | None
) -> Iterator[Scores]:
    """Score a window token by token. chooser: None without gears."""
    meter = EntropyMeter(engine.vocab)
    state = ModelState(engine.new_cache())
    gear, last = FIRST, len(part) - 2
    choice = NO_WISH if chooser is None else Wish(FIRST)
    for n, (token, target) in enumerate(zip(part, part[1:])):
        gear = choice.gear or gear
        engine.consume(state, token, choice)
        state.submit()
        if n < last:
            engine.look_ahead(state)  # while the device computes
        logits = np.asarray(state.values())
        entropy = round(meter.bits(logits), DIGITS)
        logprob = _logprob(logits, target)
        gears = None if chooser is None else [gear]
        yield checked(Scores(start + n + 1, [target], [logprob], [entropy], gears))
        if n < last and chooser is not None:
            choice = chooser(entropy)
    mx.clear_cache()


def _in_chunks(
    engine: Engine, start: int, part: Sequence[int], chooser: Chooser
) -> Iterator[Scores]:
    """Score a window in passes of several tokens, with the gears that would have been selected."""
    gear, end = FIRST, start + len(part) - 1
    for scores in score_window(engine, start, part, default_chunk(engine)):
        entropies = [round(entropy, DIGITS) for entropy in scores.entropies]
        selected = []
        for position, entropy in enumerate(entropies, scores.position):
            selected.append(gear)
            if position < end:
                gear = chooser(entropy).gear or gear
        yield replace(scores, entropies=entropies, gears=selected)


def _logprob(logits: np.ndarray, target: int) -> float:
    """Return ln p of the target, in float64. logits: float32 (vocab,)."""
    values = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):  # infinite logits: the result is NaN, and refused
        values -= values.max()
        chosen = values[target]
        return float(chosen - math.log(np.exp(values, out=values).sum()))
