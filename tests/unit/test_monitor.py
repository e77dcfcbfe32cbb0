"""The entropy meter against a float64 reference; the monitor against the paper's rules."""

from __future__ import annotations

import json
import math

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toastkit.errors import DataError, UsageError
from toastkit.gears.monitor import EntropyMeter, EntropyMonitor, MonitorOptions

UNSCALED = MonitorOptions(scale_to_vocab=False)
entropies = st.floats(0, 15, allow_nan=False)


def gears(values: list[float], options: MonitorOptions = UNSCALED, vocab: int = 32768) -> list[str]:
    monitor = EntropyMonitor(vocab, options)
    return [monitor.update(value).gear for value in values]


def entropy_bits(logits: np.ndarray) -> float:
    return EntropyMeter(len(logits)).bits(logits)


def reference_entropy(logits: np.ndarray) -> float:
    z = np.nan_to_num(logits.astype(np.float64), nan=0.0, posinf=1e4, neginf=-1e4)
    p = np.exp(z - z.max())
    p /= p.sum()
    return float(-(p[p > 0] * np.log2(p[p > 0])).sum())


ODD = [math.nan, math.inf, -math.inf, 3e38, -3e38]


@given(st.lists(st.floats(-50, 50, width=32) | st.sampled_from(ODD), min_size=1, max_size=60))
def test_entropy_is_that_of_a_float64_reference(logits):
    array = np.array(logits, np.float32)
    kept = array.copy()
    measured = entropy_bits(array)
    assert 0 <= measured <= math.log2(len(logits))
    assert measured == pytest.approx(reference_entropy(array), abs=2e-5)
    assert np.array_equal(array, kept, equal_nan=True)


@pytest.mark.parametrize("vocab", [4096, 151936])
@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 10.0])
def test_entropy_of_a_large_vocabulary(vocab, scale):
    logits = (np.random.default_rng(1).standard_normal(vocab) * scale).astype(np.float32)
    assert EntropyMeter(vocab).bits(logits) == pytest.approx(reference_entropy(logits), abs=1e-4)


def test_entropy_of_known_distributions():
    assert entropy_bits(np.zeros(4096, np.float32)) == pytest.approx(12, abs=1e-5)
    coin = np.full(1000, -np.inf, np.float32)
    coin[[3, 5]] = 2
    assert entropy_bits(coin) == pytest.approx(1, abs=1e-6)
    assert entropy_bits(np.array([1.0], np.float32)) == 0


def test_a_meter_can_be_used_again():
    meter = EntropyMeter(100)
    rows = np.random.default_rng(2).standard_normal((3, 100)).astype(np.float32)
    first = [meter.bits(row) for row in rows]
    assert [meter.bits(row) for row in rows] == first
    with pytest.raises(DataError, match=r"logits have shape \[5\]"):
        meter.bits(np.zeros(5, np.float32))


def test_gears_without_history():
    assert [gears([value])[0] for value in (0, 1.8, 1.81, 3.49, 3.5, 12)] == [
        "low", "low", "mid", "mid", "high", "high",
    ]  # fmt: skip


def test_rolling_mean_slope_and_forecast():
    monitor = EntropyMonitor(32768)
    first = monitor.update(2.0)
    assert (first.mean, first.slope, first.forecast, first.reason) == (2, 0, 2, "start")
    for value in (3.0, 4.0, 5.0, 6.0):
        monitor.update(value)
    last = monitor.update(8.0)
    assert last.mean == pytest.approx(26 / 5)
    assert last.slope == pytest.approx((8 - 3) / 4)
    assert last.forecast == pytest.approx(26 / 5 + 2 * 5 / 4)


def test_hysteresis_holds_both_extreme_gears():
    one = MonitorOptions(window=1, scale_to_vocab=False)
    assert gears([1.0, 1.85, 1.9, 1.95, 1.85], one) == ["low", "low", "low", "mid", "mid"]
    assert gears([4.0, 3.45, 3.4, 3.35, 3.45], one) == ["high", "high", "high", "mid", "mid"]
    # A jump over the middle crosses every margin.
    assert gears([1.0, 4.0, 1.0], one) == ["low", "high", "low"]


def test_readings_say_why():
    monitor = EntropyMonitor(32768, MonitorOptions(window=1))
    expected = [
        (1.0, "start", False), (1.2, "mean 1.20 <= 1.80", False),
        (1.85, "held by hysteresis", False), (2.5, "1.80 < mean 2.50 < 3.50", True),
        (4.0, "mean 4.00 >= 3.50", True), (14.0, "mean 14.00 >= 3.50", False),
        (14.0, "catastrophic", False),
    ]  # fmt: skip
    for value, reason, shifted in expected:
        reading = monitor.update(value)
        assert (reading.reason, reading.shifted) == (reason, shifted)


def test_catastrophe_needs_two_in_a_row_and_overrides_the_mean():
    options = MonitorOptions(window=10, low=7.0, high=14.9, scale_to_vocab=False)
    calm = [0.0] * 8
    assert gears([*calm, 14.0, 0.0, 14.0], options)[-1] == "low"
    assert gears([*calm, 14.0, 14.0], options)[-1] == "high"
    # 0.9 * 15 = 13.5 must be exceeded.
    assert gears([*calm, 13.5, 13.5], options)[-1] == "low"


@pytest.mark.parametrize("vocab", [4096, 32768, 151936])
def test_thresholds_scale_with_the_vocabulary(vocab):
    monitor = EntropyMonitor(vocab)
    assert monitor.low == pytest.approx(1.8 * math.log2(vocab) / 15)
    assert monitor.high == pytest.approx(3.5 * math.log2(vocab) / 15)
    assert EntropyMonitor(vocab, UNSCALED).high == 3.5


@given(st.lists(entropies, max_size=20), st.lists(entropies, max_size=20), st.integers(1, 7))
def test_a_restored_monitor_goes_on_identically(before, after, window):
    monitor = EntropyMonitor(4096, MonitorOptions(window=window))
    for value in before:
        monitor.update(value)
    state = monitor.state()
    restored = [
        EntropyMonitor.from_state(state),
        EntropyMonitor.from_state(msgpack.unpackb(msgpack.packb(state))),
        EntropyMonitor.from_state(json.loads(json.dumps(state))),
    ]
    expected = [monitor.update(value) for value in after]
    for other in restored:
        assert [other.update(value) for value in after] == expected


@given(st.lists(entropies, min_size=1, max_size=40))
def test_the_gear_depends_on_the_mean_alone_outside_the_margins(values):
    monitor = EntropyMonitor(32768)
    for value in values:
        reading = monitor.update(value)
        if reading.reason == "catastrophic":
            assert reading.gear == "high"
        elif reading.mean <= monitor.low:
            assert reading.gear == "low"
        elif reading.mean >= monitor.high:
            assert reading.gear == "high"
        elif monitor.low + 0.1 < reading.mean < monitor.high - 0.1:
            assert reading.gear == "mid"


def test_an_entropy_that_is_not_finite_is_refused():
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(DataError, match="is not finite"):
            EntropyMonitor(4096).update(value)


@pytest.mark.parametrize(
    "options, name",
    [({"window": 0}, "window"), ({"window": 2.0}, "window"), ({"low": math.nan}, "low threshold"),
     ({"low": 4.0}, "thresholds"), ({"high": math.inf}, "high threshold"),
     ({"hysteresis": -0.1}, "hysteresis"), ({"reference_vocab": 1}, "reference vocabulary"),
     ({"lookahead": -1}, "lookahead")],
)  # fmt: skip
def test_illegal_options_are_named(options, name):
    with pytest.raises(UsageError, match=f"^invalid {name}"):
        EntropyMonitor(4096, MonitorOptions(**options))


@pytest.mark.parametrize(
    "change",
    [{"gear": "reverse"}, {"window": [math.nan]}, {"window": "ab"},
     {"window": None}, {"previous": "x"}, {"vocab": "x"}, {"vocab": 0}, {"options": {"windows": 5}},
     {"options": {"window": -1}}],
)  # fmt: skip
def test_a_malformed_state_is_refused(change):
    state = {**EntropyMonitor(4096).state(), **change}
    with pytest.raises(DataError, match="cannot restore the entropy monitor"):
        EntropyMonitor.from_state(state)
    with pytest.raises(DataError):
        EntropyMonitor.from_state({})
