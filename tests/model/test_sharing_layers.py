"""Layers of Gemma 4 in one operation, or in two beside attention: to the bit what they are in many,
and what mlx_lm gives; with the keys and values of a layer before, as these lie."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.models import gemma4_text
from mlx_lm.models.cache import BatchKVCache, KVCache

from tests.model.checkpoints import open_model, write_random
from tests.model.reference import held_by
from tests.model.test_last_token import check_same
from tests.model.test_native_blocks import counted
from tests.model.test_native_operations import alike, library
from tests.native_library import built, cache, needed, operations_of, watched
from toastkit.engine.last_token import _last_layers
from toastkit.native.kv_caches import LayerKV, keep_in
from toastkit.native.layers import blocks
from toastkit.native.replacing import last_position_only, use_native

__all__ = ["built", "cache", "library"]
pytestmark = needed
LENGTHS = (5, 1, 3, 33, 1, 1)  # of passes over the same caches

SLIDES, SEES_ALL = "sliding_attention", "full_attention"
SIZES: dict[str, Any] = {
    "model_type": "gemma4_text", "hidden_size": 64, "intermediate_size": 96, "head_dim": 16,
    "global_head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50,
    "vocab_size_per_layer_input": 50, "hidden_size_per_layer_input": 0, "sliding_window": 64,
    "num_hidden_layers": 5, "layer_types": [SLIDES, SEES_ALL, SLIDES, SLIDES, SEES_ALL],
    "num_kv_shared_layers": 0, "use_double_wide_mlp": False,
}  # fmt: skip
SHARING = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}
OWN = {"hidden_size_per_layer_input": 32}
KEYS_ARE_VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
EXPERTS = KEYS_ARE_VALUES | {
    "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
}  # fmt: skip
CASES = {
    "plain": {}, "sharing": SHARING, "own": OWN, "both": SHARING | OWN,
    "keys are values": KEYS_ARE_VALUES, "experts": EXPERTS, "sharing experts": EXPERTS | SHARING,
    "window": SHARING | OWN | {"sliding_window": 4},
}  # fmt: skip


def made_of(sizes: dict[str, Any], bits: int = 0, native: bool = True) -> Any:
    """A random model, packed where bits are not 0."""
    mx.random.seed(3)
    model = gemma4_text.Model(gemma4_text.ModelArgs.from_dict(SIZES | sizes))
    model.update(tree_map(lambda a: mx.random.normal(a.shape) / 4, model.parameters()))
    if bits:
        nn.quantize(model, 32, bits, class_predicate=lambda _, m: hasattr(m, "to_quantized"))
    if native:
        use_native(model.modules())
    return model


def in_many(*_: Any) -> None:
    """In place of Layer.passed."""


def passes(model: Any, batch: int = 1, kept: mx.Dtype = mx.float32) -> list[mx.array]:
    """Logits of passes, and what caches hold then."""
    caches, made = model.make_cache(), []
    if kept != mx.float32:
        keep_in(kept, caches)
    for n, length in enumerate(LENGTHS):
        ids = mx.random.randint(0, 50, (batch, length), key=mx.random.key(n))
        made.append(model(ids, caches))
        mx.eval(made)
    assert all(one.offset == sum(LENGTHS) for one in caches)
    return made + [array for one in caches for array in held_by(one)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("batch", "bits"), [(1, 4), (3, 0)])
def test_one_operation_or_two_are_many(case: str, batch: int, bits: int) -> None:
    model = made_of(CASES[case], bits)
    with counted() as counts:
        made = passes(model, batch)
    assert sum(counts.values()) == len(LENGTHS) * len(model.layers)
    # The others are long, or their caches have no room yet, or slide and take several positions.
    assert counts["one"] >= 2 * len(model.layers)
    with patch.object(blocks.Layer, "forward", in_many):
        wanted = passes(model, batch)
    assert all(map(mx.array_equal, made, wanted))
    if not bits:  # as mlx_lm has them
        theirs = passes(made_of(CASES[case], native=False), batch)
        assert all(alike(a, b, 2e-5) for a, b in zip(made, theirs, strict=True))


@pytest.mark.parametrize("alone", [(), (2,), (4,)])
@pytest.mark.parametrize("case", ["plain", "both", "sharing experts", "window"])
def test_the_last_position_alone(case: str, alone: Sequence[int]) -> None:
    """Of the last layer that keeps something, and those behind it: the bits it has among others.
    alone: layers that are left to themselves."""
    model = made_of(CASES[case], 4)
    for i in alone:
        watched(model.layers[i].self_attn)
    held = SimpleNamespace(store=SimpleNamespace(model=model), new_caches=model.make_cache)
    last = _last_layers(held)
    assert len(last) == (3 if "num_kv_shared_layers" in CASES[case] else 1)
    found, wanted = model.make_cache(), model.make_cache()
    for n, length in enumerate(LENGTHS):
        ids = mx.random.randint(0, 50, (2, length), key=mx.random.key(n))
        with last_position_only(last):
            made = model(ids, found)
        whole = alone == (4,) and case == "plain"
        assert made.shape[1] == (length if whole else 1)
        assert mx.array_equal(made[:, -1], model(ids, wanted)[:, -1])
    for ours, theirs in zip(found, wanted):
        assert all(map(mx.array_equal, held_by(ours), held_by(theirs)))


@pytest.mark.parametrize("case", ["both", "sharing experts"])
def test_a_prompt_is_read_in_one_pass(case: str, tmp_path: Path) -> None:
    """Its last token with the others, to the bit as by itself, and through sliding windows."""
    config = SIZES | CASES[case] | {"vocab_size": 4096, "vocab_size_per_layer_input": 4096}
    engine = open_model(write_random(tmp_path / "m", config), native="require")
    assert check_same(engine, 2) == [2]
    assert check_same(engine, 24, 16) == [16, 24]
    assert check_same(engine, 70) == [69, 70]  # more than a window has


@pytest.mark.parametrize("kept", [mx.float16, mx.int8])
def test_caches_that_keep_fewer_bits(kept: mx.Dtype) -> None:
    """Who shares them reads them as they lie."""
    model = made_of(CASES["both"], 4)
    with counted() as counts:
        made = passes(model, 2, kept)
    assert counts["one"] >= 3 * len(model.layers)
    with patch.object(blocks.Layer, "forward", in_many):
        wanted = passes(model, 2, kept)
    assert all(map(mx.array_equal, made, wanted))


def test_rows_of_a_batch_that_begin_at_other_places() -> None:
    model, rows = made_of({**SHARING, **OWN, "layer_types": [SEES_ALL] * 5}), []
    for fill in (0, 2):
        rows.append(mx.pad(mx.arange(1, 6 - fill)[None], [(0, 0), (fill, 0)]))
    for ours in (True, False):
        caches = [BatchKVCache([0, 2]) for _ in model.make_cache()]
        with (
            counted() as counts,
            patch.object(blocks.Layer, "forward", blocks.Layer.forward if ours else in_many),
        ):
            made = [model(mx.concatenate(rows), caches), model(mx.array([[7], [8]]), caches)]
        assert counts == {"one": 0, "two": 10 if ours else 0}
        if ours:
            found = made
    assert all(map(mx.array_equal, found, made))
    alone = model.make_cache()
    wanted = [model(mx.arange(1, 4)[None], alone), model(mx.array([[8]]), alone)]
    assert alike(found[0][1:, 2:], wanted[0], 1e-5) and alike(found[1][1:], wanted[1], 1e-5)


def test_a_layer_that_is_left_to_itself_shares_too() -> None:
    """It hands on, and takes, what mlx_lm's would."""
    model = made_of(CASES["both"], 4)
    with patch.object(blocks.Layer, "forward", in_many):
        wanted = passes(model)

    for alone in (1, 4):  # who keeps them, and who asks for them
        watched(model.layers[alone].self_attn)
        with counted() as counts:
            made = passes(model)
        assert sum(counts.values()) == len(LENGTHS) * 4
        assert all(map(mx.array_equal, made, wanted))
        model.layers[alone].self_attn.__class__ = type(model.layers[0].self_attn)


def test_a_step_is_an_operation_a_layer() -> None:
    model = made_of(CASES["both"], 4)
    caches = model.make_cache()
    mx.eval(model(mx.array([[1, 2, 3]]), caches), model(mx.array([[4]]), caches))
    found = operations_of(model(mx.array([[5]]), caches))
    assert found.count("ToastLayer") == len(model.layers)
    assert not {"ToastProjected", "ToastAttention", "ToastRope", "SliceUpdate"} & {*found}


def test_who_shares_a_cache_does_not_have_it_copied() -> None:
    """While the step before, in which another layer reads it, is in line to be computed."""
    wide = {"hidden_size": 256, "intermediate_size": 2048}  # so that a step takes a while
    model = made_of({**SHARING, **wide, "layer_types": [SEES_ALL] * 5})
    caches = model.make_cache()
    mx.eval(model(mx.arange(5)[None], caches))
    places = []
    for _ in range(7):
        for _ in range(3):
            mx.async_eval(model(mx.array([[5]]), caches))
        mx.eval(caches[2].keys)
        places.append(np.frombuffer(memoryview(caches[2].keys), np.float32).ctypes.data)
    # Where MLX's thread does not get to letting go, it is copied: seldom.
    assert sum(a == b for a, b in zip(places, places[1:])) >= 3


def test_what_is_not_so_goes_its_own_way() -> None:
    """An input of its own that is not given, or not asked for, or narrow; no cache."""
    [layer, *_], x = made_of(CASES["own"]).layers, mx.ones((1, 1, 64))
    [plain, *_] = made_of(CASES["plain"]).layers
    own = mx.ones((1, 1, 32))
    with counted() as counts:
        layer(x, None, KVCache())
        layer(x, None, KVCache(), own.astype(mx.float16))
        layer(x, None, None, own)
        plain(x, None, KVCache(), own)
    assert counts == {"one": 0, "two": 0}
    layer.layer_scalar = layer.layer_scalar.astype(mx.float16)
    with counted() as counts:
        layer(x, None, KVCache(), own)
    assert counts == {"one": 0, "two": 0}


def test_another_number_of_experts_counts_at_once() -> None:
    model = made_of(EXPERTS)
    [layer, *_], x = model.layers, mx.random.normal((1, 1, 64))
    first = layer(x, None, KVCache())[0]
    layer.router.config.top_k_experts = 3
    made = layer(x, None, KVCache())[0]
    assert not mx.array_equal(first, made)
    other = made_of(EXPERTS | {"top_k_experts": 3}, native=False).layers[0]
    assert alike(made, other(x, None, KVCache())[0], 1e-5)


def test_what_does_not_fit_together(library: Any) -> None:
    """The library says so."""
    model = made_of(CASES["both"])
    caches = model.make_cache()
    model(mx.array([[1, 2]]), caches)
    layer, x, own = model.layers[4], mx.zeros((1, 2, 64)), mx.zeros((1, 2, 32))
    keys, values = caches[1].keys, caches[1].values
    shares = blocks.Extras(layer_input=own, shared_kv=LayerKV(keys, values, 0, 2, 2))
    plan = layer.current_plan(64)

    def one(extras: Any) -> Any:
        kept = extras.shared_kv
        return blocks._one_node(library, plan, x, True, None, kept.room(), extras)

    assert one(shares)[0][0].shape == x.shape
    for wrong in (None, own[..., :31], own[:, :1], own.astype(mx.float16), own[0]):
        with pytest.raises(ValueError):
            one(shares._replace(layer_input=wrong))
        with pytest.raises(ValueError):
            blocks._two_nodes(library, plan, x, "causal", None, shares._replace(layer_input=wrong))
    for wrong in (keys[:, :1], keys[..., :31], keys[0], keys.astype(mx.int32)):
        for which in ({"keys": wrong}, {"values": wrong}):
            with pytest.raises(ValueError):
                one(shares._replace(shared_kv=shares.shared_kv._replace(**which)))
    for length in (1, 257):
        with pytest.raises(ValueError):
            one(shares._replace(shared_kv=shares.shared_kv._replace(length=length)))
    for name in ("shares_cache", "layer_input", "network"):
        before = getattr(plan.shape, name)
        setattr(plan.shape, name, 0 if before else 1)
        with pytest.raises(ValueError):
            one(shares)
        setattr(plan.shape, name, before)
