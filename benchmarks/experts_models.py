"""Random mixtures of experts in the shapes of real ones, with fewer layers or all, for the
benchmarks of experts."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from toastkit.model.locate import locate

COMMON = {
    "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    "tie_word_embeddings": False, "norm_topk_prob": False,
}  # fmt: skip
# As published, but for what says nothing about size or speed.
SHAPES: dict[str, dict[str, Any]] = {
    "olmoe": {
        **COMMON, "model_type": "olmoe", "num_hidden_layers": 16, "intermediate_size": 1024,
        "num_experts": 64, "num_experts_per_tok": 8, "vocab_size": 50304,
    },
    "qwen1.5": {
        **COMMON, "model_type": "qwen2_moe", "num_hidden_layers": 24, "intermediate_size": 5632,
        "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632, "decoder_sparse_step": 1, "vocab_size": 151936,
    },
    "deepseek-lite": {
        **COMMON, "model_type": "deepseek_v2", "num_hidden_layers": 27, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "n_routed_experts": 64, "num_experts_per_tok": 6,
        "n_shared_experts": 2, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
        "v_head_dim": 128, "vocab_size": 102400, "topk_method": "greedy", "n_group": 1,
        "topk_group": 1, "rope_scaling": {
            "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
            "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096,
        },
    },
}  # fmt: skip
COUNTS = ("num_experts", "n_routed_experts")
SMALL_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
# Embeddings times this: the larger, the more of what a router sees is the token's own and stays the
# same from layer to layer. So scaled, routers are about as foreseeable as those of crumb, which is
# trained: three quarters of what is read ahead because of them is wanted, and slots for a quarter
# of the experts hold a third of those wanted. As drawn it would be 10% and 80%: all tokens would
# go to much the same experts.
OWN = {"olmoe": 20.0, "qwen1.5": 28.0, "deepseek-lite": 1.0}
# The same in the whole depth, where what layers add sums up: attention adds much the same to all
# tokens, experts add what is a token's own and new in each layer. Slots for a quarter of the
# experts hold 31% (OLMoE) and 26% (Qwen) of those wanted; 88% of what is read ahead is wanted.
DEEP = {
    "olmoe": {"embed_tokens": 26.0, "o_proj": 0.5, "down_proj": 1.6},
    "qwen1.5": {"embed_tokens": 26.0, "o_proj": 0.25, "down_proj": 1.5},
}


def structure(config: dict[str, Any], bits: int) -> nn.Module:
    """The architecture, quantised as mlx_lm does: random, and nothing of it evaluated."""
    architecture = import_module(f"mlx_lm.models.{config['model_type']}")
    model: nn.Module = architecture.Model(architecture.ModelArgs.from_dict(config))
    # Routers are not quantised, as published.
    nn.quantize(
        model, 64, bits,
        class_predicate=lambda path, module: (
            hasattr(module, "to_quantized") and not path.endswith("gate")
        ),
    )  # fmt: skip
    return model


def make(folder: Path, shape: str, layers: int, bits: int, experts: int | None = None) -> Path:
    """The checkpoint of a shape in a folder, made if it is not there; a shard is a layer. Its
    vocabulary is smaller by as much as it has fewer layers. experts: None for as many as it has."""
    path = folder / f"{shape}-{layers}-{bits}{'' if experts is None else f'-{experts}'}"
    if path.exists():
        return path
    config = dict(SHAPES[shape])
    if experts is not None:
        config |= {key: experts for key in COUNTS if key in config}
    share = layers / config["num_hidden_layers"]
    config["vocab_size"] = 64 * round(config["vocab_size"] * share / 64)
    config |= {"num_hidden_layers": layers, "quantization": {"group_size": 64, "bits": bits}}
    deep = layers == SHAPES[shape]["num_hidden_layers"]
    scaled = DEEP.get(shape, {}) if deep else {"embed_tokens": OWN[shape]}
    return write(path, config, bits, scaled)


def write(path: Path, config: dict[str, Any], bits: int, scaled: Mapping[str, float]) -> Path:
    """A random checkpoint. config: with how it is quantised, in `bits`. scaled: see OWN, by
    module."""
    random = np.random.default_rng(0)
    shards: dict[str, dict[str, mx.array]] = {}
    for name, array in tree_flatten(structure(config, bits).parameters()):
        number = name.split("layers.")[1].split(".")[0] if "layers." in name else "outside"
        shards.setdefault(number, {})[name] = array
    part, where = path.with_suffix(".part"), {}
    part.mkdir(parents=True)
    for number, tensors in shards.items():  # one at a time: a whole model may not fit into memory
        values = {name: filled(name, like, bits, scaled, random) for name, like in tensors.items()}
        mx.save_safetensors(str(part / f"model-{number}.safetensors"), values, {"format": "mlx"})
        where.update(dict.fromkeys(tensors, f"model-{number}.safetensors"))
    (part / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (part / "config.json").write_text(json.dumps(config))
    for name in SMALL_FILES:
        (part / name).write_bytes(locate("crumb").read(name) or b"{}")
    os.sync()  # what is not on the disk yet cannot be dropped from the cache
    return part.rename(path)


def filled(
    name: str, like: mx.array, bits: int, scaled: Mapping[str, float], random: np.random.Generator
) -> mx.array:
    """Values of a parameter that keep activations in bounds. scaled: see OWN, by module."""
    if like.dtype == mx.uint32:
        words = np.frombuffer(random.bytes(4 * like.size), np.uint32)
        return mx.array(words.reshape(like.shape))
    times = math.prod(value for module, value in scaled.items() if f"{module}." in name)
    spread = 0.03 / (1 << bits) * times
    if name.endswith(("scales", "biases")):
        value = spread if name.endswith("scales") else -spread * ((1 << bits) - 1) / 2
        return mx.full(like.shape, value, mx.bfloat16)
    if "norm" in name:
        return mx.ones(like.shape, mx.bfloat16)
    return mx.array(0.02 * random.standard_normal(like.shape, np.float32)).astype(mx.bfloat16)
