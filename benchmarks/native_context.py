"""A token's speed after a long context, with native products, beside what memory would allow.

    python benchmarks/native_context.py [--models large,large-2] [--contexts 1000,28000,68000]
        [--rounds 3] [--keep DIR]

Keys and values are random and not computed: a token takes as long with them. What memory allows: as
many bytes of weights and cache as a token reads take as long as the same bytes of weights alone.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from measure import machine, spread
from native import THREADS, instructions, over
from native_models import HERE, checkpoint
from workers import Worker

AIMS = {28000: 0.75, 68000: 0.56}  # of the speed after the first context
TOKENS = 8  # that are timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default="large,large-2")
    parser.add_argument("--contexts", default="1000,28000,68000")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="make the models here, use them again")
    options = parser.parse_args()
    contexts = [int(word) for word in options.contexts.split(",")]
    print(f"{machine()}; {THREADS} threads; {instructions()}; {options.rounds} rounds")
    print("\n| model | context | cache, MB | ms a token | times the first | memory allows | aim |")
    print(f"|---|{'---:|' * 6}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        for model in options.models.split(","):
            path = checkpoint(options.keep or Path(temporary), model)
            command = [sys.executable, str(HERE / "native_engine.py"), "native", str(path)]
            worker = Worker("toastkit", command)
            weights = worker.ask("size")
            times: dict[int, list[float]] = {context: [] for context in contexts}
            sizes = {}
            for _ in range(options.rounds):
                for context in contexts:
                    seconds, sizes[context] = worker.ask("after", context, TOKENS)
                    times[context].append(seconds)
            worker.end()
            short = contexts[0]
            for context in contexts:
                allowed = (weights + sizes[short]) / (weights + sizes[context])
                print(f"| {model} | {context:,} | {sizes[context] / 1e6:,.0f} "
                      f"| {spread(times[context], 1e-3, 1)} | {over(times[short], times[context])} "
                      f"| {allowed:.2f} | {AIMS.get(context, '')} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
