"""What it would be worth to keep, where a step falls back, what both of its passes have in common:
all that comes before the first router, which has seen the same input in both.

    python benchmarks/experts_shared.py [--rounds N] [MODEL ...]

Parts of a step are timed in turn, one token after 256: what comes before the first router, and a
step of the big and of the little model; crumb whole, the others as random models of a few layers
with the sizes of the real ones, 4 bits a weight, and the rest of their layers added up. gain: how
many times faster a run would be whose steps fall back at a ratio of 0.11, 0.21 (the paper's) or 1.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from measure import in_turn, machine

from toastkit.engine import device

READ, RATIOS = 256, (0.11, 0.21, 1.0)
COMMON = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
# Sizes of the real models; with 16 experts, for a token goes to K of them however many there are.
SHAPES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "OLMoE-1B-7B": ("olmoe", 16, {
        "hidden_size": 2048, "intermediate_size": 1024, "num_attention_heads": 16,
        "num_key_value_heads": 16, "num_experts": 16, "num_experts_per_tok": 8,
        "vocab_size": 50304, "norm_topk_prob": False,
    }),
    "Qwen1.5-MoE-A2.7B": ("qwen2_moe", 24, {
        "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632, "num_attention_heads": 16,
        "num_key_value_heads": 16, "num_experts": 16, "num_experts_per_tok": 4,
        "vocab_size": 151936, "tie_word_embeddings": False,
    }),
    "DeepSeek-V2-Lite": ("deepseek_v2", 27, {
        "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 16,
        "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1,
        "moe_layer_freq": 1, "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128, "vocab_size": 102400,
        "topk_method": "greedy", "n_group": 1, "topk_group": 1, "rope_scaling": {
            "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
            "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096,
        },
    }),
}  # fmt: skip


def crumb() -> tuple[Any, int]:
    """The embedded model, and how many layers it has."""
    from toastkit.engine.opening import open_engine
    from toastkit.model.locate import locate

    engine = open_engine(locate("crumb"), device_name="cpu")
    return engine.model, len(engine.model.layers)


def random_model(name: str) -> tuple[Any, int]:
    """A model of the dense layers and one with experts, and how many the real one has."""
    from importlib import import_module

    kind, layers, sizes = SHAPES[name]
    count = 1 + sizes.get("first_k_dense_replace", 0)
    architecture = import_module(f"mlx_lm.models.{kind}")
    config = {"model_type": kind, "num_hidden_layers": count, **COMMON, **sizes}
    model = architecture.Model(architecture.ModelArgs.from_dict(config))
    nn.quantize(model, group_size=64, bits=4)
    mx.eval(model.parameters())
    return model, layers


class FirstRouter(Exception):
    """Raised where a pass has come to it."""


def parts(model: Any, layers: int, rounds: int) -> tuple[list[float], list[float], list[float]]:
    """Seconds, round by round: before the first router, a big step, a little step."""
    from mlx_lm.models.cache import make_prompt_cache

    from toastkit.experts.routers import router_of

    blocks = [
        m for layer in model.layers for _, m in layer.named_modules() if router_of(m) is not None
    ]
    owners = [(_owner(b, router_of(b).k), router_of(b).k.rpartition(".")[2]) for b in blocks]
    own_k = getattr(*owners[0])
    cache = make_prompt_cache(model)
    mx.eval(model(mx.zeros((1, READ), mx.uint32), cache=cache))

    def step() -> float:
        start = time.perf_counter()
        mx.eval(model(mx.array([[5]]), cache=cache))
        return time.perf_counter() - start

    def with_k(k: int) -> float:
        for owner, name in owners:
            setattr(owner, name, k)
        return step()

    def before() -> float:
        kind, held = type(blocks[0]), []

        class Stops(kind):
            def __call__(self, x):
                held.append(x)
                raise FirstRouter

        blocks[0].__class__ = Stops
        start = time.perf_counter()
        try:
            model(mx.array([[5]]), cache=cache)
        except FirstRouter:
            mx.eval(held)
        blocks[0].__class__ = kind
        return time.perf_counter() - start

    def block(k: int) -> float:
        """A layer with experts, by itself."""
        for owner, name in owners:
            setattr(owner, name, k)
        layer, own, x = model.layers[-1], cache[-1], mx.ones((1, 1, model.args.hidden_size))
        start = time.perf_counter()
        mx.eval(layer(x, None, own))
        return time.perf_counter() - start

    more = layers - len(model.layers)
    cases: dict[str, Callable[[], float]] = {
        "before": before, "big": lambda: with_k(own_k), "little": lambda: with_k(own_k // 2),
    }  # fmt: skip
    if more:
        cases |= {"big layer": lambda: block(own_k), "little layer": lambda: block(own_k // 2)}
    times = in_turn(cases, rounds)
    for name in ("big", "little") if more else ():
        times[name] = [a + more * b for a, b in zip(times[name], times[f"{name} layer"])]
    return times["before"], times["big"], times["little"]


def _owner(module: Any, path: str) -> Any:
    for word in path.split(".")[:-1]:
        module = getattr(module, word)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("models", nargs="*", help="of crumb and those of SHAPES (default: all)")
    flags = parser.parse_args()
    device.start("cpu")
    print(machine(), "\n")
    print("| model | before the first router, ms | big step | little step | share of a big step |"
          + "".join(f" gain at {r} |" for r in RATIOS))  # fmt: skip
    print("|---|" + "---:|" * (4 + len(RATIOS)))
    for name in flags.models or ("crumb", *SHAPES):
        model, layers = crumb() if name == "crumb" else random_model(name)
        before, big, little = parts(model, layers, flags.rounds)
        a, b, c = (statistics.median(values) for values in (before, big, little))
        share = sorted(x / y for x, y in zip(before, big))
        gains = [(c + r * b) / (c + r * (b - a)) for r in RATIOS]
        spread = f"{a / b:.1%} ({share[0]:.1%} .. {share[-1]:.1%})"
        print(f"| {name} | {a * 1e3:.2f} | {b * 1e3:.1f} | {c * 1e3:.1f} | {spread} |"
              + "".join(f" {gain:.4f} |" for gain in gains), flush=True)  # fmt: skip
        del model


if __name__ == "__main__":
    main()
