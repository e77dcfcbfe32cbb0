"""A checkpoint as mlx_lm.convert writes it: quantised, with modules that are exceptions."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from . import experts
from .writing import Checkpoint, random_tensors

DEFAULT = {"group_size": 64, "bits": 4, "mode": "affine"}
EXCEPTIONS: dict = {
    "model.layers.1.self_attn.q_proj": {"group_size": 32, "bits": 8},
    "model.layers.2.mlp.gate": False,
    "model.embed_tokens": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
}


def qwen3_moe() -> Checkpoint:
    """Experts stacked, four bits a weight: but for one module of eight, one left as it is, and an
    embedding in mxfp4."""
    import mlx.nn as nn
    from mlx.utils import tree_flatten
    from mlx_lm.models import qwen3_moe as architecture

    plain = experts.qwen3_moe()
    model = architecture.Model(architecture.ModelArgs.from_dict(plain.config))
    weights = model.sanitize(random_tensors(plain))
    model.load_weights(list(weights.items()))

    def choose(path: str, module: nn.Module) -> bool | dict:
        return EXCEPTIONS.get(path, hasattr(module, "to_quantized"))

    nn.quantize(model, **DEFAULT, class_predicate=choose)
    tensors: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    settings = {**DEFAULT, **EXCEPTIONS}
    config = {**plain.config, "quantization": settings, "quantization_config": settings}
    return replace(plain, config=config, tensors=tensors, shapes={}, shards=2)
