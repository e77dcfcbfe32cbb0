"""The speedup of MoBiLE: seconds of its passes, and the estimate of paper 002 (equation 1).

T, a step of the whole model, is not run next to a little one. It is measured on the last token of
each prompt that the whole model reads, which is such a step with the same flags. If passes read no
weights, a fallback counts as a step of the whole model; it is slightly faster, as the common part
of both passes is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KINDS = ("whole", "little", "again")  # T, T_l and T_b of the paper


def estimated_speedup(whole: float, little: float, again: float, ratio: float) -> float:
    """Equation 1: speedup over the whole model alone. whole, little, again: T, T_l and T_b, in
    seconds. ratio: r, the share of steps that fall back, 0..1."""
    return whole / (little + ratio * again)


class PassTimes:
    """Seconds of passes over one token, by kind: of the whole model, of the little one, and of the
    whole one running a step again. And of a `step`, wall time: including what is done between two
    steps of a run."""

    def __init__(self) -> None:
        self._sums = dict.fromkeys(("step", *KINDS), (0, 0.0))
        self._before = dict(self._sums)
        self._last: float | None = None  # when a step of this run ended

    def begin_run(self) -> None:
        """Reset the run's counts, except those of the whole model's passes, which accumulate."""
        self._before = {**self._sums, "whole": (0, 0.0)}
        self._last = None

    def add(self, kind: str, start: float, end: float, before: float = 0.0) -> None:
        """Add a pass of a kind. start, end: of time.perf_counter(). before: seconds of it that were
        spent earlier."""
        self._count(kind, 1, end - start + before)
        if kind != "whole":
            since = start if self._last is None else self._last
            self._count("step", int(kind == "little"), end - since)
            self._last = end

    def leave_out(self) -> None:
        """Skip what runs now, such as a step of a batch: the next step's wall time starts with
        itself."""
        self._last = None

    def _count(self, kind: str, passes: int, more: float) -> None:
        count, seconds = self._sums[kind]
        self._sums[kind] = count + passes, seconds + more

    def means(self, run: bool = True) -> dict[str, float | None]:
        """Mean seconds by kind, None without passes: of the run, or of all so far."""
        found: dict[str, float | None] = {}
        for kind, sums in self._sums.items():
            counts = zip(sums, self._before[kind] if run else (0, 0.0))
            count, seconds = (now - before for now, before in counts)
            found[kind] = round(seconds / count, 6) if count else None
        return found


def with_steps(report: Mapping[str, Any], steps: int, fallbacks: int) -> dict[str, Any]:
    """A report of experts with its steps, its fallbacks and their ratio, None without steps; and,
    if it has seconds, the estimate of equation 1, None if one of its inputs is unknown."""
    ratio = round(fallbacks / steps, 6) if steps else None
    counted = {**report, "steps": steps, "fallbacks": fallbacks, "ratio": ratio}
    if "seconds" in counted:
        whole, little, again = (counted["seconds"][kind] for kind in KINDS)
        counted["estimate"] = None
        again = 0.0 if fallbacks == 0 else again  # none was needed
        if ratio is not None and None not in (whole, little, again):
            counted["estimate"] = round(estimated_speedup(whole, little, again, ratio), 3)
    return counted
