"""Mixers of Mamba-2 in one operation, and whole layers of them, of networks and of attention alone:
to the bit what their parts give."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref, py_object
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, KVCache

from tests.model.test_native_blocks import counted
from tests.model.test_native_operations import alike, library
from tests.model.test_recurrences import LEFT, MIXERS, made, quantise, read
from tests.native_library import needed, operations_of, watched
from toastkit.native.layers import blocks, mixer
from toastkit.native.library import NONE
from toastkit.native.modules import recurrent

__all__ = ["library"]
pytestmark = needed
EXPERTS = {
    "n_routed_experts": 6, "n_shared_experts": 1, "moe_intermediate_size": 16, "n_group": 2,
    "moe_shared_expert_intermediate_size": 64, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "topk_group": 1, "routed_scaling_factor": 2.5,
}  # fmt: skip
NEMOTRON = EXPERTS | {
    "hybrid_override_pattern": ["M", "-", "*", "E", "M", "E"], "num_hidden_layers": 6,
}  # fmt: skip
GRANITE = {
    "num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 64,
    "layer_types": ["mamba", "attention", "mamba"],
}  # fmt: skip
LAYERS = [
    ("nemotron_h", NEMOTRON), ("granitemoehybrid", GRANITE), ("granitemoehybrid", {}),
    ("nemotron_h", NEMOTRON | {"n_shared_experts": None, "mlp_bias": True}), ("mamba2", {}),
]  # fmt: skip


def check_parts(model: Any, parts: list[int], logits: mx.array, kept: list[mx.array]) -> None:
    """That this is, to the bit, what is read of a model whose layers and mixers are in parts."""
    with (
        patch.object(blocks.Layer, "natively", lambda *_: None),
        patch.object(mixer.NemotronLayer, "natively", lambda *_: None),
        patch.object(mixer.MixerLayer, "natively", lambda *_: None),
        patch.object(recurrent.Mixer, "mixed", lambda *_: None),
    ):
        theirs, theirs_kept = read(model, parts)
    pairs = [(logits, theirs), *zip(kept, theirs_kept, strict=True)]
    assert all(mx.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", MIXERS)
def test_mixers_in_one_node(name: str) -> None:
    """To the bit what its parts give, in any parts of a prompt."""
    _, ours = made(name, mx.float32)
    for parts in ([1, 2, 3, 5, 20], []):
        check_parts(ours, parts, *read(ours, parts))


def test_what_of_mixers_is_not_so() -> None:
    """Rows of a batch that end elsewhere, convolutions in 16 bits, no cache."""
    theirs, ours = (model.backbone.layers[0].mixer for model in made("mamba2", mx.float32))
    x, mask = mx.random.normal((2, 5, 32)), mx.arange(5)[None] >= mx.array([[0], [2]])
    assert ours.mixed(x, None, ArraysCache(2)) is not None
    assert ours.mixed(x, mask, ArraysCache(2)) is None and ours.mixed(x, None, None) is None
    both = [mixer(x, mask, ArraysCache(2)) * mask[..., None] for mixer in (ours, theirs)]
    assert alike(*both, 1e-4)
    ends = ArraysCache(2)
    ends.prepare(lengths=[3, 5])
    assert ours.mixed(x, None, ends) is None
    assert ours.mixed(x.astype(mx.bfloat16), None, ArraysCache(2)) is None
    ours.conv1d.weight = ours.conv1d.weight.astype(mx.bfloat16)
    assert ours.mixed(x, None, ArraysCache(2)) is None


def taken(function: Callable[..., None], *given: Any) -> bool:
    """Whether the library takes what it is given."""
    try:
        function(*given)
    except ValueError:
        return False
    return True


def test_mixers_that_do_not_fit_together(library: Any) -> None:
    """The library says so."""
    mixer = made("mamba2", mx.float32)[1].backbone.layers[0].mixer
    projected, state = mx.zeros((2, 5, 164)), mx.zeros((2, 4, 16, 8))
    conv, before = mixer.conv1d, mx.zeros((2, 3, 96))
    fits = [projected, conv.weight, conv.bias, before, mixer.A_log, mixer.D, mixer.dt_bias, state]

    def one(arrays: list[Any], heads: int = 4, groups: int = 2, numbers: int = 8) -> bool:
        given = recurrent._float32(*arrays)
        three = [mx.array(0) for _ in range(3)]
        shape = byref(recurrent.MixerShape(heads, groups, numbers, 0, 0.0, 1.0))
        return taken(library.c.mixer, (py_object * 3)(*three), given, shape)

    assert one(fits)
    for i, array in enumerate(fits):
        for wrong in (array[:-1], array[..., :-1], array[None]):
            assert not one([*fits[:i], wrong, *fits[i + 1 :]])
    for i in (4, 5, 6):
        assert not one([*fits[:i], None, *fits[i + 1 :]])
    for wrong in ((0, 2, 8), (4, 0, 8), (4, 3, 8), (4, 2, 0), (5, 1, 8), (4, 2, 100)):
        assert not one(fits, *wrong)


@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize(
    ("name", "more"),
    [("falcon_h1", {}), *(("granitemoehybrid", {"position_embedding_type": turned})
                          for turned in ("nope", "rope"))],
)  # fmt: skip
def test_layers_of_attention_and_mixers(name: str, more: dict, bits: int) -> None:
    """One node: Granite 4's where there are no experts, Falcon-H1's but for the mixer."""
    _, ours = made(name, mx.float32, **more)
    if bits:
        quantise(ours, bits)
    parts = [5, 6, 7, 22]
    with counted() as counts:
        logits, kept = read(ours, parts)
    assert counts["one"] + counts["two"] == 2 * 5 and counts["one"] >= 2 * 3
    check_parts(ours, parts, logits, kept)


@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize(
    "case", LAYERS, ids=["nemotron", "granite-experts", "granite", "alone", "mamba"]
)
def test_layers_in_one_node(case: tuple[str, dict], bits: int) -> None:
    """In any parts of a prompt, and with somebody before one."""
    name, more = case
    _, ours = made(name, mx.float32, **more)
    if bits:
        quantise(ours, bits)
    parts = [1, 2, 3, 5, 21]
    logits, kept = read(ours, parts)
    check_parts(ours, parts, logits, kept)
    found, layers = operations_of(stepped(ours)), len(ours.layers)
    assert sum(found.count(f"Toast{one}") for one in ("MixerLayer", "Fed", "Layer")) == layers
    for part in (ours.layers[0], ours.layers[-1]):
        seen = watched(next(part[name] for name in ("mixer", "mamba", "self_attn") if name in part))
        assert mx.array_equal(read(ours, parts)[0], logits) and len(seen) == len(parts) + 1


def stepped(model: Any) -> mx.array:
    """Logits of a token, as a graph, after three."""
    layers = model.make_cache()
    mx.eval(model(mx.array([[3, 4, 5]]), cache=layers))
    return model(mx.array([[6]]), cache=layers)


@pytest.mark.parametrize("case", LAYERS[:2], ids=["nemotron", "granite"])
def test_what_of_layers_is_not_so(case: tuple[str, dict]) -> None:
    """Masks, rows that end elsewhere, 16 bits, no cache, weights that others take the place of."""
    _, ours = made(case[0], mx.float32, **case[1])
    layer, x = ours.layers[0], mx.random.normal((2, 5, 32))
    ends, mask = ArraysCache(2), mx.arange(5)[None] >= mx.array([[0], [2]])
    ends.prepare(lengths=[3, 5])
    assert layer.natively(x, None, ArraysCache(2)) is not None
    assert layer.natively(x, mask, ArraysCache(2)) is None
    assert layer.natively(x, None, ends) is layer.natively(x, None, None) is None
    assert layer.natively(x.astype(mx.bfloat16), None, ArraysCache(2)) is None
    half = ArraysCache(2)
    half[0] = mx.zeros((2, 3, 96))
    assert layer.natively(x, None, half) is None
    mixer = layer.mixer if case[0] == "nemotron_h" else layer.mamba
    before = layer(x, None, ArraysCache(2))
    mixer.D = mixer.D * 2
    after = layer(x, None, ArraysCache(2))
    assert not mx.array_equal(after, before)
    for change in (lambda: mixer, lambda: mixer.norm, lambda: mixer.conv1d):
        part = change()
        name = "weight" if "weight" in part else "A_log"
        wide, part[name] = part[name], part[name].astype(mx.bfloat16)
        assert layer.natively(x, None, ArraysCache(2)) is None
        part[name] = wide
    assert mx.array_equal(layer(x, None, ArraysCache(2)), after)


def test_the_last_position_alone() -> None:
    """Of a prompt's last layers; what is kept is of all."""
    for case in LAYERS[:2]:
        _, ours = made(case[0], mx.float32, **case[1])
        layer, x = ours.layers[0], mx.random.normal((2, 5, 32))
        caches = ArraysCache(2), ArraysCache(2)
        whole = layer(x, None, caches[0])
        vars(layer)["_last_only"] = True
        assert mx.array_equal(layer(x, None, caches[1]), whole[:, -1:])
        assert all(map(mx.array_equal, caches[0].cache, caches[1].cache))
    last = made("nemotron_h", mx.float32, **NEMOTRON)[1].layers
    assert [layer.keeps_nothing for layer in last] == [False, True, False, True, False, True]


def test_layers_that_do_not_fit_together(library: Any) -> None:
    """The library says so."""
    _, ours = made("nemotron_h", mx.float32, **NEMOTRON)
    x, cache = mx.random.normal((1, 3, 32)), ArraysCache(2)
    mixes, feeds, attends, chooses = (ours.layers[i] for i in range(4))
    for layer, own in ((mixes, cache), (feeds, None), (attends, KVCache()), (chooses, None)):
        layer(x, None, own)
    plan, made_of = mixes._plan, feeds._plan

    def mixed(x: mx.array = x, before: Any = cache[0], state: Any = cache[1]) -> Any:
        objects = (py_object * 3)(*(mx.array(0) for _ in range(3)))
        places = byref(plan.operands), byref(plan.shape), byref(plan.recurrence), None
        given = (NONE if one is None else one for one in (before, state))
        return taken(library.c.mixer_layer, objects, x, *given, *places)

    def one_fed(x: mx.array = x) -> Any:
        places = byref(made_of.operands), byref(made_of.shape), None
        return taken(library.c.fed, mx.array(0), x, *places)

    assert mixed() and one_fed()
    for wrong in (x[0], x[..., :16], x.astype(mx.float16)):
        assert not (mixed(wrong) or one_fed(wrong))
    assert not (mixed(before=None) or mixed(state=cache[0]) or mixed(before=cache[0][:, 1:]))
    for shape, other in ((plan.recurrence, {"heads": 3, "groups": 3, "numbers": 9, "normed": 7}),
                         (plan.shape, {"network": 1, "layer_input": 1})):  # fmt: skip
        for name, value in other.items():
            before = getattr(shape, name)
            setattr(shape, name, value)
            assert not mixed()
            setattr(shape, name, before)
    made_of.shape.network = 0
    assert not one_fed()


@pytest.mark.parametrize("name", sorted({"falcon_mamba", "jamba"} - LEFT))
def test_scans_that_do_not_fit_together(library: Any, name: str) -> None:
    """The library says so."""
    layer = made(name, mx.float32)[1].layers[0]
    x, cache = mx.random.normal((1, 3, 32)), ArraysCache(2)
    assert layer.natively(x, None, cache) is not None
    plan, part = layer._plan, layer.mamba if name == "jamba" else layer.mixer

    def one(x: mx.array = x, before: Any = cache[0], state: Any = cache[1]) -> Any:
        objects = (py_object * 3)(*(mx.array(0) for _ in range(3)))
        given = (NONE if array is None else array for array in (before, state))
        places = byref(plan.operands), byref(plan.shape), None, None
        return taken(library.c.selective, objects, x, *given, *places)

    assert one()
    for wrong in (x[0], x[..., :16], x.astype(mx.float16)):
        assert not one(wrong)
    assert not (one(before=None) or one(state=cache[0]) or one(before=cache[0][:, 1:]))
    for field in ("layer_norms", "parallel", "layer_input"):
        setattr(plan.shape, field, 1)
        assert not one()
        setattr(plan.shape, field, 0)
    check_other_arrays_are_refused(plan, part, one)


def check_other_arrays_are_refused(plan: Any, module: Any, one: Callable[[], bool]) -> None:
    """Each array of a module, with a row less and of integers. one: whether the plan is taken."""
    given = {id(a): a for _, a in tree_flatten(module.parameters())}
    for places in plan.operands._pointed[:2]:  # of parts, and beside them
        for i, array in [(i, given[at]) for i, at in enumerate(places) if at and at in given]:
            for wrong in (array[:-1], array.astype(mx.int32)):
                places[i] = id(wrong)
                assert not one()
            places[i] = id(array)
    assert one()


def test_time_mixing_that_does_not_fit_together(library: Any) -> None:
    """The library says so; and what is no float32, or without a cache, is left to mlx_lm."""
    layer = made("rwkv7", mx.float32)[1].layers[1]
    x, first, cache = mx.random.normal((1, 3, 32)), mx.zeros((1, 3, 2, 16)), ArraysCache(3)
    assert layer.natively(x, first, cache) is not None
    assert layer.natively(x, first, None) is layer.natively(x, None, cache) is None
    assert layer.natively(x, first.astype(mx.float16), cache) is None
    plan, states = layer._plan, (cache[0], cache[2], cache[1])

    def one(x: mx.array = x, first: mx.array = first, before: Any = states) -> bool:
        objects = (py_object * 4)(*(mx.array(0) for _ in range(4)))
        places = byref(plan.operands), byref(plan.shape)
        return taken(library.c.time_mixing, objects, x, first, *before, *places)

    assert one() and one(before=[NONE] * 3)
    for wrong in (x[0], x[..., :16], x.astype(mx.float16)):
        assert not one(wrong)
    assert not (one(first=first[..., :8]) or one(before=[NONE, *states[1:]]) or one(before=[x] * 3))
    for field, other in {"heads": 3, "layer_norms": 0, "parallel": 1, "network": 1}.items():
        before = getattr(plan.shape, field)
        setattr(plan.shape, field, other)
        assert not one()
        setattr(plan.shape, field, before)
    check_other_arrays_are_refused(plan, layer, one)


def test_linear_attention_that_does_not_fit_together(library: Any) -> None:
    """The library says so; and what has other positions, or a mask, is left to mlx_lm."""
    layer = made("bailing_moe_linear", mx.float32)[1].layers[0]
    x, cache = mx.random.normal((1, 3, 32)), ArraysCache(1)
    assert layer._is_planned(x, 5) and not layer._is_planned(x, mx.array([5]))
    assert layer.natively(x, None, None) is layer.natively(x, mx.ones((1, 3)), cache) is None
    assert layer.natively(x, None, cache) is not None
    plan, state = layer._plan, cache[0].swapaxes(2, 3)

    def one(x: mx.array = x, before: Any = state) -> bool:
        objects = (py_object * 2)(*(mx.array(0) for _ in range(2)))
        places = byref(plan.operands), byref(plan.shape), byref(plan.recurrence), None
        return taken(library.c.linear_attention, objects, x, before, *places)

    assert one() and one(before=NONE)
    for wrong in (x[0], x[..., :16], x.astype(mx.float16)):
        assert not one(wrong)
    assert not (one(before=state[..., :8]) or one(before=x))
    for shape, field, other in (
        (plan.shape, "gated", 1), (plan.shape, "heads", 3), (plan.shape, "fused_head", 0),
        (plan.shape, "layer_norms", 1), (plan.recurrence, "normed", 5),
    ):  # fmt: skip
        before = getattr(shape, field)
        setattr(shape, field, other)
        assert not one()
        setattr(shape, field, before)
    check_other_arrays_are_refused(plan, layer, one)
