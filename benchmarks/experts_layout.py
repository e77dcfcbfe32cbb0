"""What it gains that an expert lies in one piece of a `.toast` file: `bake --expert-major`.

    python benchmarks/experts_layout.py [--folder DIR] [--rounds N] [SHAPE ...]

Two files of one model, by tensor and by expert, in turn, past the system's cache of files: missing
experts that are fetched into slots, EXPERTS of a layer at a time; the whole model loaded; and, of
crumb, tokens a second with 6 slots of 16. Medians and ranges, and the ratio by round: above 1 the
file by experts is the quicker. The models but crumb are random, in four bits, of a few layers.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from experts_models import COMMON, SHAPES, make
from measure import in_turn, machine, ratio, spread

from toastkit.engine.engine import Engine
from toastkit.engine.opening import open_engine
from toastkit.engine.state import ModelState
from toastkit.experts.experts_options import SlotOptions
from toastkit.model.locate import locate
from toastkit.store.bake import bake
from toastkit.store.store import Store
from toastkit.store.waiting import NOW

EXPERTS, LAYERS, TOKENS = 6, 4, 24
OPENED = """
import sys, time
from toastkit.engine.opening import open_engine
from toastkit.model.locate import locate
open_engine(locate("crumb")).close()  # imports, and what MLX makes once
begun = time.perf_counter()
open_engine(locate(sys.argv[1]))
print(time.perf_counter() - begun)
"""
SHAPES["qwen3"] = {
    **COMMON, "model_type": "qwen3_moe", "intermediate_size": 6144, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "head_dim": 128, "norm_topk_prob": True,
}  # fmt: skip


def baked(folder: Path, shape: str) -> dict[str, Path]:
    """A file of each layout; crumb's source is the embedded model."""
    source = "crumb" if shape == "crumb" else str(make(folder / shape, shape, LAYERS, 4))
    files = locate(source)
    found = {}
    for layout in ("tensors", "experts"):
        found[layout] = folder / f"{shape}.{layout}.toast"
        with Store(files) as store:
            bake(store, found[layout], expert_major=layout == "experts")
    os.sync()  # what is not on the disk yet cannot be dropped from the cache
    return found


def drop(path: Path) -> None:
    """Has the system forget a file."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def opened(path: Path) -> Engine:
    engine = open_engine(locate(str(path)), expert_slots=SlotOptions("slots", 8, "off"))
    engine.holdings.store.keeps_cached = False
    return engine


def fetching(path: Path) -> Callable[[], float]:
    """Fetches EXPERTS of every layer, chosen anew; MB/s of the file."""
    engine, rounds = opened(path), iter(range(1 << 30))

    def run() -> float:
        drop(path)
        lot = random.Random(next(rounds))  # the same for both files
        seconds, size = 0.0, 0
        for layer in engine.holdings.slots.layers:
            experts = engine.holdings.store.shape(layer.switch.stacks[0].names[0])[0]
            chosen = lot.sample(range(experts), EXPERTS)
            begun = time.perf_counter()
            layer.memory.finish(layer.memory.begin(chosen, list(range(EXPERTS)), NOW))
            seconds += time.perf_counter() - begun
            size += EXPERTS * layer.memory.read_bytes
        return size / seconds / 1e6

    return run


def loading(path: Path) -> Callable[[], float]:
    """Opens the model whole, in a process of its own, whose memory is all new; MB/s of the file."""

    def run() -> float:
        drop(path)
        command = [sys.executable, "-c", OPENED, str(path)]
        seconds = float(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        return path.stat().st_size / seconds / 1e6

    return run


def decoding(path: Path) -> Callable[[], float]:
    """Tokens a second with 6 slots."""
    engine = open_engine(locate(str(path)), expert_slots=SlotOptions("slots", 6, "off"))
    engine.holdings.store.keeps_cached = False

    def run() -> float:
        drop(path)
        state = ModelState(engine.new_cache())
        engine.consume(state, 5)
        begun = time.perf_counter()
        for token in range(TOKENS):
            engine.consume(state, 7 + 131 * token % 3000)
        return TOKENS / (time.perf_counter() - begun)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("shapes", nargs="*", default=["crumb", "qwen3", "olmoe"], metavar="SHAPE")
    options = parser.parse_args()
    print(f"{machine()}\n\n{'':22}{'by tensor':>26}{'by expert':>26}{'expert / tensor':>22}")
    for shape in options.shapes:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            files = baked(Path(folder), shape)
            ways = {"fetch, MB/s": fetching, "load, MB/s": loading}
            if shape == "crumb":
                ways["decode, tokens/s"] = decoding
            for what, way in ways.items():
                found = in_turn({name: way(path) for name, path in files.items()}, options.rounds)
                both = f"{spread(found['tensors']):>26}{spread(found['experts']):>26}"
                told = ratio(found["experts"], found["tensors"])
                print(f"{shape:7}{what:16}{both}{told:>22}", flush=True)


if __name__ == "__main__":
    main()
