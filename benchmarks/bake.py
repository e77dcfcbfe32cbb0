"""How much memory `toast-model bake` takes beside the largest layer, and how fast it is.

    python benchmarks/bake.py [--gib 3] [--hidden 2048] [--json] [CASE ...]

A random llama in bfloat16, in shards of a layer each, is baked in every way, each in a process of
its own that has baked the embedded model before: what is measured is what the size of the model
adds. "experts" bakes a mixture of experts of that size expert by expert. The bound is 2.5 times the
largest layer, or the largest tensor outside the layers.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path

from measure import machine

CASES = {
    "copy": {},
    "dtype": {"dtype": "float16"},
    "quant": {"quantization": {"bits": 4}},
    "gears": {"gears": ("low", "mid")},
    "split": None,
    "experts": {"expert_major": True},
}
EXPERTS = 8  # of the mixture
VOCAB = 16384
MIB = 1 << 20


def write_model(path: Path, hidden: int, size: int, experts: int) -> None:
    """A random llama of about `size` bytes, or a mixture of so many experts in place of each MLP; a
    shard for each layer."""
    import mlx.core as mx

    width = hidden * 11 // 4 // max(experts, 1)
    square, wide, tall = (hidden, hidden), (width, hidden), (hidden, width)
    shapes = {f"self_attn.{name}_proj.weight": square for name in "qkvo"}
    for n in range(max(experts, 1)):
        place = f"mlp.experts.{n}" if experts else "mlp"
        shapes |= {f"{place}.gate_proj.weight": wide, f"{place}.up_proj.weight": wide}
        shapes |= {f"{place}.down_proj.weight": tall}
    shapes |= {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    if experts:
        shapes |= {"mlp.gate.weight": (experts, hidden)}
        shapes |= {f"self_attn.{name}_norm.weight": (hidden,) for name in "qk"}
    outside = {"model.embed_tokens.weight": (VOCAB, hidden), "model.norm.weight": (hidden,)}
    per_layer = 2 * (4 * hidden * hidden + 3 * hidden * width * max(experts, 1))
    layers = max(2, (size - 2 * VOCAB * hidden) // per_layer)
    config = {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": width,
        "num_hidden_layers": layers, "num_attention_heads": hidden // 64, "rms_norm_eps": 1e-6,
        "num_key_value_heads": hidden // 64, "vocab_size": VOCAB, "tie_word_embeddings": True,
    }  # fmt: skip
    if experts:
        config |= {"model_type": "olmoe", "num_experts": experts, "num_experts_per_tok": 2}
    (path / "config.json").write_text(json.dumps(config))
    groups = [outside]
    for i in range(layers):
        groups.append({f"model.layers.{i}.{name}": shape for name, shape in shapes.items()})
    places = {}
    for number, group in enumerate(groups):
        # Rows alike: to draw them all takes longer than to bake them.
        tensors = {n: mx.broadcast_to(mx.random.normal(s[-1:], dtype=mx.bfloat16), s)
                   for n, s in group.items()}  # fmt: skip
        file = f"model-{number:05}.safetensors"
        mx.save_safetensors(str(path / file), tensors)
        places |= dict.fromkeys(tensors, file)
        del tensors
        mx.clear_cache()
    index = {"metadata": {}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def measure(case: str, source: str, out: Path) -> dict:
    """Bakes in this process. Sizes in bytes."""
    from toastkit.engine import device

    device.start("cpu")
    import mlx.core as mx

    from toastkit.model.locate import locate
    from toastkit.store.bake import bake, split
    from toastkit.store.quantising import QuantizationOptions
    from toastkit.store.store import Store

    def run(name: str, out: Path):
        store = Store(locate(name))
        if CASES[case] is None:
            split(store, out)
            return store
        options = dict(CASES[case])
        if "quantization" in options:
            options["quantization"] = QuantizationOptions(**options["quantization"])
        bake(store, out, **options)
        return store

    run("crumb", out / "crumb.toast")
    mx.reset_peak_memory()
    before, start = peak_bytes(), time.perf_counter()
    store = run(source, out / "made.toast")
    seconds = time.perf_counter() - start
    layers = [sum(map(store.nbytes, store.layer_names(i))) for i in range(store.layer_count)]
    return {
        "layer": max(*layers, *map(store.nbytes, store.layer_names(None))),
        "model": sum(map(store.nbytes, store.names)),
        "mlx": mx.get_peak_memory(),
        "process": peak_bytes() - before,
        "seconds": seconds,
    }


def peak_bytes() -> int:
    """The most memory that this process has had resident."""
    with suppress(OSError, IndexError):  # getrusage counts what the parent had before exec
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) << 10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def report(found: dict[str, dict]) -> None:
    first = next(iter(found.values()))
    print(f"{machine()}; model {first['model'] / MIB:.0f} MiB, "
          f"largest layer, or tensor outside, {first['layer'] / MIB:.1f} MiB\n")  # fmt: skip
    print(f"{'':8}{'MLX peak':>24}{'process grew by':>24}{'seconds':>10}{'MiB/s':>8}")
    for case, it in found.items():
        mlx, process = (f"{it[k] / MIB:.1f} MiB ({it[k] / it['layer']:.2f}x)" for k in
                        ("mlx", "process"))  # fmt: skip
        speed = it["model"] / MIB / it["seconds"]
        print(f"{case:8}{mlx:>24}{process:>24}{it['seconds']:>10.1f}{speed:>8.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=3.0)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    options = parser.parse_args()
    found = {}
    # Processes of a server that has imported all and computed nothing.
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["mlx.core", "toastkit.engine.device", "toastkit.store.bake"])
    with tempfile.TemporaryDirectory() as folder:
        for case in options.cases or CASES:
            experts = EXPERTS if case == "experts" else 0
            source = Path(folder) / f"source-{experts}"
            if not source.exists():
                source.mkdir()
                write_model(source, options.hidden, int(options.gib * 2**30), experts)
            with (
                tempfile.TemporaryDirectory() as out,
                ProcessPoolExecutor(1, mp_context=processes) as pool,
            ):
                found[case] = pool.submit(measure, case, str(source), Path(out)).result()
    print(json.dumps(found)) if options.json else report(found)


if __name__ == "__main__":
    main()
