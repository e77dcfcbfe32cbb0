"""Gated delta nets of Qwen3-Next and Qwen3.5 in few nodes; and decoder layers with attention or
another mixer: such a delta net, a short convolution (LFM2), or Mamba-2 in parallel (Falcon-H1).
Recognised by their source (known.py)."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import mlx.core as mx

from toastkit.native.forms.common import Block, Known
from toastkit.native.functions import Native
from toastkit.native.layers.blocks import FEW, Layer, unshared
from toastkit.native.layers.plans import NO_EXTRAS, Extras, LayerShape
from toastkit.native.library import NONE, Library, in_use
from toastkit.native.modules.feed_forward import FeedForward
from toastkit.native.modules.mixtures import Mixture, MixtureShape
from toastkit.native.modules.norms import Norm
from toastkit.native.modules.products import Linear, operands_of
from toastkit.native.modules.recurrent import MAX_KERNEL, Convolution
from toastkit.native.operands import Operands


class DeltaLayer(Native):
    """A gated delta net. _parts: its projections."""

    _parts: tuple[str, ...]

    def __call__(
        self: Any, inputs: mx.array, mask: mx.array | None = None, cache: Any = None
    ) -> mx.array:
        library = in_use()
        plain_state = mask is None and cache is not None and cache.lengths is None
        if library is None or not plain_state or not _is_plain(self, inputs, cache):
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
    """True if the layer is entirely float32, so that nothing is rounded between kernels, and not
    sharded."""
    weights = layer["conv1d"]["weight"], layer["A_log"], layer["dt_bias"], layer["norm"]["weight"]
    arrays = [inputs, *weights, *(state for state in (cache[0], cache[1]) if state is not None)]
    plain = "bias" not in layer["conv1d"] and weights[0].shape[1] <= MAX_KERNEL
    unsharded = getattr(layer, "sharding_group", None) is None
    return plain and unsharded and all(array.dtype == mx.float32 for array in arrays)


class _Shape(ctypes.Structure):
    """toast_decoder, see glue/decoder.cpp."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in (
            "key_heads", "value_heads", "key_size", "value_size", "projections", "network",
            "activation",
        )),
        ("eps", ctypes.c_float * 3),
    )  # fmt: skip


class _Parts(NamedTuple):
    """Operands and constants of a layer; mixture: its network, if that is one."""

    operands: Operands
    shape: _Shape
    mixture: Mixture | None


class Decoder(Layer):
    """A decoder layer of a gated delta net or attention, and a network: one node, unless a part's
    class was replaced. All (B, L, columns) float32."""

    _block = Block("self_attn", "input_layernorm", "mlp", "post_attention_layernorm")

    def natively(
        self: Any, x: mx.array, mask: Any, cache: Any, extras: Extras = NO_EXTRAS
    ) -> mx.array | None:
        if self.is_linear:
            return self._one_node(x, cache) if mask is None else None
        return super().natively(x, mask, cache, extras)

    def _one_node(self: Any, x: mx.array, cache: Any) -> mx.array | None:
        library = in_use()
        if library is None or cache is None or cache.lengths is not None or x.ndim != 3:
            return None
        parts = vars(self).get("_step_plan")
        if parts is None or not parts.operands.is_valid():
            parts = vars(self)["_step_plan"] = self._find_parts()
        conv_state, state = cache[0], cache[1]
        if parts is None or (conv_state is None) is not (state is None) or x.dtype != mx.float32:
            return None
        if conv_state is not None and not conv_state.dtype == state.dtype == mx.float32:
            return None
        mixture = None if parts.mixture is None else parts.mixture.as_shape()
        if parts.mixture is not None and mixture is None:
            return None
        return _run(library, x, parts, mixture, cache)

    def _find_parts(self: Any) -> _Parts | None:
        rule, network = self["linear_attn"], self["mlp"]
        norms = self["input_layernorm"], self["post_attention_layernorm"]
        conv, calls = rule["conv1d"], type(network).__call__
        unsharded = vars(rule).get("sharding_group") is None
        known_rule = type(rule).__call__ is DeltaLayer.__call__
        plain = all(type(norm).__call__ is Norm.__call__ for norm in norms)
        if not (unsharded and known_rule and plain) or "bias" in conv:
            return None
        places = [*((norm, "weight") for norm in norms), (conv, "weight"), (rule, "A_log")]
        places += [(rule, "dt_bias"), (rule["norm"], "weight")]
        arrays = [module[key] for module, key in places]
        if conv["weight"].shape[1] > MAX_KERNEL or any(a.dtype != mx.float32 for a in arrays):
            return None
        form: Any = type(network)._form if calls is FeedForward.__call__ else None
        if form is None and calls is not Mixture.__call__:
            return None
        projections = [*(rule[part] for part in rule._parts), rule["out_proj"]]
        if not all(isinstance(part, Linear) for part in projections):
            return None
        network_parts = [network[name] for name in form.parts] if form else []
        if (found := operands_of([*projections, *network_parts])) is None:
            return None
        modules = [self, rule, conv, rule["norm"], *norms, network]
        operands = Operands([*projections, *network_parts], found, places, modules)
        shape = _Shape(
            rule.num_k_heads, rule.num_v_heads, rule.head_k_dim, rule.head_v_dim, len(rule._parts),
            len(network_parts), form.kind if form else 0,
        )  # fmt: skip
        shape.eps[:] = *(norm.eps for norm in norms), rule["norm"].eps
        return _Parts(operands, shape, None if form else network)


def _run(
    library: Library, x: mx.array, parts: _Parts, mixture: MixtureShape | None, cache: Any
) -> mx.array:
    parts.operands.mark_used()
    y, new_conv, new_state = (x.__copy__() for _ in range(3))
    conv_state, state = (NONE if kept is None else kept for kept in (cache[0], cache[1]))
    layer = ctypes.byref(parts.operands), ctypes.byref(parts.shape)
    mixture_pointer = None if mixture is None else ctypes.byref(mixture)
    library.c.decoder(y, new_conv, new_state, x, conv_state, state, *layer, mixture_pointer)
    cache[0], cache[1] = new_conv, new_state
    cache.advance(x.shape[1])
    return y


class ParallelLayer(Layer):
    """Falcon-H1's layer: mixer and attention read the same norm, their sum goes through a network.
    One node apart from the mixer. All (B, L, columns) float32, or of the parts' dtype."""

    _block = Block("self_attn", "input_layernorm", "feed_forward", "pre_ff_layernorm")

    def __call__(  # type: ignore[override]
        self: Any, h: mx.array, cache: Any, attn_mask: Any, mamba_mask: Any
    ) -> mx.array:
        normed = self["input_layernorm"](h)
        residual = h + self["mamba"](input_states=normed, cache=cache[0], mask=mamba_mask)
        y = self.natively(h, attn_mask, cache[1], Extras(residual=residual))
        if y is None:
            residual = residual + self["self_attn"](normed, mask=attn_mask, cache=cache[1])
            y = residual + self["feed_forward"](self["pre_ff_layernorm"](residual))
        return y


class ConvolutionLayer(Layer):
    """A layer of a short convolution or attention, and a network: one node for a few positions,
    apart from a mixture. All (B, L, columns) float32."""

    _block = Block("self_attn", "operator_norm", "feed_forward", "ffn_norm")

    def natively(
        self: Any, x: mx.array, mask: Any, cache: Any, extras: Extras = NO_EXTRAS
    ) -> mx.array | None:
        if self.is_attention_layer:
            return super().natively(x, mask, cache, extras)
        return self._one_node(x, cache) if mask is None else None

    def _one_node(self: Any, x: mx.array, cache: Any) -> mx.array | None:
        library = in_use()
        if library is None or cache is None or cache.lengths is not None:
            return None
        if x.ndim != 3 or x.shape[0] * x.shape[1] > FEW:
            return None
        plan = vars(self).get("_step_plan")
        if plan is None or not plan[0].is_valid():
            plan = vars(self)["_step_plan"] = self._find_parts()
        arrays = [x, *([] if cache[0] is None else [cache[0]])]
        if plan is None or any(array.dtype != mx.float32 for array in arrays):
            return None
        operands, shape = plan
        operands.mark_used()
        *outs, last = unshared(x, 2 if shape.network else 3)
        pointers = (ctypes.py_object * (len(outs) + 1))(*outs, last)
        state = NONE if cache[0] is None else cache[0]
        layer = ctypes.byref(operands), ctypes.byref(shape)
        library.c.short_conv(pointers, x, state, *layer)
        cache[0] = last
        cache.advance(x.shape[1])
        return outs[0] if shape.network else outs[0] + self["feed_forward"](outs[1])

    def _find_parts(self: Any) -> tuple[Operands, LayerShape] | None:
        short, network = self["conv"], self["feed_forward"]
        conv, norms = short["conv"], (self["operator_norm"], self["ffn_norm"])
        form = vars(type(network)).get("_form")
        network_parts = [network[name] for name in form.parts] if form else []
        parts = [*[short["in_proj"]] * 3, short["out_proj"], *network_parts]
        parameters = [conv[key] for key in ("weight", "bias") if key in conv]
        plain = all(type(norm).__call__ is Norm.__call__ for norm in norms)
        calls: Any = Known.__call__, Convolution.__call__
        if not plain or (type(short).__call__, type(conv).__call__) != calls:
            return None
        if not conv.is_plain() or any(array.dtype != mx.float32 for array in parameters):
            return None
        if (found := operands_of(parts)) is None:
            return None
        shape = LayerShape(
            1, 1, fused_head=found[0].columns, network=len(network_parts), multiplier=1.0
        )
        shape.activation = form.kind if form else 0
        shape.eps[:2] = [norm.eps for norm in norms]
        bias = (conv, "bias") if "bias" in conv else None
        arrays = [*((norm, "weight") for norm in norms), *[None] * 6, (conv, "weight"), bias, None]
        modules = [self, short, conv, *norms, network]
        return Operands(parts, found, arrays, modules), shape
