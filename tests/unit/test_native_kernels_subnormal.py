"""No kernel computes with numbers below the normal ones, which make Intel's processors slow."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from tests.native_library import needed
from tests.unit.native_attention import Asked, attend, cached
from tests.unit.native_kernels import (
    PAIR_DIGITS,
    Kernels,
    kernels,
    on_each,
    on_row_sets,
    on_sets,
    random_matrix,
)
from tests.unit.native_rows import distribution, log_sum_exp, softmax

__all__ = ["kernels"]
pytestmark = [
    needed, pytest.mark.skipif(platform.machine() != "x86_64", reason="MXCSR is of x86-64")
]  # fmt: skip
MET, MADE = 2, 16  # of MXCSR: an operation had such a number, or gave one
LEAST = np.float32(float.fromhex("-0x1.5d589ep6"))  # whose exponential is normal


@contextmanager
def none_subnormal() -> Iterator[None]:
    """Of this thread, meanwhile."""
    libm, state = ctypes.CDLL("libm.so.6"), (ctypes.c_uint32 * 8)()
    libm.fesetenv(ctypes.c_void_p(-1))  # the default, with no flag set
    yield
    libm.fegetenv(state)
    assert not state[7] & (MET | MADE)


@on_sets
def test_no_scale_beyond_the_last_is(kernels: Kernels) -> None:
    """As a byte of 0 would be in mxfp4."""
    x = np.random.default_rng(1).normal(size=(6, 96)).astype(np.float32)
    matrix = random_matrix(2, (1, 17, 96), "mxfp4", 32, "")
    for bits in (12, 16, 32):
        for count in (1, 5, 6):
            with none_subnormal():
                kernels.multiply(matrix, x[:count], activation_bits=bits)


@on_row_sets
def test_no_exponential_is(kernels: Kernels) -> None:
    """The first that would be is 0, the last one above it right."""
    x = np.concatenate([np.linspace(-110, -80, 2000), [LEAST, np.nextafter(LEAST, -100), 0]])
    x = x.astype(np.float32)[None]
    for of_row in (log_sum_exp, distribution):
        with none_subnormal():
            of_row(kernels, x, "f32")
    with none_subnormal():
        out = softmax(kernels, x, ("f32", "f32"))
    assert np.array_equal(out > 0, x >= LEAST)
    exact = np.where(x >= LEAST, np.exp(x.astype(np.float64)), 0)
    np.testing.assert_allclose(out, exact, rtol=2e-5)


@on_each(tuple(PAIR_DIGITS))
def test_no_weight_times_the_scale_of_a_value_is(kernels: Kernels) -> None:
    """Of 8-bit attention with scores far apart, of few queries and of many."""
    keys, values = (cached(i, (1, 1, 300, 64), "i8", "turned") for i in (2, 3))
    for count in (1, 4, 70):
        queries = cached(1, (1, count, 1, 64), "f32", "turned") * np.float32(30)
        with none_subnormal():
            attend(kernels, Asked(queries, keys, values, ("f32", "i8", "i8"), 64**-0.5))
