"""A pass with absent layers, played through: by hand, within its bounds, and never slower for more
memory."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from toastkit.residency.predict import (
    MAX_SLOWDOWN,
    Calibration,
    PassTime,
    Slowdown,
    Source,
    depth,
    fitted_slowdown,
    predict,
    simulate,
)
from toastkit.residency.residency_options import PLACEMENTS
from toastkit.residency.sizing import placed

seconds = st.floats(1e-3, 10.0)
shares = st.floats(0, 1)
layer = st.tuples(seconds, seconds, st.booleans())
layers = st.lists(layer, min_size=1, max_size=12)
slower = st.floats(0, MAX_SLOWDOWN)
NONE = Slowdown(0.0, 0.0)
BOTH = Slowdown(1.0, 1.0)


def measured(count: int, compute: float = 0.5, **rest: float) -> Calibration:
    source = Source(rate=10.0, token=NONE, chunk=NONE)
    found = Calibration(
        (compute,) * count, (compute,) * count, (0.1,) * count, 1.0, 0.5, 1.0, source,
        replace(source, rate=5.0),
    )  # fmt: skip
    return replace(found, **rest)


# ------------------------------------------------------------------------------------------ by hand


def test_nothing_is_read_where_all_stay() -> None:
    assert simulate([None] * 3, [1.0, 2.0, 3.0], 0.5, BOTH).seconds == 6.5
    assert simulate([], [], 0.5, BOTH).seconds == 0.5


def test_the_slower_of_the_two_decides() -> None:
    assert simulate([1.0] * 8, [2.0] * 8, 1.0, NONE).seconds == pytest.approx(17.0)
    # Reading goes on while what is outside the layers runs.
    assert simulate([2.0] * 8, [1.0] * 8, 2.0, NONE).seconds == pytest.approx(16.0)


def test_where_layers_differ_what_is_read_ahead_decides() -> None:
    assert simulate([3.0, 1.0, 3.0], [3.0, 1.0, 3.0], 0.0, NONE) == pytest.approx(PassTime(0, 7))
    for most, waiting in (4, 1.0), (1, 3.0):
        found = simulate([2.0, 3.0, 1.0], [1.0, 3.0, 1.0], 0.0, NONE, most=most)
        assert found == pytest.approx(PassTime(waiting, 5.0))


def test_what_disturbs_each_other_takes_as_long_as_one_after_the_other() -> None:
    assert simulate([2.0] * 8, [1.0] * 8, 1.0, BOTH).seconds == pytest.approx(25.0)


def test_a_layer_that_is_the_only_one_is_not_read_while_it_runs() -> None:
    assert simulate([4.0, None], [1.0, 1.0], 1.0, NONE).seconds == pytest.approx(1.0 + 4.0)
    assert simulate([4.0], [3.0], 0.0, NONE).seconds == pytest.approx(7.0)


def test_who_reads_may_take_processors_from_who_computes_and_lose_none() -> None:
    slowdown = Slowdown(reading=0.0, computing=1.0)
    assert simulate([2.0] * 8, [0.5] * 8, 0.0, slowdown) == pytest.approx(PassTime(8.0, 8.0))
    assert simulate([1.0] * 8, [2.0] * 8, 0.0, slowdown) == pytest.approx(PassTime(0.0, 20.0))


def test_or_lose_all() -> None:
    slowdown = Slowdown(reading=1.0, computing=0.0)
    assert simulate([2.0] * 8, [1.0] * 8, 0.0, slowdown) == pytest.approx(PassTime(12.0, 8.0))


def test_layers_that_stay_run_while_the_next_streamed_one_is_read() -> None:
    reads = [None] * 4 + [3.0] * 4
    assert simulate(reads, [1.0] * 8, 1.0, NONE, most=2).seconds == pytest.approx(12.0)
    # One layer has to be read whole while none of those that stay is left to run.
    assert simulate([None, None, 4.0], [1.0] * 3, 1.0, NONE) == pytest.approx(PassTime(1.0, 4.0))


def test_one_layer_is_read_ahead_where_reading_is_much_faster() -> None:
    assert depth([(1.0, 2.0)] * 8, 10.0) == 1
    assert depth([(1.0, 1.1)] * 8, 0.0) == 3
    # One that runs with those before it, which stay, says nothing of the others.
    assert depth([(1.0, 20.0)] + [(1.0, 0.5)] * 7, 1.0) == 4
    assert depth([(2.0, 1.0)] * 8, 3.0) == 3
    assert depth([(2.0, 1.0)] * 2, 30.0) == 2
    assert depth([(0.1, 3.0), (2.0, 3.0)] * 4, 0.0) == 3  # by the one that takes longest to read


# ------------------------------------------------------------------------------------------- always


@given(layers, seconds, shares, st.integers(1, 5))
def test_bounds(made: list, outside: float, share: float, most: int) -> None:
    """No less than the larger of reading and computing, and no more than one after the other."""
    reads = [read if absent else None for read, _, absent in made]
    computes = [compute for _, compute, _ in made]
    found = simulate(reads, computes, outside, Slowdown(share, share), most).seconds
    reading, computing = sum(r or 0.0 for r in reads), sum(computes) + outside
    # What is read ahead at the end of a pass and not at the end of the one before.
    slack = 1e-6
    assert max(reading, computing) - slack <= found <= reading + computing + slack


@given(
    st.integers(1, 12), seconds, seconds, seconds, shares, st.integers(2, 5),
    st.sampled_from(PLACEMENTS[:2]),
)  # fmt: skip
def test_more_memory_is_never_slower(
    count: int, read: float, compute: float, outside: float, share: float, most: int, where: str
) -> None:
    def with_resident(number: int) -> float:
        stay = placed(number, range(count), where)
        reads = [None if i in stay else read for i in range(count)]
        return simulate(reads, [compute] * count, outside, Slowdown(share, share), most).seconds

    # The last absent layer cannot be read while it runs: then one more that stays may be slower.
    found = [with_resident(number) for number in range(count + 1) if number != count - 1]
    for more, fewer in zip(found[1:], found):
        assert more <= fewer * 1.001 + 1e-9


@settings(max_examples=examples(15))
@given(st.lists(layer, min_size=1, max_size=6), seconds, slower, slower)
def test_a_slowdown_is_found_again(
    made: list, outside: float, reading: float, computing: float
) -> None:
    """Or another one that makes no difference to such a pass."""
    reads, computes = [read for read, _, _ in made], [compute for _, compute, _ in made]
    known = simulate(reads, computes, outside, Slowdown(reading, computing))
    found = simulate(reads, computes, outside, fitted_slowdown(reads, computes, outside, known))
    assert sum(found) == pytest.approx(sum(known), rel=0.05)


def test_one_pass_that_begins_with_nothing_read() -> None:
    # The second layer is read while the first one runs.
    found = simulate([1.0] * 2, [2.0] * 2, 0.0, NONE, passes=1)
    assert found == pytest.approx(PassTime(1.0, 4.0))
    slowdown = Slowdown(0.53, 1.29)  # between the places that are tried first
    known = simulate([2.0] * 8, [1.0] * 8, 0.0, slowdown, passes=1)
    found = fitted_slowdown([2.0] * 8, [1.0] * 8, 0.0, known, passes=1)
    assert (found.reading, found.computing) == pytest.approx((0.53, 1.29), abs=0.01)


# -------------------------------------------------------------------------------------- predictions


def test_a_prediction() -> None:
    told = predict([10] * 4, measured(4), {0, 1}, cached=True, prompt=1, chunk=4)
    assert told.reading == 2.0 and told.computing == 3.0
    assert told.token == told.prompt and 3.0 <= told.token <= 5.0
    slower = predict([10] * 4, measured(4), {0, 1}, cached=False, prompt=1, chunk=4)
    assert slower.reading == 4.0 and slower.token > told.token


@pytest.mark.parametrize("more", [1, 2])
def test_a_prompt_is_read_in_chunks_and_its_last_token_by_itself(more: int) -> None:
    told = predict([10] * 4, measured(4), range(4), cached=True, prompt=9 + more, chunk=4)
    chunk = 4 * (0.5 + 4 * 0.1) + 0.5
    rest = 4 * (0.5 + more * 0.1) + 0.5
    assert told.prompt == pytest.approx(2 * chunk + rest + told.token)


@pytest.mark.parametrize(
    ("prompt", "passes"), [(1, []), (2, [2]), (4, [4]), (5, [5]), (6, [4, 2]), (9, [4, 5])]
)
def test_or_it_goes_along(prompt: int, passes: list[int]) -> None:
    told = predict([10] * 4, measured(4), range(4), cached=True, prompt=prompt, chunk=4, along=True)
    seconds = [4 * (0.5 + count * 0.1) + 0.5 for count in passes] or [told.token]
    assert told.prompt == pytest.approx(sum(seconds))


def test_layers_that_stay_are_not_waited_for() -> None:
    told = predict([10] * 4, measured(4, stays=0.5), range(4), cached=True, prompt=1, chunk=4)
    assert told.token == pytest.approx(4 * 0.25 + 1.0)
    assert math.isfinite(told.prompt)
