"""4-bit codes that meet activations in pairs, which share a digit, on the processor's sets."""

from __future__ import annotations

import ctypes
import mmap
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from tests.native_library import needed
from tests.unit.native_kernels import (
    TYPES,
    Kernels,
    full_matrix,
    kernels,
    on_each,
    on_sets,
    random_matrix,
)

__all__ = ["kernels"]
pytestmark = needed
BITS = 12  # of activations


def numbers(seed: int, count: int, columns: int) -> np.ndarray:
    """Random float32 (count, columns), of very different sizes."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(count, columns)) * np.exp(rng.normal(size=(count, 1)))).astype("f")


@on_each(("avx2", "avxvnni"))
def test_shared_digits_do_not_saturate(kernels: Kernels) -> None:
    """Of the largest codes, in groups of every size, times the largest numbers and digits."""
    for size, digit, sign in product((32, 64, 128), (-64, -63, -1, 0, 62, 63), (1, -1)):
        x = np.empty((1, size), np.float32)
        x[:, ::2], x[:, 1::2] = sign * 128 * 118 + digit, sign * 16 * 8 * 118 + 16 * (digit % 8)
        x[:, :2] = 128 * 118, 128 * 119  # the second is the largest number there is
        out = kernels.multiply(full_matrix((1, 9, size), 4, size), x, activation_bits=12)
        np.testing.assert_allclose(out, 15 * x.sum(dtype=np.float64), rtol=2e-7)


def before_nothing(array: np.ndarray) -> np.ndarray:
    """A copy; what reads behind it ends the process."""
    size = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    behind, none = ctypes.c_void_p(start + size), 0  # PROT_NONE
    assert not ctypes.CDLL(None).mprotect(behind, ctypes.c_size_t(mmap.PAGESIZE), none)
    copy = np.frombuffer(memory, array.dtype, array.size, size - array.nbytes)
    copy[:] = array.ravel()
    return copy.reshape(array.shape)


@pytest.mark.parametrize("columns", [512, 608])
@pytest.mark.parametrize("type_", list(TYPES))
def test_nothing_behind_a_matrix_is_read(kernels: Kernels, type_: str, columns: int) -> None:
    """No sanitizer sees what assembly reads."""
    matrix, x = random_matrix(5, (1, 67, columns), 4, 32, type_), numbers(6, 34, columns)
    assert matrix.scales is not None and matrix.biases is not None
    alone = matrix._replace(
        weight=before_nothing(matrix.weight), scales=before_nothing(matrix.scales),
        biases=before_nothing(matrix.biases),
    )  # fmt: skip
    for _ in kernels.sets():
        for count in (1, 3, 16, 34):
            out = kernels.multiply(alone, x[:count], activation_bits=BITS)
            assert np.array_equal(out, kernels.multiply(matrix, x[:count], activation_bits=BITS))


@settings(max_examples=examples(15))
@given(
    seed=st.integers(0, 1 << 30), experts=st.integers(1, 2), rows=st.integers(1, 200),
    groups=st.integers(1, 40), size=st.sampled_from((32, 64, 128)),
    type_=st.sampled_from(list(TYPES)), count=st.integers(13, 70), threads=st.integers(1, 3),
)  # fmt: skip
def test_vectors_side_by_side_are_one_by_one(
    kernels: Kernels, seed: int, experts: int, rows: int, groups: int, size: int, type_: str,
    count: int, threads: int,
) -> None:  # fmt: skip
    """To the bit: whole sixteens of them and what is left over, of any experts."""
    matrix = random_matrix(seed, (experts, rows, groups * size), 4, size, type_)
    x, rng = numbers(seed, count, groups * size), np.random.default_rng(seed)
    vector = rng.permutation(count).astype(np.uint32)
    expert = rng.integers(0, experts, count).astype(np.uint32)
    for _ in kernels.sets():
        kernels.library.toast_set_threads(threads)
        out = kernels.multiply(matrix, x, vector=vector, expert=expert, activation_bits=BITS)
        for i in (0, 12, *rng.integers(0, count, 3), count - 1):
            alone = kernels.multiply(matrix, x[vector[i] :][:1], vector=vector[:1] * 0,
                                     expert=expert[i : i + 1], activation_bits=BITS)  # fmt: skip
            assert np.array_equal(out[i], alone[0])


@settings(max_examples=examples(20))
@given(
    sizes=st.lists(st.sampled_from((32, 64)), min_size=2, max_size=6),
    rows=st.lists(st.integers(1, 300), min_size=6, max_size=6),
    counts=st.lists(st.integers(14, 70), min_size=2, max_size=3),
)
def test_matrices_share_what_is_made_of_their_vectors(
    kernels: Kernels, sizes: list[int], rows: list[int], counts: list[int]
) -> None:
    """Those of one call, where they want the same; those of the next call get their own."""
    matrices = [
        random_matrix(i, (1, rows[i], 512), 4, size, "bf16") for i, size in enumerate(sizes)
    ]
    for _ in kernels.sets():
        for seed, count in enumerate(counts):
            x = numbers(seed, count, 512)
            for matrix, out in zip(matrices, kernels.multiply_all(matrices, x, BITS), strict=True):
                for i in (0, 13, count - 1):
                    alone = kernels.multiply(matrix, x[i : i + 1], activation_bits=BITS)
                    assert np.array_equal(out[i], alone[0])


@pytest.mark.parametrize("count", [16, 127, 128])
def test_vectors_side_by_side_that_fit_no_cache(kernels: Kernels, count: int) -> None:
    """With one thread, and so many rows that a chunk has several tiles."""
    matrix = random_matrix(18, (1, 1061, 4160), 4, 32, "bf16")
    x = numbers(19, count, 4160)
    for _ in kernels.sets():
        kernels.library.toast_set_threads(1)
        out = kernels.multiply(matrix, x, activation_bits=BITS)
        for i in (0, 15, count - 1):
            alone = kernels.multiply(matrix, x[i : i + 1], activation_bits=BITS)
            assert np.array_equal(alone[0], out[i])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@on_sets
def test_what_is_no_number_stays_in_its_vector(kernels: Kernels, bad: float) -> None:
    matrix = random_matrix(3, (1, 70, 576), 4, 64, "f32")
    x = numbers(4, 30, 576)
    x[1, 100] = bad
    out = kernels.multiply(matrix, x, activation_bits=BITS)
    assert not np.isfinite(out[1]).any()
    assert np.isfinite(np.delete(out, 1, 0)).all()
