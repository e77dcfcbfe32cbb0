"""Tokens a second where more processes want to run than there are processors: ours, llama.cpp.

    python benchmarks/native_crowd.py [--rounds 3] [--seconds 3] [--llama PYTHON] [--keep DIR]

The llama of 160 MB (native_models.py). Decoders beside processes that do nothing but count, then
several decoders at once, whose tokens are added up; every one has as many threads as there are
processors. Then toast-decode as one process and as a pipeline of six. llama.cpp: see native.py.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from measure import in_turn, machine, spread
from native import ACTIVE, LLAMA, OURS, THREADS, instructions, over, workers
from native_models import HERE
from pipeline import cases
from workers import Worker, together

CROWDS = ((1, 0), (1, 2), (2, 0), (4, 0))  # decoders, processes that count
CONTEXT = 16  # tokens of a prompt
PIPELINE_TOKENS = 100


def crowds(folder: Path, llama: str, rounds: int, seconds: float) -> None:
    """Prints a row for each crowd."""
    most = max(count for count, _ in CROWDS)
    sets = [workers(folder, "small", llama, [OURS, LLAMA, ACTIVE]) for _ in range(most)]
    busy = [Worker("busy", [sys.executable, str(HERE / "workers.py")]) for _ in range(2)]
    names = list(sets[0])
    found: dict[tuple[int, int], dict[str, list[float]]] = {crowd: {} for crowd in CROWDS}
    for _ in range(rounds):
        for (decoders, others), rates in found.items():
            for name in names:
                crowd = [engines[name] for engines in sets[:decoders]]
                for one in crowd:
                    one.ask("begin", CONTEXT)
                answers = together([*crowd, *busy[:others]], "go", seconds)
                rates.setdefault(name, []).append(sum(answers[:decoders]))
    for worker in [*busy, *(engine for engines in sets for engine in engines.values())]:
        worker.end()
    heads = [f"{name} / alone" for name in names]
    print(f"\n| tokens a second | {' | '.join(names)} | {' | '.join(heads)} |")
    print(f"|---|{'---:|' * 2 * len(names)}")
    for (decoders, others), rates in found.items():
        what = f"{decoders} decoding" + (f", {others} others busy" if others else "")
        alone = found[CROWDS[0]]
        cells = [spread(rates[name], 1, 1) for name in names]
        cells += [over(rates[name], alone[name]) for name in names]
        print(f"| {what} | {' | '.join(cells)} |", flush=True)


def pipeline(model: Path, rounds: int) -> None:
    """Prints a row for each of one process and six."""
    os.environ["TOAST_NATIVE"] = "require"
    runs = cases(model, PIPELINE_TOKENS, ["--raw", "Once upon a time"], [], [])
    wanted = {name: run for name, run in runs.items() if "mlx_lm" not in name}
    seconds = in_turn(wanted, rounds)
    print("\n| tokens a second | | times one process |\n|---|---:|---:|")
    for name, values in seconds.items():
        rates = [1 / value for value in values]
        print(f"| {name} | {spread(rates, 1, 1)} | {over(seconds['toast-decode'], values)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--llama", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--keep", type=Path, help="make the models here, use them again")
    options = parser.parse_args()
    print(f"{machine()}; {THREADS} threads; {instructions()}; {options.rounds} rounds")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        crowds(folder, options.llama, options.rounds, options.seconds)
        pipeline(folder / "small", options.rounds)


if __name__ == "__main__":
    main()
