"""Scores in gears: against the embedded model with numbers that numpy quantised, token by token on
one cache, and against the figures that came with it."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.model.checkpoints import open_crumb
from tests.model.test_perplexity import WHOLE_TEXTS, Scripted, expected, ids_of
from toastkit.engine import geared as geared_module
from toastkit.engine.engine import Engine
from toastkit.engine.geared import Chooser, by_selector, score_in_gear, score_in_gears
from toastkit.engine.perplexity import Scores, Totals, score, windows
from toastkit.errors import DataError
from toastkit.gears.gear_options import GearOptions
from toastkit.gears.monitor import MonitorOptions
from toastkit.gears.selector import GearSelector, SelectorOptions
from toastkit.holdings.policy import Wish

WINDOW, COUNT = 16, 40  # tokens of a window, and of the text
# Perplexity of whole texts by bits: scale and numbers a row in every matrix of the layers, made and
# scored by a torch implementation of its own, which came with the embedded model.
PUBLISHED = {
    "story": {2: 2010.6578, 4: 1.7574, 6: 1.7335, 8: 1.7332},
    "arith": {2: 1409.1332, 4: 1.5887, 6: 1.5634, 8: 1.5636},
    "chat": {2: 2749.6504, 4: 1.4516, 6: 1.4075, 8: 1.4080},
}
MIXED = SelectorOptions(MonitorOptions(window=2, low=0.3, high=1.2), min_duration=1)


def quantised(weight: np.ndarray, bits: int) -> np.ndarray:
    """What a matrix stands for once a row of it is so many whole numbers and a scale."""
    largest = 2 ** (bits - 1) - 1
    scale = np.maximum(np.abs(weight).max(axis=-1, keepdims=True) / largest, 1e-8)
    word = scale.view(np.uint32)  # the scale is stored in bfloat16, rounded to even
    scale = ((word + 0x7FFF + (word >> 16 & 1)) & 0xFFFF0000).view(np.float32)
    return np.clip(np.round(weight / scale), -largest, largest) * scale


def by_hand(scope: str, bits: int) -> Engine:
    """The embedded model without gears, its matrices put through `quantised`."""
    engine = open_crumb(native_exact=True)
    found = []
    for name, value in tree_flatten(engine.model.parameters()):
        inside = "_attn." in name if scope == "attention" else ".layers." in name
        if inside and name.endswith(".weight") and value.ndim > 1 and "conv1d" not in name:
            found.append((name, mx.array(quantised(np.array(value), bits))))
    assert len(found) > 20
    engine.model.load_weights(found, strict=False)
    return engine


def with_gears(scope: str = "all", bits: tuple[int, int] = (4, 8)) -> Engine:
    return open_crumb(native_exact=True, gear_options=GearOptions("auto", scope, bits))


@pytest.fixture(scope="module")
def geared(mlx_started) -> Engine:
    """The embedded model with gears of all matrices."""
    return with_gears()


@pytest.fixture(scope="module")
def in_gear(crumb) -> dict[str, Engine]:
    """Engines without gears that compute what the three gears should."""
    return {"low": by_hand("all", 4), "mid": by_hand("all", 8), "high": crumb}


@pytest.fixture(scope="module")
def ids(mlx_started) -> list[int]:
    return ids_of("story", COUNT + 1)


@pytest.fixture(scope="module")
def mixed(geared, ids) -> Scores:
    """The text in gears that the entropy chooses; a step is counted for every pass."""
    geared.begin_run()
    found = joined(score_in_gears(geared, ids, WINDOW, selecting(MIXED)))
    # The last id is never run.
    counted = geared.gears.run_report()
    assert {gear: counted[gear] for gear in ("low", "mid", "high")} == Counter(found.gears)
    assert len(found.gears) == len(ids) - 1
    return found


def joined(parts) -> Scores:
    """One Scores of all parts, which follow each other."""
    parts = list(parts)
    whole = Scores(parts[0].position, [], [], [], [])
    for part in parts:
        assert part.position == whole.position + len(whole.ids)
        for name in ("ids", "logprobs", "entropies", "gears"):
            getattr(whole, name).extend(getattr(part, name) or ())
    return whole


def close(mine: Scores, logprobs, entropies, tolerance: float = 1e-4) -> None:
    assert np.abs(np.array(mine.logprobs) - logprobs).max() < tolerance
    assert np.abs(np.array(mine.entropies) - entropies).max() < tolerance


def selecting(options: SelectorOptions) -> Callable[[], Chooser]:
    return lambda: by_selector(GearSelector(4096, options))


def scheduled(gears: Iterable[str]) -> Chooser:
    """These gears, whatever the entropy."""
    wishes = map(Wish, gears)
    return lambda entropy: next(wishes)


def told_of(gears: Iterable[str]) -> list[str]:
    """The gears of all passes, of those for all passes but the first of each window."""
    wanted = iter(gears)
    return ["high" if n % WINDOW == 0 else next(wanted) for n in range(COUNT)]


def selected(scores: Scores, options: SelectorOptions, window: int) -> list[str]:
    """The gears that a selector chooses from the entropies, each window anew and in high gear."""
    gears = []
    for start in range(0, len(scores.ids), window):
        selector = GearSelector(4096, options)
        entropies = scores.entropies[start : start + window]
        gears += ["high", *(selector.update(entropy).gear for entropy in entropies[:-1])]
    return gears


def reference(engines: dict[str, Engine], ids, gears, window: int) -> tuple[list, list]:
    """Log-probabilities and entropies, each token run by the engine of its gear on one cache."""
    logprobs, entropies = [], []
    for start, part in windows(ids, window):
        cache = engines["high"].new_cache()
        rows = []
        for token, gear in zip(part[:-1], gears[start:]):
            rows.append(np.array(engines[gear].step(token, cache)))
        first, second = expected(rows, part[1:])
        logprobs += first.tolist()
        entropies += second.tolist()
    return logprobs, entropies


# ------------------------------------------------------------------------------ one gear throughout


def test_a_fixed_gear_is_that_of_weights_quantised_by_hand(ids, geared, in_gear) -> None:
    engine, gears = with_gears("attention", (2, 6)), {"low": 2, "mid": 6}
    of_attention = [(engine, gear, by_hand("attention", bits)) for gear, bits in gears.items()]
    for engine, gear, other in ((geared, "low", in_gear["low"]), *of_attention):
        mine = joined(score_in_gear(engine, ids, WINDOW, gear, 16))
        assert mine.ids == ids[1:] and mine.gears == [gear] * COUNT
        assert engine.gears is not None and engine.gears.gear == gear
        theirs = joined(score(other, ids, WINDOW))
        close(mine, theirs.logprobs, theirs.entropies)


def test_high_gear_is_no_gears(crumb, geared, ids) -> None:
    list(score_in_gear(geared, ids[:9], WINDOW, "low"))  # the originals have left and come back
    mine = joined(score_in_gear(geared, ids, WINDOW, "high"))
    plain = joined(score(crumb, ids, WINDOW))
    assert (mine.logprobs, mine.entropies) == (plain.logprobs, plain.entropies)
    assert plain.gears == [] and next(score(crumb, ids, WINDOW)).gears is None


# ----------------------------------------------------------------------------- gears that change


def test_entropy_decides(mixed, in_gear, ids) -> None:
    """The gear of each pass is the selector's, high first in each window, and the figures are those
    of that gear. Every entropy is the meter's, to the sixth digit."""
    assert mixed.ids == ids[1:] and mixed.gears == selected(mixed, MIXED, WINDOW)
    assert set(mixed.gears) == {"low", "mid", "high"}
    assert mixed.entropies == [round(entropy, 6) for entropy in mixed.entropies]
    close(mixed, *reference(in_gear, ids, mixed.gears, WINDOW))


def test_a_schedule_that_was_recorded_gives_the_same(geared, mixed, ids) -> None:
    starts = [start for start, _ in windows(ids, WINDOW)]
    kept = iter([mixed.gears[start + 1 : start + WINDOW] for start in starts])
    assert joined(score_in_gears(geared, ids, WINDOW, lambda: scheduled(next(kept)))) == mixed


def test_a_schedule_of_ones_own(geared, in_gear, ids) -> None:
    """One list may serve all windows; it is asked for every pass but the first of each."""
    gears = ["low", "high", "mid", "mid", "low"] * 12
    schedule, told = scheduled(gears), told_of(gears)
    mine = joined(score_in_gears(geared, ids, WINDOW, lambda: schedule))
    assert mine.gears == told
    close(mine, *reference(in_gear, ids, told, WINDOW))


def test_gears_that_are_only_watched(crumb, ids, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that cannot shift: passes of several tokens, and the gears that would have been."""
    monkeypatch.setattr(geared_module, "default_chunk", lambda engine: 7)
    parts = list(score_in_gears(crumb, ids, WINDOW, selecting(MIXED)))
    assert [len(part.ids) for part in parts] == [7, 7, 2] * 2 + [7, 1]
    mine, plain = joined(parts), joined(score(crumb, ids, WINDOW, 7))
    assert mine.logprobs == plain.logprobs
    assert mine.entropies == [round(entropy, 6) for entropy in plain.entropies]
    assert mine.gears == selected(mine, MIXED, WINDOW) and len(set(mine.gears)) == 3
    gears = (["low", "high", "mid"] * COUNT)[: COUNT - 3]
    exact = scheduled(gears)  # asked as often as by an engine that shifts
    assert joined(score_in_gears(crumb, ids, WINDOW, lambda: exact)).gears == told_of(gears)


# ---------------------------------------------------------------------------------- what is called


class Recorder(Scripted):
    """An engine with gears that writes down what is asked of it."""

    gears = object()  # it can shift

    def __init__(self, logits) -> None:
        super().__init__(logits)
        self.events: list = []

    def consume(self, state, token, wish: Wish) -> None:
        self.events += [wish.gear, *([f"prepare {wish.expected}"] if wish.expected else []), token]
        state.logits = self.logits

    def look_ahead(self, state) -> None:
        """Nothing."""


class Eager:
    """Chooses low, and sees mid coming."""

    def __init__(self) -> None:
        self.entropies: list[float] = []

    def __call__(self, entropy: float) -> Wish:
        self.entropies.append(entropy)
        return Wish("low", "mid")


def test_the_order_of_shifts_and_steps() -> None:
    engine = Recorder([0.0] * 8)
    choosers = [Eager(), Eager()]
    waiting = iter(choosers)
    parts = list(score_in_gears(engine, [1, 2, 3, 4, 5, 6], 3, lambda: next(waiting)))
    assert engine.events == [
        "high", 1, "low", "prepare mid", 2, "low", "prepare mid", 3,
        "high", 4, "low", "prepare mid", 5,
    ]  # fmt: skip
    assert [part.gears for part in parts] == [[g] for g in ("high", "low", "low", "high", "low")]
    assert [chooser.entropies for chooser in choosers] == [[3.0, 3.0], [3.0]]
    assert joined(parts).logprobs == pytest.approx([-math.log(8)] * 5, abs=1e-12)


def test_scores_of_a_large_vocabulary_are_in_double_precision() -> None:
    logits = np.random.default_rng(1).normal(0, 3, 151_936).astype(np.float32)
    mine = joined(score_in_gears(Recorder(logits), [1, 2, 151_935], 8, Eager))
    logprobs, entropies = expected([logits, logits], [2, 151_935])
    assert np.abs(np.array(mine.logprobs) - logprobs).max() < 1e-12
    assert np.abs(np.array(mine.entropies) - entropies).max() < 1e-5


def test_tokens_that_are_ruled_out() -> None:
    mine = joined(score_in_gears(Recorder([0.0, 0.0, -math.inf]), [0, 1, 2], 8, Eager))
    assert mine.logprobs == [pytest.approx(-math.log(2)), -math.inf]
    assert mine.entropies == [1.0, 1.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_numbers(bad: float) -> None:
    with pytest.raises(DataError, match="the model's logits for token 1 are not numbers"):
        list(score_in_gears(Recorder([0.0, bad, 1.0]), [0, 0], 8, Eager))


def test_an_id_outside_the_vocabulary() -> None:
    engine = Recorder([0.0] * 3)
    with pytest.raises(DataError, match="token 3 is outside the vocabulary of 3"):
        list(score_in_gears(engine, [0, 3], 8, Eager))
    assert engine.events == []


def test_totals_count_gears_and_shifts() -> None:
    totals, other = Totals(), Totals()
    for gears in (["high"], ["low"], ["low", "mid"], ["high"]):
        totals.add(Scores(1, [0] * len(gears), [-1.0] * len(gears), [1.0] * len(gears), gears))
    assert totals.gears == {"high": 2, "low": 2, "mid": 1} and totals.shifts == 3
    other.add(Scores(1, [0, 0], [-1.0] * 2, [1.0] * 2, ["low", "high"]))
    other.include(totals)
    assert other.gears == {"high": 3, "low": 3, "mid": 1} and other.shifts == 4
    plain = Totals()
    plain.add(Scores(1, [0], [-1.0], [1.0]))
    assert not plain.gears and plain.shifts == 0


# -------------------------------------------------------------------------------------- whole texts


@pytest.mark.skipif(WHOLE_TEXTS not in os.environ, reason=f"minutes of work: set {WHOLE_TEXTS}")
@pytest.mark.parametrize("domain", PUBLISHED)
@pytest.mark.parametrize("pair", [(2, 6), (4, 8)])
def test_whole_texts_have_the_published_perplexity(domain: str, pair: tuple[int, int]) -> None:
    engine, ids = with_gears("all", pair), ids_of(domain)
    for gear, bits in zip(("low", "mid"), pair):
        totals = Totals()
        for part in score_in_gear(engine, ids, 1024, gear):
            totals.add(part)
        assert totals.perplexity == pytest.approx(PUBLISHED[domain][bits], rel=1e-2), bits
