"""Layers of Kimi Delta Attention in one operation: to the bit what their parts give."""

from __future__ import annotations

from ctypes import byref, c_int32, py_object
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm.models import kimi_linear
from mlx_lm.models.cache import ArraysCache

from tests.model.reference import needs_new_mlx_lm
from tests.model.test_latent_layers import KIMI, SIZES
from tests.model.test_mixer_layers import stepped, taken
from tests.model.test_native_operations import alike, library
from tests.model.test_recurrences import quantise, read
from tests.native_library import needed, operations_of, watched
from toastkit.native import replacing
from toastkit.native.layers.decoder import KimiLayer
from toastkit.native.library import NONE

__all__ = ["library"]
pytestmark = [needed, needs_new_mlx_lm, pytest.mark.usefixtures("library")]  # 0.31 norms otherwise
LINEAR = {
    "kda_layers": [1, 2], "full_attn_layers": [3], "num_heads": 3, "head_dim": 32,
    "short_conv_kernel_size": 3,
}  # fmt: skip


def made() -> tuple[Any, Any]:
    """mlx_lm's and ours, with the same random weights."""
    sizes = SIZES | KIMI | {"linear_attn_config": LINEAR, "model_type": "kimi_linear"}
    args = kimi_linear.ModelArgs.from_dict(sizes)
    mx.random.seed(7)
    theirs, ours = kimi_linear.Model(args), kimi_linear.Model(args)
    theirs.update(tree_map(lambda a: mx.random.normal(a.shape) / 5, theirs.parameters()))
    ours.update(theirs.parameters())
    replacing.use_native(ours.modules())
    return theirs, ours


def of_their_parts(model: Any, parts: list[int]) -> tuple[mx.array, list[mx.array]]:
    with patch.object(KimiLayer, "natively", lambda *_: None):
        return read(model, parts)


@pytest.mark.parametrize("bits", [0, 4])
def test_layers_in_one_node(bits: int) -> None:
    """In any parts of a prompt, and with somebody before one; and as mlx_lm has them."""
    theirs, ours = made()
    if bits:
        quantise(ours, bits)
    parts = [1, 2, 3, 5, 21]
    (logits, kept), (own, own_kept) = read(ours, parts), of_their_parts(ours, parts)
    for a, b in zip((logits, *kept), (own, *own_kept), strict=True):
        # The latent is met in another way by many positions.
        assert alike(a, b, 1e-3 if bits else 1e-5)
    first = [layer.natively for layer in ours.layers[:2]]
    x, caches = mx.random.normal((2, 5, 64)), [ArraysCache(4), ArraysCache(4)]
    for layer, native in zip(ours.layers, first):
        found = native(x, None, caches[0])
        with patch.object(KimiLayer, "natively", lambda *_: None):
            assert mx.array_equal(found, layer(x, None, caches[1]))
        assert all(map(mx.array_equal, caches[0].cache, caches[1].cache))
    assert operations_of(stepped(ours)).count("ToastKimiLayer") == 2
    if not bits:
        wanted, theirs_kept = read(theirs, parts)
        assert alike(logits, wanted, 1e-3)
        assert all(alike(a, b, 1e-3) for a, b in zip(kept, theirs_kept, strict=True))
    seen = watched(ours.layers[0].self_attn)
    assert alike(read(ours, parts)[0], logits, 1e-5) and len(seen) == len(parts) + 1


def test_what_of_layers_is_not_so() -> None:
    """Masks, rows that end elsewhere, 16 bits, no cache, weights that others take the place of."""
    layer, x = made()[1].layers[0], mx.random.normal((2, 5, 64))
    ends, half = ArraysCache(4), ArraysCache(4)
    ends.prepare(lengths=[3, 5])
    half[1] = mx.zeros((2, 2, 96))
    for mask, cache in (
        (mx.ones((2, 5), mx.bool_), ArraysCache(4)), (None, ends), (None, None), (None, half),
    ):  # fmt: skip
        assert layer.natively(x, mask, cache) is None
    assert layer.natively(x.astype(mx.bfloat16), None, ArraysCache(4)) is None
    before, rule = layer(x, None, ArraysCache(4)), layer.self_attn
    for part, name in ((rule, "A_log"), (rule.q_conv.conv, "weight"), (rule.o_norm, "weight")):
        own = part[name]
        part[name] = own * 2
        assert not mx.array_equal(layer(x, None, ArraysCache(4)), before)
        part[name] = own
    for part, name in ((rule, "dt_bias"), (rule.k_conv.conv, "weight")):
        part[name] = part[name].astype(mx.bfloat16)
        assert layer.natively(x, None, ArraysCache(4)) is None
        part[name] = part[name].astype(mx.float32)
    vars(layer)["_last_only"] = True
    assert layer(x, None, ArraysCache(4)).shape == (2, 1, 64)


def test_what_does_not_fit_together(library: Any) -> None:
    """The library says so."""
    layer, x, cache = made()[1].layers[0], mx.random.normal((1, 3, 64)), ArraysCache(4)
    layer(x, None, cache)
    plan, given = layer._plan, list(cache.cache)

    def one(x: mx.array = x, kept: list[Any] = given, size: int = 32) -> Any:
        outs = (py_object * 5)(*(mx.array(0) for _ in range(5)))
        before = (NONE if one is None else one for one in kept)
        places = byref(plan.operands), byref(plan.shape)
        return taken(library.c.kimi_layer, outs, x, *before, *places, byref(c_int32(size)), None)

    assert one() and one(kept=[None] * 4)
    for wrong in (x[0], x[..., :32], x.astype(mx.float16)):
        assert not one(wrong)
    for i in range(4):
        for other in (None, given[i][:, 1:], given[i][..., 1:], given[i].astype(mx.float16)):
            assert not one(kept=[*given[:i], other, *given[i + 1 :]])
    assert not (one(size=16) or one(size=0))
    others = {"heads": 2, "network": 1, "layer_norms": 1, "parallel": 1, "layer_input": 1}
    for name, value in others.items():
        before = getattr(plan.shape, name)
        setattr(plan.shape, name, value)
        assert not one()
        setattr(plan.shape, name, before)
