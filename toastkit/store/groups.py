"""How a row of numbers is cut into groups that share a scale: sizes alone, no MLX."""

from __future__ import annotations

GROUP_SIZES = (128, 64, 32)  # that MLX has; in a large one the repeated scale costs less


def group_size_of(columns: int) -> int | None:
    """The group size in which rows of so many numbers are stored; None where MLX has none."""
    return next((size for size in GROUP_SIZES if columns % size == 0 and columns), None)


def padded(columns: int) -> int:
    """The columns of a row that is filled up until MLX has a group size for it."""
    return columns + -columns % GROUP_SIZES[-1]


def row_bytes(bits: int, columns: int, scale_bytes: int) -> int:
    """Bytes of a quantised row as it is stored: its numbers, and a scale and a bias for each group.

    columns: of the original, at least 1; filled up to a multiple of 32. scale_bytes: of one scale.
    """
    stored = padded(columns)
    size = group_size_of(stored)
    if size is None:
        raise ValueError("a row without columns has no bytes")
    return stored * bits // 8 + 2 * scale_bytes * (stored // size)
