"""What fits into a memory: what would stay is what --resident has stay, and a refusal's number
works."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toastkit.errors import UsageError
from toastkit.holdings.pressure import Pressure
from toastkit.holdings.read_ahead import MAX_AHEAD
from toastkit.residency.residency_options import PLACEMENTS, PRIORITIES, ResidencyOptions
from toastkit.residency.residency_plan import Memory, ResidencyPlan, plan_residency
from toastkit.residency.residency_policy import ResidencyPolicy
from toastkit.residency.sizing import Sizes, minimum

MB = 1 << 20
MODEL = Sizes(100 * MB, (50 * MB,) * 8, 1000.0, MB)
models = st.builds(
    Sizes, st.integers(0, 10**9),
    st.lists(st.integers(1, 10**8), min_size=1, max_size=9).map(tuple),
    st.floats(0, 1e5), st.integers(0, 10**7),
)  # fmt: skip


def planned(size: int, given: bool = True, model: Sizes = MODEL, **rest) -> ResidencyPlan:
    return plan_residency("m", model, Memory(size, given), longest=32768, **rest)


def test_all_layers_stay_where_they_fit() -> None:
    found = planned(2000 * MB)
    assert (found.resident, found.filled, found.layers) == (8, 8, 8)
    assert found.weights == 500 * MB and found.staying == frozenset(range(8))
    assert (found.context, found.cache) == (1024, MB + 1024 * 1000) and found.cache == found.reserve


def test_a_long_context_takes_the_place_of_layers() -> None:
    found = planned(410 * MB, context=32768)
    assert found.cache == MB + 32768 * 1000 and found.reserve == MB + 1024 * 1000
    assert found.filled < found.resident


def test_layers_that_can_be_read_ahead() -> None:
    """As many as the rest of a given memory holds, beside the one that is awaited."""
    reserve = MB + 1024 * 1000
    for size in (410, 449, 460, 599):
        found = planned(size * MB, context=10)
        spare = size * MB - found.weights - reserve
        assert found.reserve == reserve and found.ahead == 1 + spare // (50 * MB)
    assert planned(599 * MB, context=10).ahead == 2
    assert planned(202 * MB, context=10).ahead == 1  # less is left than is to be reserved
    assert planned(599 * MB, given=False).ahead == MAX_AHEAD


def test_only_max_context_reserves_for_the_context() -> None:
    """As in a run, which is not told how much will be read."""
    assert planned(2000 * MB, context=10).reserve == planned(2000 * MB).reserve
    for context, tokens in ((2000, 2000), (None, 32768)):
        found = planned(2000 * MB, priority="max-context", context=context)
        assert found.reserve == found.cache == MB + tokens * 1000 and found.context == tokens


def first_count(options: ResidencyOptions, memory: int) -> int:
    """Layers that a run has stay to begin with."""
    policy = ResidencyPolicy(options, lambda: memory)
    policy.sizes, policy.paths = MODEL, ["layers.0"]  # as of a model that it has taken on
    return policy._first_count()


def test_what_it_says_is_what_resident_does() -> None:
    told = set()
    for where in PLACEMENTS:
        for priority in PRIORITIES:
            for size in range(390 * MB, 900 * MB, 15 * MB):
                for fixed, kind in ((True, "bytes"), (False, "auto")):
                    options = ResidencyOptions(kind, size * fixed, where, priority, 32768)
                    found = planned(size, fixed, priority=priority, placement=where)
                    assert found.resident == first_count(options, size)
                    told.add((fixed, found.resident))
    assert len(told) > 9


def test_no_layer_that_it_says_stays_is_given_up_at_once() -> None:
    for size in range(390 * MB, 900 * MB, 15 * MB):
        found = planned(size, False)
        left = found.memory - found.weights - found.reserve
        assert Pressure(found.layers).update(left, found.resident, 0) == found.resident


@given(models, st.integers(1, 32768), st.booleans())
def test_the_number_of_a_refusal_works(model: Sizes, context: int, fixed: bool) -> None:
    with pytest.raises(UsageError) as caught:
        planned(0, fixed, model, context=context)
    (number,) = re.findall(r"needs ([0-9]+)M at least", caught.value.message)
    found = planned(int(number) * MB, fixed, model, context=context)
    least = min(minimum(model), model.outside + sum(model.layers) + model.cache_fixed)
    assert found.least >= least and found.filled <= found.resident
    with pytest.raises(UsageError):
        planned((int(number) - 1) * MB, fixed, model, context=context)


def test_a_refusal_says_what_there_is() -> None:
    with pytest.raises(UsageError, match="^--mem 100M: m needs 202M at least, with 10 tokens"):
        planned(100 * MB, context=10)
    with pytest.raises(UsageError, match="^100M of memory are available: m needs 202M at least"):
        planned(100 * MB, False, context=10)
    with pytest.raises(UsageError, match="with 1 token of context$"):
        planned(100 * MB, context=1)


def test_where_a_run_would_have_no_layer_stay_so_has_the_plan() -> None:
    """--resident auto refuses no memory; what it keeps free is none that a model needs."""
    found = planned(210 * MB, False, context=10)
    assert (found.resident, found.least) == (0, planned(210 * MB, context=10).least)
