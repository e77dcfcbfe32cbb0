"""Attention of toastkit/native/kernels, against float64, on every instruction set of this
processor."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from tests.native_library import needed
from tests.unit.native_attention import (
    LOWEST,
    Asked,
    Wanted,
    asked,
    attend,
    attend_all,
    cached,
    types,
    wanted,
)
from tests.unit.native_kernels import (
    KEPT_TYPES,
    ROUNDING,
    Kernels,
    kernels,
    on_row_sets,
    read,
    stored,
)
from tests.unit.native_rows import numbers, quantised_rows

__all__ = ["kernels"]
pytestmark = needed


def multiplies_integers(kernels: Kernels) -> bool:
    """Whether what keys and values in 8 bits meet has 16 bits there."""
    return kernels.instructions.startswith("avx")


def check(
    kernels: Kernels, asked: Asked, out_type: str = "f32", known: Wanted | None = None
) -> np.ndarray:
    """Attention of out_type, within the error bounds of float64's. known: that, where it has been
    computed."""
    given = attend(kernels, asked, out_type)
    out, (right, size) = read(given, out_type), known or wanted(asked)
    # A score is off by some roundings of its terms, and so is a weight by that share.
    q, k = (abs(read(array, type_)) for array, type_ in zip(asked[:2], asked.types))
    terms = abs(asked.scale) * q.max(initial=0) * k.max(initial=0) * q.shape[-1]
    share = 2.0**-23 * (terms + 20)
    most = size * (share + ROUNDING[out_type] * 1.01) + 2.0**-24
    if multiplies_integers(kernels):
        # Queries have 16 bits there, half a step being a share of the largest number of a row;
        # weights of values likewise, of a span.
        keys, values = (type_ == "i8" for type_ in asked.types[1:])
        v = abs(read(asked.values, asked.types[2])).max(initial=0)
        most = most + v * (keys * 2.0**-14 * terms + values * 2.0**-16 * asked.keys.shape[2])
    assert (abs(out - right) <= most).all()
    return given


@settings(max_examples=examples(120))
@given(asked=asked(), out_type=types)
def test_attention_is_that_of_float64(kernels: Kernels, asked: Asked, out_type: str) -> None:
    known = wanted(asked)
    for _ in kernels.row_sets():
        check(kernels, asked, out_type, known)


@settings(max_examples=examples(40))
@given(asked=asked(), threads=st.integers(1, 4))
def test_a_batch_gives_what_its_queries_give(kernels: Kernels, asked: Asked, threads: int) -> None:
    """To the bit, with any number of threads."""
    for _ in kernels.row_sets():
        together = attend(kernels, asked)
        kernels.library.toast_set_threads(threads)
        for row in range(len(asked.queries)):
            assert np.array_equal(attend(kernels, asked.of_batch(row))[0], together[row])


@settings(max_examples=examples(40))
@given(asked=asked(kinds=("none",)), data=st.data())
def test_padding_before_changes_nothing(kernels: Kernels, asked: Asked, data) -> None:
    batch, m = len(asked.queries), asked.keys.shape[2]
    padding = [data.draw(st.integers(0, m - 1)) for _ in range(batch)]
    mask = np.arange(m) >= np.array(padding)[:, None, None, None]
    for _ in kernels.row_sets():
        together = attend(kernels, asked._replace(mask=mask))
        for row, hidden in enumerate(padding):
            assert np.array_equal(attend(kernels, asked.of_batch(row, hidden))[0], together[row])


@settings(max_examples=examples(40))
@given(asked=asked(kinds=("none",)))
@on_row_sets
def test_queries_at_a_time_or_in_turn(kernels: Kernels, asked: Asked) -> None:
    """A prompt in one pass gives, to the bit, what it gives token by token."""
    n, m = asked.queries.shape[2], asked.keys.shape[2]
    together = attend(kernels, asked._replace(mask="causal"))
    for i in range(n) if n <= m else ():
        seen = m - n + i + 1
        one = asked._replace(
            queries=asked.queries[:, :, i : i + 1], keys=asked.keys[:, :, :seen],
            values=asked.values[:, :, :seen],
        )  # fmt: skip
        assert np.array_equal(attend(kernels, one)[:, :, 0], together[:, :, i])


@pytest.mark.parametrize("type_", list(KEPT_TYPES))
def test_long_contexts_are_shared_out(kernels: Kernels, type_: str) -> None:
    """In three spans of keys. Each query has, to the bit, what it has alone."""
    keys, values = (cached(i, (1, 1, 1500, 128), type_, "cache") for i in (2, 3))
    for rows in (1, 11, 16, 17, 64, 130):
        queries = cached(1, (1, rows, 1, 128), "f32", "cache")
        asked = Asked(queries, keys, values, ("f32", type_, type_), 128**-0.5)
        known = wanted(asked)
        for _ in kernels.row_sets():
            together = check(kernels, asked, known=known)
            alone = attend(kernels, asked._replace(queries=asked.queries[:, -1:]))
            assert np.array_equal(together[:, -1:], alone)


@pytest.mark.parametrize("threads", [1, 3])
@on_row_sets
def test_several_are_each_alone(kernels: Kernels, threads: int) -> None:
    """Keys of few positions, which a thread takes whole, and of many, which all share; one with
    none is refused before anything is written."""
    random = np.random.default_rng(1)
    longest = [random.standard_normal((1, 2, 5000, 64)).astype(np.float32) for _ in range(2)]
    queries = [random.standard_normal((1, 16, 1, 64)).astype(np.float32) for _ in range(4)]
    several = [
        Asked(q, *(x[:, :, :n] for x in longest), ("f32", "f32", "f32"), 0.125)
        for q, n in zip(queries, (1, 5000, 37, 4000))
    ]
    kernels.library.toast_set_threads(threads)
    for found, one in zip(attend_all(kernels, several), several):
        assert np.array_equal(found, attend(kernels, one))
    none = several[0]._replace(keys=longest[0][:, :, :0], values=longest[1][:, :, :0])
    with pytest.raises(ValueError):
        attend_all(kernels, [*several, none])


@pytest.mark.parametrize("type_", list(KEPT_TYPES))
def test_heads_that_lie_side_by_side(kernels: Kernels, type_: str) -> None:
    """As a session's file has them, and taken together, which two threads do: to the bit what they
    give one by one."""
    keys, values = (cached(i, (2, 5, 2049, n), type_, "turned") for i, n in ((2, 24), (3, 40)))
    by_head = {"keys": np.ascontiguousarray(keys), "values": np.ascontiguousarray(values)}
    for repeats in (1, 3, 9, 16):
        queries = cached(1, (2, 5 * repeats, 1, 24), "f32", "cache")
        sinks = queries[0, :, 0, 0].copy()
        asked = Asked(queries, keys, values, ("f32", type_, type_), 0.2, sinks=sinks)
        known = wanted(asked)
        for _ in kernels.row_sets():
            kernels.library.toast_set_threads(2)
            together = check(kernels, asked, known=known)
            assert np.array_equal(together, attend(kernels, asked._replace(**by_head)))


@pytest.mark.parametrize("type_", list(KEPT_TYPES))
def test_sizes_of_heads(kernels: Kernels, type_: str) -> None:
    for size in (64, 96, 100, 256):
        queries = cached(1, (1, 8, 1, size), "f32", "cache")
        keys, values = (cached(i, (1, 2, 600, size), type_, "cache") for i in (2, 3))
        asked = Asked(queries, keys, values, ("f32", type_, type_), size**-0.5)
        known = wanted(asked)
        for _ in kernels.row_sets():
            check(kernels, asked, known=known)


@settings(max_examples=examples(20))
@given(asked=asked(kept=("i8", "f32")), out_type=types)
def test_8_bits_are_what_they_stand_for(kernels: Kernels, asked: Asked, out_type: str) -> None:
    """To the bit what the same numbers give in float32, where these are multiplied."""
    wide = [
        read(array, type_).astype(np.float32) for array, type_ in zip(asked[1:3], asked.types[1:])
    ]
    of = asked._replace(keys=wide[0], values=wide[1], types=(asked.types[0], "f32", "f32"))
    for _ in kernels.row_sets():
        if not multiplies_integers(kernels):
            assert np.array_equal(attend(kernels, asked, out_type), attend(kernels, of, out_type))


@pytest.mark.parametrize("size", [128, 516, 517, 1100])
def test_the_largest_sums_fit(kernels: Kernels, size: int) -> None:
    """Of numbers that are all the largest, of the least that a byte can be, too."""
    for repeats in (1, 4, 30):
        queries = np.ones((1, repeats, 1, size), np.float32)
        keys, values = (stored(np.ones((1, 1, 1024, n), np.float32), "i8") for n in (size, 24))
        keys[..., ::2, :size] = -128
        values[..., 256:, :24] = -128
        asked = Asked(queries, keys, values, ("f32", "i8", "i8"), 1 / size)
        known = wanted(asked)
        for _ in kernels.row_sets():
            check(kernels, asked, known=known)


@on_row_sets
def test_many_tiles_go_on_from_span_to_span(kernels: Kernels) -> None:
    """To the bit what fewer give, whose spans are shared out."""
    queries, keys, values = (cached(i, (5, 13, n, 8), "f32", "cache")
                             for i, n in enumerate((16, 600, 600)))  # fmt: skip
    asked = Asked(queries, keys, values, ("f32",) * 3, 0.3, "causal")
    together = check(kernels, asked)
    assert np.array_equal(attend(kernels, asked.of_batch(4))[0], together[4])


@on_row_sets
def test_queries_that_see_nothing(kernels: Kernels) -> None:
    """The mean of all values, or nothing beside a sink; so where numbers hide all."""
    queries, keys, values = (cached(i, (2, 4, n, 16), "f32", "cache")
                             for i, n in enumerate((3, 700, 700)))  # fmt: skip
    mask = np.arange(700) >= np.array([700, 30])[:, None, None, None]
    asked = Asked(queries, keys, values, ("f32",) * 3, 0.5, mask)
    check(kernels, asked)
    check(kernels, asked._replace(mask=np.where(mask, 0, LOWEST["f32"]).astype(np.float32)))
    sinks = np.ones(4, np.float32)
    assert not attend(kernels, asked._replace(sinks=sinks))[0].any()
    nothing = np.full((2, 1, 1, 700), -np.inf, np.float32)
    assert np.isnan(attend(kernels, asked._replace(mask=nothing))).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("rows", [2, 40])
@on_row_sets
def test_what_is_no_number_stays_none(kernels: Kernels, bad: float, rows: int) -> None:
    """In the query that sees it, and in no other."""
    queries, keys, values = (cached(i, (1, 1, n, 16), "f32", "cache")
                             for i, n in enumerate((rows, 600, 600)))  # fmt: skip
    keys[0, 0, 599, 3] = bad
    values[0, 0, 599] = 1
    queries[0, 0, -1, 3] = 1
    out = attend(kernels, Asked(queries, keys, values, ("f32",) * 3, 1.0, "causal"))[0, 0]
    assert np.isnan(out[-1]).all() and np.isfinite(out[:-1]).all()


@on_row_sets
def test_large_scores_leave_one_key(kernels: Kernels) -> None:
    queries, keys, values = (cached(i, (1, 2, n, 8), "f32", "cache")
                             for i, n in enumerate((1, 900, 900)))  # fmt: skip
    keys[0, :, 555] = queries[0, :, 0] * 1e6
    out = attend(kernels, Asked(queries, keys, values, ("f32",) * 3, 1e3))
    assert np.array_equal(out[:, :, 0], values[:, :, 555])


@on_row_sets
def test_what_is_not_known_is_refused(kernels: Kernels) -> None:
    queries, keys, values = (cached(i, (1, heads, 4, 8), "f32", "cache")
                             for i, heads in enumerate((6, 3, 3)))  # fmt: skip
    good = Asked(queries, keys, values, ("f32",) * 3, 1.0)
    with pytest.raises(ValueError, match="1"):  # heads that cannot be shared
        attend(kernels, good._replace(keys=keys[:, :0]))
    with pytest.raises(ValueError, match="1"):
        attend(kernels, good._replace(queries=queries[:, :5]))
    with pytest.raises(ValueError, match="1"):  # a query in 8 bits
        attend(kernels, good._replace(types=("i8", "f32", "f32")))
    with pytest.raises(ValueError, match="1"):  # no keys
        attend(kernels, good._replace(keys=keys[:, :, :0], values=values[:, :, :0]))


@settings(max_examples=examples(40))
@given(
    st.integers(0, 1 << 20),
    st.integers(0, 40),
    st.one_of(st.integers(1, 140), st.just(5000)),
    types,
)
def test_rows_in_8_bits(kernels: Kernels, seed: int, count: int, size: int, type_: str) -> None:
    """As numpy rounds them, no number further off than half a step; rows of any size."""
    x = numbers(seed, (count, size), type_, gap=seed % 3)
    sizes = np.exp(np.random.default_rng(seed).normal(size=(count, 1)) * 5).clip(1e-4, 1e3)
    x[...] = stored(read(x, type_).astype(np.float32) * sizes, type_)
    values = read(x, type_)
    right = stored(values, "i8")
    most = abs(values).max(-1, keepdims=True, initial=0)
    assert (abs(read(right, "i8") - values) <= most / 254 * (1 + 1e-4)).all()
    for _ in kernels.row_sets():
        rows, wide = quantised_rows(kernels, x, type_)
        assert np.array_equal(rows, right)
        assert np.array_equal(wide, read(rows, "i8"))


@on_row_sets
def test_rows_in_8_bits_at_the_ends(kernels: Kernels) -> None:
    """Of nothing but zeros, of NaN, infinite, so small that no scale is."""
    rare = (
        [np.nan, 1, -2],
        [np.inf, 1, -1],
        [-np.inf, 3e38, 0],
        [1e-45, 2e-45, -3e-44],
        [0, 0, -0.0],
    )
    x = np.array(rare, np.float32)
    rows, wide = quantised_rows(kernels, x, "f32")
    assert np.isnan(wide[0]).all()
    with np.errstate(invalid="ignore"):
        assert np.array_equal(rows[1:], stored(x[1:], "i8"))
    wanted = [[3e38, 0, 0], [-3e38, 3e38, 0], [0, 0, 0], [0, 0, 0]]
    assert np.allclose(wide[1:], wanted, rtol=1e-6, atol=0)
