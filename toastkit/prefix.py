"""The common prefix of two sequences: texts, lists of tokens, arrays."""

from __future__ import annotations

from typing import Any


def common_prefix(a: Any, b: Any) -> int:
    """Return the length of the longest common prefix of two sequences: str, list, array. Bisects,
    because slices compare fast."""
    if type(a) is not type(b):
        a, b = list(a), list(b)
    low, high = 0, min(len(a), len(b))
    middle = high  # often one is a prefix of the other
    while low < high:
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return low
