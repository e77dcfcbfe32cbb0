"""How long each command takes to start: `--help`, and a first real result.

    python benchmarks/startup.py [--rounds 9] [--only WORD]

Each is a whole process, timed from outside, in turn with `python -c pass` and `mlx_lm.generate
--help`; the ratio is to `python -c pass` of the same round.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from functools import partial

from measure import BIN, in_turn, machine, ratio, spread

from toastkit.commands import COMMANDS

PROMPT = "Who are you?"


def run(arguments: list[str], **environment: str) -> float:
    start = time.perf_counter()
    subprocess.run(
        arguments, input=b"", stdout=subprocess.DEVNULL, check=True,
        env={**os.environ, **environment},
    )  # fmt: skip
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", metavar="WORD", help="commands that hold the word")
    options = parser.parse_args()
    rounds = options.rounds
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
