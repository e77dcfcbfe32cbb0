"""The formats of the gears: whole numbers with one scale a row, symmetric around zero.

GEARBX, section 5: s = max|row| / qmax, not below a floor; q = clip(round(w / s), -qmax, qmax). A
row stands for q * s, off by s / 2 at most. The numbers are stored as MLX packs its affine
quantisation, q + 2^(bits-1) with the same scale and bias in every group of a row, so that
mx.quantized_matmul and mx.gather_qmm run them on every device.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from toastkit.errors import DataError

GEAR_BITS = {"low": 4, "mid": 8}
LARGEST = {2: 1, 4: 7, 6: 31, 8: 127}  # bits -> qmax
GROUP_SIZES = (128, 64, 32)  # that MLX has; in a large one the repeated scale costs less
FLOOR, HALF_FLOOR = 1e-8, 1e-4  # of the scale; float16 has no smaller normal numbers to spare


class Rows(NamedTuple):
    """A quantised matrix. weight: (..., columns * bits / 32) uint32. scales, biases:
    (..., columns / group size), of the original's dtype."""

    weight: mx.array
    scales: mx.array
    biases: mx.array


def group_size_of(columns: int) -> int | None:
    """The group size in which rows of so many numbers are stored; None where MLX has none."""
    return next((size for size in GROUP_SIZES if columns % size == 0 and columns), None)


def quantise_rows(weight: mx.array, bits: int) -> Rows:
    """Quantises along the last axis.

    weight: (..., columns) float32, float16 or bfloat16. bits: a key of LARGEST.
    Raises ValueError for columns that are no multiple of 32 and for other bits, DataError for NaN
    and infinite weights.
    """
    largest = LARGEST.get(bits)
    size = group_size_of(weight.shape[-1])
    if largest is None or size is None:
        raise ValueError(f"rows of {weight.shape[-1]} numbers cannot be stored in {bits} bits")
    wide = weight.astype(mx.float32)
    peak = mx.abs(wide).max(axis=-1, keepdims=True)
    if not mx.isfinite(peak).all().item():
        raise DataError("NaN or infinite weights cannot be quantised")
    floor = HALF_FLOOR if weight.dtype == mx.float16 else FLOOR
    # As it will be stored: rounding it afterwards would shift what the numbers stand for.
    scale = mx.maximum(peak / largest, floor).astype(weight.dtype)
    q = mx.clip(mx.round(wide / scale.astype(mx.float32)), -largest, largest)
    offset = 1 << (bits - 1)
    packed = _pack((q + offset).astype(mx.uint32), bits)
    groups = (*weight.shape[:-1], weight.shape[-1] // size)
    scales = mx.contiguous(mx.broadcast_to(scale, groups))
    return Rows(packed, scales, -offset * scales)


def dequantise_rows(rows: Rows, bits: int) -> mx.array:
    """What quantised rows stand for: (..., columns) float32."""
    columns = rows.weight.shape[-1] * 32 // bits
    q = _unpack(rows.weight, bits).astype(mx.float32) - (1 << (bits - 1))
    groups = rows.scales.shape[-1]
    grouped = q.reshape(*q.shape[:-1], groups, columns // groups)
    return (grouped * rows.scales[..., None].astype(mx.float32)).reshape(q.shape)


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
