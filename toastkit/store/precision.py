"""Gear formats: integers with one scale per row, symmetric around zero.

GEARBX, section 5: s = max|row| / qmax, not below a floor; q = clip(round(w / s), -qmax, qmax). A
weight is q * s, with an error of at most s / 2. They are stored as MLX packs its affine
quantisation, q + 2^(bits-1) with the same scale and bias in every group of a row, so that
mx.quantized_matmul and mx.gather_qmm run them on every device.

MLX's words, read as little-endian bytes, are the paper's packings (section 5.2): two 4-bit numbers
per byte with offset 8, the first in the low half; four 6-bit numbers in three bytes with offset 32;
four 2-bit numbers per byte with offset 2. Only 8 bits differ, in the sign bit: the paper's signed
byte is ours xor 0x80.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from toastkit.errors import DataError

GROUP_SIZES = (128, 64, 32)  # supported by MLX; larger groups repeat the scale less often
GEAR_BITS = {"low": 4, "mid": 8}
GEAR_OF = {bits: gear for gear, bits in GEAR_BITS.items()}
LARGEST = {2: 1, 4: 7, 6: 31, 8: 127}  # bits -> qmax
FLOOR, HALF_FLOOR = 1e-8, 1e-4  # of the scale; float16 has no smaller normal numbers to spare
# The sample of looks_quantised, and its threshold: float weights have at least 0.92 of the expected
# distinct values, 8-bit ones in groups of 32 up to 0.86 in rows of 192.
SAMPLE_ROWS, SAMPLE_COLUMNS = 16, 1024
FEW = 0.85
MIN_SAMPLE = 128  # numbers; among fewer, some may be equal by chance
BLOCK = 1 << 20  # numbers quantised at a time: intermediates stay in the CPU cache


class Rows(NamedTuple):
    """A quantised matrix. weight: (..., columns * bits / 32) uint32. scales, biases:
    (..., columns / group size), of the original's dtype."""

    weight: mx.array
    scales: mx.array
    biases: mx.array


def group_size_of(columns: int) -> int | None:
    """The group size for rows of that many columns; None if MLX has none."""
    return next((size for size in GROUP_SIZES if columns % size == 0 and columns), None)


def padded(columns: int) -> int:
    """Columns of a row after padding to a length that MLX has a group size for."""
    return columns + -columns % GROUP_SIZES[-1]


def row_bytes(bits: int, columns: int, scale_bytes: int) -> int:
    """Bytes of a quantised row as stored: its numbers, and a scale and a bias per group.

    columns: of the original, at least 1; padded to a multiple of 32. scale_bytes: of one scale.
    """
    stored = padded(columns)
    size = group_size_of(stored)
    if size is None:
        raise ValueError("a row without columns has no bytes")
    return stored * bits // 8 + 2 * scale_bytes * (stored // size)


def empty_rows(shape: tuple[int, ...], bits: int, dtype: mx.Dtype) -> Rows:
    """Zeros laid out like quantise_rows with `pad` for matrices of that shape, (..., columns).
    dtype: of the scales. Raises ValueError for rows without columns."""
    *outer, columns = shape
    stored = padded(columns)
    size = group_size_of(stored)
    if size is None:
        raise ValueError("a row without columns has no numbers")
    scales = (*outer, stored // size)
    weight = mx.zeros((*outer, stored * bits // 32), mx.uint32)
    return Rows(weight, mx.zeros(scales, dtype), mx.zeros(scales, dtype))


def quantise_rows(weight: mx.array, bits: int, pad: bool = False) -> Rows:
    """Quantise along the last axis.

    weight: (..., columns) float32, float16 or bfloat16. bits: a key of LARGEST. pad: pad rows whose
    length is no multiple of 32, which MLX cannot store, with zeros; their multiplicand must be
    padded too.
    Raises ValueError for such rows without pad and for other bits, DataError for NaN and infinite
    weights. Lazy, except for a large matrix.
    """
    columns = weight.shape[-1]
    size = group_size_of(padded(columns) if pad else columns)
    if bits not in LARGEST or size is None:
        raise ValueError(f"rows of {columns} numbers cannot be stored in {bits} bits")
    if pad and padded(columns) != columns:
        sides = [(0, 0)] * (weight.ndim - 1) + [(0, padded(columns) - columns)]
        weight = mx.pad(weight, sides)
    step = max(1, BLOCK // weight.shape[-1])
    if weight.size <= step * weight.shape[-1]:
        return _quantised_block(weight, bits, size)
    flat = weight.reshape(-1, weight.shape[-1])
    blocks = []
    for first in range(0, flat.shape[0], step):
        blocks.append(_quantised_block(flat[first : first + step], bits, size))
        mx.eval(blocks[-1])
    return Rows(
        *(mx.concatenate(list(parts)).reshape(*weight.shape[:-1], -1) for parts in zip(*blocks))
    )


def check_finite(weight: mx.array) -> None:
    """weight: (...), of any floating dtype. Raises DataError for NaN and infinity, of which
    quantising makes plausible numbers."""
    if not mx.isfinite(weight).all().item():
        raise DataError("NaN or infinite weights cannot be quantised")


def _quantised_block(weight: mx.array, bits: int, size: int) -> Rows:
    """As quantise_rows. size: of a group."""
    wide = weight.astype(mx.float32)
    # One per row, in the dtype it is stored in: rounding it afterwards would shift the weights.
    floor = HALF_FLOOR if weight.dtype == mx.float16 else FLOOR
    peak = mx.abs(wide).max(axis=-1, keepdims=True)
    scale = mx.maximum(peak / LARGEST[bits], floor).astype(weight.dtype)
    check_finite(scale)
    largest, offset = LARGEST[bits], 1 << (bits - 1)
    q = mx.clip(mx.round(wide / scale.astype(mx.float32)), -largest, largest)
    packed = _pack((q + offset).astype(mx.uint32), bits)
    groups = (*weight.shape[:-1], weight.shape[-1] // size)
    scales = mx.contiguous(mx.broadcast_to(scale, groups))
    return Rows(packed, scales, -offset * scales)


def dequantise_rows(rows: Rows, bits: int, columns: int | None = None) -> mx.array:
    """Dequantise rows to (..., columns) float32. columns: of the original, to cut off padding."""
    stored = rows.weight.shape[-1] * 32 // bits
    q = _unpack(rows.weight, bits).astype(mx.float32) - (1 << (bits - 1))
    groups = rows.scales.shape[-1]
    grouped = q.reshape(*q.shape[:-1], groups, stored // groups)
    whole = (grouped * rows.scales[..., None].astype(mx.float32)).reshape(q.shape)
    return whole if columns is None else whole[..., :columns]


def looks_quantised(weight: mx.array) -> bool:
    """Return True if float weights were quantised before, so that quantising again adds to the
    error (paper 003, sections 6.4 and 13.3).

    weight: (..., columns) of any float dtype; at most 16 rows are sampled. Each row's distinct
    values are counted against those expected of as many random bfloat16 numbers of the same
    magnitudes: bfloat16 is the coarsest training dtype. Zeros do not count, and a constant row is
    ignored. Not detected: 8 bits in groups in rows shorter than some 200, and weights that were
    fine-tuned or rotated after quantisation.
    """
    import numpy as np

    if weight.size == 0:
        return False
    count = weight.size // weight.shape[-1]
    chosen = np.unique(np.linspace(0, count - 1, SAMPLE_ROWS).astype(int))
    places = zip(*(axis.tolist() for axis in np.unravel_index(chosen, weight.shape[:-1])))
    rows = mx.stack([weight[place][:SAMPLE_COLUMNS] for place in places]).astype(mx.float32)
    looked = found = expected = 0.0
    for row in np.array(rows):
        values, sizes = np.unique(row[np.isfinite(row) & (row != 0)], return_counts=True)
        if len(values) < 2:
            continue
        looked += sizes.sum()
        # A binade holds 128 numbers of either sign; n draws hit this many of them.
        exponents = np.frexp(values)[1] * 2 + (values < 0)
        draws = np.bincount(exponents - exponents.min(), weights=sizes)
        expected += float((128 * (1 - (1 - 1 / 128) ** draws)).sum())
        found += len(values)
    return looked >= MIN_SAMPLE and found < FEW * expected


def _pack(q: mx.array, bits: int) -> mx.array:
    """(..., columns) uint32 below 2^bits -> (..., columns * bits / 32) uint32: one row of bits, the
    first number in the lowest."""
    if bits == 6:  # four numbers in three bytes
        words = _join(q, 4, 6)
        parts = mx.stack([(words >> shift) & 0xFF for shift in (0, 8, 16)], axis=-1)
        return parts.astype(mx.uint8).reshape(*q.shape[:-1], -1).view(mx.uint32)
    return _join(q, 32 // bits, bits)


def _unpack(packed: mx.array, bits: int) -> mx.array:
    """(..., columns * bits / 32) uint32 -> (..., columns) uint32."""
    if bits == 6:
        parts = packed.view(mx.uint8).astype(mx.uint32).reshape(*packed.shape[:-1], -1, 3)
        words = parts[..., 0] | (parts[..., 1] << 8) | (parts[..., 2] << 16)
        return _split(words, 4, 6)
    return _split(packed, 32 // bits, bits)


def _join(q: mx.array, count: int, bits: int) -> mx.array:
    """`count` numbers of `bits` bits into each word."""
    parts = q.reshape(*q.shape[:-1], -1, count)
    words = parts[..., 0]
    for i in range(1, count):
        words = words | (parts[..., i] << (bits * i))
    return words


def _split(words: mx.array, count: int, bits: int) -> mx.array:
    parts = [(words >> (bits * i)) & ((1 << bits) - 1) for i in range(count)]
    return mx.stack(parts, axis=-1).reshape(*words.shape[:-1], -1)
