"""MoBiLE in a batch: rows that fall back are run again by themselves, and the others stay."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from tests.model.moe_engines import MIDDLE, Made, arrays, prompt_of, read_once, same
from tests.model.reference import OLD_MLX_LM
from tests.model.service_driver import Asked, Driver
from toastkit.daemon import stepper as stepper_module
from toastkit.engine import batch as batch_module
from toastkit.engine.batch import Batch, can_batch
from toastkit.engine.engine import Engine
from toastkit.engine.savepoints import copy_caches
from toastkit.engine.state import Passed
from toastkit.errors import IOFailure
from toastkit.experts.experts_options import SlotOptions
from toastkit.gears.gear_options import GearOptions
from toastkit.holdings.policy import NO_WISH
from toastkit.residency.residency_options import ResidencyOptions

pytestmark = pytest.mark.skipif(OLD_MLX_LM, reason="the old mlx_lm has other batched caches")

LENGTHS = (30, 40, 9)  # the window of those that have one is 32
STEPS = 4
CLOSE = 1e-3  # of the largest logit, of a batch's to those alone


def joined(engine: Engine, lengths: Sequence[int] = LENGTHS) -> Batch:
    batch = Batch(engine)
    batch.join([read_once(engine, prompt_of(engine, n)) for n in lengths])
    return batch


def tokens_of(step: int, rows: int = len(LENGTHS)) -> list[int]:
    return [(5 + 97 * step + 11 * row) % 4096 for row in range(rows)]


Run = tuple[list[list[np.ndarray]], list[list[Passed]], list[list[np.ndarray]]]


def run(engine: Engine, steps: int = STEPS, lengths: Sequence[int] = LENGTHS) -> Run:
    """(logits, how they were come by, of each step and row; what each state holds at the end)."""
    batch = joined(engine, lengths)
    logits, passed = [], []
    for step in range(steps):
        batch.step(tokens_of(step, len(lengths)))
        logits.append([np.array(state.logits) for state in batch.members])
        passed.append([state.passed for state in batch.members])
    return logits, passed, held(batch)


def held(batch: Batch) -> list[list[np.ndarray]]:
    """What the states hold once they have left."""
    states = list(batch.members)
    batch.leave(states)
    return [arrays(state.cache) for state in states]


def alike(found: Run, expected: Run) -> bool:
    return all(
        len(mine) == len(theirs) and all(map(same, mine, theirs))
        for mine, theirs in zip(found[::2], expected[::2])
    )


# ------------------------------------------------------------------------- what a row comes out as


# One for each kind of cache that a batch has.
@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_next", "gpt_oss", "deepseek_v3"])
def test_gamma_one_is_a_big_batch_and_gamma_zero_a_little_one(made: Made, name: str) -> None:
    """Logits and states, to the bit."""
    for gamma, mode, passed in ((1.0, "big", Passed(4, True)), (0.0, "little", Passed(2, False))):
        engine = made(name, "mobile", gamma)
        engine.begin_run()
        found, plain = run(engine), run(made(name, mode))
        assert alike(found, plain)
        assert found[1] == [[passed] * len(LENGTHS)] * STEPS
        assert plain[1] == [[passed._replace(fallback=False)] * len(LENGTHS)] * STEPS
        report = engine.run_report()["experts"]
        steps = STEPS * len(LENGTHS)
        assert (report["steps"], report["fallbacks"]) == (steps, int(gamma) * steps)


def by_hand(big: Engine, little: Engine, gamma: float, lengths: Sequence[int], steps: int) -> Run:
    """Whole copies of all caches are kept before each little pass, and their unsure rows run big;
    what they then hold takes the place of what the little pass left, array by array."""
    batch = joined(little, lengths)
    logits, passed = [], []
    for step in range(steps):
        tokens, before = tokens_of(step, len(lengths)), copy_caches(batch.caches)
        batch.step(tokens)
        logits.append([np.array(state.logits) for state in batch.members])
        sure = [1 / np.exp(x.astype(np.float64) - x.max()).sum() for x in logits[-1]]
        fell = [not value > gamma for value in sure]
        passed.append([Passed(4 if back else 2, back) for back in fell])
        if any(fell):
            unsure = np.flatnonzero(fell).tolist()
            over_arrays(partial(np.take, indices=unsure, axis=0), before)
            big.decide(NO_WISH)
            ids = mx.array([[tokens[row]] for row in unsure], mx.uint32)
            for row, own in zip(unsure, big.step_rows(ids, before)):
                logits[-1][row] = np.array(own)
            over_arrays(partial(with_rows, unsure), batch.caches, before)
    return logits, passed, held(batch)


def with_rows(rows: list[int], whole: np.ndarray, own: np.ndarray) -> np.ndarray:
    whole = whole.copy()
    whole[rows] = own
    return whole


def over_arrays(change: Any, *caches: Sequence[Any]) -> None:
    """Gives the first caches what `change` makes of each of their arrays, and of those of the
    others."""
    for layers in zip(*caches):
        for name, first in vars(layers[0]).items():
            values = [vars(layer)[name] for layer in layers]
            if isinstance(first, list):
                vars(layers[0])[name] = [changed(change, *each) for each in zip(*values)]
            else:
                vars(layers[0])[name] = changed(change, *values)


def changed(change: Any, *values: Any) -> Any:
    if not isinstance(values[0], mx.array):
        return values[0]
    return mx.array(change(*map(np.array, values)))


@pytest.mark.parametrize("name", ["qwen3_next", "gpt_oss", "deepseek_v3"])
@settings(max_examples=examples(3), deadline=None)
@given(data=st.data())
def test_some_rows_fall_back_and_the_others_stay(
    made: Made, name: str, data: st.DataObject
) -> None:
    """At any gamma: a row that is kept is, to the bit, the little batch's, and one that fell back
    what the big model makes of a batch of such rows: logits and states, and all that follows."""
    gamma = data.draw(st.floats(0.015, 0.04))
    lengths = data.draw(st.lists(st.sampled_from([1, 9, 28, 31, 40]), min_size=2, max_size=4))
    steps = data.draw(st.integers(1, STEPS))
    engine = made(name, "mobile", 0.5)
    object.__setattr__(engine.experts.options, "gamma", gamma)
    engine.begin_run()
    found = run(engine, steps, lengths)
    expected = by_hand(made(name, "big"), made(name, "little"), gamma, lengths, steps)
    assert found[1] == expected[1] and alike(found, expected)
    report = engine.run_report()["experts"]
    assert report["steps"] == steps * len(lengths)
    assert report["fallbacks"] == sum(one.fallback for row in expected[1] for one in row)


@pytest.mark.parametrize("name", ["qwen3_next", "gpt_oss"])
def test_a_row_is_what_it_is_alone(made: Made, name: str) -> None:
    engine = made(name, "mobile", MIDDLE)
    logits, passed, _ = run(engine)
    falls = [one.fallback for row in passed for one in row]
    assert 0 < sum(falls) < len(falls)
    for row, length in enumerate(LENGTHS):
        alone = read_once(engine, prompt_of(engine, length))
        for step in range(STEPS):
            engine.consume(alone, tokens_of(step)[row])
            expected = np.array(alone.logits)
            assert passed[step][row] == alone.passed
            assert np.abs(logits[step][row] - expected).max() < CLOSE * np.abs(expected).max()


def test_a_batch_steps_with_the_little_k(made: Made) -> None:
    for mode in ("big", "little", "mobile"):
        assert made("olmoe", mode).steps_together
    _, [[one, two, three]], _ = run(made("olmoe", "little"), steps=1)
    assert one == two == three == Passed(2, False)


# ------------------------------------------------------------------------------ the trial of it


def test_the_trial_is_of_the_caches_and_not_of_gamma(made: Made, monkeypatch) -> None:
    """Its steps are nobody's, and what is run again is tried too."""
    engine = made("qwen3_next", "mobile", MIDDLE)
    engine.begin_run()
    assert can_batch(engine) and engine.run_report()["experts"]["steps"] == 0
    assert not engine.run_report()["experts"]["fallbacks"]
    monkeypatch.setattr(batch_module, "_write_back", lambda *arguments: None)
    assert can_batch(engine) is False
    assert can_batch(made("qwen3_next", "big"))  # where none falls back that does no harm


# --------------------------------------------------------------------------------- with the others


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_experts_in_slots(made: Made, name: str, monkeypatch) -> None:
    """To the bit. What the rows that fell back want of the first layer, and nobody else does, is
    told beforehand."""
    engine = made(name, "mobile", MIDDLE, expert_slots=SlotOptions("slots", 5, "off"))
    slots, told = engine.holdings.slots, []
    engine.load()
    tell = slots.foresight.tell
    monkeypatch.setattr(slots.foresight, "tell", lambda *a: (told.append(a[0]), tell(*a)))
    wanted = []
    again = Batch.run_again

    def run_again(*arguments: Any) -> Any:
        logits = again(*arguments)
        wanted.append([set(layer.choice) for layer in slots.layers])
        return logits

    monkeypatch.setattr(Batch, "run_again", run_again)
    found = run(engine)
    monkeypatch.undo()
    assert alike(found, run(made(name, "mobile", MIDDLE)))
    assert len(told) == len(wanted) > 0
    assert all(set(one[0]) == layers[0] for one, layers in zip(told, wanted))
    assert all(len(one) == len(slots.layers) for one in told)
    assert {len(passed) for passed in found[1]} == {len(LENGTHS)}


def test_layers_that_come_and_go(made: Made) -> None:
    some = ResidencyOptions("layers", 1)
    for gamma in (MIDDLE, 1.0):
        found = run(made("qwen3_next", "mobile", gamma, residency=some), steps=2)
        assert alike(found, run(made("qwen3_next", "mobile", gamma), steps=2))


def test_gears(made: Made) -> None:
    gears = GearOptions("low", "all")
    found = [
        run(made("qwen3_next", mode, 1.0, gear_options=gears), steps=2)
        for mode in ("mobile", "big")
    ]
    assert alike(*found) and not alike(found[1], run(made("qwen3_next", "big"), steps=2))


# ----------------------------------------------------------------------------------- a daemon's


PROMPTS = {"Who are you?": 18, "12 + 7 = ?": 9, "Why?": 8}  # tokens of the answers


@pytest.fixture(scope="module")
def alone(made: Made) -> list[Asked]:
    """What comes of each prompt by itself; nothing is kept."""
    engine, found = made("qwen3_next", "mobile", MIDDLE), []
    for prompt, count in PROMPTS.items():
        fresh = Driver(engine, cache_bytes=0, spill_bytes=0)
        found.append(fresh.ask(prompt, max_tokens=count, ignore_eos=True))
    return found


def all_at_once(driver: Driver) -> tuple[list[Asked], set[tuple[int, ...]]]:
    """What came of them, and the sizes of the batches that there were. Prompts are read between the
    steps of the first, which others join and leave."""
    sizes = set()
    first, *others = (
        partial(driver.start, prompt, max_tokens=count, ignore_eos=True)
        for prompt, count in PROMPTS.items()
    )
    asked = [first()]
    driver.turns_until(lambda: len(asked[0].ids) == 3)
    asked += [start() for start in others]
    while driver.service.busy:
        driver.service.turn()
        sizes.add(tuple(driver.service.stepper.sizes))
    return asked, sizes


def test_conversations_fall_back_by_themselves(made: Made, homes, alone: list[Asked]) -> None:
    """Each is answered, and each has its own account, as if it were alone."""
    engine = made("qwen3_next", "mobile", MIDDLE)
    asked, sizes = all_at_once(Driver(engine, cache_bytes=0, spill_bytes=0))
    assert (3,) in sizes
    assert [one.answer for one in asked] == [one.answer for one in alone]
    counts, wanted = ([one.stats["experts"] for one in ones] for ones in (asked, alone))
    assert [one["fallbacks"] for one in counts] == [one["fallbacks"] for one in wanted]
    assert [one["steps"] + 1 for one in counts] == list(PROMPTS.values())
    assert all(0 < one["fallbacks"] < one["steps"] for one in counts)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_second_pass_that_fails_costs_the_batch_and_no_answer(
    made: Made, homes, alone: list[Asked], monkeypatch, rows: int
) -> None:
    """Its conversations are read anew, their steps by the models that took them."""
    engine = made("qwen3_next", "mobile", MIDDLE)
    step_rows, passes = engine.step_rows, []

    def fail(ids: mx.array, cache: list) -> mx.array:
        in_batch = driver.service.stepper.sizes and not isinstance(cache[1].offset, int)
        if in_batch and len(ids) == rows and engine.experts.k_now == 4:
            passes.append(rows)
            if len(passes) == 2:
                raise IOFailure("no disk")
        return step_rows(ids, cache)

    driver = Driver(engine, cache_bytes=0, spill_bytes=0)
    monkeypatch.setattr(stepper_module, "can_batch", lambda engine: True)
    monkeypatch.setattr(engine, "step_rows", fail)
    asked, _ = all_at_once(driver)
    assert len(passes) == 2  # they step alone from then on
    assert [one.answer for one in asked] == [one.answer for one in alone]
    assert {block.k for block in engine.experts.blocks} == {2}
