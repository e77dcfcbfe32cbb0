"""The sampler in numpy, held against a naive one that sorts and draws noise for everything."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from toastkit.errors import DataError
from toastkit.sampling.draws import Draw, position_key, uniform_scalar
from toastkit.sampling.host import HostSampler
from toastkit.sampling.sampling_options import SamplingOptions
from toastkit.sampling.threefry import gumbel, uniform


def random_logits(vocab: int, scale: float = 3.0, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab) * scale).astype(np.float32)


def naive_survivors(values: np.ndarray, options: SamplingOptions, position: int) -> np.ndarray:
    """Steps 5-9 on all values, with full sorts. values: logits minus maximum. bool (vocab,)."""
    keep = values > -np.inf
    vocab = len(values)
    if 0 < options.top_p < 1:
        ordered = np.sort(values)[::-1]
        mass = np.exp(ordered).astype(np.float64)
        above = np.concatenate([[0], np.cumsum(mass)[:-1]])
        total = float(np.exp(values).sum())
        keep &= values >= ordered[above < options.top_p * total].min()
    if options.min_p > 0:
        best = np.sort(np.where(keep, values, -np.inf))[-min(options.min_tokens_to_keep, vocab)]
        keep &= (values >= np.float32(math.log(options.min_p))) | (values >= best)
    if 0 < options.typical_p < 1:
        keep[keep] = naive_typical(values[keep], options.typical_p)
    coin = uniform_scalar(position_key(options.seed, position, stream=1))
    if options.xtc_probability > 0 and coin <= options.xtc_probability:
        masses = np.where(keep, np.exp(values), 0)
        over = masses > np.float32(options.xtc_threshold) * np.exp(values[keep]).sum()
        if over.any():
            keep &= values <= values[over].min()
    if 0 < options.top_k < keep.sum():
        keep &= values >= np.sort(values[keep])[-options.top_k]
    return keep


def naive_typical(values: np.ndarray, typical_p: float) -> np.ndarray:
    total = np.exp(values).sum()
    p = np.exp(values) / total
    information = np.log(total) - values
    distance = np.abs(information - (p * information).sum())
    order = np.argsort(distance)
    mass = np.cumsum(p[order], dtype=np.float64)
    last = min((mass < typical_p).sum(), len(order) - 1)
    return distance <= distance[order[last]]


def naive_draw(logits: np.ndarray, options: SamplingOptions, position: int) -> int:
    values = logits - logits.max()
    keep = naive_survivors(values, options, position)
    noise = gumbel(uniform(position_key(options.seed, position), len(values)))
    noisy = values * np.float32(1 / options.temperature) + noise
    return int(np.where(keep, noisy, -np.inf).argmax())


probabilities = st.sampled_from([0.0, 0.05, 0.3, 0.9, 0.999, 1.0]) | st.floats(0, 1)
sampling_options = st.builds(
    lambda **given: SamplingOptions(**given),  # else Hypothesis fills in what is not given here
    temperature=st.sampled_from([0.01, 0.5, 0.8, 1.0, 2.0, 50.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 40, 100_000]),
    top_p=probabilities,
    min_p=st.sampled_from([0.0, 0.0, 1e-4, 0.1, 1.0]),
    min_tokens_to_keep=st.sampled_from([1, 1, 3, 50]),
    typical_p=st.sampled_from([1.0, 1.0, 0.2, 0.9]),
    xtc_probability=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    xtc_threshold=st.sampled_from([0.0, 0.01, 0.1, 0.5]),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=examples(75), deadline=None)
@given(
    sampling_options,
    st.integers(1, 200),
    st.sampled_from([0.0, 0.3, 3.0, 20.0]),
    st.booleans(),
    st.integers(0, 2**40),
)
def test_equals_the_naive_sampler(options, vocab, scale, coarse, position):
    logits = random_logits(vocab, scale, seed=vocab)
    if coarse:  # many exact ties, as half-precision logits have
        logits = np.round(logits * 2) / 2
    drawn = HostSampler(options, vocab).draw(logits, position)
    assert drawn.id == naive_draw(logits, options, position)


LARGE_CASES = [
    SamplingOptions(temperature=1.0),
    SamplingOptions(temperature=0.3),
    SamplingOptions(temperature=5.0),
    SamplingOptions(temperature=0.8, top_p=0.95),
    SamplingOptions(temperature=0.8, top_p=0.5, top_k=30),
    SamplingOptions(temperature=1.0, top_p=0.9999),
    SamplingOptions(temperature=0.8, top_k=40),
    SamplingOptions(temperature=2.0, top_k=5000),
    SamplingOptions(temperature=0.8, min_p=0.05),
    SamplingOptions(temperature=3.0, min_p=0.5, min_tokens_to_keep=100),
    SamplingOptions(temperature=1.0, typical_p=0.4),
    SamplingOptions(temperature=1.0, typical_p=0.001, xtc_probability=1.0, xtc_threshold=0.01),
    SamplingOptions(temperature=1.0, xtc_probability=0.5, xtc_threshold=1e-3, top_k=20),
]


@pytest.mark.parametrize("options", LARGE_CASES)
@pytest.mark.parametrize("scale", [1.0, 4.0, 10.0])
def test_the_short_cuts_for_a_large_vocabulary_change_nothing(options, scale):
    vocab = 70_003  # from 65,536 on typical-p has one too
    sampler = HostSampler(options, vocab)
    for position in range(3):
        logits = random_logits(vocab, scale, seed=position)
        assert sampler.draw(logits, position).id == naive_draw(logits, options, position)


def test_draws_do_not_depend_on_their_order():
    sampler = HostSampler(SamplingOptions(temperature=1.0, xtc_probability=0.5, seed=5), 300)
    rows = [random_logits(300, 2.0, seed) for seed in range(20)]
    forwards = [sampler.draw(row, position) for position, row in enumerate(rows)]
    backwards = [sampler.draw(rows[position], position) for position in reversed(range(20))]
    assert forwards == backwards[::-1]
    assert len({draw.id for draw in forwards}) > 10


def test_frequencies_follow_the_softmax():
    logits = random_logits(12, 1.5, seed=3)
    weights = np.exp(logits.astype(np.float64) / 0.7)
    expected = 5_000 * weights / weights.sum()
    sampler_of = [HostSampler(SamplingOptions(temperature=0.7, seed=s), 12) for s in range(5)]
    ids = [s.draw(logits, p, want_logprob=False).id for s in sampler_of for p in range(1000)]
    counts = np.bincount(ids, minlength=12)
    chi_square = ((counts - expected) ** 2 / expected).sum()
    # 11 degrees of freedom: 31.3 is exceeded once in a thousand times.
    assert chi_square < 31.3


def test_frequencies_over_seeds_follow_the_softmax():
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    samplers = (HostSampler(SamplingOptions(temperature=1.0, seed=s), 4) for s in range(2500))
    ids = [sampler.draw(logits, 9, want_logprob=False).id for sampler in samplers]
    shares = np.bincount(ids, minlength=4) / len(ids)
    assert np.abs(shares - [0.5, 0.25, 0.125, 0.125]).sum() / 2 < 0.02


def test_xtc_acts_as_often_as_it_should():
    options = SamplingOptions(temperature=0.01, xtc_probability=0.3, xtc_threshold=0.1, seed=1)
    sampler = HostSampler(options, 3)
    logits = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    ids = [sampler.draw(logits, p, want_logprob=False).id for p in range(2000)]
    assert set(ids) == {0, 2}
    assert ids.count(2) / 2000 == pytest.approx(0.3, abs=0.03)


def test_xtc_spares_special_ids():
    options = SamplingOptions(temperature=0.01, xtc_probability=1.0, xtc_threshold=0.1)
    logits = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    assert HostSampler(options, 3).draw(logits, 0).id == 2
    assert HostSampler(options, 3, xtc_special_ids=[0]).draw(logits, 0).id == 0


def test_greedy_takes_the_lowest_id_among_equals():
    logits = np.array([1, 5, 5, 5, 0], np.float32)
    assert HostSampler(SamplingOptions(top_p=0.1, top_k=1), 5).draw(logits, 0).id == 1


@settings(max_examples=examples(30))
@given(st.integers(2, 300), st.integers(1, 310), st.booleans())
def test_logprob_and_top_list(vocab, top, coarse):
    logits = random_logits(vocab, 2.0, seed=vocab + top)
    if coarse:
        logits = np.round(logits)
    exact = logits.astype(np.float64)
    exact -= exact.max()
    exact -= np.log(np.exp(exact).sum())
    drawn = HostSampler(SamplingOptions(temperature=1.0), vocab).draw(logits, 1, top=top)
    assert drawn.logprob == pytest.approx(exact[drawn.id], abs=1e-5)
    expected = sorted(range(vocab), key=lambda token: (-logits[token], token))[:top]
    assert [token for token, _ in drawn.top] == expected
    assert [p for _, p in drawn.top] == pytest.approx(list(exact[expected]), abs=1e-5)


def test_without_logprob_nothing_else_changes():
    logits = random_logits(500)
    sampler = HostSampler(SamplingOptions(temperature=0.9, top_p=0.9), 500)
    bare = sampler.draw(logits, 4, want_logprob=False)
    assert math.isnan(bare.logprob) and bare.top is None
    assert bare.id == sampler.draw(logits, 4, top=3).id


def test_the_logits_are_left_alone():
    logits = random_logits(50)
    logits[[3, 4, 5]] = [np.nan, np.inf, -np.inf]
    kept = logits.copy()
    options = SamplingOptions(
        temperature=1.0, repetition_penalty=2.0, bans=(1,), logit_bias=((2, 3.0),)
    )
    HostSampler(options, 50).draw(logits, 0, [6, 7], top=5)
    assert np.array_equal(logits, kept, equal_nan=True)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_guard(temperature):
    sampler = HostSampler(SamplingOptions(temperature=temperature), 4)
    assert sampler.draw(np.array([0, np.inf, 9e3, np.nan], np.float32), 0).id == 1
    assert sampler.draw(np.array([-5000, -np.inf, np.nan, -5000], np.float32), 0).id == 2
    low = sampler.draw(np.array([-2e4, -np.inf, -3e4, -np.inf], np.float32), 0)
    assert low.id in (1, 3) and low.logprob == pytest.approx(math.log(0.5))
    all_nan = sampler.draw(np.full(4, np.nan, np.float32), 0)
    assert all_nan.logprob == pytest.approx(math.log(0.25))
    # Of all -inf each counts -1e4: a flat distribution, not an error.
    assert sampler.draw(np.full(4, -np.inf, np.float32), 0).logprob == pytest.approx(math.log(0.25))


@settings(max_examples=examples(40))
@given(
    st.lists(
        st.sampled_from([math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 0.0, 1.0]),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([0.0, 1e-6, 1.0, 1e6]),
    st.sampled_from([1e-6, 1.0, 1e6]),
)
def test_extreme_logits_give_a_token(logits, temperature, repetition_penalty):
    options = SamplingOptions(
        temperature=temperature,
        repetition_penalty=repetition_penalty,
        presence_penalty=-1e6,
        logit_bias=((0, 1e6),),
        top_p=0.9,
        typical_p=0.9,
    )
    drawn = HostSampler(options, len(logits)).draw(np.array(logits, np.float32), 3, [0], top=2)
    assert 0 <= drawn.id < len(logits)
    assert drawn.logprob <= 1e-6


def test_bans_and_bias():
    logits = np.zeros(5, np.float32)
    options = SamplingOptions(bans=(0, 2, 4), logit_bias=((1, -1.0), (4, 50.0)))
    drawn = HostSampler(options, 5).draw(logits, 0, top=5)
    assert drawn.id == 3
    assert [token for token, _ in drawn.top] == [3, 1]
    assert drawn.top[0][1] - drawn.top[1][1] == pytest.approx(1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_banned_is_an_error(temperature):
    sampler = HostSampler(SamplingOptions(temperature=temperature, bans=(0, 1, 2)), 3)
    with pytest.raises(DataError, match="every id is banned"):
        sampler.draw(np.zeros(3, np.float32), 0)


def penalised(history: list[int], **options: float) -> list[float]:
    """What the penalties make of the logits [2, -2, 1, 0], by their log-probabilities."""
    logits = np.array([2, -2, 1, 0], np.float32)
    drawn = HostSampler(SamplingOptions(**options), 4).draw(logits, 0, history, top=4)
    table = dict(drawn.top)
    # Id 3 has logit 0 and is in no history.
    return [table[token] - table[3] for token in range(4)]


def test_penalties():
    assert penalised([0, 1, 0], repetition_penalty=2.0) == pytest.approx([1, -4, 1, 0])
    assert penalised([0, 1, 0], presence_penalty=0.5) == pytest.approx([1.5, -2.5, 1, 0])
    assert penalised([0, 1, 0], frequency_penalty=0.5) == pytest.approx([1, -2.5, 1, 0])
    together = dict(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    assert penalised([0, 1, 0], **together) == pytest.approx([0, -4.75, 1, 0], abs=1e-6)


def test_penalties_look_at_the_last_ids_only():
    assert penalised([0, 1, 2], presence_penalty=1.0, penalty_context=1) == pytest.approx(
        [2, -2, 0, 0], abs=1e-6
    )
    assert penalised([0, 1, 2], presence_penalty=1.0, penalty_context=0) == pytest.approx(
        [2, -2, 1, 0]
    )
    assert penalised([], presence_penalty=1.0) == pytest.approx([2, -2, 1, 0])


def test_a_foreign_id_in_the_history_is_refused():
    sampler = HostSampler(SamplingOptions(presence_penalty=1.0), 4)
    for history in ([4], [-1]):
        with pytest.raises(DataError, match="history"):
            sampler.draw(np.zeros(4, np.float32), 0, history)


def test_a_wrong_shape_is_refused():
    with pytest.raises(DataError, match=r"logits have shape \[5\], the vocabulary has 4"):
        HostSampler(SamplingOptions(), 4).draw(np.zeros(5, np.float32), 0)


def test_off_values_switch_off():
    off = SamplingOptions(temperature=1.0, top_p=0.0, top_k=9, typical_p=0.0, seed=4)
    plain = SamplingOptions(temperature=1.0, seed=4)
    off.validate(9)
    logits = random_logits(9)
    draws = [[HostSampler(o, 9).draw(logits, p) for p in range(50)] for o in (off, plain)]
    assert draws[0] == draws[1]


def test_a_draw_is_plain_data():
    drawn = HostSampler(SamplingOptions(temperature=1.0), 9).draw(random_logits(9), 0, top=2)
    assert isinstance(drawn, Draw)
    assert type(drawn.id) is int and type(drawn.logprob) is float
    assert [[type(token), type(p)] for token, p in drawn.top] == [[int, float]] * 2
