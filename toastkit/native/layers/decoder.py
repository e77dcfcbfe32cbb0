"""Gated delta nets of Qwen3-Next and Qwen3.5 in few nodes; and decoder layers with attention or
another mixer: such a delta net, that of Kimi Linear, a short convolution (LFM2), or Mamba-2 in
parallel (Falcon-H1). Recognised by their source (known.py)."""

from __future__ import annotations

import ctypes
from typing import Any

import mlx.core as mx

from toastkit.native.forms.common import USUAL, Block, Known
from toastkit.native.functions import Native
from toastkit.native.layers.blocks import FEW, Layer
from toastkit.native.layers.plans import Extras
from toastkit.native.layers.recurrent import RecurrentLayer, StepPlan, norms_of, step_plan
from toastkit.native.library import in_use
from toastkit.native.modules.norms import Norm
from toastkit.native.modules.recurrent import MAX_KERNEL, Convolution

KIMI_SEQUENCES = ("q", "k", "v")
KIMI_GATES = ("f_a_proj", "f_b_proj", "b_proj", "g_a_proj", "g_b_proj")


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


def _is_plain(layer: Any, inputs: mx.array, cache: Any) -> bool:
    """True if the layer is entirely float32, so that nothing is rounded between kernels, and not
    sharded."""
    weights = layer["conv1d"]["weight"], layer["A_log"], layer["dt_bias"], layer["norm"]["weight"]
    arrays = [inputs, *weights, *(state for state in (cache[0], cache[1]) if state is not None)]
    plain = "bias" not in layer["conv1d"] and weights[0].shape[1] <= MAX_KERNEL
    unsharded = getattr(layer, "sharding_group", None) is None
    return plain and unsharded and all(array.dtype == mx.float32 for array in arrays)


class _DeltaNet(ctypes.Structure):
    """toast_delta_net, see glue/decoder.cpp."""

    _fields_ = [
        (name, ctypes.c_int32)
        for name in ("key_heads", "value_heads", "key_size", "value_size", "projections")
    ]


class Decoder(RecurrentLayer):
    """A decoder layer of a gated delta net or attention, and a network: one node, unless a part's
    class was replaced. All (B, L, columns) float32."""

    _block = USUAL
    _function = "decoder"

    def _step_plan(self: Any, columns: int) -> StepPlan | None:
        rule, norms = self["linear_attn"], norms_of(self, self["linear_attn"]["norm"])
        conv, unsharded = rule["conv1d"], vars(rule).get("sharding_group") is None
        known_rule = type(rule).__call__ is DeltaLayer.__call__
        if not (unsharded and known_rule and norms) or "bias" in conv:
            return None
        if conv["weight"].shape[1] > MAX_KERNEL:
            return None
        names = rule._parts
        parts = [rule[name] for name in (*(*names, names[-1])[:3], "out_proj")]
        arrays = [(conv, "weight"), None, None, (rule, "A_log"), (rule, "dt_bias")]
        modules, more = (self, rule, conv), [rule[name] for name in names[3:]]
        sizes = rule.num_k_heads, rule.num_v_heads, rule.head_k_dim, rule.head_v_dim, len(names)
        net, network = _DeltaNet(*sizes), self["mlp"]
        return step_plan(self, columns, modules, parts, network, more, norms, arrays, net)


class KimiLayer(RecurrentLayer):
    """Kimi Linear's layer: of Kimi Delta Attention (arXiv 2510.26692), or of latent attention. All
    (B, L, columns) float32."""

    _block = USUAL
    _function = "kimi_layer"

    def _step_plan(self: Any, columns: int) -> StepPlan | None:
        rule, network = self["self_attn"], self["mlp"]
        short = [rule[f"{name}_conv"] for name in KIMI_SEQUENCES]
        convs, norm = [one["conv"] for one in short], rule["o_norm"]
        known = all(type(one).__call__ is Known.__call__ for one in (rule, *short))
        plain = all(type(one).__call__ is Convolution.__call__ and one.is_plain() for one in convs)
        if not (known and plain) or any("bias" in one for one in convs):
            return None
        norms = norms_of(self, norm)
        if norms is None or type(norm).__call__ is not Norm.__call__:
            return None
        arrays = [(convs[0], "weight"), (convs[1], "weight"), None, (convs[2], "weight")]
        arrays += [(rule, "A_log"), (rule, "dt_bias")]
        parts = [*(rule[f"{name}_proj"] for name in KIMI_SEQUENCES), rule["o_proj"]]
        gates, modules = [rule[name] for name in KIMI_GATES], (self, rule, *short, *convs)
        size = ctypes.c_int32(rule.head_dim)
        plan = step_plan(self, columns, modules, parts, network, gates, norms, arrays, size)
        if plan is not None:
            plan.shape.heads = rule.num_heads
        return plan


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


class ConvolutionLayer(RecurrentLayer):
    """A layer of a short convolution or attention, and a network: one node for a few positions. All
    (B, L, columns) float32."""

    _block = Block("self_attn", "operator_norm", "feed_forward", "ffn_norm")
    _function = "short_conv"

    @property
    def _attends(self: Any) -> bool:
        return self.is_attention_layer

    def _recurrent_step(self: Any, x: mx.array, mask: Any, cache: Any) -> mx.array | None:
        few = x.ndim == 3 and x.shape[0] * x.shape[1] <= FEW
        return super()._recurrent_step(x, mask, cache) if few else None

    def _step_plan(self: Any, columns: int) -> StepPlan | None:
        short, network, norms = self["conv"], self["feed_forward"], norms_of(self, None)
        conv = short["conv"]
        calls: Any = Known.__call__, Convolution.__call__
        if not norms or (type(short).__call__, type(conv).__call__) != calls:
            return None
        if not conv.is_plain():
            return None
        arrays = [(conv, "weight"), (conv, "bias") if "bias" in conv else None, None]
        parts, modules = [*[short["in_proj"]] * 3, short["out_proj"]], (self, short, conv)
        plan = step_plan(self, columns, modules, parts, network, [], norms, arrays)
        if plan is not None:
            plan.shape.fused_head = columns
        return plan
