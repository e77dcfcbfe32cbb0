"""What toastkit/native/kernels writes into caches of keys and values, on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from tests.native_library import needed
from tests.unit.native_kernels import ROUNDING, TYPES, Kernels, kernels, on_row_sets, read, stored
from tests.unit.native_rows import appended, numbers, room

__all__ = ["kernels"]
pytestmark = needed
types = st.sampled_from(list(TYPES))
LARGEST = 65504.0


@settings(max_examples=examples(60))
@given(st.integers(0, 1 << 30), st.tuples(*[st.integers(1, 3)] * 2, st.integers(0, 5)),
       st.integers(0, 70), st.tuples(types, types), st.booleans(), st.data())  # fmt: skip
def test_positions_are_rounded_into_their_place(
    kernels: Kernels, seed: int, shape: tuple, size: int, kinds: tuple, turned: bool, data
) -> None:  # fmt: skip
    """And nothing else of the cache is touched, which lies head by head or position by position."""
    batch, heads, length = shape
    if turned:  # as (batch, length, heads, size) lies in memory, with gaps
        x = numbers(seed, (batch, length, heads, size), kinds[0], 3).swapaxes(1, 2)
    else:
        x = numbers(seed, (batch, heads, length, size), kinds[0])
    first, rest = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    cache = room((batch, heads, first + length + rest, size), kinds[1])
    if data.draw(st.booleans()):
        cache = np.ascontiguousarray(cache.transpose(2, 0, 1, 3)).transpose(1, 2, 0, 3)
    wide, new = read(x, kinds[0]), slice(first, first + length)
    most = abs(wide) * ROUNDING[kinds[1]] * 1.01 + 2.0**-24
    for _ in kernels.row_sets():
        out = read(appended(kernels, x, kinds[0], cache, kinds[1], first), kinds[1])
        assert (abs(out[:, :, new] - wide) <= most).all()
        assert (out[:, :, :first] == 7).all() and (out[:, :, first + length :] == 7).all()


@settings(max_examples=examples(40))
@given(st.integers(0, 1 << 30), st.tuples(*[st.integers(1, 3)] * 2, st.integers(0, 5)),
       st.integers(0, 70), types, st.tuples(*[st.integers(0, 3)] * 2))  # fmt: skip
def test_positions_in_8_bits(
    kernels: Kernels, seed: int, shape: tuple, size: int, kind: str, around: tuple
) -> None:
    """To the bit as numpy rounds them, with the scale of each; and nothing else is touched."""
    batch, heads, length = shape
    x = numbers(seed, (batch, length, heads, size), kind, 3).swapaxes(1, 2)
    first, rest = around
    cache = np.full((batch, heads, first + length + rest, size + 4 * (size > 0)), 7, np.int8)
    wanted = cache.copy()
    if size:
        wanted[:, :, first : first + length] = stored(read(x, kind), "i8")
    for _ in kernels.row_sets():
        assert np.array_equal(appended(kernels, x, kind, cache, "i8", first), wanted)


@on_row_sets
def test_many_are_shared_out(kernels: Kernels) -> None:
    x = numbers(3, (2, 3, 400, 64), "f32")
    out = appended(kernels, x, "f32", room((2, 3, 512, 64), "f32"), "f32", 100)
    assert np.array_equal(out[:, :, 100:500], x)
    assert (out[:, :, :100] == 7).all() and (out[:, :, 500:] == 7).all()


@on_row_sets
def test_numbers_at_the_ends(kernels: Kernels) -> None:
    given = [0.1, -0.0, 7e4, -1e30, np.inf, -np.inf, np.nan, 6e-8, 65519.0]
    x = np.array(given * 3, np.float32)[None, None, None]
    half = appended(kernels, x, "f32", room(x.shape, "f16"), "f16", 0)[0, 0, 0]
    wanted = [np.float16(0.1), -0.0, LARGEST, -LARGEST, LARGEST, -LARGEST, np.nan, 6e-8, LARGEST]
    assert np.array_equal(half, np.array(wanted * 3, np.float16), equal_nan=True)
    assert np.array_equal(np.signbit(half), np.signbit(np.array(wanted * 3)))
    for kind in ("f32", "bf16"):  # these have them
        out = read(appended(kernels, x, "f32", room(x.shape, kind), kind, 0), kind)[0, 0, 0, 4:7]
        assert np.array_equal(out, x[0, 0, 0, 4:7], equal_nan=True)


@on_row_sets
def test_what_is_no_place_is_refused(kernels: Kernels) -> None:
    x, cache = stored(np.zeros((1, 1, 2, 8)), "f32"), room((1, 1, 4, 8), "f32")
    for first in (-1, 3):
        with pytest.raises(ValueError, match="1"):
            appended(kernels, x, "f32", cache, "f32", first)
