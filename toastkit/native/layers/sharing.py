"""Layers of Gemma 4: some attend to the KV cache of an earlier layer, some have a per-layer input
for each position, some have experts beside their network, with norms of their own. Recognised by
their source (known.py)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from toastkit.native.forms.common import Block
from toastkit.native.functions import Native
from toastkit.native.kv_caches import LayerKV, kept_of, offset_of
from toastkit.native.layers.blocks import Layer, last_position
from toastkit.native.layers.plans import Extras
from toastkit.native.library import in_use
from toastkit.native.operands import CHOSEN, Choice
from toastkit.native.operations import rms_norm, weighted_sum

ROUTED = Block(
    "self_attn", "input_layernorm", "router", "pre_feedforward_layernorm",
    "post_attention_layernorm",
)  # fmt: skip
DENSE = ROUTED._replace(network="mlp", fed_norm="post_feedforward_layernorm", factor="layer_scalar")
WITH_INPUT = DENSE._replace(
    input_gate="per_layer_input_gate", input_projection="per_layer_projection",
    input_norm="post_per_layer_input_norm",
)  # fmt: skip


class SharingLayer(Layer):
    """A layer that passes on a LayerKV, if activations are float32. The layers without a cache
    follow all that have one, and may be given the last position alone."""

    @property
    def keeps_nothing(self: Any) -> bool:
        """True if it attends to the cache of an earlier layer."""
        return not self["self_attn"].has_kv

    @property
    def _block(self: Any) -> Block:  # type: ignore[override]
        if self.enable_moe:
            return ROUTED
        return DENSE if self.per_layer_input_gate is None else WITH_INPUT

    def __call__(  # type: ignore[override]
        self: Any,
        x: mx.array,
        mask: Any = None,
        cache: Any = None,
        per_layer_input: mx.array | None = None,
        shared_kv: Any = None,
        offset: Any = None,
    ) -> tuple[mx.array, Any, Any]:
        ours = isinstance(shared_kv, LayerKV)
        extras = Extras(layer_input=per_layer_input, shared_kv=shared_kv if ours else None)
        result = None
        if ours and (x.shape[1] < shared_kv.positions or self._last_only):
            x, mask, extras = last_position(x, mask, extras)
        if ours or shared_kv is None:
            result = self.forward(x, mask, cache, extras)
        if result is None:
            return self._as_upstream(
                x, mask, cache, extras.layer_input, extras.shared_kv or shared_kv, offset
            )
        (y, *normed), kv = result
        return self._with_experts(y, *normed) if normed else y, kv, kv.offset

    def _as_upstream(
        self: Any, x: mx.array, mask: Any, cache: Any, layer_input: Any, shared_kv: Any, offset: Any
    ) -> tuple[mx.array, Any, Any]:
        """Run the architecture's forward for x (B, L, columns)."""
        forward: Any = super(Layer, self).__call__  # type: ignore[misc]
        if isinstance(shared_kv, LayerKV):
            return forward(x, mask, cache, layer_input, shared_kv.fetched(), shared_kv.offset)
        start = None if cache is None else offset_of(cache)
        y, fetched, offset = forward(x, mask, cache, layer_input, shared_kv, offset)
        if start is not None and x.dtype == fetched[0].dtype == mx.float32:
            keys, values = map(kept_of, fetched)
            fetched = LayerKV(keys, values, start, x.shape[1], keys.shape[2])
        return y, fetched, offset

    def _with_experts(self: Any, x: mx.array, normed: mx.array) -> mx.array:
        """The output of a layer with experts: x (B, L, columns) is the residual that network and
        experts are added to."""
        dense = self["post_feedforward_layernorm_1"](self["mlp"](normed))
        experts, weights = self["router"](x)
        routed = self["experts"](self["pre_feedforward_layernorm_2"](x), experts, weights)
        both = dense + self["post_feedforward_layernorm_2"](routed)
        return (x + self["post_feedforward_layernorm"](both)) * self["layer_scalar"]


class RouterOfNorm(Native):
    """A router over an RMS norm of x: softmax over the chosen logits, and a factor per expert."""

    def __call__(self: Any, x: mx.array) -> tuple[mx.array, mx.array]:
        library, logits = in_use(), None
        if x.dtype == mx.float32:
            logits = self["proj"](rms_norm(x, self["scale"] * self._root_size, self.eps))
        if library is None or logits is None or logits.dtype != mx.float32:
            return super().__call__(x)  # type: ignore[misc]
        experts, weights = library.route(logits, Choice(self.config.top_k_experts, CHOSEN))
        return experts, weights * self["per_expert_scale"][experts]


class Experts(Native):
    """Experts that an outside router has chosen."""

    def __call__(self: Any, x: mx.array, experts: mx.array, weights: mx.array) -> mx.array:
        return weighted_sum(self["switch_glu"](x, experts), weights)
