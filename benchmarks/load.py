"""How long a checkpoint takes to load, and how much memory, beside mlx_lm on the same files.

    python benchmarks/load.py [--gigabytes 2] [--rounds 5] [--keep DIR]

The checkpoint is a llama with random bfloat16 weights in several shards, made for the run. Each
load is a process of its own, in turn with the others, with the files in the system's cache.
"model" is the call that gives the model, imports not counted: our open_engine, and load_model of
mlx_lm.utils. "whole" is a process from its start until model and tokenizer are there: our Engine
and Tokenizer, and mlx_lm.load. Peak memory is that of the process, and what MLX counted. All keep
the checkpoint's dtype but for one: float32, our default on the CPU, where weights take twice the
room.

Then comes the time to the first byte of `toast-model info` on a checkpoint of 1,000 tensors, and
what it takes to read one layer again of a mixture of 18,432 experts' matrices: by itself, and by
building the lazy set of all tensors anew, as was done before. Last, the large checkpoint is opened
without being loaded, and a layer comes and goes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from measure import BIN, in_turn, machine, ratio, spread

from toastkit.model.locate import locate

GIGABYTE = 1e9
LLAMA = {
    "model_type": "llama", "vocab_size": 4096, "hidden_size": 2048, "intermediate_size": 5632,
    "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096, "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip
TINY = {**LLAMA, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 2}  # fmt: skip
MIXTURE = {**TINY, "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8,
           "head_dim": 16, "moe_intermediate_size": 32, "decoder_sparse_step": 1,
           "mlp_only_layers": [], "norm_topk_prob": True}  # fmt: skip
SMALL_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
TENSORS_OF_A_LAYER = 9

# Writes the tensors of {name: shape} of stdin, a shard at a time.
MAKE = """
import json, sys
import mlx.core as mx
folder, shards = sys.argv[1], json.load(sys.stdin)
seed = 0
for file, tensors in shards.items():
    arrays = {}
    for name, shape in tensors.items():
        seed, key = seed + 1, mx.random.key(seed)
        arrays[name] = (0.02 * mx.random.normal(shape, key=key)).astype(mx.bfloat16)
    mx.save_safetensors(f"{folder}/{file}", arrays, metadata={"format": "pt"})
"""
REPORT = """
import json, resource
import mlx.core as mx
try:  # getrusage counts what the parent had before exec
    resident = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) << 10
except (OSError, IndexError):
    unit = 1 if sys.platform == "darwin" else 1024
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
print(json.dumps({
    "seconds": seconds,
    "resident": resident,
    "device": mx.get_peak_memory(),
}), flush=True)
"""
OUR_MODEL = """
import sys, time
from toastkit.engine import device
from toastkit.engine.opening import open_engine
from toastkit.model.locate import locate
import mlx_lm.models.llama
device.start()
start = time.perf_counter()
files = locate(sys.argv[1])
model = open_engine(files, dtype="bfloat16").model
seconds = time.perf_counter() - start
"""
THEIR_MODEL = """
import sys, time
from pathlib import Path
import mlx_lm.models.llama
from mlx_lm.utils import load_model
start = time.perf_counter()
model, config = load_model(Path(sys.argv[1]))
seconds = time.perf_counter() - start
"""
OUR_WHOLE = """
import sys
from toastkit.engine.engine import Engine
from toastkit.engine.opening import open_engine
from toastkit.model.locate import locate
from toastkit.text.tokenizer import Tokenizer
files = locate(sys.argv[1])
engine, tokenizer = open_engine(files, dtype=DTYPE), Tokenizer(files)
seconds = None
"""
AGAIN = """
import json, sys, time
import mlx.core as mx
from toastkit.engine import device
from toastkit.model.locate import locate
from toastkit.store.store import Store
device.start()
files = locate(sys.argv[1])
with Store(files) as store:
    def whole(names):
        tensors = store.load()
        mx.eval([tensors[name] for name in names])
    times = {}
    for name, ask in (("whole", whole), ("alone", store.read)):
        times[name] = []
        for layer in range(8):
            start = time.perf_counter()
            ask(store.layer_names(layer))
            times[name].append(time.perf_counter() - start)
print(json.dumps(times))
"""
# Opens an engine and loads nothing; then a layer in the original, the next one in low gear, and
# both dropped: what the ledger counts, and what MLX does.
OPEN = """
import json, sys, time
from toastkit.engine import device
device.start()
import mlx.core as mx, mlx_lm.models.llama
from toastkit.engine.engine import Engine
from toastkit.holdings.forms import ABSENT, ORIGINAL, packed
from toastkit.model.locate import locate
from toastkit.store.store import Store
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096
before, start = resident(), time.perf_counter()
files = locate(sys.argv[1])
engine = Engine(Store(files))
told = [[time.perf_counter() - start, (resident() - before) / 2**20]]
for layer, form in ((0, ORIGINAL), (1, packed(4)), (0, ABSENT), (1, ABSENT)):
    packs = form.kind == "packed"
    wanted = {h.path: ORIGINAL if packs and h.weight is None else form
              for h in engine.holdings.modules.values() if h.layer == layer}
    engine.holdings.change(wanted)
    told.append([engine.ledger.total() / 2**20, mx.get_active_memory() / 2**20])
print(json.dumps(told))
"""
THEIR_WHOLE = """
import sys
from mlx_lm import load
model, tokenizer = load(sys.argv[1])
seconds = None
"""
PROGRAMS = {
    "model: toastkit": OUR_MODEL,
    "model: mlx_lm": THEIR_MODEL,
    "whole: toastkit": OUR_WHOLE.replace("DTYPE", "'bfloat16'"),
    "whole: mlx_lm": THEIR_WHOLE,
    "whole: toastkit, float32": OUR_WHOLE.replace("DTYPE", "'float32'"),
}


def tensors_of(config: dict, layers: int) -> dict[str, list[int]]:
    """Names and shapes of a llama's tensors."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    shared = width * config["num_key_value_heads"] // config["num_attention_heads"]
    shapes = {
        "self_attn.q_proj": [width, width], "self_attn.k_proj": [shared, width],
        "self_attn.v_proj": [shared, width], "self_attn.o_proj": [width, width],
        "mlp.gate_proj": [inner, width], "mlp.up_proj": [inner, width],
        "mlp.down_proj": [width, inner], "input_layernorm": [width],
        "post_attention_layernorm": [width],
    }  # fmt: skip
    if experts := config.get("num_experts"):
        inner = config["moe_intermediate_size"]
        shapes = {name: s for name, s in shapes.items() if "mlp" not in name}
        shapes |= {"mlp.gate": [experts, width], "self_attn.q_norm": [16], "self_attn.k_norm": [16]}
        for e in range(experts):
            shapes |= {f"mlp.experts.{e}.{n}_proj": [inner, width] for n in ("gate", "up")}
            shapes[f"mlp.experts.{e}.down_proj"] = [width, inner]
    found = {"model.embed_tokens.weight": [config["vocab_size"], width]}
    for layer in range(layers):
        found |= {f"model.layers.{layer}.{name}.weight": s for name, s in shapes.items()}
    return {**found, "model.norm.weight": [width]}


def size_of(tensors: dict[str, list[int]]) -> int:
    """Bytes in bfloat16."""
    return sum(2 * shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in tensors.values())


def make(folder: Path, config: dict, layers: int, shards: int) -> Path:
    """Writes a checkpoint as the hub has them: shards, an index, the embedded model's tokenizer."""
    folder.mkdir(parents=True)
    tensors = tensors_of(config, layers)
    files = [f"model-{n:05}-of-{shards:05}.safetensors" for n in range(1, shards + 1)]
    names = list(tensors)
    places = {name: files[n * shards // len(names)] for n, name in enumerate(names)}
    parts = {f: {n: tensors[n] for n in names if places[n] == f} for f in files}
    subprocess.run(
        [sys.executable, "-c", MAKE, str(folder)], input=json.dumps(parts).encode(), check=True
    )
    for name in SMALL_FILES:
        (folder / name).write_bytes(locate("crumb").read(name) or b"{}")
    settings = {**config, "num_hidden_layers": layers, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(settings))
    index = {"metadata": {"total_size": size_of(tensors)}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def load(program: str, folder: Path, records: list[dict]) -> float:
    """Runs a load in a process of its own; seconds, and a record of them and the memory."""
    command = [sys.executable, "-c", program + REPORT, str(folder)]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    line = process.stdout.readline()
    elapsed = time.perf_counter() - start
    if process.wait() != 0:
        raise SystemExit("the load failed")
    record = json.loads(line)
    record["seconds"] = record["seconds"] or elapsed
    records.append(record)
    return record["seconds"]


def first_byte(command: list[str]) -> float:
    """Seconds from the start of a command to the first byte of its output."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read(1)
    seconds = time.perf_counter() - start
    process.stdout.read()
    if process.wait() != 0:
        raise SystemExit(f"{' '.join(command)} failed")
    return seconds


def show(results: dict[str, list[float]], records: dict[str, list[dict]], weights: int) -> None:
    """The table: seconds, their ratio to mlx_lm's, memory in multiples of the weights."""
    print(f"{'load':26} {'seconds':>22} {'/ mlx_lm':>20} {'process peak':>14} {'MLX peak':>9}")
    for name, values in results.items():
        theirs = results[f"{name.split(':')[0]}: mlx_lm"]
        kept = records[name][1:]  # the first was the warming
        resident, device = (
            statistics.median(r[field] for r in kept) / weights for field in ("resident", "device")
        )
        print(f"{name:26} {spread(values, 1, 3):>22} {ratio(values, theirs):>20} "
              f"{resident:>14.2f} {device:>9.2f}")  # fmt: skip


def again(folder: Path) -> str:
    """Milliseconds to read a layer again, in words: the first, which finds out how, is not one."""
    command = [sys.executable, "-c", AGAIN, str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    times = json.loads(done.stdout)
    alone, whole = (spread(times[name][1:], 1e-3, 1) for name in ("alone", "whole"))
    first = times["alone"][0] * 1e3
    return f"{alone} ms alone (the first {first:.0f}), {whole} ms of a set of all"


def opened(folder: Path) -> str:
    """What it takes to open a model without loading it, and what a layer takes that comes and goes,
    in words. Linux."""
    command = [sys.executable, "-c", OPEN, str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    (seconds, mebibytes), *forms = json.loads(done.stdout)
    names = ("a layer", "and one in low gear", "without the first", "without both")
    told = ", ".join(f"{n} {a:.1f} / {b:.1f}" for n, (a, b) in zip(names, forms))
    return f"{seconds * 1e3:.0f} ms, {mebibytes:.1f} MiB; MiB by ledger / by MLX: {told}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="make the checkpoints here, use them again")
    options = parser.parse_args()
    layer = size_of(tensors_of(LLAMA, 1)) - size_of(tensors_of(LLAMA, 0))
    layers = max(1, round(options.gigabytes * GIGABYTE / layer))
    weights = size_of(tensors_of(LLAMA, layers))
    with tempfile.TemporaryDirectory() as temporary:
        base = options.keep or Path(temporary)
        large, many, mixture = base / f"llama-{layers}", base / "thousand", base / "mixture"
        if not large.exists():
            make(large, LLAMA, layers, max(2, round(weights / (0.5 * GIGABYTE))))
        if not many.exists():
            make(many, TINY, 1000 // TENSORS_OF_A_LAYER, 4)
        if not mixture.exists():
            make(mixture, MIXTURE, 48, 8)
        records: dict[str, list[dict]] = {name: [] for name in PROGRAMS}
        cases: dict[str, Callable[[], float]] = {
            name: partial(load, program, large, records[name])
            for name, program in PROGRAMS.items()
        }  # fmt: skip
        results = in_turn(cases, options.rounds)
        info = [str(BIN / "toast-model"), "info", str(many)]
        bytes_ = in_turn({"info": partial(first_byte, info)}, options.rounds)
        reading, opening = again(mixture), opened(large)
    print(f"{machine()}; {options.rounds} rounds; median (min .. max)")
    print(f"{weights / GIGABYTE:.2f} GB of weights; memory in multiples of that\n")
    show(results, records, weights)
    print(f"\ntoast-model info, 1,001 tensors: {spread(bytes_['info'], 1e-3, 0)} ms to first byte")
    print(f"a layer of a mixture read again: {reading}")
    print(f"opened, nothing loaded: {opening}")


if __name__ == "__main__":
    main()
