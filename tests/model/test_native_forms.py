"""Layers and attentions are found in architectures by their form."""

from __future__ import annotations

import types

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import (
    bailing_moe,
    cohere,
    gemma2,
    gemma3_text,
    granite,
    llama,
    mixtral,
    olmo2,
    olmoe,
    phi3,
    qwen2,
    qwen3,
    qwen3_next,
)

from tests.model.test_native_blocks import layers, library
from tests.native_library import needed
from toastkit.native.forms import Block, block_of, heads_of

__all__ = ["library"]
pytestmark = needed


def test_forms() -> None:
    usual = Block("self_attn", "input_layernorm", "mlp", "post_attention_layernorm")
    for cls in (llama.TransformerBlock, qwen2.TransformerBlock, qwen3.TransformerBlock):
        assert block_of(cls) == usual
    assert block_of(mixtral.MixtralDecoderLayer) == usual._replace(network="block_sparse_moe")
    assert block_of(olmoe.TransformerBlock) == usual
    assert block_of(bailing_moe.BailingMoeDecoderLayer) == usual._replace(attention="attention")
    between = usual._replace(
        second_norm="pre_feedforward_layernorm", attended_norm="post_attention_layernorm",
        fed_norm="post_feedforward_layernorm",
    )  # fmt: skip
    for cls in (gemma2.TransformerBlock, gemma3_text.TransformerBlock):
        assert block_of(cls) == between
    assert block_of(olmo2.TransformerBlock) == between._replace(first_norm=None, second_norm=None)
    assert block_of(granite.TransformerBlock) == usual._replace(multiplier="residual_multiplier")
    clips = types.new_class("TransformerBlock", (gemma3_text.TransformerBlock,))
    other = types.FunctionType(
        gemma3_text.TransformerBlock.__call__.__code__, {"clip_residual": mx.add}
    )
    clips.__call__ = other  # type: ignore[method-assign]
    assert block_of(clips) is None
    for cls in (
        cohere.TransformerBlock, nn.Module, qwen3_next.Qwen3NextDecoderLayer, llama.Attention,
    ):  # fmt: skip
        assert block_of(cls) is None
    for cls in (gemma2.Attention, llama.TransformerBlock, llama.Attention):
        assert heads_of(cls) is None  # the last one calls mlx_lm's, and is none of ours
    own = [layers(module, {}, 0)[0].self_attn for module in (llama, qwen3, phi3, gemma2)]
    plain, normed, joined, capped = (heads_of(type(attention)) for attention in own)
    assert capped is not None and capped.cap == "attn_logit_softcapping"
    assert joined is not None and (*joined[:3], joined.size) == (*["qkv_proj"] * 3, "head_dim")
    assert plain is not None and plain[:5] == ("q_proj", "k_proj", "v_proj", "o_proj", "n_heads")
    assert normed is not None and (plain.q_norm, normed.q_norm) == (None, "q_norm")
