"""Nodes of a token's graph, and what they cost: MLX's operations, ours for products alone, ours for
all that there is but whole layers, and with them. In one process, in turn.

    python benchmarks/native_nodes.py --rounds 3 [--models llama,crumb,gemma3,phi3,...]
        [--ways products,all] [--kv-bits 16]

The models: the small llama of native.py, crumb, and random ones in layers as other architectures
have them (native_models.py). Products alone: the same library, but norms, ropes,
gates, softmax, attention, feed-forward networks and recurrences are left to MLX. Prompts have 256
tokens; 32 for MLX's products but crumb's, which are slow.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from unittest.mock import patch

import mlx.core as mx
from measure import machine
from native_models import MODELS, checkpoint

from toastkit.engine import device
from toastkit.engine.engine import Engine
from toastkit.engine.opening import open_engine
from toastkit.model.locate import locate
from toastkit.native import functions, known, replacing
from toastkit.native.forms import common, forwards
from toastkit.native.layers.blocks import Layer
from toastkit.native.modules.products import Product

WAYS = ("MLX", "products", "parts", "all")


@contextmanager
def alone() -> Iterator[None]:
    """Engines that are opened within have native products and nothing else."""
    products = {k: v for k, v in replacing.MIXINS.items() if issubclass(v, Product)}
    with (
        patch.dict(replacing.MIXINS, products, clear=True),
        patch.dict(functions._OURS, clear=True),
        patch.dict(functions._EXPRESSIONS, clear=True),
        patch.object(forwards, "NETWORKS", []),
        patch.dict(known.LAYERS, clear=True),
        patch.object(replacing, "block_of", lambda cls: None),
    ):
        _forget()
        yield
    _forget()


@contextmanager
def in_parts() -> Iterator[None]:
    """Engines that are opened within have no whole layers."""
    mixtures = {name: one for name, one in known.LAYERS.items() if not issubclass(one[0], Layer)}
    with (
        patch.dict(known.LAYERS, mixtures, clear=True),
        patch.object(replacing, "block_of", lambda cls: None),
    ):
        _forget()
        yield
    _forget()


def _forget() -> None:
    functions._clear_caches()
    common.form_of.cache_clear()
    known.layer_of.cache_clear()
    replacing.under_its_name.cache_clear()


def nodes(engine: Engine) -> int:
    """Operations of one token's graph, without its sampling."""
    caches = engine.new_cache()
    logits = engine.prefill(list(range(5, 21)), caches)
    logits = engine.step(mx.argmax(logits), caches)  # some caches grow then
    mx.eval(logits)
    with tempfile.NamedTemporaryFile("r", suffix=".dot") as file:
        step = engine.step(mx.argmax(logits), caches)
        mx.export_to_dot(file.name, step)
        mx.eval(step)
        return len(re.findall(r"label =\"\w+\", shape=rectangle", file.read()))


def decode(engine: Engine, count: int) -> float:
    """Tokens a second, greedy, after a prompt of 16, each built while the one before runs."""
    caches = engine.new_cache()
    logits = engine.prefill(list(range(5, 21)), caches)
    token = mx.argmax(engine.step(mx.argmax(logits), caches))
    mx.eval(token)
    start = time.perf_counter()
    for _ in range(count):
        following = mx.argmax(engine.step(token, caches))
        mx.async_eval(following)
        mx.eval(token)
        token = following
    mx.eval(token)
    return count / (time.perf_counter() - start)


def prefill(engine: Engine, length: int) -> float:
    """Tokens a second of a prompt, with its last logits."""
    ids = [5 + 7 * n % 4000 for n in range(length)]
    start = time.perf_counter()
    engine.prefill(ids, engine.new_cache())
    return length / (time.perf_counter() - start)


def opened(path: str, ways: list[str], kv_bits: int) -> dict[str, Engine]:
    """An engine for each way, loaded."""
    engines = {}
    for way in ways:
        with {"products": alone, "parts": in_parts}.get(way, nullcontext)():
            native = "off" if way == "MLX" else "require"
            engines[way] = open_engine(locate(path), native=native, kv_bits=kv_bits)
            nodes(engines[way])
    return engines


def compare(name: str, path: str, ways: list[str], rounds: int, kv_bits: int) -> None:
    """Prints a row for each way."""
    engines = opened(path, ways, kv_bits)
    counts = {way: nodes(engines[way]) for way in ways}
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for way in ways:
            few = way == "MLX" and name != "crumb"
            steps = 6 if few else 48
            found.setdefault((way, "decode"), []).append(decode(engines[way], steps))
            rate = prefill(engines[way], 32 if few else 256)
            found.setdefault((way, "prefill"), []).append(rate)
    layers = len(engines[ways[-1]].model.layers)
    print(f"\n{name}, {layers} layers", flush=True)
    for way in ways:
        told = [
            f"{what} {median(rates):6.1f} ({min(rates):.1f} to {max(rates):.1f})"
            for what, rates in ((w, found[way, w]) for w in ("decode", "prefill"))
        ]
        times = [a / b for a, b in zip(found[way, "decode"], found[ways[-2], "decode"])]
        told += [f"{median(times):.2f} ({min(times):.2f} to {max(times):.2f}) x {ways[-2]}"]
        print(f"{way:9} {counts[way] / layers:5.1f} nodes a layer; tok/s: {', '.join(told)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", default="llama,crumb")
    parser.add_argument("--ways", default=",".join(WAYS), help="two or more of them")
    parser.add_argument("--kv-bits", type=int, default=32)
    options = parser.parse_args()
    device.start("cpu")
    print(f"{machine()}; {options.rounds} rounds; medians, and the range")
    wanted = set(options.ways.split(","))
    if len(wanted) < 2 or not wanted <= {*WAYS}:
        parser.error(f"--ways takes two or more of {', '.join(WAYS)}")
    ways = [way for way in WAYS if way in wanted]
    for name in options.models.split(","):
        made = "small" if name == "llama" else name
        with tempfile.TemporaryDirectory() as folder:
            path = str(checkpoint(Path(folder), made)) if made in MODELS else name
            compare(name, path, ways, options.rounds, options.kv_bits)


if __name__ == "__main__":
    main()
