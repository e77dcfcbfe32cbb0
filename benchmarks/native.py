"""Native products beside MLX's, in one process, in turn: decode and prefill.

    python benchmarks/native.py --rounds 3

A random llama of 160 MB in 4 bits, in groups of 64, and crumb. Each round runs both engines, one
after the other, so that a machine that is shared slows both down. What memory gives is told by a
float32 matrix with one vector, 512 MB, in the same run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median

from load import LLAMA, SMALL_FILES
from measure import machine

from toastkit.engine import device

device.start("cpu")

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402

from toastkit.engine.engine import Engine  # noqa: E402
from toastkit.engine.opening import open_engine  # noqa: E402
from toastkit.model.locate import locate  # noqa: E402
from toastkit.native.building import build  # noqa: E402
from toastkit.native.library import load  # noqa: E402

GIGABYTE = 1e9
PLAIN_STEPS, STEPS = 6, 48  # tokens of a measurement, of MLX's products and of ours
LENGTHS = (16, 256)  # tokens of a prompt


def packed_llama(folder: Path) -> Path:
    """Six layers, 4 bits, scales in bfloat16."""
    from mlx_lm.models import llama

    config = {**LLAMA, "num_hidden_layers": 6, "num_attention_heads": 16, "head_dim": 128}
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=64, bits=4)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    for name in SMALL_FILES:
        (folder / name).write_bytes(locate("crumb").read(name) or b"{}")
    config["quantization"] = {"group_size": 64, "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def read_rate() -> float:
    """Bytes a second of a float32 matrix that one vector is multiplied with, the best of five."""
    library, weight = load(build()), mx.ones((32768, 4096))
    x = mx.ones((1, 4096))
    mx.eval(weight, x)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        mx.eval(library.multiply(x, weight))
        times.append(time.perf_counter() - start)
    return weight.nbytes / min(times)


def decode(engine: Engine, count: int) -> float:
    """Tokens a second, greedy, after a prompt of 16."""
    cache = engine.new_cache()
    _, logits = engine.prefill(list(range(5, 21)), cache)
    token = mx.argmax(engine.step(mx.argmax(logits), cache))
    mx.eval(token)
    start = time.perf_counter()
    for _ in range(count):
        token = mx.argmax(engine.step(token, cache))
        mx.eval(token)
    return count / (time.perf_counter() - start)


def prefill(engine: Engine, length: int) -> float:
    """Tokens a second of a prompt, with its last logits."""
    ids = [5 + 7 * n % 4000 for n in range(length)]
    start = time.perf_counter()
    engine.prefill(ids, engine.new_cache())
    return length / (time.perf_counter() - start)


def compare(name: str, path: str, rounds: int) -> None:
    """Prints a row for each of decode and the prompts."""
    engines = {n: open_engine(locate(path), native=n) for n in ("off", "require")}
    size = sum(a.nbytes for _, a in tree_flatten(engines["require"].model.parameters()))
    found: dict[str, dict[str, list[float]]] = {}
    for turn in range(rounds):
        for native, engine in engines.items():
            plain = native == "off"
            few = plain and name != "crumb"
            runs = {"decode": lambda e=engine, n=PLAIN_STEPS if few else STEPS: decode(e, n)}
            for length in LENGTHS:
                if not (few and length > 16 and turn):  # a minute each
                    runs[f"prefill {length}"] = lambda e=engine, n=length: prefill(e, n)
            for what, run in runs.items():
                found.setdefault(what, {}).setdefault(native, []).append(run())
    print(f"\n{name}, {size / 1e6:.0f} MB on the device")
    for what, rates in found.items():
        ours, theirs = median(rates["require"]), median(rates["off"])
        more = f", {ours * size / GIGABYTE:.1f} GB/s" if what == "decode" else ""
        print(f"{what:12} MLX {theirs:7.1f}, native {ours:7.1f} tok/s: {ours / theirs:.1f}x{more}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(f"{machine()}; {options.rounds} rounds; medians")
    print(f"memory gives {read_rate() / GIGABYTE:.1f} GB/s")
    with tempfile.TemporaryDirectory() as folder:
        compare("llama, 4 bits", str(packed_llama(Path(folder))), options.rounds)
    compare("crumb", "crumb", options.rounds)


if __name__ == "__main__":
    main()
