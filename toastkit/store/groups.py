"""How a row of numbers is cut into groups that share a scale: sizes alone, no MLX."""

from __future__ import annotations

GROUP_SIZES = (128, 64, 32)  # that MLX has; in a large one the repeated scale costs less


def group_size_of(columns: int) -> int | None:
    """The group size in which rows of so many numbers are stored; None where MLX has none."""
    return next((size for size in GROUP_SIZES if columns % size == 0 and columns), None)


def padded(columns: int) -> int:
    """The columns of a row that is filled up until MLX has a group size for it."""
    return columns + -columns % GROUP_SIZES[-1]
