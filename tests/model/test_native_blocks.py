"""Layers of the common form in two operations beside attention: to the bit what they are in many,
and found in architectures by their form."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map
from mlx_lm.models import (
    bailing_moe,
    cohere,
    gemma2,
    granite,
    llama,
    mixtral,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    qwen3_next,
)
from mlx_lm.models.cache import KVCache

from tests.native_library import native_cache, native_path, needed
from toastkit.native import blocks
from toastkit.native.blocks import Block, block_of, heads_of
from toastkit.native.library import Library, Operand, load, use
from toastkit.native.modules import use_native

pytestmark = needed
LENGTHS = (5, 1, 1, 33, 1)  # of passes over one cache


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    made = load(str(native_path(native_cache(tmp_path_factory))))
    use(made)
    return made


SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 50, "head_dim": 32,
    "tie_word_embeddings": True, "rope_theta": 1e4, "max_position_embeddings": 100,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "moe_intermediate_size": 32, "norm_topk_prob": True, "num_local_experts": 4,
}  # fmt: skip
CASES = [(llama, {}), (qwen2, {}), (qwen3, {}), (mixtral, EXPERTS), (qwen3_moe, EXPERTS)]


def layers(architecture: Any, more: dict[str, Any], bits: int) -> list[Any]:
    """Of a random model, native; packed where bits are not 0."""
    mx.random.seed(3)
    sizes = SIZES | more | {"model_type": architecture.__name__.rpartition(".")[2]}
    model = architecture.Model(architecture.ModelArgs.from_dict(sizes))
    model.update(tree_map(lambda a: mx.random.normal(a.shape) / 4, model.parameters()))
    if bits:
        nn.quantize(model, 32, bits, class_predicate=lambda _, m: hasattr(m, "to_quantized"))
    use_native(model.modules())
    return model.layers


def passes(own: list[Any], batch: int) -> list[mx.array]:
    """What layers make of passes, (batch, length, 64) each."""
    caches, made = [KVCache() for _ in own], []
    for n, length in enumerate(LENGTHS):
        x = mx.random.normal((batch, length, 64), key=mx.random.key(n))
        for layer, cache in zip(own, caches):
            x = layer(x, "causal" if length > 1 else None, cache)
        made.append(x)
    return made


@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].__name__.rpartition(".")[2])
def test_two_operations_are_many(case: tuple, batch: int, bits: int) -> None:
    own = layers(*case, bits)
    with patch.object(blocks, "_closed", wraps=blocks._closed) as closed:
        made = passes(own, batch)
    assert closed.call_count == len(own) * len(LENGTHS)
    with patch.object(blocks.Layer, "_in_two", lambda *_: None):
        wanted = passes(own, batch)
    assert all(map(mx.array_equal, made, wanted))


def test_what_is_not_so_goes_its_own_way() -> None:
    """Parts that somebody stands before, other dtypes, no cache."""
    own = layers(llama, {}, 0)
    attention, x = own[0].self_attn, mx.zeros((1, 3, 64))
    seen: list[Any] = []

    class Watched(type(attention)):  # type: ignore[misc]
        def __call__(self, *args: Any) -> mx.array:
            seen.append(args)
            return super().__call__(*args)

    with patch.object(blocks, "_closed", wraps=blocks._closed) as closed:
        attention.__class__ = Watched
        own[0](x, None, KVCache())
        assert seen and not closed.called
        own[1](x, None, None)
        own[1](x.astype(mx.float16), None, KVCache())
        own[1].self_attn.q_proj.bias = mx.zeros((128,), mx.float16)
        own[1](x, None, KVCache())
        assert not closed.called
        del own[1].self_attn.q_proj.bias
        own[1](x, None, KVCache())
        assert closed.called


def test_forms() -> None:
    usual = Block("self_attn", "input_layernorm", "mlp", "post_attention_layernorm")
    for cls in (llama.TransformerBlock, qwen2.TransformerBlock, qwen3.TransformerBlock):
        assert block_of(cls) == usual
    assert block_of(mixtral.MixtralDecoderLayer) == usual._replace(network="block_sparse_moe")
    assert block_of(bailing_moe.BailingMoeDecoderLayer) == usual._replace(attention="attention")
    for cls in (
        gemma2.TransformerBlock, cohere.TransformerBlock, granite.TransformerBlock, nn.Module,
        qwen3_next.Qwen3NextDecoderLayer, llama.Attention,
    ):  # fmt: skip
        assert block_of(cls) is None
    for cls in (phi3.Attention, gemma2.Attention, llama.TransformerBlock, llama.Attention):
        assert heads_of(cls) is None  # the last one calls mlx_lm's, and is none of ours
    own = [layers(module, {}, 0)[0].self_attn for module in (llama, qwen3)]
    plain, normed = (heads_of(type(attention)) for attention in own)
    assert plain is not None and plain[:5] == ("q_proj", "k_proj", "v_proj", "o_proj", "n_heads")
    assert normed is not None and (plain.q_norm, normed.q_norm) == (None, "q_norm")


def test_what_does_not_fit_together(library: Library) -> None:
    norm, x = nn.RMSNorm(64), mx.zeros((1, 2, 64))
    wide, narrow = (Operand(mx.zeros((96, 64))), None), (Operand(mx.zeros((96, 32))), None)
    for y, part, heads in (
        (x, narrow, 4), (x, wide, 5), (x, wide, 0), (x[0], wide, 4), (x[..., :32], wide, 4),
        (x.astype(mx.float16), wide, 4), (x, (wide[0], mx.zeros(95)), 4),
    ):  # fmt: skip
        with pytest.raises(ValueError):
            blocks._projected(library, y, norm, [part], [heads], False)
    out, heads = (Operand(mx.zeros((64, 64))), None), mx.zeros((1, 4, 2, 16))
    for y, attended, part in (
        (x, heads, wide), (x, heads[:, :3], out), (x[:, :1], heads, out), (x, heads[0], out),
        (x, heads.astype(mx.float16), out),
    ):  # fmt: skip
        with pytest.raises(ValueError):
            blocks._closed(library, y, attended, norm, [part], None, False)
