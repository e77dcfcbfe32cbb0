"""Layers and attentions are found in architectures by their form."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import (
    afmoe,
    bailing_moe,
    cohere,
    cohere2,
    exaone,
    exaone4,
    gemma2,
    gemma3_text,
    gpt2,
    gpt_neox,
    granite,
    hunyuan,
    hunyuan_v1_dense,
    internlm2,
    llama,
    minicpm,
    minimax,
    mixtral,
    olmo2,
    olmoe,
    phi,
    phi3,
    phimoe,
    qwen2,
    qwen3,
    qwen3_next,
    smollm3,
    stablelm,
    starcoder2,
)
from mlx_lm.models.cache import KVCache

from tests.model.reference import OLD_MLX_LM
from tests.model.test_native_blocks import EXPERTS, LENGTHS, counted, layers, library, passes
from tests.native_library import needed
from toastkit.native import known, replacing
from toastkit.native.forms.common import Block, block_of, heads_of
from toastkit.native.layers import blocks

__all__ = ["library"]
pytestmark = needed

SHARED = EXPERTS | {"num_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 16}
ALPHA = {"rope_scaling": {"alpha": 10.0, "factor": 1.0, "type": "dynamic"}}
NEOX = {"layer_norm_eps": 1e-4, "rotary_emb_base": 10000, "rotary_pct": 0.25}
STABLE = {"layer_norm_eps": 1e-4, "partial_rotary_factor": 0.5}
HUNYUAN = EXPERTS | ALPHA | {
    "moe_topk": 2, "num_shared_expert": 1, "attention_bias": True, "use_cla": False,
    "cla_share_factor": 2, "use_qk_norm": True, "use_mixed_mlp_moe": True,
}  # fmt: skip
MINIMAX = EXPERTS | {"shared_intermediate_size": 0, "rotary_dim": 16, "head_dim": 32}
GPT2 = {
    "n_embd": 64, "n_head": 4, "n_layer": 2, "n_ctx": 100, "n_positions": 100,
    "layer_norm_epsilon": 1e-4, "num_key_value_heads": 4,
}  # fmt: skip
# Whose layers differ: with a rotation and without, with experts and without.
OTHERS = [
    (exaone4, {"sliding_window": 50, "sliding_window_pattern": "LG", "rope_scaling": None}),
    (smollm3, {"no_rope_layer_interval": 2}),
    (bailing_moe, SHARED), (bailing_moe, SHARED | {"use_qk_norm": True}),
    (hunyuan_v1_dense, ALPHA | {"use_qk_norm": True}),
    (hunyuan_v1_dense, {"use_qk_norm": False}),
    (minicpm, {"head_dim": 16, "dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 2.0}),
    (cohere, {"layer_norm_eps": 1e-4, "layer_norm_bias": True, "logit_scale": 0.3}),
    (cohere2, {"head_dim": 16, "sliding_window": 50, "sliding_window_pattern": 2}),
    (starcoder2, {"norm_epsilon": 1e-4}), (phi, {"partial_rotary_factor": 0.5}),
    (exaone, {"num_layers": 2, "layer_norm_epsilon": 1e-4, "head_dim": 16, "attention_bias": True}),
    (internlm2, {"bias": True}), (internlm2, {"bias": False, "num_key_value_heads": 4}),
    (gpt_neox, NEOX | {"use_parallel_residual": True}),
    (gpt_neox, NEOX | {"use_parallel_residual": False}), (gpt2, GPT2),
    (stablelm, STABLE | {"use_qkv_bias": True}), (stablelm, STABLE | {"use_qkv_bias": False}),
    (hunyuan, HUNYUAN),
    (hunyuan, HUNYUAN | {"use_qk_norm": False, "use_mixed_mlp_moe": False}),
    (minimax, MINIMAX | {"use_qk_norm": True}), (minimax, MINIMAX | {"use_qk_norm": False}),
]  # fmt: skip
if not OLD_MLX_LM:  # whose router is another one
    OTHERS.append((phimoe, EXPERTS))


def in_one_or_two(own: list[Any]) -> list[mx.array]:
    """What layers make, to the bit what they make in many."""
    with counted() as counts:
        made = passes(own, 2)
    assert counts == {"one": len(own) * 3, "two": len(own) * 2}
    with patch.object(blocks.Layer, "natively", lambda *_: None):
        wanted = passes(own, 2)
    assert all(map(mx.array_equal, made, wanted))
    return wanted


@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case[0].__name__.rpartition(".")[2])
def test_other_layers_are_one_operation_or_two(case: tuple, bits: int) -> None:
    in_one_or_two(layers(*case, bits))


@pytest.mark.parametrize("bits", [0, 4])
def test_gates_of_their_own(bits: int) -> None:
    """With a norm behind a mixture."""
    more = {
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 50,
        "num_dense_layers": 1, "num_shared_experts": 1, "score_func": "sigmoid", "n_group": 2,
        "topk_group": 1, "route_norm": True, "route_scale": 2.0,
    }  # fmt: skip
    own = layers(afmoe, EXPERTS | more, bits)
    wanted = in_one_or_two(own)
    vars(own[0])["_last_only"] = True
    last = passes(own[:1], 2)[: len(LENGTHS)]
    del vars(own[0])["_last_only"]
    whole = passes(own[:1], 2)[: len(LENGTHS)]
    assert all(mx.array_equal(a, b[:, -1:]) for a, b in zip(last, whole, strict=True))
    with patch.object(type(own[1].mlp), "as_shape", lambda *_: None):  # left to itself
        assert all(map(mx.array_equal, passes(own, 2), wanted))
    layer, x, cache = own[1], mx.random.normal((1, 2, 64)), KVCache()
    layer(x, "causal", cache)
    layer(x, "causal", cache)
    layer._plan.shape.layer_input = 1
    with pytest.raises(ValueError):
        layer(x, "causal", cache)


def test_layers_that_are_left_in_parts() -> None:
    """Which pass on keys and values, norm each head by itself, or add in another order."""
    own = layers(hunyuan, HUNYUAN | {"use_cla": True}, 0)
    x, kv = mx.random.normal((1, 3, 64)), None
    with counted() as counts:
        for layer in own:
            x, kv = layer(x, "causal", KVCache(), kv)
        assert kv is not None
        for more in ({"qk_layernorm": True}, {"use_parallel_residual": True}):
            for layer in layers(stablelm, STABLE | {"use_qkv_bias": False} | more, 0):
                layer(x, "causal", KVCache())
    assert counts == {"one": 0, "two": 0}


def test_heads_that_are_no_groups() -> None:
    """Of as many rows in one matrix."""
    layer, x, cache = layers(internlm2, {"bias": False}, 0)[0], mx.ones((1, 2, 64)), KVCache()
    layer(x, "causal", cache)
    for layer._plan.shape.heads, layer._plan.shape.key_heads in ((2, 3), (8, 0)):
        with pytest.raises(ValueError):
            layer(x, "causal", cache)


def test_norms_that_do_not_go_together() -> None:
    """Layer norms beside others, of heads, or without weights: each goes its own way."""
    x = mx.random.normal((2, 3, 64), key=mx.random.key(1))
    changes = (
        lambda layer: layer.update_modules({"input_layernorm": nn.RMSNorm(64)}),
        lambda layer: layer.update_modules({"input_layernorm": nn.LayerNorm(64, affine=False)}),
        lambda layer: layer.post_attention_layernorm.update({"bias": mx.zeros(64, mx.float16)}),
    )
    for change in changes:
        layer = layers(starcoder2, {"norm_epsilon": 1e-4}, 0)[0]
        layer(x, "causal", KVCache())
        change(layer)
        replacing.use_native(layer.modules())
        with counted() as counts:
            y = layer(x, "causal", KVCache())
        with patch.object(blocks.Layer, "natively", lambda *_: None):
            assert mx.array_equal(y, layer(x, "causal", KVCache()))
        assert counts == {"one": 0, "two": 0}
    whole, beside = (layers(cohere, {"use_qk_norm": normed}, 0)[0] for normed in (True, False))
    beside.mlp.up_proj.weight = beside.mlp.up_proj.weight.astype(mx.int32)
    with counted() as counts:
        for layer in (whole, beside):
            layer(x, "causal", KVCache())
    assert counts == {"one": 0, "two": 0}


def test_forms() -> None:
    usual = Block("self_attn", "input_layernorm", "mlp", "post_attention_layernorm")
    for cls in (llama.TransformerBlock, qwen2.TransformerBlock, qwen3.TransformerBlock):
        assert block_of(cls) == usual
    assert block_of(mixtral.MixtralDecoderLayer) == usual._replace(network="block_sparse_moe")
    assert replacing.native(olmoe.TransformerBlock)._block == usual
    assert block_of(bailing_moe.BailingMoeDecoderLayer) == usual._replace(attention="attention")
    between = usual._replace(
        second_norm="pre_feedforward_layernorm", attended_norm="post_attention_layernorm",
        fed_norm="post_feedforward_layernorm",
    )  # fmt: skip
    for cls in (gemma2.TransformerBlock, gemma3_text.TransformerBlock):
        assert replacing.native(cls)._block == between
    assert block_of(olmo2.TransformerBlock) == between._replace(first_norm=None, second_norm=None)
    assert block_of(granite.TransformerBlock) == usual._replace(multiplier="residual_multiplier")
    with patch.object(gemma3_text, "clip_residual", mx.add):
        known.layer_of.cache_clear()
        assert known.layer_of(gemma3_text.TransformerBlock) is None
    known.layer_of.cache_clear()
    beside = usual._replace(second_norm="input_layernorm", parallel=True)
    for cls in (cohere.TransformerBlock, cohere2.TransformerBlock, phi.PhiDecoderLayer):
        assert block_of(cls) == beside
    for cls in (nn.Module, qwen3_next.Qwen3NextDecoderLayer, llama.Attention):
        assert block_of(cls) is None
    for cls in (gemma2.Attention, llama.TransformerBlock, llama.Attention):
        assert heads_of(cls) is None  # the last one calls mlx_lm's, and is none of ours
    own = [layers(module, {}, 0)[0] for module in (llama, qwen3, phi3, gemma2)]
    plain, normed, joined, capped = (layer._heads(layer.self_attn) for layer in own)
    assert capped is not None and capped.cap == "attn_logit_softcapping"
    assert joined is not None and (*joined[:3], joined.size) == (*["qkv_proj"] * 3, "head_dim")
    assert plain is not None and plain[:5] == ("q_proj", "k_proj", "v_proj", "o_proj", "n_heads")
    assert normed is not None and (plain.q_norm, normed.q_norm) == (None, "q_norm")
