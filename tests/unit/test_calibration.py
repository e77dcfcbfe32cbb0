"""Calibration against examples by hand, numpy's percentiles, and what must always hold."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toastkit.errors import DataError, UsageError
from toastkit.gears.calibration import (
    CALIBRATION_PROMPTS,
    Thresholds,
    from_easy_and_hard,
    from_prefill,
    from_prompts,
    parse_prompts,
    percentile,
)
from toastkit.gears.monitor import EntropyMonitor, MonitorOptions

VOCAB = 32768  # 15 bits: caps 0.9 and 1.8
vocabularies = st.sampled_from([2, 3, 256, 4096, 32768, 151936])
shares = st.lists(st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1e-9, 0.02])), max_size=40)


def bits(values: list[float], vocab: int) -> list[float]:
    """Shares of the greatest possible entropy as entropies."""
    return [value * math.log2(vocab) for value in values]


def usable(thresholds: Thresholds) -> None:
    """They pass their own check, and a monitor takes them as they are."""
    thresholds.validate()
    options = MonitorOptions(low=thresholds.low, high=thresholds.high, scale_to_vocab=False)
    monitor = EntropyMonitor(thresholds.vocab, options)
    assert (monitor.low, monitor.high) == (thresholds.low, thresholds.high)


@pytest.mark.parametrize("n", [*range(5, 20), 29, 30, 31, 70, 100, 130, 1000])
def test_prefill_ranks_are_exact(n):
    """Samples 1, 2, ... n thousandths: each value tells its own rank. floor(0.30 n), floor(0.60 n)
    in whole numbers."""
    found = from_prefill([k / 1000 * 14 for k in range(1, n + 1)], 2**200)
    low = 3 * n // 10 * 0.014
    high = (min(n - 1, 6 * n // 10) + 1) * 0.014
    if high - low >= 0.2:
        assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    else:
        assert found.low + found.high == pytest.approx(low + high) or found.low == 0.01


def test_prefill_by_hand():
    # n = 10: e[floor(3) - 1] = e[2], e[min(9, 6)] = e[6].
    found = from_prefill([e / 10 for e in (7, 3, 9, 1, 10, 2, 8, 4, 6, 5)], VOCAB)
    assert found == Thresholds(0.3, 0.7, "prefill", 10, VOCAB)
    # n = 5: e[floor(1.5) - 1] = e[0], e[floor(3)] = e[3].
    found = from_prefill([0.1, 0.2, 0.3, 0.4, 0.5], VOCAB)
    assert (found.low, found.high) == (0.1, 0.4)
    # n = 7: e[floor(2.1) - 1] = e[1], e[floor(4.2)] = e[4].
    found = from_prefill([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7], VOCAB)
    assert (found.low, found.high) == (0.2, 0.5)


def test_prefill_counts_positive_entropies_only():
    found = from_prefill([0.0, 0.0, -1e-6, 0.1, 0.2, 0.3, 0.4, 0.5], VOCAB)
    assert (found.low, found.high, found.samples) == (0.1, 0.4, 5)
    with pytest.raises(DataError, match="needs 5 positive entropies, this has 4$") as caught:
        from_prefill([0.0, 0.1, 0.2, 0.3, 0.4], VOCAB)
    assert caught.value.hint == "give a longer prompt"
    found = from_prefill([0.4, 0.5, 0.5, 0.5, 0.6], 2)  # whose caps are closer than the band
    assert (found.low, found.high) == (pytest.approx(0.06), pytest.approx(0.12))


@pytest.mark.parametrize(
    ("entropies", "low", "high"),
    [([0.5, 0.5, 0.5, 0.6, 0.6], 0.45, 0.65),  # widened around its centre
     ([0.25, 0.3, 0.4, 0.5, 0.6], 0.25, 0.5),
     ([0.001, 0.002, 0.003, 0.004, 0.005], 0.01, 0.21),  # moved up: it would begin under the floor
     ([0.05, 0.05, 0.05, 0.07, 0.07], 0.01, 0.21),  # around the centre, 0.06, low were negative
     ([1e-5, 0.1, 0.2, 0.205, 0.3], 0.01, 0.21),  # floored first: 0.01 and 0.205 are 0.195 apart
     ([5.0, 6.0, 7.0, 8.0, 9.0], 0.9, 1.8), ([0.5, 0.6, 7.0, 8.0, 9.0], 0.5, 1.8)],  # capped
)  # fmt: skip
def test_prefill_has_a_band_a_floor_and_caps(entropies, low, high):
    found = from_prefill(entropies, VOCAB)
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))


@given(shares, vocabularies, st.randoms())
def test_prefill_always_gives_usable_thresholds(values, vocab, random):
    samples = bits(values, vocab)
    most = math.log2(vocab)
    if sum(e > 0 for e in samples) < 5:
        with pytest.raises(DataError, match="^cannot calibrate: "):
            from_prefill(samples, vocab)
        return
    found = from_prefill(samples, vocab)
    usable(found)
    assert 0.01 <= found.low <= 0.06 * most or found.low == 0.06 * most
    assert found.high <= 0.12 * most
    capped = found.low == 0.06 * most or found.high == 0.12 * most
    assert capped or found.high - found.low >= 0.2 - 1e-12
    random.shuffle(samples)
    assert from_prefill(samples, vocab) == found


def test_prompts_by_hand():
    found = from_prompts([1.0, 0.2, 3.0, 0.8, 2.0], VOCAB)
    assert found == Thresholds(1.0, 2.5, "prompts", 5, VOCAB)
    # Of an even number, between the middle two; 2.5 x 0.15 is less than the band asks for.
    found = from_prompts([0.0, 0.1, 0.2, 3.0, 4.0, 0.1], VOCAB)
    assert (found.low, found.high) == (pytest.approx(0.15), pytest.approx(0.45))
    found = from_prompts([0.0] * 9 + [1.0], VOCAB)
    assert (found.low, found.high) == (0.01, pytest.approx(0.31))
    # Where 2.5 times and 0.3 more meet: 0.2.
    assert from_prompts([0.2] * 5, VOCAB).high == pytest.approx(0.5)
    with pytest.raises(DataError, match="the prompts give 4 entropies, 5 are needed"):
        from_prompts([1.0] * 4, VOCAB)
    # What rounding on a device gives is taken.
    assert from_prompts([-1e-6] * 5, VOCAB).low == 0.01
    assert from_prompts([15.00001] * 5, VOCAB).low == 15.0


@given(shares.filter(lambda values: len(values) >= 5), vocabularies, st.randoms())
def test_prompts_always_give_usable_thresholds(values, vocab, random):
    samples = bits(values, vocab)
    found = from_prompts(samples, vocab)
    usable(found)
    assert found.low == pytest.approx(max(float(np.median(samples)), 0.01))
    assert found.high - found.low >= 0.3 - 1e-9
    assert found.high >= 2.5 * found.low - 1e-9
    random.shuffle(samples)
    assert from_prompts(samples, vocab) == found


@pytest.mark.parametrize(
    ("easy", "hard", "low", "high", "overlap"),
    # The 80th percentile of 0, 1, 2, 3, 4, 5 is 4; the 20th of 5 .. 10 is 6.
    [([0, 1, 2, 3, 4, 5], [10, 9, 8, 7, 6, 5], 4.0, 6.0, False),
     ([5, 6, 7, 8, 9, 10], [0, 1, 2, 3, 4, 5], 1.0, 9.0, True),
     ([2.0] * 5, [2.0] * 5, 1.9, 2.1, True), ([0.0] * 5, [0.0] * 5, 0.01, 0.21, True),
     ([2.0] * 5, [2.1] * 5, 1.95, 2.15, False)],  # nearly touch: widened
)  # fmt: skip
def test_easy_and_hard_by_hand(easy, hard, low, high, overlap):
    found = from_easy_and_hard(easy, hard, VOCAB)
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    assert (found.strategy, found.samples, found.vocab) == ("file", len(easy + hard), VOCAB)
    assert found.overlap == overlap


def test_each_kind_needs_five_entropies():
    with pytest.raises(DataError, match="the easy prompts give 1 "):
        from_easy_and_hard([1.0], [1.0] * 5, VOCAB)
    with pytest.raises(DataError, match="the hard prompts give 0 "):
        from_easy_and_hard([1.0] * 5, [], VOCAB)


@given(shares.filter(lambda v: len(v) >= 5), shares.filter(lambda v: len(v) >= 5), vocabularies)
def test_easy_and_hard_are_always_usable(easy, hard, vocab):
    easy, hard = bits(easy, vocab), bits(hard, vocab)
    found = from_easy_and_hard(easy, hard, vocab)
    usable(found)
    assert found.high - found.low >= 0.2 - 1e-9
    below, above = np.percentile(easy, 80), np.percentile(hard, 20)
    if above - below > 0.2 + 1e-6:
        assert (found.low, found.high) == (pytest.approx(below), pytest.approx(above))
        assert not found.overlap
    if below > above + 1e-6:
        assert found.overlap
    assert from_easy_and_hard(easy[::-1], hard[::-1], vocab) == found


@given(st.lists(st.floats(0, 15), min_size=1, max_size=30), st.integers(0, 100))
def test_percentiles_are_numpys(values, percent):
    found = percentile(sorted(values), percent)
    assert found == pytest.approx(float(np.percentile(values, percent)), abs=1e-9)


@pytest.mark.parametrize(
    "strategy", [from_prefill, from_prompts, lambda e, v: from_easy_and_hard(e, [1.0] * 5, v)]
)
def test_impossible_entropies_and_vocabularies_are_refused(strategy):
    for value in (math.nan, math.inf, -math.inf, 15.1, -0.1):
        with pytest.raises(DataError, match="bits is no entropy over 32768 ids$"):
            strategy([1.0] * 9 + [value], VOCAB)
    for vocab in (1, 0, -5, 2.5):
        with pytest.raises(UsageError, match="^invalid vocabulary"):
            strategy([0.1] * 9, vocab)


@pytest.mark.parametrize(
    "change",
    [
        {"low": -0.1}, {"low": 2.0}, {"low": math.nan}, {"low": "1"}, {"low": True},
        {"high": math.inf}, {"high": None}, {"strategy": "guess"}, {"strategy": ["file"]},
        {"samples": 0}, {"samples": 1.0}, {"vocab": 1}, {"vocab": None}, {"overlap": 1},
    ],
    ids=str,
)  # fmt: skip
def test_thresholds_that_cannot_be_are_refused(change):
    good = {"low": 1.0, "high": 2.0, "strategy": "file", "samples": 10, "vocab": 4096}
    Thresholds(**good).validate()
    with pytest.raises(DataError, match="^invalid thresholds: "):
        Thresholds(**{**good, **change}).validate()


def test_prompts_of_a_file_and_our_own():
    text = '\n{"hard": ["prove x"], "easy": ["say \\u00e9", "\\ud83d\\ude00"]}\n'
    assert parse_prompts(text) == (["say é", "😀"], ["prove x"])
    assert len(set(CALIBRATION_PROMPTS)) == 3
    assert all(20 < len(prompt) < 100 and prompt.isascii() for prompt in CALIBRATION_PROMPTS)


@pytest.mark.parametrize(
    "text, message",
    [("", r"not JSON \(line 1, column 1\)"),
     ('{"easy": ["a"],\n "hard" ["b"]}', r"not JSON \(line 2, column 9\)"),
     ("[" * 100_000, "not JSON that can be read"), ("9" * 5000, "not "), ("[]", "not an object"),
     ("null", "not an object"), ('{"easy": ["a"]}', "'hard' is not a list of one text at least"),
     ('{"easy": [], "hard": ["b"]}', "'easy' is not a list of one text at least"),
     ('{"easy": "a", "hard": ["b"]}', "'easy' is not a list of one text at least"),
     ('{"easy": ["a", 3], "hard": ["b"]}', r"'easy' holds something other .*\(item 2\)"),
     ('{"easy": [" "], "hard": ["b"]}', r"'easy' holds something other .*\(item 1\)"),
     ('{"easy": ["a"], "hard": ["\\ud800"]}', r"'hard' holds half a surrogate .*\(item 1\)"),
     ('{"easy": ["a"], "hard": ["b"], "mid": []}', "unknown field 'mid'")],
)  # fmt: skip
def test_other_files_are_refused_in_one_line(text, message):
    with pytest.raises(DataError, match=f"^cannot read calibration prompts: {message}") as caught:
        parse_prompts(text)
    assert "\n" not in caught.value.message and '"easy"' in caught.value.hint
