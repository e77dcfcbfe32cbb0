"""How long each command takes to start: `--help`, and a first real result.

    python benchmarks/startup.py [--rounds 9]

Each is a whole process, timed from outside, in turn with `python -c pass` and `mlx_lm.generate
--help`; the ratio is to `python -c pass` of the same round.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from functools import partial

from measure import BIN, in_turn, machine, ratio, spread

from toastkit.commands import COMMANDS

PROMPT = "Who are you?"


def run(arguments: list[str], text: bytes = b"") -> float:
    start = time.perf_counter()
    subprocess.run(arguments, input=text, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    cases = {"python -c pass": partial(run, [sys.executable, "-c", "pass"])}
    for command in COMMANDS:
        name = command.program
        cases[f"{name} --help"] = partial(run, [str(BIN / name), "--help"])
    cases["toast-tokenize --count"] = partial(run, [str(BIN / "toast-tokenize"), "--count", PROMPT])
    cases["toast-decode -n 1 (crumb)"] = partial(
        run, [str(BIN / "toast-decode"), "-n", "1", PROMPT]
    )
    cases["mlx_lm.generate --help"] = partial(run, [str(BIN / "mlx_lm.generate"), "--help"])
    results = in_turn(cases, rounds)
    print(f"{machine()}; {rounds} rounds; median (min .. max)\n")
    print(f"{'command':30} {'milliseconds':>26} {'times python -c pass':>26}")
    for name, values in results.items():
        print(f"{name:30} {spread(values, 1e-3, 0):>26} "
              f"{ratio(values, results['python -c pass']):>26}")  # fmt: skip


if __name__ == "__main__":
    main()
