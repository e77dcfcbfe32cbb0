"""Whether an expert should lie in one piece: a file read by experts, in one range or in several.

    python benchmarks/experts_layout.py [--folder DIR] [--rounds N]

A checkpoint has nine tensors of a layer's quantised experts, so that one expert is nine ranges of
its file. Expert by expert it would be one. Both are read as toastkit.store.reader does it, eight
experts at a time, past the system's cache of files, in turn; MB/s, median and range.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from toastkit.store.jobs import Filling, Piece
from toastkit.store.raw import RawTensors, Span
from toastkit.store.reader import NOW, Reader

EXPERTS, TOGETHER, RANGES = 64, 8, 9
# Bytes of an expert: of crumb as it is, of Qwen3-30B-A3B and OLMoE in four bits.
SIZES = {"crumb": 72 << 10, "Qwen3-30B-A3B": 2654 << 10, "OLMoE": 3456 << 10}
SHARES = (128, 4, 4) * 3  # of weights, scales and biases, of gate, up and down


def ranges_of(size: int) -> list[int]:
    """Bytes of each of an expert's tensors."""
    return [size * share // sum(SHARES) // 64 * 64 for share in SHARES]


def read(reader: Reader, path: Path, experts: list[int], sizes: list[int], major: bool) -> float:
    """Seconds until some experts are there."""
    whole, memory = sum(sizes), np.empty(sum(sizes) * len(experts), np.uint8).data
    jobs = {}
    for n, expert in enumerate(experts):
        pieces, start = [], 0
        for size in [whole] if major else sizes:
            first = expert * whole if major else start * EXPERTS + expert * size
            view = memory[n * whole + start : n * whole + start + size]
            pieces.append(Piece((Span(path, first, first + size),), "U8", view))
            start += size
        jobs[n] = Filling(tuple(pieces))
    begun = time.perf_counter()
    reader.request(jobs, lambda arrays: None, NOW, at_once=True).result()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    print("expert                  nine ranges MB/s        one range MB/s       one / nine")
    for name, size in SIZES.items():
        sizes = ranges_of(size)
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            path = Path(folder) / "experts"
            with path.open("wb") as file:
                for n in range(EXPERTS):
                    file.write(np.random.default_rng(n).bytes(sum(sizes)))
                file.flush()
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            header = SimpleNamespace(path=path, entries={})
            raw = RawTensors(SimpleNamespace(headers=[header], name="experts"))  # type: ignore
            raw.cached = False
            with_reader = Reader(raw)
            found: dict[bool, list[float]] = {True: [], False: []}
            for n in range(options.rounds):
                chosen = random.Random(n).sample(range(EXPERTS), TOGETHER)
                for major in (True, False) if n % 2 else (False, True):
                    seconds = read(with_reader, path, chosen, sizes, major)
                    found[major].append(TOGETHER * sum(sizes) / seconds / 1e6)
            with_reader.close()
            ratios = sorted(a / b for a, b in zip(found[True], found[False]))
            told = [spread(rates) for rates in (found[False], found[True])]
            ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
            print(f"{name:14} {size / 1024:7.0f}K {told[0]:>22} {told[1]:>22} {ratio:>20}")


def spread(rates: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(rates):.0f} ({min(rates):.0f}-{max(rates):.0f})"


if __name__ == "__main__":
    main()
