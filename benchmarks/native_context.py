"""A token's speed after a long context, with native products, beside what memory would allow.

    python benchmarks/native_context.py [--models large,large-2] [--contexts 1000,28000,68000]
        [--kv-bits 32,16,8] [--rounds 3] [--keep DIR]

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

TARGETS = {28000: 0.75, 68000: 0.56}  # of the speed after the first context
TOKENS = 8  # that are timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default="large,large-2")
    parser.add_argument("--contexts", default="1000,28000,68000")
    parser.add_argument("--kv-bits", default="32,16,8", help="of keys and values, in turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="make the models here, use them again")
    options = parser.parse_args()
    contexts = [int(word) for word in options.contexts.split(",")]
    print(f"{machine()}; {THREADS} threads; {instructions()}; {options.rounds} rounds")
    print("\n| model | bits of keys | context | cache, MB | ms a token | speed: times the first "
          "context | times the first bits | memory allows | target |")  # fmt: skip
    print(f"|---|{'---:|' * 8}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        for model in options.models.split(","):
            path = checkpoint(options.keep or Path(temporary), model)
            show(model, path, options.kv_bits.split(","), contexts, options.rounds)


def show(model: str, path: Path, kv_bits: list[str], contexts: list[int], rounds: int) -> None:
    """Prints a row for each number of bits and context."""
    engine = [sys.executable, str(HERE / "native_engine.py"), "native", str(path)]
    workers = {bits: Worker("toastkit", [*engine, bits]) for bits in kv_bits}
    weights = workers[kv_bits[0]].ask("size")
    times: dict[tuple[str, int], list[float]] = {}
    sizes = {}
    for _ in range(rounds):
        for context in contexts:
            for bits, worker in workers.items():
                seconds, sizes[bits, context] = worker.ask("after", context, TOKENS)
                times.setdefault((bits, context), []).append(seconds)
    for worker in workers.values():
        worker.end()
    for bits in kv_bits:
        short = bits, contexts[0]
        for context in contexts:
            now = bits, context
            allowed = (weights + sizes[short]) / (weights + sizes[now])
            print(f"| {model} | {bits} | {context:,} | {sizes[now] / 1e6:,.0f} "
                  f"| {spread(times[now], 1e-3, 1)} | {over(times[short], times[now])} "
                  f"| {over(times[kv_bits[0], context], times[now])} | {allowed:.2f} "
                  f"| {TARGETS.get(context, '')} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
