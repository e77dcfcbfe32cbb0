"""What the benchmarks share: medians with their spread, and runs of A and B in turn."""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from toastkit.residency.calibration import processor

BIN = Path(sys.executable).parent


def in_turn(cases: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Runs every case once a round, so that a machine that drifts drifts under all of them."""
    results: dict[str, list[float]] = {name: [] for name in cases}
    for case in cases.values():
        case()  # warm caches, compiled kernels and the file system
    for _ in range(rounds):
        for name, case in cases.items():
            results[name].append(case())
    return results


def spread(values: list[float], unit: float = 1.0, digits: int = 2) -> str:
    """median (min .. max) of values / unit."""
    low, middle, high = (f(values) / unit for f in (min, statistics.median, max))
    return f"{middle:.{digits}f} ({low:.{digits}f} .. {high:.{digits}f})"


def ratio(a: list[float], b: list[float]) -> str:
    """median (min .. max) of a/b, round by round."""
    return spread([x / y for x, y in zip(a, b)])


def machine() -> str:
    """The kind of machine, as much as says something about speed."""
    return f"{platform.system()} {platform.machine()}, {processor()}, {os.cpu_count()} cores"
