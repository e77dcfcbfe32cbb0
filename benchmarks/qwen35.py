"""Random checkpoints in the shapes of Qwen3.5, whole models of any size, written shard by shard.

    from qwen35 import SHAPES, make
    make(folder / "4B-4bit", SHAPES["4B"], bits=4)

Values mean nothing; sizes, names, dtypes and the work that a token takes are those of the model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from toastkit.model.locate import locate

SMALL_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
COMMON = {
    "model_type": "qwen3_5_text", "vocab_size": 248320, "head_dim": 256, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip


def _shape(hidden: int, inner: int, layers: int, heads: int, kv: int, values: int, tied: bool):
    return {
        **COMMON, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "linear_num_value_heads": values,
        "tie_word_embeddings": tied,
    }  # fmt: skip


SHAPES: dict[str, dict[str, Any]] = {
    "0.8B": _shape(1024, 3584, 24, 8, 2, 16, True),
    "2B": _shape(2048, 6144, 24, 8, 2, 16, True),
    "4B": _shape(2560, 9216, 32, 16, 4, 32, True),
    "9B": _shape(4096, 12288, 32, 16, 4, 32, False),
    "27B": _shape(5120, 17408, 64, 24, 4, 48, False),
}


def make(folder: Path, shape: dict[str, Any], bits: int | None, group_size: int = 64) -> Path:
    """A new directory with a checkpoint: in bits a weight, as mlx_lm quantises, or, for None, in
    bfloat16. A shard is a layer. Returns the directory."""
    from mlx_lm.models.qwen3_5 import Model, ModelArgs

    folder.mkdir(parents=True)
    model = Model(ModelArgs.from_dict({"model_type": "qwen3_5", "text_config": shape}))
    config: dict[str, Any] = {"model_type": "qwen3_5", "text_config": shape}
    if bits is not None:
        config["quantization"] = {"group_size": group_size, "bits": bits}
        nn.quantize(model, group_size=group_size, bits=bits)
    random = np.random.default_rng(0)
    shards: dict[str, list[tuple[str, mx.array]]] = {}
    for name, array in tree_flatten(model.parameters()):
        number = name.split("layers.")[1].split(".")[0] if "layers." in name else "outside"
        shards.setdefault(number, []).append((name, array))
    where = {}
    for number, tensors in shards.items():
        file = f"model-{number}.safetensors"
        arrays = {name: _random(name, array, bits, random) for name, array in tensors}
        mx.save_safetensors(str(folder / file), arrays, metadata={"format": "mlx"})
        where.update(dict.fromkeys(arrays, file))
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    for name in SMALL_FILES:
        (folder / name).write_bytes(locate("crumb").read(name))
    return folder


def _random(name: str, like: mx.array, bits: int | None, random: np.random.Generator) -> mx.array:
    """Values of a parameter that keep activations in bounds."""
    shape = tuple(like.shape)
    if like.dtype == mx.uint32:
        return mx.array(np.frombuffer(random.bytes(4 * like.size), np.uint32).reshape(shape))
    last = name.rpartition(".")[2]
    spread = 0.03 / (1 << (bits or 1))
    if last == "scales":
        found = np.full(shape, spread, np.float32)
    elif last == "biases":
        found = np.full(shape, -spread * ((1 << (bits or 1)) - 1) / 2, np.float32)
    elif "norm" in name:
        found = np.ones(shape, np.float32)
    else:
        found = 0.02 * random.standard_normal(shape, np.float32)
    kept = mx.float32 if last == "A_log" else mx.bfloat16
    return mx.array(found).astype(kept)
