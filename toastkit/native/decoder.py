"""Decoder layers of Qwen3-Next and Qwen3.5, of gated delta rules or of attention: one node each."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx

from toastkit.native.blocks import Layer
from toastkit.native.forms import Block
from toastkit.native.layers import DeltaLayer, Mixture, MixtureShape, Operands
from toastkit.native.library import ACTIVATIONS, NONE, Library, in_use, need
from toastkit.native.modules import FeedForward, Linear, Norm
from toastkit.native.recurrent import MOST_KERNEL


class _Shape(ctypes.Structure):
    """toast_decoder, see glue/recurrent.cpp."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in (
            "key_heads", "value_heads", "key_size", "value_size", "projections",
            "activation_bits", "network", "activation",
        )),
        ("eps", ctypes.c_float * 3),
    )  # fmt: skip


class _DecoderParts(NamedTuple):
    """A layer's own products, and its network's: None for a mixture, which has its own."""

    operands: Operands
    network: Operands | None
    shape: _Shape

    def hold(self) -> bool:
        """Whether they are still so."""
        return self.operands.hold() and (self.network is None or self.network.hold())


class Decoder(Layer):
    """A decoder layer of gated delta rules, or of attention, and a network: one node, unless
    somebody stands before a part of it. Many positions are made of their parts where there is
    attention. All (B, L, columns) float32."""

    _block = Block("self_attn", "input_layernorm", "mlp", "post_attention_layernorm")

    def natively(self: Any, x: mx.array, mask: Any, cache: Any) -> mx.array | None:
        if not self.is_linear:
            return super().natively(x, mask, cache)
        return self._in_one(x, cache) if mask is None else None

    def _in_one(self: Any, x: mx.array, cache: Any) -> mx.array | None:
        library = in_use()
        if library is None or cache is None or cache.lengths is not None or x.ndim != 3:
            return None
        kept = vars(self).get("_kept")
        if kept is None or not kept.hold():
            kept = vars(self)["_kept"] = self._found()
        if kept is None:
            return None
        rule, before, state = self["linear_attn"], cache[0], cache[1]
        arrays = (
            self["input_layernorm"]["weight"], self["post_attention_layernorm"]["weight"],
            rule["conv1d"]["weight"], before, rule["A_log"], rule["dt_bias"],
            rule["norm"]["weight"], state,
        )  # fmt: skip
        if any(one is not None and one.dtype != mx.float32 for one in (x, *arrays)):
            return None
        mixture = self["mlp"].whole() if kept.network is None else None
        if kept.network is None and mixture is None:
            return None
        return _decoded(library, x, arrays, kept, mixture, cache)

    def _found(self: Any) -> _DecoderParts | None:
        rule, network = self["linear_attn"], self["mlp"]
        norms = self["input_layernorm"], self["post_attention_layernorm"]
        conv, calls = rule["conv1d"], type(network).__call__
        alone = vars(rule).get("sharding_group") is None
        known = type(rule).__call__ is DeltaLayer.__call__
        plain = all(type(norm).__call__ is Norm.__call__ for norm in norms)
        if not (alone and known and plain) or "bias" in conv:
            return None
        if conv["weight"].shape[1] > MOST_KERNEL:
            return None
        form: Any = getattr(type(network), "_form", None)
        more = None
        if calls is FeedForward.__call__:
            more = Operands.of([network[name] for name in form.parts], [network])
        if more is None and calls is not Mixture.__call__:
            return None
        own = [*(rule[part] for part in rule._parts), rule["out_proj"]]
        around = [self, rule, conv, rule["norm"], *norms, network]
        if not all(isinstance(part, Linear) for part in own):
            return None
        if (operands := Operands.of(own, around)) is None:
            return None
        shape = _Shape(
            rule.num_k_heads, rule.num_v_heads, rule.head_k_dim, rule.head_v_dim, len(rule._parts),
            operands.activation_bits,
        )  # fmt: skip
        shape.eps[:] = *(norm.eps for norm in norms), rule["norm"].eps
        if more is not None:
            shape.network = len(form.parts)
            shape.activation = ACTIVATIONS.index(form.activation)
        return _DecoderParts(operands, more, shape)


def _decoded(
    library: Library, x: mx.array, arrays: tuple, parts: _DecoderParts,
    mixture: MixtureShape | None, cache: Any,
) -> mx.array:  # fmt: skip
    own, network = parts.operands, parts.network
    own.were_used()
    if network is not None:
        network.were_used()
    y, last, after = (x.__copy__() for _ in range(3))
    rest = (ctypes.py_object * 8)(*(NONE if one is None else one for one in arrays))
    need(
        _function(library)(
            y, last, after, x, own.objects, own.packing, rest,
            network and network.objects, network and network.packing,
            mixture and ctypes.byref(mixture), ctypes.byref(parts.shape),
        )
    )  # fmt: skip
    cache[0], cache[1] = last, after
    cache.advance(x.shape[1])
    return y


@cache
def _function(library: Library) -> Any:
    array, place = ctypes.py_object, ctypes.c_void_p
    return library.function("decoder", *[array] * 4, *[place] * 7)
