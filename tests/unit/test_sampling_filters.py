"""The filters on their own, and what options are legal."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toastkit.errors import UsageError
from toastkit.sampling import filters
from toastkit.sampling.sampling_options import SamplingOptions

value_lists = st.lists(st.floats(-30, 0, width=32), min_size=1, max_size=100).map(
    lambda values: np.array(values, np.float32) - np.float32(max(values))
)


@given(value_lists, st.floats(0.01, 0.99))
def test_top_p_keeps_the_smallest_sufficient_head(values, top_p):
    masses = np.exp(values.astype(np.float64))
    total = masses.sum()
    kept = values >= filters.top_p_threshold(values, total, top_p)
    assert kept[values.argmax()]
    assert masses[kept].sum() >= top_p * total * (1 - 1e-6)
    # Without the group of equals at its end it would not do.
    without_last = kept & (values > values[kept].min())
    assert masses[without_last].sum() < top_p * total * (1 + 1e-6)


@given(value_lists, st.integers(1, 120))
def test_top_k_keeps_k_and_ties(values, k):
    kept = values >= filters.top_k_threshold(values, k)
    assert kept[values.argmax()]
    strictly = values > values[kept].min()
    assert kept.sum() >= min(k, len(values)) and strictly.sum() < k or kept.all()


@given(value_lists, st.floats(0.001, 1), st.integers(1, 20))
def test_min_p_keeps_the_best_and_enough(values, min_p, least):
    kept = values >= filters.min_p_threshold(values, min_p, least)
    assert kept[values.argmax()]
    assert kept.sum() >= min(least, len(values))


@given(value_lists, st.floats(0.01, 0.99))
def test_typical_keeps_its_mass(values, typical_p):
    kept = filters.typical_mask(values, typical_p)
    masses = np.exp(values.astype(np.float64))
    assert masses[kept].sum() >= typical_p * masses.sum() * (1 - 1e-5)


@given(value_lists, st.floats(0, 0.5))
def test_xtc_leaves_one_over_the_threshold(values, threshold):
    kept = filters.xtc_mask(values, threshold, None)
    shares = np.exp(values) / np.exp(values).sum()
    assert kept.any()
    assert kept[shares <= threshold * (1 - 1e-5)].all()
    assert len(np.unique(values[kept & (shares > threshold * (1 + 1e-5))])) <= 1


@pytest.mark.parametrize("n", [8193, 20_000, 151_936])
@pytest.mark.parametrize("k", [1, 7, 32, 500, 8000])
def test_group_bound_is_reached_by_k(n, k):
    values = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    assert (values >= filters.at_least_k_bound(values, k)).sum() >= k
    assert filters.top_k_threshold(values, k) == np.sort(values)[n - k]


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 1e-9),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_k", True),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("min_p", -0.5),
        ("min_tokens_to_keep", 0),
        ("typical_p", 2),
        ("xtc_probability", 1.1),
        ("xtc_threshold", 0.6),
        ("repetition_penalty", 0.0),
        ("presence_penalty", math.inf),
        ("frequency_penalty", math.nan),
        ("penalty_context", -1),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_illegal_options_are_named_with_their_value(field, value):
    with pytest.raises(UsageError) as caught:
        SamplingOptions(**{field: value}).validate()
    name = field.replace("_", "-")
    assert caught.value.message.startswith(f"invalid {name}: ")
    assert str(value) in caught.value.message


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(bans=(10,)),
        SamplingOptions(bans=(-1,)),
        SamplingOptions(bans=(1.5,)),
        SamplingOptions(bans=(True,)),
        SamplingOptions(logit_bias=((10, 1.0),)),
        SamplingOptions(logit_bias=((1, math.nan),)),
        SamplingOptions(logit_bias=((1, -math.inf),)),
        SamplingOptions(logit_bias=((1, 1.0), (1, 2.0))),
    ],
)
def test_illegal_ids_and_biases_are_refused(options):
    with pytest.raises(UsageError, match="^invalid (bans|logit bias): "):
        options.validate(10)


def test_needs_history():
    assert not SamplingOptions().needs_history
    assert not SamplingOptions(bans=(1,), logit_bias=((1, 1.0),)).needs_history
    assert SamplingOptions(repetition_penalty=1.1).needs_history
    assert SamplingOptions(presence_penalty=-0.1).needs_history
    assert SamplingOptions(frequency_penalty=0.1).needs_history
    assert not SamplingOptions(frequency_penalty=0.1, penalty_context=0).needs_history
