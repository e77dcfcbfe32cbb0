"""Scores of a text in gears: in one throughout, or in gears that change from token to token.

The entropy of the logits at one position chooses the gear of the pass that comes next, and the
figures of that pass choose again: so a text goes token by token, as it would if it were an answer.
A window begins with an empty cache and in high gear, because nothing is known before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import mlx.core as mx
import numpy as np

from toastkit.engine.engine import Engine
from toastkit.engine.perplexity import (
    Scores,
    checked,
    default_chunk,
    score,
    score_window,
    windows,
)
from toastkit.engine.state import ModelState
from toastkit.gears.monitor import EntropyMeter
from toastkit.gears.selector import GearSelector
from toastkit.holdings.policy import NO_WISH, Wish
from toastkit.model.config import check_ids

FIRST = "high"  # gear of a window's first pass
DIGITS = 6  # of an entropy that a gear is chosen by: what a frame says, so that all ways agree


class Chooser(Protocol):
    """Who says which gear comes next."""

    def choose(self, entropy: float) -> Wish:
        """The gear of the pass that consumes the next token. entropy: bits, of the logits that
        this token is predicted from. Asked once for every pass but a window's first."""


class BySelector:
    """The gears of a GearSelector: what toast-decode does."""

    def __init__(self, selector: GearSelector):
        self._selector = selector

    def choose(self, entropy: float) -> Wish:
        """The selector's decision. Raises DataError for an entropy that is not finite."""
        decision = self._selector.update(entropy)
        return Wish(decision.gear, decision.expected)


class Schedule:
    """Gears that stand in a list, whatever the entropy: what `BySelector` is compared with."""

    def __init__(self, gears: Iterable[str]):
        self._gears = iter(gears)

    def choose(self, entropy: float) -> Wish:
        """The next gear of the list. Raises ValueError after its last one."""
        gear = next(self._gears, None)
        if gear is None:
            raise ValueError("the schedule has fewer gears than there are passes")
        return Wish(gear)


def score_in_gear(
    engine: Engine, ids: Sequence[int], window: int, gear: str, chunk: int | None = None
) -> Iterator[Scores]:
    """As perplexity.score, in one gear throughout. The engine stays in it."""
    engine.shift(gear)
    for part in score(engine, ids, window, chunk):
        yield replace(part, gears=[gear] * len(part.ids))


def score_in_gears(
    engine: Engine, ids: Sequence[int], window: int, chooser_for: Callable[[], Chooser]
) -> Iterator[Scores]:
    """Scores of the tokens ids[1:], in order, each with the gear of the pass that predicted it.

    window: most tokens that a token is predicted from. chooser_for(): asked for a chooser at the
    beginning of each window; to give the same one again is fine. Entropies are rounded to 6 digits,
    as the chooser sees them. The engine stays in the gear of the last pass. Where it cannot shift
    (engine.gears is None) gears are chosen all the same, and several tokens go through in a pass.
    Raises DataError for an id that the model does not have, and for logits that are not numbers;
    what Engine.decide raises.
    """
    check_ids(ids, engine.vocab)
    for start, part in windows(ids, window):
        if engine.gears is None and not falls_back(engine):
            yield from _watched(engine, start, part, chooser_for())
        else:
            yield from _stepping(engine, start, part, chooser_for())


def score_in_steps(engine: Engine, ids: Sequence[int], window: int) -> Iterator[Scores]:
    """As perplexity.score, in the gear that the engine is in, a token at a time: each is predicted
    by the pass that counts where a step may take two (see engine.big_little)."""
    check_ids(ids, engine.vocab)
    for start, part in windows(ids, window):
        yield from _stepping(engine, start, part, None)


def falls_back(engine: Engine) -> bool:
    """Whether a step may take two passes, so that there is no pass over several tokens."""
    return engine.experts is not None and engine.experts.options.threshold is not None


def _stepping(
    engine: Engine, start: int, part: Sequence[int], chooser: Chooser | None
) -> Iterator[Scores]:
    """A window, token by token. chooser: None where nothing is said of gears."""
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
            choice = chooser.choose(entropy)
    mx.clear_cache()


def _watched(engine: Engine, start: int, part: Sequence[int], chooser: Chooser) -> Iterator[Scores]:
    """A window in passes of several tokens, with the gears that would have been."""
    gear, end = FIRST, start + len(part) - 1
    for scores in score_window(engine, start, part, default_chunk(engine)):
        entropies = [round(entropy, DIGITS) for entropy in scores.entropies]
        told = []
        for position, entropy in enumerate(entropies, scores.position):
            told.append(gear)
            if position < end:
                gear = chooser.choose(entropy).gear or gear
        yield replace(scores, entropies=entropies, gears=told)


def _logprob(logits: np.ndarray, target: int) -> float:
    """ln p of the target, in float64. logits: float32 (vocab,)."""
    values = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):  # infinite ones: the result is no number, and refused
        values -= values.max()
        chosen = values[target]
        return float(chosen - math.log(np.exp(values, out=values).sum()))
