"""Attention in tiles of bytes (AMX), emulated where the processor has them not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from tests.conftest import examples
from tests.native_library import needed
from tests.unit.native_attention import Asked, asked, attend, cached, types
from tests.unit.native_kernels import SETS, Kernels, kernels

__all__ = ["kernels"]
pytestmark = [
    needed, pytest.mark.skipif("amx_int8" not in SETS, reason="of x86-64")
]  # fmt: skip


@pytest.fixture(autouse=True)
def tiles(kernels: Kernels) -> None:
    if not kernels.use("amx_int8"):
        pytest.skip("no amx_int8 here")


def check(kernels: Kernels, asked: Asked, out_type: str = "f32") -> None:
    """To the bit what the processor computes without tiles, which float64 has checked."""
    assert kernels.use("avx512vnni")
    without = attend(kernels, asked, out_type)
    assert kernels.use("amx_int8")
    out = attend(kernels, asked, out_type)
    assert out.tobytes() == without.tobytes()


@settings(max_examples=examples(80))
@given(asked=asked(kept=("i8",)), out_type=types)
def test_tiles_change_no_bit(kernels: Kernels, asked: Asked, out_type: str) -> None:
    check(kernels, asked, out_type)


@settings(max_examples=examples(20))
@given(asked=asked(kept=("i8", "bf16")))
def test_other_numbers_go_without(kernels: Kernels, asked: Asked) -> None:
    if kernels.library is not kernels.whole:
        pytest.skip("tiles alone have nobody to go to")
    check(kernels, asked)


@pytest.mark.parametrize("size", [1, 63, 64, 65, 96, 100, 127, 128, 129, 250, 256, 257])
def test_sizes_of_heads(kernels: Kernels, size: int) -> None:
    """Nothing behind the last row is read, which the sanitizers see."""
    for keys in (16, 563):
        rows = [cached(i, (1, 2, keys, size), "i8", "turned") for i in (2, 3)]
        for repeats in (4, 16):
            queries = cached(1, (1, 2 * repeats, 1, size), "f32", "cache")
            check(kernels, Asked(queries, *rows, ("f32", "i8", "i8"), size**-0.5))


def test_a_long_context(kernels: Kernels) -> None:
    """Whose spans are shared out, with rows that are no numbers."""
    keys, values = (cached(i, (1, 1, 600, 128), "i8", "cache") for i in (2, 3))
    keys[0, 0, 300, -4:].view(np.float32)[:] = np.nan
    values[0, 0, 550, -4:].view(np.float32)[:] = np.inf
    for rows in (1, 8, 9, 17, 64, 130):
        queries = cached(1, (1, rows, 1, 128), "f32", "cache")
        queries[0, -1] = 0
        check(kernels, Asked(queries, keys, values, ("f32", "i8", "i8"), 128**-0.5))
