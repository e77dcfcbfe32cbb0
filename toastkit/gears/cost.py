"""The cost and gain of a gear: the arithmetic of paper 003, sections 9 and 15. No MLX.

A token reads every weight that it uses once, and that takes its time, so bytes stand for seconds.
Measurements and predictions use the same functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping


def whole_speedup(share: float, ratio: float) -> float:
    """The ideal speedup of the whole model (section 15): 1 / ((1 - f) + f / k).

    share: f, of the bytes of a token that change gear, in [0, 1]. ratio: k > 0, how many times
    fewer bytes those become. Raises ValueError for others.
    """
    if not 0 <= share <= 1 or not ratio > 0:
        raise ValueError(f"no share and ratio of bytes: {share:g}, {ratio:g}")
    return 1 / ((1 - share) + share / ratio)


def break_even_tokens(shift_seconds: float, seconds_high: float, seconds_gear: float) -> float:
    """How many tokens a gear has to be held until its savings have paid for the shift.
    seconds_high, seconds_gear: per token. Infinity if the gear saves nothing."""
    saved = seconds_high - seconds_gear
    return shift_seconds / saved if saved > 0 else math.inf


def mean_bits(counts: Mapping[str, int], bits: Mapping[str, float]) -> float:
    """Mean bits of a managed weight over tokens: those of a fixed gear that reads the same bytes.
    counts: tokens by gear. bits: of a weight, by gear. Raises ValueError for no tokens."""
    tokens = sum(counts.values())
    if tokens <= 0:
        raise ValueError("no tokens to take the mean of")
    return sum(n * bits[gear] for gear, n in counts.items() if n) / tokens
