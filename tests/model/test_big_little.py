"""Big, little and MoBiLE: which pass a token comes from, and what a pass that is taken back leaves
behind, which is nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from tests.model.checkpoints import open_model, read
from tests.model.moe_engines import MIDDLE, Made, arrays, prompt_of, read_once, same
from toastkit.engine.big_little import confidence
from toastkit.engine.engine import Engine
from toastkit.engine.geared import score_in_gears, score_in_steps
from toastkit.engine.perplexity import score
from toastkit.engine.savepoints import copy_caches
from toastkit.engine.state import ModelState, Passed
from toastkit.errors import IOFailure
from toastkit.experts.experts_options import LittleK
from toastkit.gears.gear_options import GearOptions
from toastkit.holdings.policy import Wish
from toastkit.residency.residency_options import ResidencyOptions

COUNT = 4  # tokens of an answer


def answer(engine: Engine, ahead: bool = True, count: int = COUNT) -> tuple[list[int], list, Any]:
    """(tokens, logits of each step, the state at the end)."""
    state = read_once(engine, prompt_of(engine))
    engine.begin_run()
    tokens, logits = [], [np.array(state.logits)]
    for _ in range(count):
        state.submit()
        if ahead:
            engine.look_ahead(state)
        tokens.append(int(np.argmax(state.values())))
        engine.consume(state, tokens[-1])
        logits.append(np.array(state.logits))
    state.take_back()
    return tokens, logits, state


# --------------------------------------------------------------------------------- the two limits


# One for each kind of cache; that a step that falls back is big is seen of others in
# test_common_part.py.
@pytest.mark.parametrize(
    ("name", "ahead"),
    [("qwen2_moe", True), ("qwen3_next", True), ("qwen3_next", False), ("gpt_oss", True),
     ("deepseek_v3", True)],
)  # fmt: skip
def test_gamma_one_is_big_and_gamma_zero_is_little(made: Made, name: str, ahead: bool) -> None:
    """Tokens, logits and state, to the bit."""
    for gamma, mode, passed in ((1.0, "big", Passed(4, True)), (0.0, "little", Passed(2, False))):
        tokens, logits, state = answer(made(name, "mobile", gamma), ahead)
        wanted, expected, plain = answer(made(name, mode))
        assert tokens == wanted and same(logits, expected)
        assert same(arrays(state.cache), arrays(plain.cache))
        assert state.passed == passed and plain.passed == passed._replace(fallback=False)
        report = made(name, "mobile", gamma).run_report()["experts"]
        assert report.items() >= {
            "mode": "mobile", "gamma": gamma, "k": 4, "little_k": 2, "steps": COUNT,
            "fallbacks": COUNT * int(gamma), "ratio": gamma,
        }.items()  # fmt: skip


def test_big_is_the_model_without_a_policy(made: Made) -> None:
    plain = open_model(made("qwen3_next", "big").files, device_name="cpu")
    assert plain.experts is None and plain.run_report() == {}
    tokens, logits, state = answer(plain)
    assert state.passed is None and same(logits, answer(made("qwen3_next", "big"))[1])
    assert not same(logits[1:], answer(made("qwen3_next", "little"))[1][1:])


@given(
    st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=600),
    st.sampled_from([0.0, 1e4, -1e4]),
)
@settings(max_examples=examples(30), deadline=None)
def test_confidence_is_a_probability(values: list[float], shift: float) -> None:
    logits = np.array(values, np.float32) + np.float32(shift)
    found = confidence(mx.array(logits)).item()
    expected = 1 / np.exp(logits.astype(np.float64) - logits.max()).sum()
    assert found <= 1 and abs(found - expected) < 1e-5 * expected + 1e-9


# ------------------------------------------------------------------- a pass that is taken back


def by_hand(big: Engine, little: Engine, gamma: float, tokens: Sequence[int]) -> tuple[list, Any]:
    """Algorithm 1 without taking back: the little pass runs on a copy. (whether each step fell
    back, the state)."""
    state, fell = read_once(big, prompt_of(big)), []
    for token in tokens:
        twin = ModelState(copy_caches(state.cache), list(state.tokens))
        little.consume(twin, token)
        shares = np.exp(np.array(twin.logits, np.float64) - float(mx.max(twin.logits).item()))
        fell.append(bool(1 / shares.sum() <= gamma))
        if fell[-1]:
            big.consume(state, token)
        else:
            state = twin
        mx.eval(state.logits, [layer.state for layer in state.cache])
    return fell, state


@pytest.mark.parametrize("name", ["qwen3_next", "gpt_oss", "deepseek_v3"])
@settings(max_examples=examples(4), deadline=None)
@given(data=st.data())
def test_what_is_taken_back_leaves_nothing(made: Made, name: str, data: st.DataObject) -> None:
    """At any gamma: logits and state are those of passes of which none was ever taken back; and
    little passes, where they fail, are as if they had not been."""
    gamma = data.draw(st.floats(0.01, 0.05) | st.sampled_from([0.0, MIDDLE, 0.5, 1.0]))
    engine = made(name, "mobile", 0.5)
    tokens = data.draw(st.lists(st.integers(0, engine.vocab - 1), min_size=1, max_size=8))
    ahead = data.draw(st.booleans())
    object.__setattr__(engine.experts.options, "gamma", gamma)
    state = read_once(engine, prompt_of(engine))
    fell = []
    for token in tokens:
        if ahead:
            engine.look_ahead(state)
        engine.consume(state, token if data.draw(st.booleans()) else mx.array(token, mx.uint32))
        fell.append(state.passed.fallback)
    state.take_back()
    expected, plain = by_hand(made(name, "big"), made(name, "little"), gamma, tokens)
    assert fell == expected
    assert np.array_equal(np.array(state.logits), np.array(plain.logits))
    assert same(arrays(state.cache), arrays(plain.cache))


def test_a_window_that_is_full_gets_its_row_back(made: Made) -> None:
    """gpt_oss keeps 32 positions in every other layer: step over its end, in place."""
    engine = made("gpt_oss", "mobile", 1.0)
    assert len(prompt_of(engine)) == 40
    _, logits, state = answer(engine, count=26)
    _, expected, plain = answer(made("gpt_oss", "big"), count=26)
    assert same(logits, expected) and same(arrays(state.cache), arrays(plain.cache))


@pytest.mark.parametrize("when", ["little", "big"])
def test_a_pass_that_fails_leaves_the_state_as_it_was(made: Made, monkeypatch, when: str) -> None:
    engine = made("qwen3_next", "mobile", 1.0)
    state, twin = (read_once(engine, prompt_of(engine)) for _ in range(2))
    logits, run = state.logits, engine.step
    passes = []

    def fail(token, cache):
        passes.append(token)
        if len(passes) == (1 if when == "little" else 2):
            raise IOFailure("no disk")
        return run(token, cache)

    monkeypatch.setattr(engine, "step", fail)
    with pytest.raises(IOFailure, match="no disk"):
        engine.consume(state, 7)
    monkeypatch.undo()
    assert state.tokens == twin.tokens and state.logits is logits and state.passed is None
    assert same(arrays(state.cache), arrays(twin.cache))
    for one in (state, twin):
        engine.consume(one, 7)
    assert np.array_equal(np.array(state.logits), np.array(twin.logits))
    assert {block.k for block in engine.experts.blocks} == {2}


@pytest.mark.parametrize(("gamma", "value"), [(1.0, 1e4), (0.0, float("nan"))])
def test_what_is_never_kept(made: Made, monkeypatch, gamma: float, value: float) -> None:
    """At gamma 1 no little pass, however sure; at 0 none whose logits are no numbers."""
    engine = made("olmoe", "mobile", gamma)
    run, odd = engine.step, mx.zeros(engine.vocab).at[7].add(value)
    assert confidence(odd).item() == 1 or not gamma
    monkeypatch.setattr(
        engine, "step", lambda t, c: odd + 0 * run(t, c) if engine.experts.k_now == 2 else run(t, c)
    )
    state = read(engine, prompt_of(engine, 5))
    engine.consume(state, 9)
    assert state.passed == Passed(4, True) and np.isfinite(np.array(state.logits)).all()


# ------------------------------------------------------------------------------- which K, and when


def test_the_prompt_is_read_as_it_is_said_to_be(made: Made) -> None:
    """Its last token too, whose logits give the first token of an answer."""
    for prompt in ("big", "little"):
        whole = made("olmoe", prompt, prompt=prompt)
        expected = np.array(read(whole, prompt_of(whole, 20)).logits)
        for mode in {"big", "little", "mobile"} - {prompt}:
            engine = made("olmoe", mode, prompt=prompt)
            state = read(engine, prompt_of(engine, 20))
            assert np.array_equal(np.array(state.logits), expected) and state.passed is None


def test_each_pass_has_its_own_k(made: Made) -> None:
    """A step that is looked ahead to, with the prompt of another between, and after one that fell
    back."""
    engine = made("qwen3_next", "mobile", 1.0)
    first = read_once(engine, prompt_of(engine))
    engine.look_ahead(first)  # after a prompt, which the big model reads
    assert engine.experts.k_now == 2
    other = read(engine, prompt_of(engine)[:9])
    assert engine.experts.k_now == 4
    engine.consume(first, 5)
    engine.look_ahead(first)
    assert engine.experts.k_now == 2
    engine.consume(other, 6)
    engine.consume(first, 6)
    plain = made("qwen3_next", "big")
    alone = read_once(plain, prompt_of(plain))
    for token in (5, 6):
        plain.consume(alone, token)
    assert np.array_equal(np.array(first.logits), np.array(alone.logits))


@pytest.mark.parametrize(
    ("chosen", "k"), [(LittleK(1), 1), (LittleK(3), 3), (LittleK(30, True), 2)]
)
def test_another_little_k(made: Made, chosen: LittleK, k: int) -> None:
    engine = made("qwen3_next", "little", little_k=chosen)
    assert engine.experts.little_k == k
    assert answer(engine, count=2)[2].passed == Passed(k, False)


# --------------------------------------------------------------------------------- with the others


def test_layers_that_come_and_go(made: Made) -> None:
    some = ResidencyOptions("layers", 1)
    for gamma in (MIDDLE, 1.0):
        tokens, logits, state = answer(made("qwen3_next", "mobile", gamma, residency=some), count=3)
        wanted, expected, plain = answer(made("qwen3_next", "mobile", gamma), count=3)
        assert tokens == wanted and same(logits, expected)
        assert same(arrays(state.cache), arrays(plain.cache))


def test_gears(made: Made) -> None:
    """A step that falls back runs again in the gear of the step."""
    gears = GearOptions("auto", "all")
    found = []
    for mode, gamma in (("mobile", 1.0), ("big", 0.7)):
        engine = made("qwen3_next", mode, gamma, gear_options=gears)
        state, logits = read(engine, prompt_of(engine, 9)), []
        for token, gear in zip((5, 6, 7, 8), ("low", "mid", "low", "high")):
            engine.consume(state, token, Wish(gear))
            logits.append(np.array(state.logits))
            engine.look_ahead(state)
        assert engine.gears.gear == "high"
        found.append(logits)
    assert same(*found)


# ------------------------------------------------------------------------------------- perplexity


def scores(parts) -> list[float]:
    return [x for part in parts for x in part.logprobs]


def test_texts_are_scored_by_the_pass_that_counts(made: Made) -> None:
    ids = prompt_of(made("olmoe", "big"), 20)
    wanted = {mode: scores(score(made("olmoe", mode), ids, 8)) for mode in ("big", "little")}
    for gamma, mode in ((1.0, "big"), (0.0, "little")):
        found = scores(score_in_steps(made("olmoe", "mobile", gamma), ids, 8))
        assert len(found) == 19 and np.abs(np.subtract(found, wanted[mode])).max() < 1e-3
    engine = made("olmoe", "mobile", MIDDLE)
    engine.begin_run()
    list(score_in_steps(engine, ids, 8))
    report = engine.run_report()["experts"]
    assert report["steps"] == 19 and 0 < report["fallbacks"] < 19


def test_gears_are_shown_token_by_token_where_steps_fall_back(made: Made) -> None:
    engine = made("olmoe", "mobile", MIDDLE)
    ids = prompt_of(engine, 10)
    parts = list(score_in_gears(engine, ids, 20, lambda: lambda entropy: Wish("low")))
    assert [gear for part in parts for gear in part.gears] == ["high"] + ["low"] * 8
    assert scores(parts) == scores(score_in_steps(engine, ids, 20))


def test_states_are_kept_apart_by_how_they_were_made(made: Made, tmp_path: Path) -> None:
    variants = [
        made("qwen3_next", "big"), made("qwen3_next", "little"), made("qwen3_next", "mobile"),
        made("qwen3_next", "mobile", MIDDLE), made("qwen3_next", "big", prompt="little"),
        made("qwen3_next", "little", little_k=LittleK(1)), made("qwen3_next", "mobile", 0.7000001),
    ]  # fmt: skip
    words = [engine.experts.variant for engine in variants]
    assert words[0] == "" and len(set(words)) == len(words)
    assert words[2] == "mobile-0.7-2of4-big"
