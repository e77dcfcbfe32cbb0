"""Which layers stay: as many as asked for, where the placement says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toastkit.residency.placement import placed
from toastkit.residency.residency_options import PLACEMENTS

totals = st.integers(1, 100)
placements = st.sampled_from(PLACEMENTS)


@pytest.mark.parametrize(
    ("count", "placement", "stay"),
    [
        (3, "first", {0, 1, 2}),
        (3, "last", {5, 6, 7}),
        (0, "last", set()),
        (1, "interleaved", {0}),
        (2, "interleaved", {0, 4}),
        (4, "interleaved", {0, 2, 4, 6}),
        (6, "interleaved", {0, 2, 3, 4, 6, 7}),
    ],
)
def test_of_eight_layers(count: int, placement: str, stay: set) -> None:
    assert placed(count, range(8), placement) == stay


def test_indices_are_those_given() -> None:
    assert placed(2, [3, 5, 7, 9], "last") == {7, 9}
    assert placed(2, [3, 5, 7, 9], "interleaved") == {3, 7}


@given(st.integers(-3, 120), totals, placements)
def test_as_many_as_asked_for(count: int, total: int, placement: str) -> None:
    stay = placed(count, range(total), placement)
    assert len(stay) == max(0, min(count, total)) and stay <= set(range(total))


@given(st.integers(0, 99), totals, st.sampled_from(["first", "last"]))
def test_one_more_moves_one_layer(count: int, total: int, placement: str) -> None:
    assert placed(count, range(total), placement) <= placed(count + 1, range(total), placement)


@given(st.data(), totals)
def test_interleaved_layers_are_spread_evenly(data: st.DataObject, total: int) -> None:
    """Every stretch, also one that goes on from the last layer to the first of the next token."""
    stay = placed(data.draw(st.integers(0, total)), range(total), "interleaved")
    length = data.draw(st.integers(1, total))
    held = {sum((i + k) % total in stay for k in range(length)) for i in range(total)}
    assert max(held) - min(held) <= 1


def test_of_no_layers_none_stays() -> None:
    assert placed(0, [], "interleaved") == frozenset()
