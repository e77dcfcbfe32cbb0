"""Small random checkpoints, written as published ones are; and how tests open and read any."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from tests.model.published import writing
from tests.model.published.writing import Checkpoint
from toastkit.engine.engine import Engine
from toastkit.engine.opening import open_engine
from toastkit.engine.state import ModelState
from toastkit.holdings.policy import NO_WISH, Wish
from toastkit.model.files import ModelFiles
from toastkit.model.locate import locate
from toastkit.store.bake import bake
from toastkit.store.dtypes import DTYPES
from toastkit.store.store import Store

SIZES = {
    "vocab_size": 4096, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512, "rope_theta": 10000.0,
}  # fmt: skip


def located(model: ModelFiles | Path | str) -> ModelFiles:
    return model if isinstance(model, ModelFiles) else locate(str(model))


def open_store(model: ModelFiles | Path | str) -> Store:
    return Store(located(model))


def open_model(model: ModelFiles | Path | str, **options: Any) -> Engine:
    """An engine, in float32 unless options, of open_engine, say otherwise."""
    return open_engine(located(model), **{"dtype": "float32", **options})


def open_crumb(**options: Any) -> Engine:
    """The embedded model, native where commands would have it so: by MLX alone a prompt of forty
    tokens takes ten times as long, and a step twice. options: of open_engine."""
    return open_model("crumb", **{"native": "auto", **options})


def read(engine: Engine, ids: Sequence[int], chunk: int | None = 16) -> ModelState:
    """A new state that has read a prompt, so many tokens at a time."""
    state = ModelState(engine.new_cache())
    for _ in engine.reading(state, ids, lambda: chunk):
        pass
    return state


def logits_after(
    engine: Engine,
    state: ModelState,
    tokens: Iterable[int],
    before: Callable[[int], Wish] = lambda n: NO_WISH,
) -> list[mx.array]:
    """Logits of a state, and after each of the tokens that follow. before: what is wished for of
    the n-th step."""
    found = [state.logits]
    for n, token in enumerate(tokens):
        engine.consume(state, token, before(n))
        found.append(state.logits)
    mx.eval(found)
    return found


def baked(model: ModelFiles | Path | str, out: Path, **options: Any) -> Path:
    """A new .toast file of the model. options: of bake."""
    with open_store(model) as store:
        bake(store, out, **options)
    return out


def same(a: mx.array, b: mx.array) -> bool:
    """To the bit, in shape and dtype too."""
    bits = (array.reshape(-1).view(mx.uint8) for array in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and bool(mx.array_equal(*bits))


def write_checkpoint(path: Path, config: dict, weights: dict, shards: int = 1) -> Path:
    """A new directory with the embedded model's tokenizer."""
    return writing.write_checkpoint(path, Checkpoint(config, {}, shards=shards, tensors=weights))


def model_of(config: dict) -> Any:
    """mlx_lm's model of a configuration, without weights."""
    architecture = import_module(f"mlx_lm.models.{config['model_type']}")
    return architecture.Model(architecture.ModelArgs.from_dict(config))


def write_random(path: Path, config: dict, shards: int = 1) -> Path:
    """A checkpoint of that configuration with random weights."""
    return write_checkpoint(path, config, random_weights(model_of(config)), shards)


def random_weights(model) -> dict:
    """Weights by name, in float16, large enough for clear winners."""
    made = {}
    for number, (name, value) in enumerate(sorted(tree_flatten(model.parameters()))):
        noise = mx.random.normal(value.shape, key=mx.random.key(number))
        made[name] = (0.2 * noise + (1 if "norm" in name else 0)).astype(mx.float16)
    return made


def loaded_model(files: ModelFiles, dtype: str | None = None):
    """The model of a checkpoint with all its weights, by way of the store alone."""
    store = open_store(files)
    store.model.load_weights(list(store.load().items()))
    if dtype is not None:
        store.model.set_dtype(DTYPES[dtype])
    return store.model


def tied_llama(path: Path) -> Path:
    """Tied embeddings, two shards."""
    return write_random(path, {"model_type": "llama", "tie_word_embeddings": True, **SIZES}, 2)


def quantised_qwen3(path: Path) -> Path:
    """Four bits a weight, scales and biases beside them, an output matrix of its own."""
    return write_quantised(path, {"model_type": "qwen3", "tie_word_embeddings": False, **SIZES})


def quantised_latent(path: Path) -> Path:
    """The same with latent attention, a dense layer, and two of experts that are scored (GLM-4.7
    Flash)."""
    config = {
        **SIZES, "model_type": "glm4_moe_lite", "tie_word_embeddings": False,
        "num_key_value_heads": 4, "num_hidden_layers": 3, "q_lora_rank": 32, "kv_lora_rank": 64,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 32, "v_head_dim": 32, "n_routed_experts": 8,
        "moe_intermediate_size": 32, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
    }  # fmt: skip
    return write_quantised(path, config)


def write_quantised(
    path: Path, config: dict, weights: dict | None = None, group_size: int = 32
) -> Path:
    """A checkpoint in four bits, of these weights or random ones."""
    model = model_of(config)
    model.load_weights(list((weights or random_weights(model)).items()))
    nn.quantize(model, group_size, bits=4)
    packed = {"group_size": group_size, "bits": 4}
    config = {**config, "quantization": packed, "quantization_config": packed}
    return write_checkpoint(path, config, dict(tree_flatten(model.parameters())))
