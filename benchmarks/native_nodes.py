"""Nodes of a token's graph, and what they cost: MLX's operations, ours for products alone, ours for
all that there is. In one process, in turn.

    python benchmarks/native_nodes.py --rounds 3 [--models llama,crumb] [--kv-bits 16]

The models: the small llama of native.py, and crumb. Products alone: the same library, but norms,
ropes, gates, softmax, attention, feed-forward networks and recurrences are left to MLX. Prompts
have 256 tokens; 32 for MLX's llama, which is slow.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from unittest.mock import patch

import mlx.core as mx
from measure import machine
from native_models import checkpoint

from toastkit.engine import device
from toastkit.engine.engine import Engine
from toastkit.engine.opening import open_engine
from toastkit.model.locate import locate
from toastkit.native import forms, functions, known, modules

WAYS = ("MLX", "products", "all")


@contextmanager
def alone() -> Iterator[None]:
    """Engines that are opened within have native products and nothing else."""
    products = {k: v for k, v in modules.MIXINS.items() if issubclass(v, modules._Product)}
    with (
        patch.dict(modules.MIXINS, products, clear=True),
        patch.dict(functions._OURS, clear=True),
        patch.dict(functions._EXPRESSIONS, clear=True),
        patch.object(forms, "FORWARDS", []),
        patch.dict(known.LAYERS, clear=True),
        patch.object(modules, "block_of", lambda cls: None),
    ):
        _forget()
        yield
    _forget()


def _forget() -> None:
    functions._forget()
    forms.form_of.cache_clear()
    known.layer_of.cache_clear()
    modules._anew.cache_clear()


def nodes(engine: Engine) -> int:
    """Operations of one token's graph, without its sampling."""
    caches = engine.new_cache()
    _, logits = engine.prefill(list(range(5, 21)), caches)
    with tempfile.NamedTemporaryFile("r", suffix=".dot") as file:
        step = engine.step(mx.argmax(logits), caches)
        mx.export_to_dot(file.name, step)
        mx.eval(step)
        return len(re.findall(r"label =\"\w+\", shape=rectangle", file.read()))


def decode(engine: Engine, count: int) -> float:
    """Tokens a second, greedy, after a prompt of 16."""
    caches = engine.new_cache()
    _, logits = engine.prefill(list(range(5, 21)), caches)
    token = mx.argmax(engine.step(mx.argmax(logits), caches))
    mx.eval(token)
    start = time.perf_counter()
    for _ in range(count):
        token = mx.argmax(engine.step(token, caches))
        mx.eval(token)
    return count / (time.perf_counter() - start)


def prefill(engine: Engine, length: int) -> float:
    """Tokens a second of a prompt, with its last logits."""
    ids = [5 + 7 * n % 4000 for n in range(length)]
    start = time.perf_counter()
    engine.prefill(ids, engine.new_cache())
    return length / (time.perf_counter() - start)


def compare(name: str, path: str, rounds: int, kv_bits: int) -> None:
    """Prints a row for each way."""
    engines = {"MLX": open_engine(locate(path), native="off", kv_bits=kv_bits)}
    with alone():
        engines["products"] = open_engine(locate(path), native="require", kv_bits=kv_bits)
        nodes(engines["products"])  # loaded while it is so
    engines["all"] = open_engine(locate(path), native="require", kv_bits=kv_bits)
    counts = {way: nodes(engines[way]) for way in WAYS}
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for way in WAYS:
            few = way == "MLX" and name != "crumb"
            steps = 6 if few else 48
            found.setdefault((way, "decode"), []).append(decode(engines[way], steps))
            rate = prefill(engines[way], 32 if few else 256)
            found.setdefault((way, "prefill"), []).append(rate)
    layers = len(engines["all"].model.layers)
    print(f"\n{name}, {layers} layers")
    for way in WAYS:
        told = [
            f"{what} {median(rates):6.1f} ({min(rates):.1f} to {max(rates):.1f})"
            for what, rates in ((w, found[way, w]) for w in ("decode", "prefill"))
        ]
        print(f"{way:9} {counts[way] / layers:5.0f} nodes a layer; {', '.join(told)} tok/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", default="llama,crumb")
    parser.add_argument("--kv-bits", type=int, default=32)
    options = parser.parse_args()
    device.start("cpu")
    print(f"{machine()}; {options.rounds} rounds; medians, and the range")
    wanted = options.models.split(",")
    if "llama" in wanted:
        with tempfile.TemporaryDirectory() as folder:
            path = str(checkpoint(Path(folder), "small"))
            compare("llama, 4 bits", path, options.rounds, options.kv_bits)
    if "crumb" in wanted:
        compare("crumb", "crumb", options.rounds, options.kv_bits)


if __name__ == "__main__":
    main()
