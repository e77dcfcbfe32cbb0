"""Experts offloaded: tokens a second, hit rate and device bytes by slots, prefetch and bandwidth.

    python benchmarks/experts_offload.py [--shape olmoe|qwen1.5|crumb] [--layers N] [--bits 4]
        [--slots 16,32] [--rates 25,3.5] [--tokens N] [--rounds N] [--folder DIR]
        [--base WAY] [--repeat]

A random checkpoint in the shape of OLMoE-1B-7B or Qwen1.5-MoE-A2.7B, with fewer layers, whose
experts do not fit the slots; or crumb, as it is, over a story. Files are read past the system's
cache, and as fast as a rate in GB/s allows: PCIe 4.0 x16 has about 25, x8 12, an NVMe disk 3.5; 0
is as fast as it goes. One process, the ways in turn, in any order, each round with its own tokens;
with --repeat all with the same one after the same prompt, so that all that is wanted is in slots.
Medians and ranges, and the ratio to the base, "demand", by round:

    whole     all experts on the device
    demand    fetched when a router has chosen them
    careful   likewise, and no step is optimistic; with "always" every one is
    next-D    those that routers D layers ahead choose of this layer's input are read meanwhile
    told      the choice of all layers is known beforehand, as of an evicted pass (M3)
    little    half the experts a token, fetched when a router has chosen them
    mobile-R  MoBiLE with a fallback ratio of R: as random weights are never sure of anything, lots
              are drawn for who falls back. The big pass reads what the evicted one has named;
              mobile-R-off does not, mobile-R-next asks routers a layer ahead in all passes (M7)

For mobile, with T_l of the steps that were kept and T_b of the passes that were done again, the
estimate of paper 002 (equation 1), T / (T_l + R T_b), stands beside what was measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from toastkit.engine import big_little
from toastkit.engine.engine import Engine
from toastkit.engine.opening import open_engine
from toastkit.engine.savepoints import roll_back, take_savepoint
from toastkit.engine.state import ModelState
from toastkit.experts.experts_options import ExpertsOptions
from toastkit.experts.pass_times import estimated_speedup
from toastkit.experts.slot_options import SlotOptions
from toastkit.model.locate import locate
from toastkit.text.tokenizer import Tokenizer

COMMON = {
    "vocab_size": 4096, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "norm_topk_prob": False,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "olmoe": {
        **COMMON, "model_type": "olmoe", "intermediate_size": 1024, "num_experts": 64,
        "num_experts_per_tok": 8,
    },
    "qwen1.5": {
        **COMMON, "model_type": "qwen2_moe", "intermediate_size": 5632, "num_experts": 60,
        "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 5632,
    },
}  # fmt: skip
SMALL_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
PROMPT = list(range(5, 21))
STORY = Path(__file__).parents[1] / "tests" / "texts" / "story.txt"


def make(folder: Path, shape: str, layers: int, bits: int) -> Path:
    """A new checkpoint, quantised as mlx_lm does; a shard is a layer."""
    config: dict[str, Any] = {**SHAPES[shape], "num_hidden_layers": layers}
    architecture = import_module(f"mlx_lm.models.{config['model_type']}")
    model = architecture.Model(architecture.ModelArgs.from_dict(config))
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    shards: dict[str, dict[str, mx.array]] = {}
    config["quantization"] = {"group_size": 64, "bits": bits}
    # Routers are not quantised, as published.
    nn.quantize(
        model, 64, bits,
        class_predicate=lambda path, module: (
            hasattr(module, "to_quantized") and not path.endswith("gate")
        ),
    )  # fmt: skip
    for name, array in tree_flatten(model.parameters()):
        number = name.split("layers.")[1].split(".")[0] if "layers." in name else "outside"
        shards.setdefault(number, {})[name] = filled(name, array, bits, random)
    where = {}
    for number, tensors in shards.items():
        mx.save_safetensors(str(folder / f"model-{number}.safetensors"), tensors)
        where.update(dict.fromkeys(tensors, f"model-{number}.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "config.json").write_text(json.dumps(config))
    for name in SMALL_FILES:
        (folder / name).write_bytes(locate("crumb").read(name) or b"{}")
    return folder


def filled(name: str, like: mx.array, bits: int, random: np.random.Generator) -> mx.array:
    """Values of a parameter that keep activations in bounds."""
    if like.dtype == mx.uint32:
        words = np.frombuffer(random.bytes(4 * like.size), np.uint32)
        return mx.array(words.reshape(like.shape))
    spread = 0.03 / (1 << bits)
    if name.endswith(("scales", "biases")):
        value = spread if name.endswith("scales") else -spread * ((1 << bits) - 1) / 2
        return mx.full(like.shape, value, mx.bfloat16)
    if "norm" in name:
        return mx.ones(like.shape, mx.bfloat16)
    return mx.array(0.02 * random.standard_normal(like.shape, np.float32)).astype(mx.bfloat16)


class Rate:
    """A medium that gives so many GB/s to all threads together."""

    def __init__(self, rate: float):
        self.rate, self._free, self._lock = rate, 0.0, threading.Lock()

    def __call__(self, count: int) -> None:
        with self._lock:
            self._free = max(self._free, time.perf_counter()) + count / (self.rate * 1e9)
            wait = self._free - time.perf_counter()
        if wait > 0:
            time.sleep(wait)


@contextmanager
def drawn(falls_back: bool) -> Iterator[None]:
    """The confidence of a step of MoBiLE is by lot meanwhile."""
    real = big_little.confidence
    # Still computed, as it would be.
    big_little.confidence = lambda logits: real(logits) * 0 + (0.0 if falls_back else 1.0)
    try:
        yield
    finally:
        big_little.confidence = real


class Way:
    """An engine and what it measured. name: as above."""

    def __init__(self, path: Path, name: str, slots: int, rate: float):
        self.name, self.rates = name, []
        kind, _, rest = name.partition("-")
        self.ratio, _, how = rest.partition("-") if kind == "mobile" else ("", "", "")
        prefetch = rest if kind == "next" else "1" if how == "next" else "off"
        options = None if name == "whole" else SlotOptions("slots", slots, prefetch)
        experts = ExpertsOptions(kind) if kind in ("little", "mobile") else None
        self.engine: Engine = open_engine(
            locate(str(path)), dtype="float32", expert_slots=options, experts=experts
        )
        if experts is not None and self.engine.experts is not None:
            self.engine.experts.prefetches = how != "off"
        self.lots, self.kept, self.again = np.random.default_rng(7), [], []
        self.store = self.engine.holdings.store
        self.store.keeps_cached = False
        self.store.throttle(Rate(rate) if rate else None)
        self.state = ModelState(self.engine.new_cache())
        for _ in self.engine.reading(self.state, PROMPT):
            pass
        optimistic = self.engine.holdings.slots.optimistic
        if name in ("careful", "always"):
            optimistic._trusts, optimistic.note = name == "always", lambda found: None
        self.engine.begin_run()

    def run(self, tokens: list[int], known: list[dict[int, list[int]]], repeat: bool) -> None:
        """A round. known: by token, the choices of all layers. repeat: each step is taken back."""
        seconds = 0.0
        for token, choices in zip(tokens, known):
            point = take_savepoint(self.state.cache, 0, one_step=True) if repeat else None
            start = time.perf_counter()
            if self.name == "told":
                self.engine.holdings.slots.foresight.tell(choices)
            falls = self.ratio and self.lots.random() < float(self.ratio)
            with drawn(bool(falls)):
                self.engine.consume(self.state, token)
            mx.eval(self.state.logits)
            took = time.perf_counter() - start
            if point is not None:
                self.state.tokens.pop()
                roll_back(self.state.cache, 1, point)
            (self.again if falls else self.kept).append(took)
            seconds += took
        self.rates.append(len(tokens) / seconds)

    def estimate(self, base: Way) -> str:
        """Equation 1, from medians of what was measured."""
        little = statistics.median(self.kept)
        big = statistics.median(self.again) - little if self.again else 0.0
        ratio = len(self.again) / (len(self.again) + len(self.kept))
        plain = statistics.median(base.kept)
        return (
            f"  T_l/T {little / plain:.2f}  T_b/T {big / plain:.2f}  r {ratio:.2f}: "
            f"x{estimated_speedup(plain, little, big, ratio):.2f} estimated"
        )

    def line(self, base: Way, tokens: int) -> str:
        ratios = sorted(a / b for a, b in zip(self.rates, base.rates))
        device = (self.engine.ledger.total() - self.engine.ledger.of("cache")) / 1e6
        told = (
            f"  {self.name:8} {1e3 / statistics.median(self.rates):6.2f} ms a token, "
            f"{statistics.median(self.rates):6.2f} tok/s "
            f"({min(self.rates):.2f}-{max(self.rates):.2f})  x{statistics.median(ratios):.2f} "
            f"({ratios[0]:.2f}-{ratios[-1]:.2f})  {device:6.0f} MB on the device"
        )
        report = self.engine.run_report().get("slots")
        if report is None:
            return told
        if self.ratio:
            told += self.estimate(base)
        hit, read = report["hit"] / report["wanted"], report["read"] / tokens / 1e6
        wait = report["wait"] / tokens * 1e3
        told += f"  hit {hit:.0%}  {read:.1f} MB and {wait:.0f} ms a token"
        if report["ahead"]:
            told += f"  right {report['right'] / report['ahead']:.0%} of {report['ahead']}"
        if report["optimistic"]:
            told += f"  {report['optimistic']} optimistic, {report['retried']} retried"
        return told


def known_choices(path: Path, rounds: list[list[int]]) -> list[list[dict[int, list[int]]]]:
    """What each token will choose, by round."""
    way = Way(path, "demand", max(experts_of(path) - 1, 1), 0)
    found = []
    for tokens in rounds:
        choices = []
        for token in tokens:
            way.engine.consume(way.state, token)
            mx.eval(way.state.logits)
            layers = way.engine.holdings.slots.layers
            choices.append({n: list(layer.choice) for n, layer in enumerate(layers)})
        found.append(choices)
    way.engine.close()
    return found


def experts_of(path: Path) -> int:
    """Experts of a checkpoint."""
    return json.loads(locate(str(path)).read("config.json"))["num_experts"]


def rounds_of(path: Path, options: argparse.Namespace) -> list[list[int]]:
    """Tokens, by round."""
    count = options.tokens * options.rounds
    if options.shape == "crumb":
        files = locate("crumb")
        ids = Tokenizer(files).encode_prompt(STORY.read_text(), templated=False)[:count]
    else:
        ids = np.random.default_rng(1).integers(5, 4000, count).tolist()
    if options.repeat:
        ids = ids[:1] * count
    return [ids[i : i + options.tokens] for i in range(0, count, options.tokens)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=[*SHAPES, "crumb"], default="olmoe")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--slots", default="16,32")
    parser.add_argument("--rates", default="25,3.5,0.5")
    parser.add_argument("--ways", default="whole,demand,next-1,next-2,told")
    parser.add_argument("--base", default="demand")
    parser.add_argument("--repeat", action="store_true")
    parser.add_argument("--tokens", type=int, default=8, help="a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path("crumb")
        if options.shape != "crumb":
            path = make(Path(folder) / options.shape, options.shape, options.layers, options.bits)
        rounds = rounds_of(path, options)
        asked = "told" in options.ways.split(",")
        known = known_choices(path, rounds) if asked else [[{}] * options.tokens] * options.rounds
        print(f"{options.shape}, {options.layers} layers, {options.bits} bits, "
              f"{options.rounds} rounds of {options.tokens} tokens")  # fmt: skip
        for slots in map(int, options.slots.split(",")):
            for rate in map(float, options.rates.split(",")):
                ways = [Way(path, name, slots, rate) for name in options.ways.split(",")]
                base = next(way for way in ways if way.name == options.base)
                order = np.random.default_rng(2)
                for tokens, choices in zip(rounds, known):
                    for way in order.permutation(ways):
                        way.run(tokens, choices, options.repeat)
                print(f"{slots} slots of {experts_of(path)}, {rate or 'any'} GB/s")
                for way in ways:
                    print(way.line(base, options.tokens * options.rounds), flush=True)
                    way.engine.close()


if __name__ == "__main__":
    main()
