"""Rows of whole numbers with one scale: against plain numpy, and against MLX's own arithmetic."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from toastkit.errors import DataError
from toastkit.store.precision import LARGEST, Rows, dequantise_rows, group_size_of, quantise_rows

BITS = sorted(LARGEST)
DTYPES = [mx.float32, mx.float16, mx.bfloat16]
SHAPES = [(1, 32), (5, 64), (3, 96), (2, 4, 128), (2, 3, 4, 160)]


def noise(shape: tuple[int, ...], dtype: mx.Dtype = mx.float32, seed: int = 0) -> mx.array:
    """Rows of very different sizes."""
    values = mx.random.normal(shape, key=mx.random.key(seed))
    sizes = mx.exp(3 * mx.random.normal((*shape[:-1], 1), key=mx.random.key(seed + 1)))
    return (values * sizes).astype(dtype)


def plain(weight: mx.array, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Section 5 as it is written: numbers (..., columns) and scales (..., 1)."""
    floor = 1e-4 if weight.dtype == mx.float16 else 1e-8
    w = np.array(weight.astype(mx.float32))
    s = np.maximum(np.abs(w).max(axis=-1, keepdims=True) / LARGEST[bits], floor)
    s = np.array(mx.array(s.astype(np.float32)).astype(weight.dtype).astype(mx.float32))
    return np.clip(np.round(w / s), -LARGEST[bits], LARGEST[bits]), s


def bits_of(packed: mx.array, bits: int) -> np.ndarray:
    """(rows, columns) numbers read from a row of bits, the first number in the lowest."""
    rows = np.array(packed).reshape(-1, packed.shape[-1]).view(np.uint8)
    stream = np.unpackbits(rows, axis=-1, bitorder="little")
    return stream.reshape(len(rows), -1, bits) @ (1 << np.arange(bits))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
def test_equals_the_plain_reference(bits: int, dtype: mx.Dtype, shape: tuple[int, ...]) -> None:
    weight = noise(shape, dtype)
    rows = quantise_rows(weight, bits)
    q, s = plain(weight, bits)
    assert rows.weight.dtype == mx.uint32 and rows.scales.dtype == rows.biases.dtype == dtype
    assert rows.weight.shape == (*shape[:-1], shape[-1] * bits // 32)
    assert (bits_of(rows.weight, bits) == (q + 2 ** (bits - 1)).reshape(-1, shape[-1])).all()
    assert (np.array(rows.scales.astype(mx.float32)) == s).all()
    assert (np.array(rows.biases.astype(mx.float32)) == -(2 ** (bits - 1)) * s).all()
    back = np.array(dequantise_rows(rows, bits))
    assert (back == q.astype(np.float32) * s).all()
    assert (np.abs(np.array(weight.astype(mx.float32)) - back) <= s * 0.50001).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", BITS)
def test_mlx_reads_them_as_its_own(bits: int, shape: tuple[int, ...]) -> None:
    weight = noise(shape)
    rows = quantise_rows(weight, bits)
    size = group_size_of(shape[-1])
    theirs = mx.dequantize(*rows, group_size=size, bits=bits)
    ours = dequantise_rows(rows, bits)
    peak = float(mx.abs(ours).max())
    assert mx.allclose(theirs, ours, atol=1e-6 * peak)
    x = noise((*shape[:-2], 3, shape[-1]), seed=7)
    product = mx.quantized_matmul(x, *rows, transpose=True, group_size=size, bits=bits)
    expected = x @ ours.swapaxes(-1, -2)
    assert mx.allclose(product, expected, rtol=1e-4, atol=1e-5 * float(mx.abs(expected).max()))


def test_gathered_experts() -> None:
    weight = noise((4, 6, 64))
    rows = quantise_rows(weight, 4)
    x = noise((2, 1, 64), seed=3)
    chosen = mx.array([3, 1])
    settings = {"transpose": True, "group_size": 64, "bits": 4}
    product = mx.gather_qmm(x, *rows, rhs_indices=chosen, **settings)
    expected = x @ dequantise_rows(rows, 4)[chosen].swapaxes(-1, -2)
    assert mx.allclose(product, expected, rtol=1e-4, atol=1e-4 * float(mx.abs(expected).max()))


@pytest.mark.parametrize("bits", BITS)
def test_packing_there_and_back(bits: int) -> None:
    """Every number that the format has, read back exactly."""
    largest = LARGEST[bits]
    values = np.resize(np.arange(-largest, largest + 1), 32 * (2 * largest + 1))
    weight = mx.array(values.reshape(-1, 32 * 1), mx.float32)
    weight = mx.concatenate([weight, mx.full((len(weight), 32), largest)], axis=1)
    rows = quantise_rows(weight, bits)
    assert (rows.scales == 1).all()
    assert (dequantise_rows(rows, bits) == weight).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
def test_rows_of_zeros_and_single_values(bits: int, dtype: mx.Dtype) -> None:
    weight = np.zeros((4, 64), np.float32)
    weight[1, 5], weight[2, 63], weight[3, 0] = 60000, -60000, 1e-30
    rows = quantise_rows(mx.array(weight).astype(dtype), bits)
    back = np.array(dequantise_rows(rows, bits))
    assert not back[0].any() and not back[3].any()
    given = np.array(mx.array(weight).astype(dtype).astype(mx.float32))
    assert np.count_nonzero(back[1]) == np.count_nonzero(back[2]) == 1
    assert back[1, 5] == pytest.approx(given[1, 5], rel=0.005)
    assert back[2, 63] == pytest.approx(given[2, 63], rel=0.005)


def test_blocks_of_rows_are_the_rows_of_the_whole() -> None:
    weight = noise((10, 96), mx.bfloat16)
    whole = quantise_rows(weight, 6)
    parts = [quantise_rows(weight[i : i + 3], 6) for i in range(0, 10, 3)]
    joined = Rows(*map(mx.concatenate, zip(*parts)))
    assert all((a == b).all() for a, b in zip(whole, joined))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_a_number_is_refused(dtype: mx.Dtype, value: float) -> None:
    weight = mx.array([[1.0] * 31 + [value]] * 2).astype(dtype)
    with pytest.raises(DataError, match="NaN or infinite"):
        quantise_rows(weight, 4)


@pytest.mark.parametrize(("columns", "bits"), [(40, 4), (0, 4), (64, 3), (64, 16)])
def test_what_mlx_cannot_store_is_refused(columns: int, bits: int) -> None:
    with pytest.raises(ValueError, match="cannot be stored"):
        quantise_rows(mx.zeros((2, columns)), bits)
