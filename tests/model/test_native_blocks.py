"""Layers of the common form in one operation, or in two beside attention: to the bit what they are
in many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import eq
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import (
    gemma,
    gemma2,
    gemma3_text,
    glm4,
    glm4_moe,
    gpt_oss,
    granite,
    llama,
    ministral3,
    mixtral,
    olmo2,
    olmo3,
    olmoe,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
)
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache, RotatingKVCache

from tests.model.reference import OLD_MLX_LM, held_by, needs_new_mlx_lm
from tests.model.test_native_operations import alike, library
from tests.native_library import needed, operations_of, watched
from toastkit.native.kv_caches import Room, keep_in
from toastkit.native.layers import blocks
from toastkit.native.library import Library
from toastkit.native.replacing import use_native

__all__ = ["library"]
pytestmark = needed
LENGTHS = (5, 1, 1, 33, 1)  # of passes over one cache


SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 50, "head_dim": 32,
    "tie_word_embeddings": True, "rope_theta": 1e4, "max_position_embeddings": 100,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "moe_intermediate_size": 32, "norm_topk_prob": True, "num_local_experts": 4,
}  # fmt: skip
TURNED = {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}
BETWEEN = {"query_pre_attn_scalar": 32, "sliding_window": 50, "sliding_window_pattern": 2}
MULTIPLIED = {
    "residual_multiplier": 0.3, "attention_multiplier": 0.2, "embedding_multiplier": 2.0,
    "logits_scaling": 8.0, "attention_bias": True, "mlp_bias": False, "num_key_value_heads": 4,
}  # fmt: skip
JOINED = {"head_dim": 16, "num_attention_heads": 4}
HALVED = {"attention_bias": True, "partial_rotary_factor": 0.5}
SCORED = HALVED | {
    "moe_intermediate_size": 32, "norm_topk_prob": True, "n_group": 2, "topk_group": 1,
    "n_shared_experts": 1, "n_routed_experts": 8, "routed_scaling_factor": 1.5,
    "num_experts_per_tok": 2, "first_k_dense_replace": 0, "use_qk_norm": True,
    "rope_scaling": None,
}  # fmt: skip
TYPES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 50}
# In mlx-lm 0.31 its experts have another activation.
WITH_SINKS = [] if OLD_MLX_LM else [(gpt_oss, EXPERTS | TYPES)]
CASES = [
    (llama, {}), (llama, TURNED), (qwen2, {}), (qwen3, {}), (mixtral, EXPERTS),
    (qwen3_moe, EXPERTS), (olmoe, EXPERTS), (gemma, {}), (gemma3_text, BETWEEN),
    (granite, MULTIPLIED), (phi3, JOINED), (glm4, HALVED), (olmo2, {}), (olmo3, TYPES),
    (glm4_moe, SCORED), (glm4_moe, SCORED | {"use_qk_norm": False, "first_k_dense_replace": 1}),
    *WITH_SINKS,
]  # fmt: skip


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


def passes(own: list[Any], batch: int, kept: mx.Dtype = mx.float32) -> list[mx.array]:
    """What layers make of passes, (batch, length, 64) each; and what their caches hold then."""
    caches, made = [KVCache() for _ in own], []
    if kept != mx.float32:
        keep_in(kept, caches)
    for n, length in enumerate(LENGTHS):
        x = mx.random.normal((batch, length, 64), key=mx.random.key(n))
        for layer, cache in zip(own, caches):
            x = layer(x, "causal" if length > 1 else None, cache)
            x = x[0] if isinstance(x, tuple) else x  # with keys and values
        made.append(x)
    assert all(cache.offset == sum(LENGTHS) for cache in caches)
    return made + [x for cache in caches for x in held_by(cache)]


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """How often layers are one operation meanwhile, and how often two."""
    with (
        patch.object(blocks, "_one_node", wraps=blocks._one_node) as one,
        patch.object(blocks, "_two_nodes", wraps=blocks._two_nodes) as two,
    ):
        counts: dict[str, int] = {}
        yield counts
        counts.update(one=one.call_count, two=two.call_count)


def in_many(make: Callable[[], Any]) -> Any:
    """The same, whose layers are many operations, attention that of mlx_lm."""
    with patch.object(blocks.Layer, "natively", lambda *_: None):
        return make()


def both_ways(make: Callable[[], list[mx.array]], **times: int) -> tuple[list[mx.array], ...]:
    """With layers that are one operation, or two, so many times; and many."""
    with counted() as counts:
        made = make()
    assert counts == times
    return made, in_many(make)


ALL = [(case, *rest) for case in CASES for rest in ((1, 4), (3, 0))]
ALL += [(case, *rest) for case in ((qwen3, {}), (qwen3_moe, EXPERTS)) for rest in ((1, 0), (3, 4))]


@pytest.mark.parametrize(
    ("case", "batch", "bits"), ALL, ids=[f"{c[0].__name__}-{b}-{bits}" for c, b, bits in ALL]
)
def test_one_operation_or_two_are_many(case: tuple, batch: int, bits: int) -> None:
    own = layers(*case, bits)
    # The first pass finds no room, and the one of 33 positions is not for one.
    found = both_ways(lambda: passes(own, batch), one=len(own) * 3, two=len(own) * 2)
    assert all(map(mx.array_equal, *found))


@pytest.mark.parametrize("kept", [mx.float16, mx.int8])
def test_caches_that_keep_fewer_bits(kept: mx.Dtype) -> None:
    own = layers(qwen3, {}, 4)
    found = both_ways(lambda: passes(own, 2, kept), one=len(own) * 3, two=len(own) * 2)
    assert all(map(mx.array_equal, *found))


@pytest.mark.parametrize("kept", [mx.float32, mx.int8])
def test_scores_that_are_capped(kept: mx.Dtype) -> None:
    """With masks that are arrays, as the architecture has them."""
    own = layers(gemma2, {"attn_logit_softcapping": 3.0}, 4)

    def passes() -> list[mx.array]:
        caches, made = [KVCache() for _ in own], []
        keep_in(kept, caches)
        for n, length in enumerate((*LENGTHS, 1)):
            x = mx.random.normal((2, length, 64), key=mx.random.key(n))
            mask = create_causal_mask(length, caches[0].offset) if length > 1 else None
            for layer, cache in zip(own, caches):
                x = layer(x, mask, cache)
            made.append(x)
        return made

    ones = (*LENGTHS, 1).count(1)
    twos = len(LENGTHS) + 1 - ones
    made, wanted = both_ways(passes, one=len(own) * ones, two=len(own) * twos)
    assert all(alike(a, b, 1e-4 if kept == mx.float32 else 2e-2) for a, b in zip(made, wanted))
    own = layers(gemma2, {"attn_logit_softcapping": 1e4}, 4)
    assert not alike(passes()[0], made[0], 1e-2)


@needs_new_mlx_lm
@pytest.mark.parametrize("bits", [0, 4])
def test_queries_that_are_scaled(bits: int) -> None:
    """By what a layer is given; and where it is given nothing, or something else, by itself."""
    rope = {"rope_theta": 1e4, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 4}
    own = layers(ministral3, {"rope_parameters": rope, "sliding_window": None}, bits)

    def passes(scaled: bool = True, odd: bool = False) -> list[mx.array]:
        caches, made = [KVCache() for _ in own], []
        for n, length in enumerate(LENGTHS):
            x = mx.random.normal((2, length, 64), key=mx.random.key(n))
            scales = mx.random.uniform(1, 2, (length, 1), key=mx.random.key(n))
            given = None if not scaled else scales.astype(mx.float16) if odd else scales
            for layer, cache in zip(own, caches):
                x = layer(x, given, "causal" if length > 1 else None, cache=cache)
            made.append(x)
        return made + [x for cache in caches for x in held_by(cache)]

    for given, count in ({}, 3), ({"scaled": False}, 0), ({"odd": True}, 0):
        times = {"one": len(own) * count, "two": len(own) * 2 * bool(count)}
        assert all(map(mx.array_equal, *both_ways(partial(passes, **given), **times)))


@pytest.mark.parametrize("kept", [mx.float32, mx.int8])
@pytest.mark.parametrize("keep", [0, 2])
@pytest.mark.parametrize("prompt", [3, 12])
def test_caches_that_rotate(prompt: int, keep: int, kept: mx.Dtype) -> None:
    """Once their window is full, and before; a prompt longer than it is cut by the next step."""
    own, size = layers(gemma3_text, BETWEEN, 4), 8

    def steps() -> list[mx.array]:
        caches, made = [RotatingKVCache(size, keep) for _ in own], []
        if kept != mx.float32:
            keep_in(kept, caches)
        for n in range(2 * size + 3):
            x = mx.random.normal((2, 1 if n else prompt, 64), key=mx.random.key(n))
            for layer, cache in zip(own, caches):
                x = layer(x, cache.make_mask(x.shape[1]), cache)
            made.append(x)
            mx.eval(made)
        held = [array for cache in caches for array in held_by(cache)]
        assert [(c.offset, c._idx) for c in caches] == [(c.offset, c._idx) for c in caches[:1]] * 2
        return [*made, *held, mx.array([caches[0].offset, caches[0]._idx])]

    # Two: the prompt; and the step that cuts it, or finds no room yet and, behind the room, again.
    found = both_ways(steps, one=len(own) * (2 * size + 1), two=2 * len(own))
    assert all(map(mx.array_equal, *found))


def test_what_others_hold_of_a_cache_stays() -> None:
    [layer, _], x = layers(llama, {}, 0), mx.ones((1, 2, 64))
    cache = KVCache()
    mx.eval(layer(x, "causal", cache))
    held = [(array, mx.array(np.array(array))) for array in (cache.keys, cache.values)]
    y = layer(x, "causal", cache)
    assert operations_of(cache.keys) == ["ToastLayer"]
    cache.trim(2)
    again = layer(x, "causal", cache)
    mx.eval(y, again, cache.keys, cache.values)
    assert mx.array_equal(y, again)
    for array, before in held:
        assert mx.array_equal(array, before, equal_nan=True)  # what nobody wrote may be NaN
    place, held, y, again, array = pointer(cache.keys), [], None, None, None
    mx.eval(layer(x, "causal", cache), cache.keys)
    assert pointer(cache.keys) == place  # nobody looks on: in its memory
    places = [place]
    for _ in range(5):  # where MLX's thread does not get to letting go, it is copied: seldom
        for _ in range(5):
            mx.async_eval(layer(x, "causal", cache))
        mx.eval(cache.keys)
        places.append(pointer(cache.keys))
    assert any(map(eq, places, places[1:]))  # while the step before is computed, too


@pytest.mark.parametrize("kept", [mx.float32, mx.float16, mx.int8])
@pytest.mark.parametrize("length", [1, 256, 257])
def test_first_positions_are_written_by_one_operation(length: int, kept: mx.Dtype) -> None:
    """And the room behind them, which nobody has written, is never seen."""
    [layer, _], caches = layers(llama, {}, 0), [KVCache(), KVCache()]
    if kept != mx.float32:
        keep_in(kept, caches)
    x = mx.random.normal((2, length, 64), key=mx.random.key(1))
    mx.eval([mx.full((1 << 16,), mx.nan) + i for i in range(8)])  # what the room may hold
    made = [layer(x, "causal", caches[0])]
    for array in (caches[0].keys, caches[0].values):
        done = operations_of(array)
        assert "ToastAppend" in done and "SliceUpdate" not in done
    assert (caches[0].offset, caches[0].keys.shape[2]) == (length, -(-length // 256) * 256)
    more = [layer(x, "causal", caches[0]), caches[0].trim(length), layer(x, None, caches[0])]
    with patch.object(blocks.Layer, "natively", lambda *_: None):
        wanted = [layer(x, "causal", caches[1]), layer(x, "causal", caches[1])]
        caches[1].trim(length)
        wanted.append(layer(x, None, caches[1]))
    assert all(map(mx.array_equal, [made[0], more[0], more[2]], wanted))


def pointer(array: mx.array) -> int:
    """Where an array's numbers begin."""
    return np.frombuffer(memoryview(array), np.float32).ctypes.data


def test_other_weights_are_taken_as_they_come() -> None:
    """Of a layer that was computed with others: in other numbers, bits and classes; with a bias."""
    own, x = layers(llama, {}, 0), mx.random.normal((1, 1, 64))

    def step(cache: KVCache) -> mx.array:
        return own[0](x, None, cache)

    def compared() -> None:
        caches = [KVCache(), KVCache()]
        first = [step(cache) for cache in caches]
        with counted() as counts:
            made = step(caches[0])
        assert counts == {"one": 1, "two": 0}
        assert mx.array_equal(made, in_many(lambda: step(caches[1]))) and mx.array_equal(*first)

    compared()
    own[0].self_attn.q_proj.weight = mx.random.normal((128, 64))
    compared()
    own[0].mlp.up_proj.bias = mx.random.normal((96,))
    compared()
    own[0].update_modules({"mlp": {"gate_proj": own[1].mlp.gate_proj}})
    compared()
    nn.quantize(own[0].mlp, 32, 8)
    use_native(own[0].modules())
    compared()
    up = own[0].mlp.up_proj
    up.bits = 4
    up.update(dict(zip(("weight", "scales", "biases"), mx.quantize(mx.ones((96, 64)), 32, 4))))
    compared()


def test_what_is_not_so_goes_its_own_way() -> None:
    """Parts that somebody stands before, other dtypes, no cache."""
    own = layers(llama, {}, 0)
    attention, x = own[0].self_attn, mx.zeros((1, 3, 64))
    own[0](x, None, KVCache())
    with counted() as counts:
        seen = watched(attention)
        own[0](x, None, KVCache())
        assert seen
        own[1](x, None, None)
        own[1](x.astype(mx.float16), None, KVCache())
        own[1].self_attn.q_proj.bias = mx.zeros((128,), mx.float16)
        own[1](x, None, KVCache())
    assert counts == {"one": 0, "two": 0}
    del own[1].self_attn.q_proj.bias
    with counted() as counts:
        cache = KVCache()
        own[1](x, None, cache)
        own[1](x, mx.ones((3, 6), mx.bool_), cache)
        own[1](x, "causal", RotatingKVCache(99))
    assert counts == {"one": 0, "two": 3}


@pytest.mark.parametrize(
    "case", [(llama, {}), (gemma3_text, BETWEEN), *WITH_SINKS],
    ids=lambda case: case[0].__name__.rpartition(".")[2],
)  # fmt: skip
def test_what_does_not_fit_together(library: Library, case: tuple) -> None:
    """The library says so."""
    [layer, _], x = layers(*case, 0), mx.zeros((1, 2, 64))
    cache = KVCache()
    layer(x, "causal", cache)
    plan = layer._plan
    kept, other = cache.keys, {"dims": 64, "heads": 5, "key_heads": 3, "network": 1}

    def one(x: mx.array = x, plan: Any = plan, **more: Any) -> None:
        with pytest.raises(ValueError):
            own = {"keys": kept, "values": kept, "offset": 2} | more
            room = Room(own["offset"], more.pop("length", own["offset"] + 2))
            blocks._one_node(library, plan, x, True, SimpleNamespace(**own), room)

    for wrong in (x[0], x[..., :32], x.astype(mx.float16)):
        one(wrong)
    for keys in (kept[:, :1], kept[..., :31], kept[0], kept[:, :, :3], kept.astype(mx.int32)):
        one(keys=keys)
        one(values=keys)
    for offset in (-1, 255):
        one(offset=offset)
    for length in (3, 5, 257):
        one(length=length)
    for name, value in other.items():
        before = getattr(plan.shape, name)
        setattr(plan.shape, name, value)
        one()
        setattr(plan.shape, name, before)
    given = {id(a): a for _, a in tree_flatten(layer.parameters())}
    given |= {id(a): a for a in plan.operands._fixed}
    for places in plan.operands._pointed[:2]:  # of parts, and beside them
        for i, array in [(i, given[at]) for i, at in enumerate(places) if at]:
            for wrong in (array[:-1], array.astype(mx.int32)):
                places[i] = id(wrong)
                one()
            places[i] = id(array)
    blocks._one_node(library, plan, x, True, cache, Room(2, 4))
    for shape in ((1, 3, 2, 32), (1, 4, 1, 32), (4, 2, 32)):
        attended = mx.zeros(shape)
        own = plan._replace(heads=plan.heads._replace(attend=lambda *_, a=attended, **__: a))
        with pytest.raises(ValueError):
            blocks._two_nodes(library, own, x, "causal", KVCache())
