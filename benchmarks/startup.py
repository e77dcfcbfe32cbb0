"""How long each command takes to start: `--help`, and a first real result.

    python benchmarks/startup.py [--rounds 9] [--only WORD] [--first MODEL,...] [--beside CHECKOUT]

Each is a whole process, timed from outside, in turn with `python -c pass` and `mlx_lm.generate
--help`; the ratio is to `python -c pass` of the same round. --first: instead, the time until an
answer's first byte, of one process and of six in a pipe, for each of these models. --beside: the
same commands with another checkout's code, in turn; the ratio is to these.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from measure import BIN, in_turn, machine, ratio, spread

from toastkit.commands import COMMANDS

PROMPT = "Who are you?"
ONE = ("decode -m MODEL --raw --temp 0 -n 1 --native require PROMPT",)
SIX = (
    "tokenize -m MODEL --raw PROMPT", "prefill --native require", "decode --native require",
    "entropy-gear", "sample --temp 0 -n 1", "detokenize",
)  # fmt: skip


def run(arguments: list[str], **environment: str) -> float:
    start = time.perf_counter()
    subprocess.run(
        arguments, input=b"", stdout=subprocess.DEVNULL, check=True,
        env={**os.environ, **environment},
    )  # fmt: skip
    return time.perf_counter() - start


def first_byte(stages: Sequence[str], model: str, checkout: str | None) -> tuple[float, float]:
    """Seconds until a pipe of commands has written something, and until all have ended."""
    environment = {**os.environ, **({"PYTHONPATH": checkout} if checkout else {})}
    start, processes = time.perf_counter(), []
    for stage in stages:
        given = [{"MODEL": model, "PROMPT": PROMPT}.get(word, word) for word in stage.split()]
        processes.append(
            subprocess.Popen(
                [str(BIN / f"toast-{given[0]}"), *given[1:]], env=environment,
                stdin=processes[-1].stdout if processes else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
            )
        )  # fmt: skip
        if len(processes) > 1:
            processes[-2].stdout.close()  # it is the next one's alone
    assert processes[-1].stdout.read(1), "no answer"
    seconds = time.perf_counter() - start
    processes[-1].stdout.read()
    assert not any(process.wait() for process in processes)
    return seconds, time.perf_counter() - start


def first_bytes(models: Sequence[str], beside: str | None, rounds: int) -> None:
    """Prints a row for each model, way and checkout."""
    print("| first byte, its end | ms | ms | times as long as here |\n|---|---:|---:|---:|")
    for model in models:
        for way, stages in (("one process", ONE), ("six", SIX)):
            trees = {"here": None, **({"beside": beside} if beside else {})}
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in trees}
            for n in range(rounds + 1):
                for name in list(trees)[:: 1 if n % 2 else -1]:
                    seconds = first_byte(stages, model, trees[name])
                    if n:  # the first round fills caches
                        found[name].append(seconds)
            here = [first for first, _ in found["here"]]
            for name, pairs in found.items():
                first, end = ([pair[i] for pair in pairs] for i in (0, 1))
                print(f"| {Path(model).name}, {way}, {name} | {spread(first, 1e-3, 0)} | "
                      f"{spread(end, 1e-3, 0)} | {ratio(first, here)} |", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", metavar="WORD", help="commands that hold the word")
    parser.add_argument("--first", default="", metavar="MODEL,...")
    parser.add_argument("--beside", metavar="CHECKOUT")
    options = parser.parse_args()
    rounds = options.rounds
    if options.first:
        print(f"{machine()}; {rounds} rounds; median (min .. max)\n")
        return first_bytes(options.first.split(","), options.beside, rounds)
    cases = {"python -c pass": partial(run, [sys.executable, "-c", "pass"])}
    for command in COMMANDS:
        name = command.program
        cases[f"{name} --help"] = partial(run, [str(BIN / name), "--help"])
    cases["toast-tokenize --count"] = partial(run, [str(BIN / "toast-tokenize"), "--count", PROMPT])
    for native in ("off", "auto"):
        cases[f"toast-decode -n 1, native {native}"] = partial(
            run, [str(BIN / "toast-decode"), "-n", "1", PROMPT], TOAST_NATIVE=native
        )
    cases["mlx_lm.generate --help"] = partial(run, [str(BIN / "mlx_lm.generate"), "--help"])
    wanted = {n: run for n, run in cases.items() if options.only in n or n == "python -c pass"}
    results = in_turn(wanted, rounds)
    print(f"{machine()}; {rounds} rounds; median (min .. max)\n")
    print(f"{'command':30} {'milliseconds':>26} {'times python -c pass':>26}")
    for name, values in results.items():
        print(f"{name:30} {spread(values, 1e-3, 0):>26} "
              f"{ratio(values, results['python -c pass']):>26}")  # fmt: skip


if __name__ == "__main__":
    main()
