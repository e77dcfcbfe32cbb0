"""Rows of whole numbers with one scale: against plain numpy, and against MLX's own arithmetic."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from toastkit.errors import DataError
from toastkit.store import precision
from toastkit.store.precision import (
    FLOOR,
    GROUP_SIZES,
    HALF_FLOOR,
    LARGEST,
    Rows,
    dequantise_rows,
    group_size_of,
    padded,
    quantise_rows,
    row_bytes,
)

BITS = sorted(LARGEST)
DTYPES = [mx.float32, mx.float16, mx.bfloat16]
SHAPES = [(1, 32), (5, 64), (3, 96), (2, 4, 128), (2, 3, 4, 160)]


def noise(shape: tuple[int, ...], dtype: mx.Dtype = mx.float32, seed: int = 0) -> mx.array:
    """Rows of very different sizes."""
    values = mx.random.normal(shape, key=mx.random.key(seed))
    sizes = mx.exp(3 * mx.random.normal((*shape[:-1], 1), key=mx.random.key(seed + 1)))
    return (values * sizes).astype(dtype)


def numbers(array: mx.array) -> np.ndarray:
    """Any float array in numpy, which has no bfloat16."""
    return np.array(array.astype(mx.float32))


def plain(weight: mx.array, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Section 5 as it is written: numbers (..., columns) and scales (..., 1)."""
    floor = 1e-4 if weight.dtype == mx.float16 else 1e-8
    w = numbers(weight)
    s = np.maximum(np.abs(w).max(axis=-1, keepdims=True) / LARGEST[bits], floor)
    s = numbers(mx.array(s.astype(np.float32)).astype(weight.dtype))
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
    assert (numbers(rows.scales) == s).all()
    assert (numbers(rows.biases) == -(2 ** (bits - 1)) * s).all()
    back = np.array(dequantise_rows(rows, bits))
    assert (back == q.astype(np.float32) * s).all()
    assert (np.abs(numbers(weight) - back) <= s * 0.50001).all()


# ----------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize(
    ("columns", "size"), [(32, 32), (96, 32), (192, 64), (128, 128), (4096, 128), (40, None)]
)
def test_group_sizes(columns: int, size: int | None) -> None:
    assert group_size_of(columns) == size


def test_padding() -> None:
    assert [padded(n) for n in (0, 1, 31, 32, 33, 64, 100)] == [0, 32, 32, 32, 64, 64, 128]


@pytest.mark.parametrize(
    ("bits", "columns", "scale_bytes", "expected"),
    [
        (4, 192, 2, 96 + 3 * 2 * 2),  # three groups of 64
        (8, 4096, 2, 4096 + 32 * 2 * 2),
        (6, 32, 4, 24 + 2 * 4),
        (2, 40, 4, 16 + 2 * 4),  # stored as 64
    ],
)
def test_bytes_of_a_row(bits: int, columns: int, scale_bytes: int, expected: int) -> None:
    assert row_bytes(bits, columns, scale_bytes) == expected


@given(
    bits=st.sampled_from([2, 4, 6, 8]),
    columns=st.integers(1, 20000),
    scale_bytes=st.sampled_from([2, 4]),
)
def test_scales_and_padding_are_all_that_comes_on_top(
    bits: int, columns: int, scale_bytes: int
) -> None:
    """Of table 5's bits / 8, to which rows of many numbers come close."""
    size = group_size_of(padded(columns))
    assert size in GROUP_SIZES
    found = row_bytes(bits, columns, scale_bytes)
    assert found - columns * bits / 8 < bits * 4 + 2 * scale_bytes * (columns / size + 1)
    assert found > columns * bits / 8


def test_a_row_has_columns() -> None:
    with pytest.raises(ValueError, match="without columns"):
        row_bytes(4, 0, 2)


# ------------------------------------------------------------------------ MLX's own arithmetic


def check_close(found: mx.array, expected: mx.array, tolerance: float) -> None:
    """Within a share of the largest number expected."""
    assert found.shape == expected.shape
    error = float(mx.abs(found.astype(mx.float32) - expected).max())
    assert error <= tolerance * float(mx.abs(expected).max())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
def test_mlx_reads_them_as_its_own(bits: int, dtype: mx.Dtype, shape: tuple[int, ...]) -> None:
    """The fused product is that of the dequantised matrix; scales are taken to float32, as loading
    takes all weights on the CPU."""
    rows = quantise_rows(noise(shape, dtype), bits)
    rows = Rows(rows.weight, rows.scales.astype(mx.float32), rows.biases.astype(mx.float32))
    settings = {"group_size": group_size_of(shape[-1]), "bits": bits}
    ours = dequantise_rows(rows, bits)
    check_close(mx.dequantize(*rows, **settings), ours, 1e-6)
    x = noise((*shape[:-2], 3, shape[-1]), seed=7)
    product = mx.quantized_matmul(x, *rows, transpose=True, **settings)
    check_close(product, x @ ours.swapaxes(-1, -2), 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
def test_gathered_experts(bits: int, dtype: mx.Dtype) -> None:
    rows = quantise_rows(noise((4, 6, 160), dtype), bits)
    rows = Rows(rows.weight, rows.scales.astype(mx.float32), rows.biases.astype(mx.float32))
    x = noise((2, 1, 160), seed=3)
    chosen = mx.array([3, 1])
    settings = {"transpose": True, "group_size": 32, "bits": bits}
    product = mx.gather_qmm(x, *rows, rhs_indices=chosen, **settings)
    check_close(product, x @ dequantise_rows(rows, bits)[chosen].swapaxes(-1, -2), 1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.float16, 0.02), (mx.bfloat16, 0.15)])
@pytest.mark.parametrize("bits", BITS)
def test_products_in_16_bits(bits: int, dtype: mx.Dtype, tolerance: float) -> None:
    """On the CPU MLX adds up in the type of the activations, and 8 bits with their offset of 128
    are hardest hit."""
    weight = mx.random.normal((6, 160), key=mx.random.key(1)).astype(dtype)
    rows = quantise_rows(weight, bits)
    x = mx.random.normal((3, 160), key=mx.random.key(2)).astype(dtype)
    product = mx.quantized_matmul(x, *rows, transpose=True, group_size=32, bits=bits)
    check_close(product, x.astype(mx.float32) @ dequantise_rows(rows, bits).T, tolerance)
    stack = Rows(*(part[None] for part in rows))
    settings = {"transpose": True, "group_size": 32, "bits": bits}
    gathered = mx.gather_qmm(x[:1], *stack, rhs_indices=mx.array([0]), **settings)
    expected = x[:1].astype(mx.float32) @ dequantise_rows(rows, bits).T
    check_close(gathered, expected[None], tolerance)


# ------------------------------------------------------------------------------------- packings


def papers_packing(q: np.ndarray, bits: int) -> np.ndarray:
    """Section 5.2 as it is written: (rows, columns) numbers -> (rows, bytes) uint8."""
    if bits == 8:
        return q.astype(np.int8).view(np.uint8)
    offset = {2: 2, 4: 8, 6: 32}[bits]
    v = (q + offset).astype(np.uint8)
    if bits == 4:  # low nibble first
        return v[:, 0::2] | v[:, 1::2] << 4
    a, b, c, d = (v[:, n::4] for n in range(4))
    if bits == 2:
        return a | b << 2 | c << 4 | d << 6
    parts = [a | b << 6, b >> 2 | c << 4, c >> 4 | d << 2]
    return np.stack(parts, axis=-1).reshape(len(q), -1)


@pytest.mark.parametrize("columns", [32, 96, 256])
@pytest.mark.parametrize("bits", BITS)
def test_the_bytes_are_the_papers(bits: int, columns: int) -> None:
    weight = noise((7, columns))
    ours = np.array(quantise_rows(weight, bits).weight).view(np.uint8)
    flip = 0x80 if bits == 8 else 0  # a signed byte, and one with offset 128
    assert (ours ^ flip == papers_packing(plain(weight, bits)[0], bits)).all()


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
    given = numbers(mx.array(weight).astype(dtype))
    assert np.count_nonzero(back[1]) == np.count_nonzero(back[2]) == 1
    assert back[1, 5] == pytest.approx(given[1, 5], rel=0.005)
    assert back[2, 63] == pytest.approx(given[2, 63], rel=0.005)


@pytest.mark.parametrize("block", [1, 96, 2 * 96, 5 * 96 + 1])
def test_what_is_large_goes_through_in_blocks(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = noise((3, 4, 90), mx.bfloat16)  # experts, filled up to 96 columns
    whole = quantise_rows(weight, 4, pad=True)
    monkeypatch.setattr(precision, "BLOCK", block)
    found = quantise_rows(weight, 4, pad=True)
    assert [a.shape for a in found] == [a.shape for a in whole]
    assert all((a == b).all() for a, b in zip(whole, found))


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


# ------------------------------------------------------------------------------------ properties

bits_of_gears = st.sampled_from(BITS)
dtypes = st.sampled_from(DTYPES)


@st.composite
def matrices(draw) -> mx.array:
    """float32 rows of sizes from below every floor to near what float16 holds."""
    shape = (draw(st.integers(1, 4)), draw(st.sampled_from((32, 64, 96)) | st.integers(1, 100)))
    unit = st.floats(-1, 1, width=32)
    values = draw(arrays.arrays(np.float32, shape, elements=unit))
    sizes = draw(arrays.arrays(np.int8, (shape[0], 1), elements=st.integers(-12, 4)))
    return mx.array(values * np.float32(10) ** sizes)


@given(data=st.data(), bits=bits_of_gears)
def test_codes_there_and_back(data, bits: int) -> None:
    """Numbers with a full scale come back as they were, whatever the scale."""
    largest = LARGEST[bits]
    codes = data.draw(arrays.arrays(np.int16, (3, 64), elements=st.integers(-largest, largest)))
    codes[:, 0] = largest
    sizes = data.draw(arrays.arrays(np.float32, (3, 1), elements=st.floats(2**-13, 4, width=32)))
    rows = quantise_rows(mx.array(codes * sizes), bits)
    assert (bits_of(rows.weight, bits) - 2 ** (bits - 1) == codes).all()
    again = quantise_rows(dequantise_rows(rows, bits), bits)
    assert (again.weight == rows.weight).all()


@given(weight=matrices(), bits=bits_of_gears, dtype=dtypes)
def test_rows_know_nothing_of_each_other(weight: mx.array, bits: int, dtype: mx.Dtype) -> None:
    weight = weight.astype(dtype)
    whole = quantise_rows(weight, bits, pad=True)
    alone = [quantise_rows(weight[n : n + 1], bits, pad=True) for n in range(len(weight))]
    joined = Rows(*map(mx.concatenate, zip(*alone)))
    assert all((a == b).all() for a, b in zip(whole, joined))


@given(weight=matrices(), bits=bits_of_gears, dtype=dtypes)
def test_rows_of_any_length(weight: mx.array, bits: int, dtype: mx.Dtype) -> None:
    weight = weight.astype(dtype)
    columns = weight.shape[-1]
    rows = quantise_rows(weight, bits, pad=True)
    q, s = plain(weight, bits)
    back = numbers(dequantise_rows(rows, bits, columns))
    assert (back == q.astype(np.float32) * s).all()
    assert (np.abs(numbers(weight) - back) <= s * 0.5001).all()
    floor = HALF_FLOOR if dtype == mx.float16 else FLOOR
    assert (numbers(rows.scales[:, :1]) == s).all()
    assert (s >= numbers(mx.array(floor).astype(dtype))).all()
    codes = bits_of(rows.weight, bits)
    assert codes.shape[-1] == padded(columns) and padded(columns) % 32 == 0
    assert padded(columns) - columns < 32
    assert (codes[:, :columns] == q + 2 ** (bits - 1)).all()
    assert (codes[:, columns:] == 2 ** (bits - 1)).all()  # zeros
    assert rows.scales.shape[-1] == padded(columns) // group_size_of(padded(columns))
    if columns % 32 == 0:
        assert all((a == b).all() for a, b in zip(rows, quantise_rows(weight, bits)))


def test_padding_is_multiplied_with_padding() -> None:
    weight, x = noise((2, 5, 40)), noise((2, 3, 40), seed=4)
    rows = quantise_rows(weight, 6, pad=True)
    wide = mx.pad(x, [(0, 0), (0, 0), (0, 24)])
    product = mx.quantized_matmul(wide, *rows, transpose=True, group_size=64, bits=6)
    check_close(product, x @ dequantise_rows(rows, 6, 40).swapaxes(-1, -2), 1e-5)
    with pytest.raises(ValueError, match="rows of 0 numbers"):
        quantise_rows(mx.zeros((2, 0)), 4, pad=True)
