"""Equations 1 and 2 of paper 001: by hand, by counting, and beside the paper's figures; and which
layers stay: as many as asked for, where the placement says."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toastkit.residency.residency_options import PLACEMENTS, PRIORITIES
from toastkit.residency.sizing import (
    RUNTIME,
    Sizes,
    adaptive,
    cache_reserve,
    fitting,
    minimum,
    needed,
    placed,
)

MB = 1 << 20
# Qwen3.5-9B in 6 bits (section 3.2): 1.54 GB outside the layers, 32 of 168 MB.
PAPER = Sizes(1540 * 10**6, (168 * 10**6,) * 32, 0, 0)
placements, totals = st.sampled_from(PLACEMENTS), st.integers(1, 100)
layer_lists = st.lists(st.integers(1, 50), min_size=1, max_size=12).map(tuple)


def sizes(layers: tuple[int, ...], outside: int = 0, fixed: int = 0) -> Sizes:
    return Sizes(outside, layers, 0.5, fixed)


def held(model: Sizes, stay: frozenset[int]) -> int:
    """The most bytes at any instant of two tokens: layers that stay, the one that runs, the next
    absent one on its way."""
    absent = [size for i, size in enumerate(model.layers) if i not in stay]
    pairs = zip(absent, absent[1:] + absent[:1])
    most = max((a + b for a, b in pairs), default=0) if len(absent) > 1 else sum(absent)
    return model.outside + sum(model.layers[i] for i in stay) + most


# ------------------------------------------------------------------------------------ equation 1


def test_the_minimum_holds_two_layers() -> None:
    model = sizes((5, 9, 7), outside=100, fixed=20)
    assert minimum(model) == 100 + 9 + 7 + 20
    assert minimum(sizes((5,), outside=100)) == 105 and minimum(sizes((), outside=100)) == 100


@pytest.mark.parametrize(("budget", "count"), [(2.0, 2), (3.0, 8), (3.5, 11), (4.0, 14), (5.0, 20)])
def test_the_paper_s_budgets(budget: float, count: int) -> None:
    """Table 7; the paper's budgets are without the window."""
    assert fitting(PAPER, int(budget * 10**9) + 2 * PAPER.layers[0], 0, "first") == count


def test_alike_layers_by_hand() -> None:
    model = sizes((10,) * 8, outside=100)
    for budget, count in [(119, 0), (120, 0), (129, 0), (130, 1), (179, 5), (180, 8), (999, 8)]:
        assert fitting(model, budget, 0, "first") == count, budget
    assert fitting(model, 137, 7, "first") == 1 and fitting(model, 137, 8, "first") == 0


def test_sums_are_exact_where_layers_differ() -> None:
    """A mixture's first layers are small, and the window is of the large ones."""
    model = sizes((1, 1, 1, 30, 30, 30))
    assert needed(model, 3, "first") == 3 + 60 and needed(model, 3, "last") == 90 + 2
    assert fitting(model, 63, 0, "first") == 3
    assert fitting(model, 63, 0, "last") == 0 and fitting(model, 90, 0, "last") == 1
    assert fitting(model, 92, 0, "last") == 3


@given(layer_lists, st.integers(0, 700), st.integers(0, 50), placements)
def test_what_fits_fits_and_no_more_does(
    layers: tuple[int, ...], budget: int, reserve: int, placement: str
) -> None:
    model = sizes(layers, outside=30)
    count = fitting(model, budget, reserve, placement)
    stay = placed(count, range(len(layers)), placement)
    if count:
        assert held(model, stay) + reserve <= needed(model, count, placement) + reserve <= budget
    for more in range(count + 1, len(layers) + 1):
        assert needed(model, more, placement) + reserve > budget


@given(layer_lists, st.integers(0, 700), st.integers(0, 300), placements)
def test_a_larger_budget_never_holds_fewer(
    layers: tuple[int, ...], budget: int, more: int, placement: str
) -> None:
    model = sizes(layers, outside=30)
    assert fitting(model, budget, 9, placement) <= fitting(model, budget + more, 9, placement)
    assert fitting(model, budget + more, 9 + more, placement) == fitting(
        model, budget, 9, placement
    )


@given(layer_lists, placements)
def test_where_all_fit_all_stay(layers: tuple[int, ...], placement: str) -> None:
    model = sizes(layers, outside=7)
    whole = 7 + sum(layers)
    assert fitting(model, whole, 0, placement) == len(layers)
    assert needed(model, 0, placement) == minimum(model) <= whole


# ------------------------------------------------------------------------------------ equation 2


def test_the_paper_s_most() -> None:
    """Table 8, max-tps: 24 layers with 6.5 GB available. So many were too many there."""
    assert adaptive(PAPER, 6500 * 10**6, 0, "first") == 24
    assert adaptive(PAPER, 1800 * 10**6, 0, "first") == adaptive(PAPER, 0, 0, "first") == 0


def test_the_reserve_is_taken_off() -> None:
    model = Sizes(0, (10 * MB,) * 100, 0, 0)
    assert adaptive(model, 660 * MB, 0, "first") == 45
    assert adaptive(model, 660 * MB, 100 * MB, "first") == 36
    assert adaptive(model, 100 << 30, 0, "first") == 100
    assert adaptive(model, 0, 0, "first") == 0


@given(layer_lists, st.integers(-50, 900), st.integers(0, 50), placements)
def test_never_more_than_the_equation_and_than_fits(
    layers: tuple[int, ...], spare: int, reserve: int, placement: str
) -> None:
    model = sizes(layers, outside=30)
    average = sum(layers) / len(layers)
    count = adaptive(model, RUNTIME + spare, reserve, placement)
    assert 0 <= count <= len(layers)
    assert count <= max(0, 0.9 * (spare - 30 - average - reserve) / average)
    if count:
        assert needed(model, count, placement) + reserve <= spare


@given(st.integers(1, 50), st.integers(1, 40), st.integers(0, 3000))
def test_alike_layers_are_the_equation_but_for_the_second_one_on_its_way(
    size: int, count: int, spare: int
) -> None:
    model = sizes((size,) * count)
    paper = max(0, min(count, math.floor(0.9 * (spare - size) / size)))
    found = adaptive(model, RUNTIME + spare, 0, "first")
    assert paper - 1 <= found <= paper
    assert found == paper or needed(model, paper, "first") > spare


def test_a_model_without_weights_in_its_layers() -> None:
    assert adaptive(sizes((0, 0)), 1 << 30, 0, "first") == 2
    assert adaptive(sizes(()), 1 << 30, 0, "first") == 0


# -------------------------------------------------------------------------------------- the caches


def test_tokens_to_keep_room_for() -> None:
    model = Sizes(0, (1,), 2.5, 1000)
    for priority, context, tokens in [
        ("max-tps", 8192, 512), ("balanced", 8192, 1024), ("max-context", 8192, 8192),
        ("max-tps", 100, 100), ("balanced", 0, 0), ("max-context", 7, 7),
    ]:  # fmt: skip
        assert cache_reserve(model, priority, context) == 1000 + math.ceil(2.5 * tokens)


@given(layer_lists, st.integers(0, 1 << 20), st.integers(0, 2000), placements)
def test_the_more_context_the_fewer_layers(
    layers: tuple[int, ...], context: int, budget: int, placement: str
) -> None:
    """In the order of the priorities, where the context is a long one."""
    model = Sizes(0, layers, 0.5, 9)
    reserves = [cache_reserve(model, priority, context) for priority in PRIORITIES]
    counts = [fitting(model, budget, reserve, placement) for reserve in reserves]
    assert reserves == sorted(reserves) and counts == sorted(counts, reverse=True)


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
