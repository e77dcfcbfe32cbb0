"""What a gear costs and gains: the arithmetic of paper 003, sections 9 and 15. No MLX.

A token reads every weight that it uses once, and that is what takes its time; so bytes stand for
seconds. What is measured and what is predicted go through the same functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from toastkit.store.groups import row_bytes

BASE = "high"  # the gear that the others are held against


def bytes_per_parameter(bits: int, columns: int, scale_bytes: int) -> float:
    """Bytes of one weight in a row of so many, with its share of scales and biases: table 7, where
    those are left out, has bits / 8."""
    return row_bytes(bits, columns, scale_bytes) / columns


def token_bytes(parameters: float, each: float, rest: float = 0) -> float:
    """Bytes that a token reads: `parameters` managed weights of `each` bytes, and `rest` bytes of
    all that stays as it is. The paper's B = L P b is that without a rest."""
    return parameters * each + rest


def whole_speedup(share: float, ratio: float) -> float:
    """The ideal speedup of the whole model (section 15): 1 / ((1 - f) + f / k).

    share: f, of the bytes of a token that change gear, in [0, 1]. ratio: k > 0, how many times
    fewer bytes those become. Raises ValueError for others.
    """
    if not 0 <= share <= 1 or not ratio > 0:
        raise ValueError(f"no share and ratio of bytes: {share:g}, {ratio:g}")
    return 1 / ((1 - share) + share / ratio)


def break_even_tokens(shift_seconds: float, seconds_high: float, seconds_gear: float) -> float:
    """How many tokens a gear has to be held until what it saves has paid for the shift.
    seconds_high, seconds_gear: of a token. Infinity where the gear saves nothing."""
    saved = seconds_high - seconds_gear
    return shift_seconds / saved if saved > 0 else math.inf


def dynamic_seconds(
    counts: Mapping[str, int], seconds: Mapping[str, float], shifts: int, shift_seconds: float
) -> float:
    """T_dynamic of section 9: the time of tokens and shifts together.

    counts: tokens by gear. seconds: of a token, by gear. shift_seconds: of one shift.
    Raises KeyError for a gear of which the seconds are not known.
    """
    return shifts * shift_seconds + sum(n * seconds[gear] for gear, n in counts.items() if n)


def speedup(
    counts: Mapping[str, int], seconds: Mapping[str, float], shifts: int, shift_seconds: float
) -> float:
    """How many times faster than all in high gear: N t_high / T_dynamic. The arguments are those of
    dynamic_seconds, seconds has "high" among them. Raises ValueError for no time at all."""
    total = dynamic_seconds(counts, seconds, shifts, shift_seconds)
    if not total > 0:
        raise ValueError("no tokens that took any time")
    return sum(counts.values()) * seconds[BASE] / total


def mean_bits(counts: Mapping[str, int], bits: Mapping[str, float]) -> float:
    """Bits of a managed weight in the mean over tokens: what a fixed gear of the same bytes would
    have. counts: tokens by gear. bits: of a weight, by gear. Raises ValueError for no tokens."""
    tokens = sum(counts.values())
    if tokens <= 0:
        raise ValueError("no tokens to take the mean of")
    return sum(n * bits[gear] for gear, n in counts.items() if n) / tokens
