"""What MoBiLE gains: seconds of its passes, and the estimate of paper 002 (equation 1) from them.

T, a step of the whole model, is not run beside a little one. It is known of the last token of each
prompt that the whole model reads, which is such a step with the same flags. Where nothing is read
in a pass, one that is done again takes as long as any other of the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KINDS = ("whole", "little", "again")  # T, T_l and T_b of the paper


def estimated_speedup(whole: float, little: float, again: float, ratio: float) -> float:
    """Equation 1: how many times as fast as the whole model alone. whole, little, again: T, T_l and
    T_b, seconds. ratio: r, of steps that fall back, 0..1."""
    return whole / (little + ratio * again)


class PassTimes:
    """Seconds of passes over one token, by kind: of the whole model, of the little one, and of the
    whole one where it does a step again. And, by the wall, from the first step's begin to the last
    one's end."""

    def __init__(self) -> None:
        self._sums = dict.fromkeys(KINDS, (0, 0.0))
        self._before = dict(self._sums)
        self._first: float | None = None
        self._last = 0.0

    def begin_run(self) -> None:
        """Means are of the passes from here on, but for the whole model's: of those so far."""
        self._before = {**self._sums, "whole": (0, 0.0)}
        self._first = None

    def add(self, kind: str, start: float, end: float, before: float = 0.0) -> None:
        """A pass of a kind, by time.perf_counter(). before: seconds of it that were spent
        earlier."""
        count, seconds = self._sums[kind]
        self._sums[kind] = count + 1, seconds + end - start + before
        if kind != "whole":
            self._first = start if self._first is None else self._first
            self._last = end

    def means(self, steps: int) -> dict[str, float | None]:
        """By kind, and `step`, of so many steps by the wall; None where there were none."""
        wall = None if self._first is None else self._last - self._first
        found: dict[str, float | None] = {"step": wall and steps and wall / steps or None}
        for kind in KINDS:
            count, seconds = (a - b for a, b in zip(self._sums[kind], self._before[kind]))
            found[kind] = seconds / count if count else None
        return {kind: value and round(value, 6) for kind, value in found.items()}


def with_steps(report: Mapping[str, Any], steps: int, fallbacks: int) -> dict[str, Any]:
    """A report of experts with so many steps, of which the whole model did some again: their ratio,
    None without steps, and, where it has seconds, what equation 1 says of that, None where not all
    is known that it takes."""
    ratio = round(fallbacks / steps, 6) if steps else None
    counted = {**report, "steps": steps, "fallbacks": fallbacks, "ratio": ratio}
    if "seconds" in counted:
        whole, little, again = (counted["seconds"][kind] for kind in KINDS)
        counted["estimate"] = None
        again = 0.0 if fallbacks == 0 else again  # none was needed
        if ratio is not None and None not in (whole, little, again):
            counted["estimate"] = round(estimated_speedup(whole, little, again, ratio), 3)
    return counted
