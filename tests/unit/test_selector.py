"""The gear selector against the paper's rules: start, duration, catastrophe, forecast, resuming."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toastkit.errors import DataError, UsageError
from toastkit.gears.classifier import Difficulty, classify
from toastkit.gears.monitor import EntropyMonitor, MonitorOptions, Reading
from toastkit.gears.selector import GearSelector, SelectorOptions

VOCAB = 32768
# Half of what is drawn is about the thresholds or past the catastrophe's limit, 13.5.
entropies = st.one_of(st.floats(0, 15), st.sampled_from([1.75, 1.85, 3.45, 3.55, 13.6, 14.5]))
courses = st.lists(entropies, max_size=40)
durations = st.integers(1, 6)
windows = st.integers(1, 6)
starts = st.one_of(
    st.none(),
    st.sampled_from(["low", "mid", "high"]).map(lambda gear: Difficulty(2.5, gear, 1, 0, 80, 4.2)),
)


def one(min_duration: int = 1, **monitor) -> SelectorOptions:
    """A window of one entropy: the mean is the entropy."""
    return SelectorOptions(MonitorOptions(window=1, **monitor), min_duration)


def run(
    values: list[float], options: SelectorOptions | None = None, start: Difficulty | None = None
) -> list[Reading]:
    selector = GearSelector(VOCAB, options, start)
    return [selector.update(value) for value in values]


def gears(decisions: list[Reading]) -> list[str]:
    return [decision.gear for decision in decisions]


def start_in(gear: str, score: float = 4.8) -> Difficulty:
    return Difficulty(score, gear, 1, 1, 50, 5.0)


# ------------------------------------------------------------------------------------- the rules


def test_without_a_start_the_first_entropy_decides():
    assert [(d.gear, d.shifted, d.reason) for d in run([4.0, 4.0])] == [
        ("high", False, "start"),
        ("high", False, "mean 4.00 >= 3.50"),
    ]


def test_the_start_gear_holds_until_the_window_is_full():
    decisions = run([0.1] * 6, start=start_in("high"))
    assert gears(decisions) == ["high"] * 4 + ["low"] * 2
    assert [d.reason for d in decisions[:4]] == ["prompt score 4.8 -> high"] * 4
    assert [d.reason for d in decisions[4:]] == ["mean 0.10 <= 1.80"] * 2
    assert [d.shifted for d in decisions] == [False] * 4 + [True, False]
    # The readings are those of the entropies nevertheless.
    assert decisions[0].mean == 0.1 and decisions[0].expected == "low"


def test_the_start_gear_counts_towards_the_duration():
    options = SelectorOptions(MonitorOptions(window=3), min_duration=4)
    decisions = run([0.1] * 6, options, start_in("mid"))
    assert gears(decisions) == ["mid"] * 4 + ["low"] * 2
    assert [d.reason for d in decisions[2:4]] == ["held: 2 of 4 tokens", "held: 3 of 4 tokens"]


def test_a_window_of_one_leaves_nothing_to_the_prompt():
    assert gears(run([0.1], one(), start_in("high"))) == ["low"]


def test_a_gear_is_held_for_the_least_duration():
    decisions = run([1.0, 5.0, 5.0, 5.0, 5.0, 1.0, 1.0], one(3))
    assert gears(decisions) == ["low"] * 3 + ["high"] * 3 + ["low"]
    assert [d.reason for d in decisions] == [
        "start",
        "held: 1 of 3 tokens",
        "held: 2 of 3 tokens",
        "mean 5.00 >= 3.50",
        "mean 5.00 >= 3.50",
        "held: 2 of 3 tokens",
        "mean 1.00 <= 1.80",
    ]
    assert [n for n, d in enumerate(decisions) if d.shifted] == [3, 6]


def test_what_went_by_while_a_gear_was_held_is_forgotten():
    assert gears(run([1.0, 5.0, 1.0, 1.0], one(3))) == ["low"] * 4


def test_a_catastrophe_waits_for_nothing_and_begins_the_duration_anew():
    decisions = run([1.0, 14.0, 14.0, 1.0, 1.0, 1.0], one(3, low=13.9, high=14.9))
    assert [(d.gear, d.shifted) for d in decisions[:3]] == [
        ("low", False),
        ("low", False),
        ("high", True),
    ]
    assert decisions[2].reason == "catastrophic"
    assert gears(decisions[3:]) == ["high", "high", "low"]


def test_a_catastrophe_ends_what_the_prompt_asked_for():
    options = SelectorOptions(MonitorOptions(window=10), min_duration=1)
    decisions = run([14.0, 14.0, 14.0, 0.0, 0.0], options, start_in("low", 1.0))
    assert gears(decisions) == ["low"] + ["high"] * 4
    assert decisions[0].reason == "prompt score 1 -> low"
    assert decisions[3].reason == "mean 10.50 >= 3.50"


def test_hysteresis_protects_the_gear_that_runs():
    """While low is held the mean is mid for a token; the margin of low still counts."""
    values = [1.0, 2.5, 1.85, 1.85, 1.95]
    assert gears(run(values, one(3))) == ["low"] * 4 + ["mid"]
    assert run(values, one(3))[3].reason == "held by hysteresis"
    # The monitor, on its own, has gone to mid and stays there.
    monitor = EntropyMonitor(VOCAB, one().monitor)
    assert [monitor.update(value).gear for value in values][2:] == ["mid"] * 3


def test_the_forecast_says_what_to_prepare():
    selector = GearSelector(VOCAB, SelectorOptions(MonitorOptions(window=2), 4))
    first, second = selector.update(1.0), selector.update(2.4)
    assert (first.forecast, first.expected) == (1.0, "low")
    assert second.forecast == pytest.approx(1.7 + 2 * 1.4)
    assert (second.gear, second.expected) == ("low", "high")
    assert selector.update(0.0).expected == "low"


def test_thresholds_are_those_of_the_vocabulary():
    selector = GearSelector(4096)
    assert (selector.monitor.vocab, selector.gear) == (4096, None)
    assert (selector.monitor.low, selector.monitor.high) == (
        pytest.approx(1.44),
        pytest.approx(2.8),
    )
    assert selector.update(1.44).gear == selector.gear == "low"


def test_a_prompt_that_was_classified_can_be_a_start():
    selector = GearSelector(VOCAB, start=classify("Prove that √2 is irrational, step by step."))
    assert selector.update(0.0).reason == "prompt score 6.548 -> high"


def test_last_and_whether_another_goes_on():
    selector = GearSelector(VOCAB)
    assert selector.last is None
    assert selector.update(1.5) is selector.last
    assert selector.goes_on_as(GearSelector(VOCAB, SelectorOptions(), start_in("high")))
    assert not selector.goes_on_as(GearSelector(4096))
    assert not selector.goes_on_as(GearSelector(VOCAB, SelectorOptions(min_duration=5)))
    assert not selector.goes_on_as(GearSelector(VOCAB, one(4)))


# ------------------------------------------------------------------------------------ properties


@given(courses, windows)
def test_the_gears_without_duration_and_start_are_the_monitors(values, window):
    options = MonitorOptions(window=window)
    monitor = EntropyMonitor(VOCAB, options)
    for value, decision in zip(values, run(values, SelectorOptions(options, 1))):
        reading = monitor.update(value)
        kept = (decision.entropy, decision.mean, decision.slope, decision.forecast)
        assert kept == (reading.entropy, reading.mean, reading.slope, reading.forecast)
        assert (decision.gear, decision.shifted) == (reading.gear, reading.shifted)
        assert decision.reason == reading.reason
        assert decision.expected == monitor.plain(reading.forecast)


@given(courses, windows, durations, starts)
def test_no_run_of_a_gear_is_too_short(values, window, duration, start):
    options = SelectorOptions(MonitorOptions(window=window), duration)
    decisions = run(values, options, start)
    length = 0
    for before, decision in zip([None, *decisions], decisions):
        assert decision.shifted == (before is not None and decision.gear != before.gear)
        if decision.shifted:
            assert length >= duration or decision.reason == "catastrophic"
            length = 0
        length += 1
        if decision.reason == "catastrophic":
            assert decision.gear == "high"


@given(courses, windows, durations, starts)
def test_an_extreme_gear_is_left_only_past_its_margin(values, window, duration, start):
    options = SelectorOptions(MonitorOptions(window=window), duration)
    decisions = run(values, options, start)
    for before, decision in zip(decisions, decisions[1:]):
        if decision.shifted and decision.reason != "catastrophic":
            assert before.gear != "low" or decision.mean > 1.9
            assert before.gear != "high" or decision.mean < 3.4


@given(courses, courses, windows, durations, starts)
def test_a_resumed_selector_goes_on_identically(before, after, window, duration, start):
    selector = GearSelector(VOCAB, SelectorOptions(MonitorOptions(window=window), duration), start)
    for value in before:
        selector.update(value)
    state = selector.state()
    resumed = [
        GearSelector.from_state(state),
        GearSelector.from_state(msgpack.unpackb(msgpack.packb(state))),
        GearSelector.from_state(json.loads(json.dumps(state))),
    ]
    kept = selector.last if before else None
    expected = [selector.update(value) for value in after]
    for other in resumed:
        assert other.goes_on_as(selector)
        assert other.state() == state
        assert kept is None or other.last == kept
        assert [other.update(value) for value in after] == expected
    assert selector.state() == resumed[0].state()


# --------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "4", None, 2**40])
def test_an_illegal_duration_is_named(value):
    with pytest.raises(UsageError, match="^invalid minimum duration: "):
        GearSelector(VOCAB, SelectorOptions(min_duration=value))


def test_options_of_the_monitor_are_held_too():
    with pytest.raises(UsageError, match="^invalid window"):
        SelectorOptions(MonitorOptions(window=0)).validate()
    with pytest.raises(UsageError, match="^invalid vocabulary"):
        GearSelector(1)
    with pytest.raises(DataError, match="is not finite"):
        GearSelector(VOCAB).update(math.nan)


def begun() -> dict:
    selector = GearSelector(VOCAB, start=start_in("mid"))
    selector.update(1.0)
    return selector.state()


FRESH = GearSelector(VOCAB).state()
LAST = begun()["last"]


@pytest.mark.parametrize(
    "change",
    [
        {"last": None},
        {"last": {}},
        {"last": "low"},
        {"last": {**LAST, "gear": "reverse"}},
        {"last": {**LAST, "gear": ["low"]}},
        {"last": {**LAST, "expected": None}},
        {"last": {**LAST, "mean": math.nan}},
        {"last": {**LAST, "slope": -math.inf}},
        {"last": {**LAST, "forecast": "1"}},
        {"last": {**LAST, "shifted": 1}},
        {"last": {**LAST, "reason": b"x"}},
        {"last": {**LAST, "more": 1}},
        {"held": 0},
        {"held": -1},
        {"held": True},
        {"held": 1.0},
        {"held": None},
        {"start": {}},
        {"start": "high"},
        {"min_duration": 0},
        {"min_duration": None},
        {"monitor": None},
        {"monitor": {}},
        {"monitor": FRESH["monitor"]},
        {"monitor": {**begun()["monitor"], "gear": None}},
    ],
    ids=str,
)
def test_a_malformed_state_is_refused(change):
    GearSelector.from_state(begun())
    with pytest.raises(DataError, match="^cannot restore the ") as caught:
        GearSelector.from_state({**begun(), **change})
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "change",
    [
        {"previous": 2.0},
        {"previous": None},
        {"gear": None},
        {"window": []},
        {"window": [1.0] * 6},
        {"window": {1.0}},
        {"window": [10**400], "previous": 10**400},
        {"vocab": 4096.0},
        {"options": {**FRESH["monitor"]["options"], "scale_to_vocab": "no"}},
        {"options": {**FRESH["monitor"]["options"], "low": 9.0}},
    ],
    ids=lambda change: str(change)[:40],
)
def test_a_monitor_that_contradicts_itself_is_refused(change):
    monitor = {**begun()["monitor"], **change}
    with pytest.raises(DataError, match="^cannot restore the entropy monitor: "):
        GearSelector.from_state({**begun(), "monitor": monitor})


@pytest.mark.parametrize("state", [None, [], 3, {}, {**FRESH, "held": 1}, {**FRESH, "last": LAST}])
def test_what_is_no_state_at_all_is_refused(state):
    GearSelector.from_state(FRESH)
    with pytest.raises(DataError):
        GearSelector.from_state(state)


def test_importing_the_selector_loads_neither_numpy_nor_mlx():
    code = "import sys, toastkit.gears.selector; print({'numpy', 'mlx'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "set()", result.stderr
