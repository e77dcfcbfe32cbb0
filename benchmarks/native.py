"""Native products beside mlx_lm, llama.cpp and what memory gives, in turn: decode and prefill.

    python benchmarks/native.py [--models small,large,olmoe] [--what decode,x4,16,256,2048]
        [--rounds 3] [--llama PYTHON] [--keep DIR]

Random models in 4 bits (native_models.py): llamas of 160 MB and 1 GB, and mixtures in the shapes of
OLMoE, Qwen3-30B-A3B (qwen3-moe, a quarter of its layers, and qwen3-30b) and Qwen3-Next (next). What
they compute with: two threads, or as many as there are processors. Every engine is a process of its
own, and stands still while another one is measured. Ratios are of the same round.

mlx_lm runs in float32, seven times as fast as in bfloat16 here, a few tokens of it: its products go
row by row, so that a token of a prompt takes as long as one that is decoded, however long the
prompt is. llama.cpp runs as it is installed, and with OMP_WAIT_POLICY=active; the faster one
counts. It is left out where --llama PYTHON, an interpreter, has none; native_llama.py says how to
install it. What memory gives is an array of 512 MB, added up by all threads, before and after each
decode of ours. After a minute in which others were measured the first short prompt takes up to a
quarter longer; so the others read it, or 256 tokens of it, once more before it counts.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import numpy as np
from measure import machine, spread
from native_models import HERE, MODELS, bytes_read, checkpoint, gguf
from workers import Worker

GIGABYTE = 1e9
THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
OURS, MLX, LLAMA, ACTIVE = "toastkit", "mlx_lm", "llama.cpp", "llama.cpp, active"
TARGETS = {"decode": (25.0, 1.2), "prefill": (60.0, 1.3)}  # times mlx_lm, times llama.cpp
SHARE = 0.75  # of the read rate, for decode
TOGETHER = "x"
CONTEXT = 16  # tokens before those that are decoded
# Of mlx_lm: decoded, of a prompt.
FEW = {
    "small": (8, 12), "large": (2, 4), "olmoe": (4, 8), "qwen3-moe": (2, 4), "qwen3-30b": (2, 4),
    "next": (2, 4),
}  # fmt: skip
LONG = 1000  # tokens of a prompt that is not in the round that warms up
WARM = 256  # tokens of a prompt that are read, at most, before it counts
DECODED = {
    "small": 96, "large": 24, "olmoe": 48, "qwen3-moe": 48, "qwen3-30b": 24, "next": 48,
}  # fmt: skip


def instructions() -> str:
    """What the kernels run on, in words."""
    from toastkit.native.starting import status

    return f"native products {status()}"


class Memory:
    """What it gives: bytes a second, of all threads together, the median of some readings."""

    def __init__(self) -> None:
        numbers = np.ones(64 << 20, np.uint64)
        self._parts, self._size = np.array_split(numbers, THREADS), numbers.nbytes
        self._pool = ThreadPoolExecutor(THREADS)

    def rate(self, readings: int = 7) -> float:
        times = []
        for _ in range(readings):
            start = time.perf_counter()
            list(self._pool.map(np.add.reduce, self._parts))
            times.append(time.perf_counter() - start)
        return self._size / median(times)


def workers(folder: Path, model: str, llama: str, wanted: list[str]) -> dict[str, Worker]:
    """The engines that there are, loaded and at rest."""
    path = str(checkpoint(folder, model))
    engine = str(HERE / "native_engine.py")
    found = {}
    for name, how in ((MLX, "mlx_lm"), (OURS, "native")):
        if name in wanted:
            found[name] = Worker(name, [sys.executable, engine, how, path])
    asked = {LLAMA: {}, ACTIVE: {"OMP_WAIT_POLICY": "active"}}
    if asked.keys() & set(wanted):
        file = gguf(folder, model, llama)
        if file is None:
            print(f"llama.cpp is left out: {llama} has no `gguf` and `llama_cpp`")
        else:
            command = [llama, str(HERE / "native_llama.py"), "run", str(file), str(THREADS)]
            found |= {n: Worker(n, command, e) for n, e in asked.items() if n in wanted}
    return found


def asked(engine: Worker, model: str, case: str) -> float:
    """Tokens a second of a case."""
    if case == "decode":
        few = engine.name == MLX
        return engine.ask("decode", *((2, FEW[model][0]) if few else (CONTEXT, DECODED[model])))
    if case.startswith(TOGETHER):
        return engine.ask("together", int(case[1:]), DECODED[model])
    engine.ask("prefill", min(int(case), WARM))
    return engine.ask("prefill", int(case))


def label(case: str) -> str:
    """A case, in words."""
    if case.startswith(TOGETHER):
        return f"{case[1:]} together"
    return case if case == "decode" else f"prefill {case}"


def measured(
    engines: dict[str, Worker], model: str, what: list[str], rounds: int, memory: Memory
) -> dict[str, dict[str, list[float]]]:
    """Tokens a second by what is done and engine, and under "memory" bytes a second."""
    found: dict[str, dict[str, list[float]]] = {}
    prompt = FEW[model][1]
    for turn in range(rounds + 1):
        if turn == 1:
            found.clear()  # the first round warms up
        plain = None  # mlx_lm's rate of a prompt, of any
        for case in what:
            if not turn and case.isdigit() and int(case) >= LONG:
                continue
            rates = found.setdefault(case, {})
            for name, engine in engines.items():
                if name == MLX and case != "decode":
                    if case.startswith(TOGETHER):
                        continue
                    rate = plain = plain or engine.ask("prefill", prompt)
                elif name == OURS and case == "decode":
                    before = memory.rate()
                    rate = asked(engine, model, case)
                    rates.setdefault("memory", []).append((before + memory.rate()) / 2)
                else:
                    rate = asked(engine, model, case)
                rates.setdefault(name, []).append(rate)
    return found


def report(model: str, found: dict[str, dict[str, list[float]]], sizes: tuple[int, int]) -> None:
    """Tables of tokens a second, and of ratios with the targets."""
    print(
        f"\n{model}: a token reads {sizes[0] / 1e6:.0f} MB of the checkpoint, {sizes[1] / 1e6:.0f}"
    )
    print("as it lies on the device. Tokens a second, median (least .. most):\n")
    names = [name for name in (MLX, LLAMA, ACTIVE, OURS) if any(name in f for f in found.values())]
    print(f"| | {' | '.join(names)} |\n|---|{'---:|' * len(names)}")
    for case, rates in found.items():
        cells = " | ".join(spread(rates[name], 1, 1) if name in rates else "" for name in names)
        print(f"| {label(case)} | {cells} |")
    print(
        "\n| times | mlx_lm | target | llama.cpp | target | GB/s | of what memory gives | target |"
    )
    print(f"|---|{'---:|' * 7}")
    for case, rates in found.items():
        targets = TARGETS["prefill" if case.isdigit() else "decode"]
        peers = [n for n in (LLAMA, ACTIVE) if n in rates]
        peer = max(peers, key=lambda n: median(rates[n])) if peers else ""
        cells = []
        for name, target in zip((MLX, peer), targets):
            cells += [over(rates[OURS], rates[name]) if name in rates else "", f"{target:g}"]
        if case == "decode":
            shares = [[r * size for r in rates[OURS]] for size in sizes]
            given = spread(rates["memory"], GIGABYTE, 1)
            both = ", ".join(over(share, rates["memory"]) for share in shares)
            cells += [f"{spread(shares[0], GIGABYTE, 1)} of {given}", both, f"{SHARE:g}"]
        else:
            cells += ["", "", ""]
        print(f"| {label(case)} | {' | '.join(cells)} |")


def over(ours: list[float], theirs: list[float]) -> str:
    """Ratios of the same round."""
    return spread([a / b for a, b in zip(ours, theirs)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default="small,large,olmoe")
    parser.add_argument(
        "--what",
        default="decode,16,256,2048",
        help="decode, xN: N together, N: a prompt of N tokens",
    )
    parser.add_argument("--engines", default="|".join((MLX, LLAMA, ACTIVE, OURS)), help="A|B|...")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--keep", type=Path, help="make the models here, use them again")
    options = parser.parse_args()
    names, models = options.engines.split("|"), options.models.split(",")
    if OURS not in names or not {*names} <= {MLX, LLAMA, ACTIVE, OURS}:
        parser.error(f"--engines: {OURS}, and any of {MLX}, {LLAMA} and {ACTIVE!r}")
    if unknown := {*models} - {*DECODED}:
        parser.error(f"--models: no {', '.join(unknown)} (but {', '.join(DECODED)})")
    memory = Memory()
    print(f"{machine()}; {THREADS} threads; {instructions()}; {options.rounds} rounds")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        for model in models:
            engines = workers(folder, model, options.llama, names)
            found = measured(engines, model, options.what.split(","), options.rounds, memory)
            on_disk = bytes_read(weights(folder / model), MODELS[model])
            report(model, found, (on_disk, engines[OURS].ask("size")))
            for engine in engines.values():
                engine.end()


def weights(folder: Path) -> dict:
    """Of a checkpoint, not read."""
    import mlx.core as mx

    found: dict = {}
    for path in folder.glob("*.safetensors"):
        found |= mx.load(str(path))  # type: ignore[operator]
    return found


if __name__ == "__main__":
    main()
