"""Layers of latent attention in one operation, or in two beside it: what they are in many."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache

from tests.model.reference import OLD_MLX_LM, held_by
from tests.model.test_native_blocks import both_ways, counted, library
from tests.model.test_native_operations import alike
from tests.native_library import needed, operations_of
from toastkit.native.kv_caches import Room, dequantise, keep_in, quantise
from toastkit.native.layers import blocks
from toastkit.native.layers.latent_attention import attend
from toastkit.native.library import Library
from toastkit.native.replacing import use_native

__all__ = ["library"]
pytestmark = needed
LENGTHS = (5, 1, 33, 1)  # of passes over one cache
SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "vocab_size": 50, "rope_theta": 1e4,
    "max_position_embeddings": 100, "kv_lora_rank": 96, "q_lora_rank": 32, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32, "v_head_dim": 32, "first_k_dense_replace": 1, "n_routed_experts": 4,
    "n_shared_experts": 1, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True,
}  # fmt: skip
WHOLE = {"q_lora_rank": None}
BIASED = {"attention_bias": True}
YARN = {
    "type": "yarn", "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 25,
    "beta_fast": 32, "beta_slow": 1, "mscale": 0.7, "mscale_all_dim": 0.7, "rope_theta": 1e4,
    "llama_4_scaling_beta": 0.1,
}  # fmt: skip
LONG = {"original_max_position_embeddings": 25, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
KIMI = {
    "head_dim": 48, "num_experts": 4, "num_experts_per_token": 2, "num_shared_experts": 1,
    "model_max_length": 100, "num_hidden_layers": 3, "linear_attn_config": {
        "kda_layers": [1], "full_attn_layers": [2, 3], "num_heads": 2, "head_dim": 32,
        "short_conv_kernel_size": 4,
    },
}  # fmt: skip
CPM = {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 2.0, "rope_scaling": LONG}
# By architecture; and whether it is given what queries are multiplied by.
KEPT = [
    ("deepseek_v3", {}), ("deepseek_v3", WHOLE | BIASED | {"rope_scaling": YARN}),
    ("glm4_moe_lite", {}), ("kimi_linear", KIMI),
    *([] if OLD_MLX_LM else [("mistral4", {"rope_parameters": YARN, "rope_interleave": False})]),
]  # fmt: skip
OPENED = [
    ("deepseek_v2", WHOLE | {"rope_scaling": YARN}),
    ("deepseek_v2", BIASED | {"rope_scaling": YARN}),
    ("youtu_llm", {"rope_traditional": False}), ("minicpm3", CPM),
]  # fmt: skip
BATCHES = pytest.mark.parametrize(("batch", "bits"), [(1, 4), (3, 0), (3, 4)])


def each(cases: Sequence[tuple]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case[0])


def layers(name: str, more: dict[str, Any], bits: int = 0) -> list[Any]:
    """Two of a random model, native; packed where bits are not 0."""
    architecture: Any = import_module(f"mlx_lm.models.{name}")
    mx.random.seed(3)
    args = architecture.ModelArgs.from_dict(SIZES | more | {"model_type": name})
    model = architecture.Model(args)
    model.update(tree_map(lambda a: mx.random.normal(a.shape) / 6, model.parameters()))
    if bits:
        nn.quantize(model, 32, bits, class_predicate=lambda _, m: hasattr(m, "to_quantized"))
    use_native(model.modules())
    return model.layers[-2:]


def passed(layer: Any, x: mx.array, mask: Any, cache: Any, n: int = 0) -> mx.array:
    """What a layer makes of x (batch, length, 64)."""
    if not layer._block.scaled:
        return layer(x, mask, cache)
    scales = mx.random.uniform(1, 2, (x.shape[1], 1), key=mx.random.key(n))
    return layer(x, scales, mask, cache)


def passes(
    own: list[Any], batch: int, kept: mx.Dtype = mx.float32, arrays: bool = True
) -> list[mx.array]:
    """What layers make of passes, (batch, length, 64) each; and what their caches hold then."""
    caches, made = [KVCache() for _ in own], []
    if kept != mx.float32:
        keep_in(kept, caches)
    for n, length in enumerate(LENGTHS):
        x = mx.random.normal((batch, length, 64), key=mx.random.key(n))
        mask: Any = None
        if length > 1:
            mask = create_causal_mask(length, caches[0].offset) if arrays else "causal"
        for layer, cache in zip(own, caches):
            x = passed(layer, x, mask, cache, n)
        made.append(x)
    return made + [x for cache in caches for x in held_by(cache)]


@BATCHES
@each(KEPT)
def test_whose_latent_is_kept(case: tuple, batch: int, bits: int) -> None:
    """One position to the bit. Several meet the latent, and not what comes of it for each head: the
    sums are others."""
    own = layers(*case, bits)
    arrays = case[0] != "mistral4"
    made, wanted = both_ways(
        lambda: passes(own, batch, arrays=arrays), one=len(own) * 2, two=len(own) * 2
    )
    close = 1e-3 if bits else 1e-5  # activations in 8 bits differ, where sums do
    assert all(alike(a, b, close * max(1, mx.abs(b).max().item())) for a, b in zip(made, wanted))


@BATCHES
@each(KEPT)
def test_one_position_to_the_bit(case: tuple, batch: int, bits: int) -> None:
    """From caches that are the same, but for queries that are multiplied, once they have met their
    matrices."""
    own = layers(*case, bits)
    x = mx.random.normal((batch, 1, 64), key=mx.random.key(1))

    def stepped() -> list[mx.array]:
        cache, made = KVCache(), []
        both = (mx.random.normal((batch, 1, 40, n), key=mx.random.key(n)) for n in (96, 16))
        cache.update_and_fetch(*both)
        for layer in own[:1]:
            made += [passed(layer, x, None, cache), *held_by(cache)]
        return made

    made, wanted = both_ways(stepped, one=1, two=0)
    if case[0] == "mistral4":
        assert all(alike(a, b, 1e-4 + 1e-2 * bool(bits)) for a, b in zip(made, wanted))
    else:
        assert all(map(mx.array_equal, made, wanted))


@BATCHES
@each(OPENED)
def test_whose_heads_are_kept(case: tuple, batch: int, bits: int) -> None:
    own = layers(*case, bits)
    found = both_ways(lambda: passes(own, batch, arrays=False), one=len(own) * 2, two=len(own) * 2)
    assert all(map(mx.array_equal, *found))


@pytest.mark.parametrize("kept", [mx.float16, mx.int8])
@each([KEPT[0], KEPT[3], OPENED[2]])
def test_caches_that_keep_fewer_bits(case: tuple, kept: mx.Dtype) -> None:
    own = layers(*case, 4)
    arrays = case in KEPT
    times = {"one": len(own) * 2, "two": len(own) * 2}
    for a, b in zip(*both_ways(lambda: passes(own, 2, kept, arrays), **times)):
        assert alike(a, b, 5e-2 * max(1, mx.abs(b).max().item()))


@pytest.mark.parametrize("larger", [0.0, 1e-3, 1.0, 100.0])
def test_parts_in_8_bits_keep_their_own_scales(library: Library, larger: float) -> None:
    """However large the RoPE part of keys is beside the latent, some of which are 0."""
    numbers = np.random.default_rng(1)
    wide = [mx.array(numbers.standard_normal((2, 1, 40, n)), mx.float32) for n in (64, 16)]
    wide[0][:, :, 3:5] = 0
    kept = [quantise(wide[0]), quantise(wide[1] * larger)]
    layer = keep_in_8(kept)
    latent, keys = layer.keys_and_values()
    asked = mx.array(numbers.standard_normal((2, 4, 7, 80)), mx.float32)
    asked[..., 64:] /= larger or 1
    found = np.array(attend(library, asked, latent, keys, 0.2, "causal"))
    both = np.concatenate([np.array(dequantise(one)) for one in kept], -1).astype(np.float64)
    scores = 0.2 * np.array(asked, np.float64) @ both.swapaxes(-1, -2)
    scores[..., np.triu(np.ones((7, 40), bool), 34)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = weights / weights.sum(-1, keepdims=True) @ both[..., :64]
    assert np.abs(found - expected).max() < 1e-3


def keep_in_8(kept: list[mx.array]) -> KVCache:
    """A cache that holds these."""
    layer = KVCache()
    keep_in(mx.int8, [layer])
    layer.keys, layer.values = kept
    layer.offset = kept[0].shape[2]
    return layer


@each([KEPT[0], KEPT[2], OPENED[1]])
def test_rows_of_a_batch_that_begin_elsewhere(case: tuple) -> None:
    """With padding before them, where one position is not one operation."""
    own = layers(*case)

    def made() -> list[mx.array]:
        cache, found = BatchKVCache([2, 0]), []
        for n, length in enumerate((6, 1, 4, 1)):
            x = mx.random.normal((2, length, 64), key=mx.random.key(n))
            mask = cache.make_mask(length, return_array=True)
            found.append(own[0](x, mask, cache)[:, 2 if n == 0 else 0 :])
        return found

    assert all(alike(a, b, 1e-4) for a, b in zip(*both_ways(made, one=0, two=4)))


@each([*KEPT[:3], *OPENED])
def test_the_last_position_alone(case: tuple) -> None:
    """What all give at the last; and all are kept."""
    own, caches = layers(*case), [KVCache(), KVCache()]
    for n, length in enumerate((7, 4, 1)):
        x = mx.random.normal((2, length, 64), key=mx.random.key(n))
        mask = create_causal_mask(length, caches[0].offset) if length > 1 else None
        whole = own[0](x, mask, caches[0])
        vars(own[0])["_last_only"] = True
        last = own[0](x, mask, caches[1])
        del vars(own[0])["_last_only"]
        assert last.shape[1] == 1
        assert alike(last, whole[:, -1:], 1e-5 * max(1, mx.abs(whole).max().item()))
    assert all(map(mx.array_equal, *map(held_by, caches)))


def test_nodes_of_a_layer() -> None:
    own, cache = layers(*KEPT[2], 4), KVCache()
    own[0](mx.zeros((1, 3, 64)), create_causal_mask(3, 0), cache)
    assert operations_of(own[0](mx.zeros((1, 1, 64)), None, cache)).count("ToastLayer") == 1


def test_what_is_not_so_goes_its_own_way() -> None:
    own, x = layers(*KEPT[0]), mx.zeros((1, 3, 64))
    mask, quantised = create_causal_mask(3, 0), QuantizedKVCache(32, 8)
    with counted() as counts:
        own[0](x, mask, None)
        own[0](x.astype(mx.float16), mask, KVCache())
        with pytest.raises((AttributeError, ValueError)):  # as mlx_lm's
            own[0](x, mask, quantised)
        own[0].self_attn.embed_q.weight = own[0].self_attn.embed_q.weight.astype(mx.int32)
        own[0](x, mask, KVCache())
        own[1].self_attn.kv_a_layernorm.__class__ = nn.LayerNorm
        own[1](x, mask, KVCache())
    assert counts == {"one": 0, "two": 0}


@each([KEPT[0], OPENED[2]])
def test_what_does_not_fit_together(library: Library, case: tuple) -> None:
    """The library says so."""
    [layer, _], x = layers(*case), mx.zeros((1, 1, 64))
    cache = KVCache()
    layer(x, None, cache)
    plan = layer._plan
    other = {
        "dims": 64, "heads": 5, "key_heads": 3, "network": 1, "latent": 40, "nope": 48,
        "query_rank": 16, "expanded": 1 - plan.shape.expanded, "gated": 1, "shares_cache": 1,
        "fused_head": 16,
    }  # fmt: skip

    def one(x: mx.array = x, **more: Any) -> None:
        with pytest.raises(ValueError):
            own = {"keys": cache.keys, "values": cache.values, "offset": 1} | more
            room = Room(own["offset"], own["offset"] + x.shape[1])
            blocks._one_node(library, plan, x, False, SimpleNamespace(**own), room)

    for wrong in (x[0], x[..., :32], x.astype(mx.float16)):
        one(wrong)
    if not plan.shape.expanded:
        one(mx.zeros((1, 2, 64)))
    one(keys=cache.values[..., :4])
    one(values=cache.keys[..., :4])
    for name, value in other.items():
        before = getattr(plan.shape, name)
        setattr(plan.shape, name, value)
        one()
        if name != "key_heads":
            with pytest.raises(ValueError):
                blocks._two_nodes(library, plan, x, None, KVCache())
        setattr(plan.shape, name, before)
    given = {id(a): a for _, a in tree_flatten(layer.parameters())}
    given |= {id(a): a for a in plan.operands._fixed}
    for places in plan.operands._pointed[:2]:  # of parts, and beside them
        for i, array in [(i, given[at]) for i, at in enumerate(places) if at and at in given]:
            for wrong in (array[:-1], array.astype(mx.int32)):
                places[i] = id(wrong)
                one()
            places[i] = id(array)
    blocks._one_node(library, plan, x, False, cache, Room(1, 2))
