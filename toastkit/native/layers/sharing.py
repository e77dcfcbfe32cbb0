"""Layers of Gemma 4: some attend to the keys and values of a layer before, positions may have an
input of their own at each, and some have experts beside their network, with norms of their own.
Known by what their forwards are (known.py)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from toastkit.native.forms.common import Block
from toastkit.native.functions import Native
from toastkit.native.kv_caches import Kept, kept_of, offset_of
from toastkit.native.layers.blocks import Layer, last_of
from toastkit.native.layers.plans import Beside
from toastkit.native.library import in_use
from toastkit.native.operands import CHOSEN, Choice
from toastkit.native.operations import rms_norm, weighted_sum

ROUTED = Block(
    "self_attn", "input_layernorm", "router", "pre_feedforward_layernorm",
    "post_attention_layernorm",
)  # fmt: skip
DENSE = ROUTED._replace(network="mlp", fed_norm="post_feedforward_layernorm", factor="layer_scalar")
WITH_OWN = DENSE._replace(
    own_gate="per_layer_input_gate", own_product="per_layer_projection",
    own_norm="post_per_layer_input_norm",
)  # fmt: skip


class SharingLayer(Layer):
    """What is handed on from layer to layer is a Kept, where activations are float32. All that keep
    nothing lie behind those that do, and may be given the last position alone."""

    @property
    def keeps_nothing(self: Any) -> bool:
        """Whether it attends to what a layer before has kept."""
        return not self["self_attn"].has_kv

    @property
    def _block(self: Any) -> Block:  # type: ignore[override]
        if self.enable_moe:
            return ROUTED
        return DENSE if self.per_layer_input_gate is None else WITH_OWN

    def __call__(  # type: ignore[override]
        self: Any,
        x: mx.array,
        mask: Any = None,
        cache: Any = None,
        per_layer_input: mx.array | None = None,
        shared_kv: Any = None,
        offset: Any = None,
    ) -> tuple[mx.array, Any, Any]:
        known = isinstance(shared_kv, Kept)
        beside, passed = Beside(own=per_layer_input, kept=shared_kv if known else None), None
        if known and (x.shape[1] < shared_kv.positions or self._last_only):
            x, mask, beside = last_of(x, mask, beside)
        if known or shared_kv is None:
            passed = self.passed(x, mask, cache, beside)
        if passed is None:
            return self._alone(x, mask, cache, beside.own, beside.kept or shared_kv, offset)
        (y, *normed), kept = passed
        return self._routed(y, *normed) if normed else y, kept, kept.offset

    def _alone(
        self: Any, x: mx.array, mask: Any, cache: Any, own: Any, kept: Any, offset: Any
    ) -> tuple[mx.array, Any, Any]:
        """As the architecture has it, x (B, L, columns)."""
        theirs: Any = super(Layer, self).__call__  # type: ignore[misc]
        if isinstance(kept, Kept):
            return theirs(x, mask, cache, own, kept.fetched(), kept.offset)
        before = None if cache is None else offset_of(cache)
        y, both, offset = theirs(x, mask, cache, own, kept, offset)
        if before is not None and x.dtype == both[0].dtype == mx.float32:
            keys, values = map(kept_of, both)
            both = Kept(keys, values, before, x.shape[1], keys.shape[2])
        return y, both, offset

    def _routed(self: Any, x: mx.array, normed: mx.array) -> mx.array:
        """What comes out of a layer with experts: x, (B, L, columns), is what its network and they
        are added to."""
        fed = self["post_feedforward_layernorm_1"](self["mlp"](normed))
        which, shares = self["router"](x)
        mixed = self["experts"](self["pre_feedforward_layernorm_2"](x), which, shares)
        both = fed + self["post_feedforward_layernorm_2"](mixed)
        return (x + self["post_feedforward_layernorm"](both)) * self["layer_scalar"]


class RouterOfNorm(Native):
    """By the logits of what is chosen, of a norm; each expert's share has a factor."""

    def __call__(self: Any, x: mx.array) -> tuple[mx.array, mx.array]:
        library, logits = in_use(), None
        if x.dtype == mx.float32:
            logits = self["proj"](rms_norm(x, self["scale"] * self._root_size, self.eps))
        if library is None or logits is None or logits.dtype != mx.float32:
            return super().__call__(x)  # type: ignore[misc]
        which, shares = library.route(logits, Choice(self.config.top_k_experts, CHOSEN))
        return which, shares * self["per_expert_scale"][which]


class Experts(Native):
    """Experts that somebody else has chosen."""

    def __call__(self: Any, x: mx.array, which: mx.array, shares: mx.array) -> mx.array:
        return weighted_sum(self["switch_glu"](x, which), shares)
