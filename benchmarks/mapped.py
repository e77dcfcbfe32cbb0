"""Weights that lie in their files, beside weights that are read: how soon the first token is there,
how fast tokens come, and what two processes take.

    python benchmarks/mapped.py MODEL [--what start,disk,steps,memory] [--rounds 7]

MODEL: a .toast file, or a checkpoint whose tensors are aligned. start: `toast-decode -n 1` by the
clock, the file in the system's cache; disk: the same, the file not in it. steps: of one engine each
in one process, in turn. memory: two processes that have answered. Medians, least and most.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from residency_files import drop, warm, weights

COMMAND = """
import sys
from toastkit.residency import mapping
if sys.argv.pop(1) == "read":
    mapping.MappingPolicy._fits = lambda *_: False
from toastkit.commands.decode import main
main()
"""
WAYS = ("read", "mapped")
TOKENS = 24  # of a round


def said(name: str, seconds: list[float]) -> None:
    """A row of a table, in milliseconds."""
    low, middle, high = (1000 * f(seconds) for f in (min, statistics.median, max))
    print(f"| {name} | {middle:.0f} | {low:.0f} to {high:.0f} |", flush=True)


def started(model: Path, way: str, count: int, **settings) -> subprocess.Popen:
    """A process that answers a prompt with so many tokens."""
    options = ["-m", str(model), "--raw", "-n", str(count), "--temp", "0", "--native", "require"]
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, way, *options],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, **settings,
    )  # fmt: skip
    process.stdin.write(b"The cat\n")
    process.stdin.close()
    return process


def start(model: Path, rounds: int, before: Callable[[list[Path]], None]) -> None:
    """Seconds until a process has written its only token, and until it has ended."""
    files = weights(model)
    first, whole = ({way: [] for way in WAYS} for _ in range(2))
    for _ in range(rounds):
        for way in WAYS:
            before(files)
            begun = time.perf_counter()
            with started(model, way, 1) as process:
                process.stdout.read(1)
                first[way].append(time.perf_counter() - begun)
                process.stdout.read()
            whole[way].append(time.perf_counter() - begun)
    for way in WAYS:
        said(f"{way}: first byte", first[way])
        said(f"{way}: end", whole[way])


def steps(model: Path, rounds: int) -> None:
    """Seconds of a step where all weights are read, and where they lie in their files."""
    import mlx.core as mx

    from toastkit.engine.engine import Engine
    from toastkit.engine.state import ModelState
    from toastkit.model.locate import locate
    from toastkit.native.starting import NativeOptions
    from toastkit.residency.mapping import MappingPolicy
    from toastkit.store.store import Store

    files = locate(str(model))
    ways = {"read": [], "mapped": [MappingPolicy()]}
    engines = {}
    for way, policies in ways.items():
        store = Store(files)
        engine = Engine(store, policies, native=NativeOptions("require"))
        cache = engine.new_cache()
        state = ModelState(cache, [5, 6, 7], logits=engine.prefill([5, 6, 7], cache))
        engines[way] = engine, state
    text = Path("/proc/self/smaps").read_text()
    large = sum(int(line.split()[1]) for line in text.splitlines() if line[:8] == "FilePmdM")
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for n in range(rounds * TOKENS):
        for way in WAYS if n % 2 else WAYS[::-1]:
            engine, state = engines[way]
            begun = time.perf_counter()
            engine.consume(state, int(mx.argmax(state.logits).item()))
            mx.eval(state.logits)
            seconds[way].append(time.perf_counter() - begun)
    for way, found in seconds.items():
        said(f"{way}: a step", found)
    pairs = [mapped / read for read, mapped in zip(*seconds.values())]
    print(f"mapped takes {statistics.median(pairs):.2f} times as long, by pairs")
    print(f"of the file on large pages: {(large << 10) / 1e6:.0f} MB", flush=True)


def memory(model: Path, rounds: int) -> None:
    """Of two processes that have taken 8 steps and go on: what is each one's, and its share."""
    for way in WAYS:
        processes = [started(model, way, 4000) for _ in range(2)]
        for process in processes:
            process.stdout.read(8)
        for process in processes:
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            found = {n: f"{int(text.split(n + ':')[1].split()[0]) / 1e6:.2f} GB"
                     for n in ("Rss", "Pss", "Pss_Anon", "Pss_File")}  # fmt: skip
            print(way, found, flush=True)
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    """Prints what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--what", default="start,disk,steps,memory")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    print(f"{given.model}, {os.cpu_count()} processors", flush=True)
    kinds = {
        "start": lambda: start(given.model, given.rounds, warm),
        "disk": lambda: start(given.model, given.rounds, drop),
        "steps": lambda: steps(given.model, given.rounds),
        "memory": lambda: memory(given.model, given.rounds),
    }
    wanted = given.what.split(",")
    if unknown := {*wanted} - {*kinds}:
        parser.error(f"--what: no {', '.join(unknown)} (but {', '.join(kinds)})")
    for what in wanted:
        if what != "memory":
            print(f"| {what} | median, ms | least to most |\n|---|---|---|", flush=True)
        kinds[what]()


if __name__ == "__main__":
    main()
