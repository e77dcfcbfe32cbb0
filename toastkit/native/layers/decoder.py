"""Gated delta rules of Qwen3-Next and Qwen3.5, of few nodes; and decoder layers in which attention
is one of several kinds: beside these rules, LFM 2's short convolutions, or Falcon-H1's mixers. They
are known by what their forwards are (known.py)."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx

from toastkit.native.forms.common import Block, Known
from toastkit.native.functions import Native
from toastkit.native.layers.blocks import FEW, Layer, copies
from toastkit.native.layers.plans import NOTHING, Beside, LayerShape
from toastkit.native.library import NONE, Library, in_use, need
from toastkit.native.modules.feed_forward import FeedForward
from toastkit.native.modules.mixtures import Mixture, MixtureShape
from toastkit.native.modules.norms import Norm
from toastkit.native.modules.products import Linear, operands_of
from toastkit.native.modules.recurrent import MOST_KERNEL, Convolution
from toastkit.native.operands import Operands


class DeltaLayer(Native):
    """Of gated delta rules. _parts: its projections."""

    _parts: tuple[str, ...]

    def __call__(
        self: Any, inputs: mx.array, mask: mx.array | None = None, cache: Any = None
    ) -> mx.array:
        library = in_use()
        known = mask is None and cache is not None and cache.lengths is None
        if library is None or not known or not _is_plain(self, inputs, cache):
            return super().__call__(inputs, mask, cache)  # type: ignore[misc]
        y, cache[0], cache[1] = library.delta_layer(
            [self[part](inputs) for part in self._parts],
            (self["conv1d"]["weight"], self["A_log"], self["dt_bias"], self["norm"]["weight"]),
            (self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim),
            self["norm"].eps,
            cache[0],
            cache[1],
        )
        cache.advance(inputs.shape[1])
        return self["out_proj"](y)


class FourProjections(DeltaLayer):
    _parts = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")


class TwoProjections(DeltaLayer):
    _parts = ("in_proj_qkvz", "in_proj_ba")


def _is_plain(layer: Any, inputs: mx.array, cache: Any) -> bool:
    """Whether all of a layer is in float32, between which kernels round nothing, and on one
    machine."""
    own = layer["conv1d"]["weight"], layer["A_log"], layer["dt_bias"], layer["norm"]["weight"]
    arrays = [inputs, *own, *(kept for kept in (cache[0], cache[1]) if kept is not None)]
    plain = "bias" not in layer["conv1d"] and own[0].shape[1] <= MOST_KERNEL
    alone = getattr(layer, "sharding_group", None) is None
    return plain and alone and all(array.dtype == mx.float32 for array in arrays)


class _Shape(ctypes.Structure):
    """toast_decoder, see glue/recurrent.cpp."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in (
            "key_heads", "value_heads", "key_size", "value_size", "projections", "network",
            "activation",
        )),
        ("eps", ctypes.c_float * 3),
    )  # fmt: skip


class _Found(NamedTuple):
    """What a layer is made of, but for a network that is a mixture."""

    operands: Operands
    shape: _Shape
    mixture: Mixture | None


class Decoder(Layer):
    """A decoder layer of gated delta rules, or of attention, and a network: one node, unless
    somebody stands before a part of it. All (B, L, columns) float32."""

    _block = Block("self_attn", "input_layernorm", "mlp", "post_attention_layernorm")

    def natively(
        self: Any, x: mx.array, mask: Any, cache: Any, beside: Beside = NOTHING
    ) -> mx.array | None:
        if self.is_linear:
            return self._in_one(x, cache) if mask is None else None
        return super().natively(x, mask, cache, beside)

    def _in_one(self: Any, x: mx.array, cache: Any) -> mx.array | None:
        library = in_use()
        if library is None or cache is None or cache.lengths is not None or x.ndim != 3:
            return None
        found = vars(self).get("_kept")
        if found is None or not found.operands.hold():
            found = vars(self)["_kept"] = self._found()
        before, state = cache[0], cache[1]
        if found is None or (before is None) is not (state is None) or x.dtype != mx.float32:
            return None
        if before is not None and not before.dtype == state.dtype == mx.float32:
            return None
        mixture = None if found.mixture is None else found.mixture.whole()
        if found.mixture is not None and mixture is None:
            return None
        return _decoded(library, x, found, mixture, cache)

    def _found(self: Any) -> _Found | None:
        rule, network = self["linear_attn"], self["mlp"]
        norms = self["input_layernorm"], self["post_attention_layernorm"]
        conv, calls = rule["conv1d"], type(network).__call__
        alone = vars(rule).get("sharding_group") is None
        known = type(rule).__call__ is DeltaLayer.__call__
        plain = all(type(norm).__call__ is Norm.__call__ for norm in norms)
        if not (alone and known and plain) or "bias" in conv:
            return None
        beside = [*((norm, "weight") for norm in norms), (conv, "weight"), (rule, "A_log")]
        beside += [(rule, "dt_bias"), (rule["norm"], "weight")]
        arrays = [module[key] for module, key in beside]
        if conv["weight"].shape[1] > MOST_KERNEL or any(a.dtype != mx.float32 for a in arrays):
            return None
        form: Any = type(network)._form if calls is FeedForward.__call__ else None
        if form is None and calls is not Mixture.__call__:
            return None
        own = [*(rule[part] for part in rule._parts), rule["out_proj"]]
        if not all(isinstance(part, Linear) for part in own):
            return None
        more = [network[name] for name in form.parts] if form else []
        if (found := operands_of([*own, *more])) is None:
            return None
        around = [self, rule, conv, rule["norm"], *norms, network]
        operands = Operands([*own, *more], found, beside, around)
        shape = _Shape(
            rule.num_k_heads, rule.num_v_heads, rule.head_k_dim, rule.head_v_dim, len(rule._parts),
            len(more), form.kind if form else 0,
        )  # fmt: skip
        shape.eps[:] = *(norm.eps for norm in norms), rule["norm"].eps
        return _Found(operands, shape, None if form else network)


def _decoded(
    library: Library, x: mx.array, found: _Found, mixture: MixtureShape | None, cache: Any
) -> mx.array:
    found.operands.were_used()
    y, last, after = (x.__copy__() for _ in range(3))
    before, state = (NONE if kept is None else kept for kept in (cache[0], cache[1]))
    places = ctypes.byref(found.operands), ctypes.byref(found.shape)
    more = None if mixture is None else ctypes.byref(mixture)
    need(_function(library)(y, last, after, x, before, state, *places, more))
    cache[0], cache[1] = last, after
    cache.advance(x.shape[1])
    return y


@cache
def _function(library: Library) -> Any:
    array, place = ctypes.py_object, ctypes.c_void_p
    return library.function("decoder", *[array] * 6, *[place] * 3)


class ParallelLayer(Layer):
    """Falcon-H1's: what its mixer and its attention make of one norm is added up, and goes through
    a network: one node but for the mixer. All (B, L, columns) float32, or as the parts have it."""

    _block = Block("self_attn", "input_layernorm", "feed_forward", "pre_ff_layernorm")

    def __call__(  # type: ignore[override]
        self: Any, h: mx.array, cache: Any, attn_mask: Any, mamba_mask: Any
    ) -> mx.array:
        normed = self["input_layernorm"](h)
        both = h + self["mamba"](input_states=normed, cache=cache[0], mask=mamba_mask)
        y = self.natively(h, attn_mask, cache[1], Beside(sum=both))
        if y is None:
            both = both + self["self_attn"](normed, mask=attn_mask, cache=cache[1])
            y = both + self["feed_forward"](self["pre_ff_layernorm"](both))
        return y


class ConvolutionLayer(Layer):
    """A layer of a short convolution, or of attention, and a network: of a few positions one node,
    but for a mixture. All (B, L, columns) float32."""

    _block = Block("self_attn", "operator_norm", "feed_forward", "ffn_norm")

    def natively(
        self: Any, x: mx.array, mask: Any, cache: Any, beside: Beside = NOTHING
    ) -> mx.array | None:
        if self.is_attention_layer:
            return super().natively(x, mask, cache, beside)
        return self._in_one(x, cache) if mask is None else None

    def _in_one(self: Any, x: mx.array, cache: Any) -> mx.array | None:
        library = in_use()
        if library is None or cache is None or cache.lengths is not None:
            return None
        if x.ndim != 3 or x.shape[0] * x.shape[1] > FEW:
            return None
        kept = vars(self).get("_kept")
        if kept is None or not kept[0].hold():
            kept = vars(self)["_kept"] = self._found()
        arrays = [x, *([] if cache[0] is None else [cache[0]])]
        if kept is None or any(array.dtype != mx.float32 for array in arrays):
            return None
        operands, shape = kept
        operands.were_used()
        *outs, last = copies(x, 2 if shape.network else 3)
        made = (ctypes.py_object * (len(outs) + 1))(*outs, last)
        before = NONE if cache[0] is None else cache[0]
        places = ctypes.byref(operands), ctypes.byref(shape)
        need(_short_convolution(library)(made, x, before, *places))
        cache[0] = last
        cache.advance(x.shape[1])
        return outs[0] if shape.network else outs[0] + self["feed_forward"](outs[1])

    def _found(self: Any) -> tuple[Operands, LayerShape] | None:
        short, network = self["conv"], self["feed_forward"]
        conv, norms = short["conv"], (self["operator_norm"], self["ffn_norm"])
        form = vars(type(network)).get("_form")
        behind = [network[name] for name in form.parts] if form else []
        parts = [*[short["in_proj"]] * 3, short["out_proj"], *behind]
        own = [conv[key] for key in ("weight", "bias") if key in conv]
        plain = all(type(norm).__call__ is Norm.__call__ for norm in norms)
        calls: Any = Known.__call__, Convolution.__call__
        if not plain or (type(short).__call__, type(conv).__call__) != calls:
            return None
        if not conv.is_plain() or any(array.dtype != mx.float32 for array in own):
            return None
        if (found := operands_of(parts)) is None:
            return None
        shape = LayerShape(1, 1, joined=found[0].columns, network=len(behind), multiplier=1.0)
        shape.activation = form.kind if form else 0
        shape.eps[:2] = [norm.eps for norm in norms]
        bias = (conv, "bias") if "bias" in conv else None
        beside = [*((norm, "weight") for norm in norms), *[None] * 6, (conv, "weight"), bias, None]
        around = [self, short, conv, *norms, network]
        return Operands(parts, found, beside, around), shape


@cache
def _short_convolution(library: Library) -> Any:
    array, place = ctypes.py_object, ctypes.c_void_p
    return library.function("short_conv", place, array, array, place, place)
