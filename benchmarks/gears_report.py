"""How benchmarks/gears.py says things: tables that are Markdown too, progress, noise."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence

START = time.perf_counter()


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> None:
    """Prints a table. left: columns that are words, and stand on the left."""
    lines = [tuple(head), *map(tuple, rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines)]
    for number, line in enumerate(lines):
        cells = (
            cell.ljust(width) if n < left else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(line, widths))
        )
        print(f"| {' | '.join(cells)} |")
        if number == 0:
            marks = (
                "-" * width if n < left else "-" * (width - 1) + ":"
                for n, width in enumerate(widths)
            )
            print(f"| {' | '.join(marks)} |")
    print(flush=True)


def title(name: str, *notes: str) -> None:
    """Begins a section. notes: what one has to know to read it."""
    print(f"## {name}\n")
    for note in notes:
        print(note)
    print(f"Load average as it began: {load_average()}.\n", flush=True)


def load_average() -> str:
    """How many processes wanted a core in the last minute: over 1 means that others were at work,
    or, where a section runs several itself, more of them than there are cores."""
    return f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def say(what: str) -> None:
    """Progress, on stderr."""
    print(f"[{seconds():6.0f} s] {what}", file=sys.stderr, flush=True)


def seconds() -> float:
    """Since the start."""
    return time.perf_counter() - START


def percent(share: float, digits: int = 1) -> str:
    """A share as a percentage."""
    return f"{100 * share:.{digits}f}%"


def mib(count: float) -> str:
    """Bytes in MiB."""
    return f"{count / 2**20:,.2f}"
