"""Layers of the common form (forms/common.py). For a few positions a layer is one node of MLX's
graph, its KV cache included. For many positions, or other caches, masks and RoPEs, it is two nodes,
with attention between them. Anything else is left to the architecture's own forward."""

from __future__ import annotations

from ctypes import byref
from typing import Any

import mlx.core as mx

from toastkit.native.batched_caches import attend
from toastkit.native.forms.common import USUAL, Block, Heads, KnownAttention, heads_of
from toastkit.native.functions import Native
from toastkit.native.kv_caches import (
    LayerKV,
    Room,
    appended_first,
    kept_of,
    offset_of,
    room_in,
    set_appended,
)
from toastkit.native.layers import latent_attention
from toastkit.native.layers.plans import NO_EXTRAS, Extras, Plan, multiplier_of, plan_of
from toastkit.native.library import NONE, Library, in_use, objects, unshared
from toastkit.native.modules.mixtures import Mixture, MixtureShape
from toastkit.native.operations import is_mask

FEW = 16  # most positions, over all rows of a batch, that are one node


class Layer(Native):
    """A decoder layer of the common form. _block: its class's names of its parts. _plan: of the
    last step. _last_only: all positions go into the KV cache, but only the last one's output is
    computed (see last_position_only); for the last layer, when no other output is used."""

    _block: Block
    _plan: Plan | None = None
    _last_only: bool = False

    def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        y = self.natively(x, mask, cache)
        return super().__call__(x, mask, cache) if y is None else y  # type: ignore[misc]

    def natively(
        self: Any, x: mx.array, mask: Any, cache: Any, extras: Extras = NO_EXTRAS
    ) -> mx.array | None:
        """Return the output for x (B, L, columns) float32; None if the library cannot compute
        it."""
        result = self.forward(x, mask, cache, extras)
        if result is None:
            return None
        y, *normed = result[0]
        return y + self._feed_forward(self._plan.network, *normed) if normed else y

    def _feed_forward(self: Any, network: Any, normed: mx.array) -> mx.array:
        """The network's branch of the residual, (B, L, columns), for a network that is not part of
        the node."""
        y, multiplier = network(normed), multiplier_of(self)
        if self._block.fed_norm is not None:
            y = self[self._block.fed_norm](y)
        return y if multiplier == 1 else y * multiplier

    def _mixture_shape(self: Any, mixture: Mixture) -> MixtureShape | None:
        """The layer's mixture for a node that includes it, or None."""
        return mixture.as_shape()

    def forward(
        self: Any, x: mx.array, mask: Any, cache: Any, extras: Extras
    ) -> tuple[list[mx.array], LayerKV] | None:
        """Return the output, or, if the network is not part of the node, its residual input and the
        norm of that: float32 (B, L, columns) each, or (B, 1, columns) of the last position; and the
        keys and values attended to. None as for `natively`."""
        library, kv = in_use(), extras.shared_kv
        if library is None or (cache is None and kv is None) or x.dtype != mx.float32:
            return None
        plan = self.current_plan(x.shape[-1]) if x.ndim == 3 else None
        if plan is None or not (plan.takes_only_x if extras is NO_EXTRAS else plan.accepts(extras)):
            return None
        batch, length, _ = x.shape
        plain_mask, room = mask is None or (isinstance(mask, str) and mask == "causal"), None
        if plain_mask and batch * length <= FEW and plan.is_one_node(length):
            room = kv.room() if kv else room_in(cache, length)
        if room is None and not _allows_two_nodes(plan, mask, cache):
            return None
        plan.operands.mark_used()
        if self._last_only and length > 1:
            extras = extras._replace(last_only=True)
        if room is None:
            return _two_nodes(library, plan, x, mask, cache, extras)
        mixture = self._mixture_shape(plan.network) if plan.network_is_mixture else None
        outs, kv = _one_node(library, plan, x, mask is not None, cache, room, extras, mixture)
        return [out[:, -1:] for out in outs] if extras.last_only else outs, kv

    def current_plan(self: Any, columns: int) -> Plan | None:
        """Return the plan for x (..., columns), made anew if it is no longer valid; None as for
        `plan_of`."""
        plan = self._plan
        if plan is None or plan.columns != columns or not plan.operands.is_valid():
            plan = vars(self)["_plan"] = self._plan_of(columns)
        return plan

    def _plan_of(self, columns: int) -> Plan | None:
        return plan_of(self, columns)

    def _heads(self: Any, attention: Any) -> Heads | None:
        """The attention's names of its parts; None for one of another form."""
        kind: Any = type(attention)
        return attention.heads() if issubclass(kind, KnownAttention) else heads_of(kind)


class ScaledLayer(Layer):
    """A layer that is also passed a factor of its queries."""

    def __call__(  # type: ignore[override]
        self: Any, x: mx.array, attn_scale: Any = None, mask: Any = None, cache: Any = None
    ) -> mx.array:
        expected = getattr(attn_scale, "shape", None) == (x.shape[1], 1)
        expected = expected and attn_scale.dtype == mx.float32
        y = self.natively(x, mask, cache, Extras(attn_scale)) if expected else None
        if y is not None:
            return y
        return super(Layer, self).__call__(x, attn_scale, mask, cache)  # type: ignore[misc]


class ForkedLayer(Layer):
    """A layer whose network reads a norm of its own of the same input as attention, if a flag says
    so (GPT-NeoX)."""

    _forked = Block("attention", "input_layernorm", "mlp", "post_attention_layernorm")

    @property
    def _block(self: Any) -> Block:  # type: ignore[override]
        return self._forked._replace(parallel=self.use_parallel_residual)


class UnforkedLayer(Layer):
    """One whose network reads the same norm then: left in parts (StableLM)."""

    _block = USUAL

    def _plan_of(self: Any, columns: int) -> Plan | None:
        return None if self.use_parallel_residual else super()._plan_of(columns)


class PassingLayer(Layer):
    """A layer that passes on its keys and values, which only layers that share them look at; where
    they do, all are left in parts (Hunyuan)."""

    _block = USUAL

    def __call__(  # type: ignore[override]
        self: Any, x: mx.array, mask: Any = None, cache: Any = None, shared_kv_states: Any = None
    ) -> tuple[mx.array, Any]:
        y = None if self.args.use_cla else self.natively(x, mask, cache)
        if y is not None:
            return y, None
        return super(Layer, self).__call__(x, mask, cache, shared_kv_states)  # type: ignore[misc]


def _allows_two_nodes(plan: Plan, mask: Any, cache: Any) -> bool:
    """True if the layer can be two nodes around attention: native attention, or the architecture's
    function unless that has capped scores or a latent."""
    heads = plan.heads
    native = (
        not hasattr(cache, "bits") and is_mask(mask) and (plan.rope_known or heads.latent is None)
    )
    return native or heads.cap is heads.latent is None


def _one_node(
    library: Library, plan: Plan, x: mx.array, causal: bool, cache: Any, room: Room,
    extras: Extras = NO_EXTRAS, mixture: MixtureShape | None = None,
) -> tuple[list[mx.array], LayerKV]:  # fmt: skip
    """Compute a layer in one node: lazily its output, or, if its network is separate, the residual
    and its norm, (B, L, columns) each; and the keys and values attended to. causal: positions are
    masked causally."""
    outs = unshared(x, 1 if plan.network is None or mixture else 2)
    query_scales, layer_input, kv, residual, _ = extras
    keys, values, offset = kv[:3] if kv else (cache.keys, cache.values, cache.offset)
    caches = [] if kv else [*unshared(keys, 1), *unshared(values, 1)]
    layer = byref(plan.operands), byref(plan.shape), byref(mixture) if mixture else None
    optional = (NONE if one is None else one for one in (query_scales, layer_input, residual))
    library.c.whole(
        objects(*outs, *caches), x, keys, values, *optional, *room, offset, causal, *layer
    )
    if kv:
        return outs, kv
    set_appended(cache, caches, x.shape[1], room.first)
    return outs, LayerKV(caches[0], caches[1], offset, x.shape[1], room.length)


def _two_nodes(
    library: Library, plan: Plan, x: mx.array, mask: Any, cache: Any, extras: Extras = NO_EXTRAS
) -> tuple[list[mx.array], LayerKV]:
    """As _one_node, in two nodes around attention."""
    kv, length = extras.shared_kv, x.shape[1]
    offset = kv.offset if kv else offset_of(cache)
    queries, *projected = _project_heads(library, plan, x, offset, extras)
    gates = projected.pop() if plan.heads.gated else NONE
    if extras.last_only:
        x, mask, extras = last_position(x, mask, extras)
    if kv:
        keys, values = kv.fetched()
    else:
        keys, values = appended_first(cache, *projected) or cache.update_and_fetch(*projected)
        kv = LayerKV(kept_of(keys), kept_of(values), offset, length, keys.shape[2])
    del projected
    if extras.query_scales is not None:
        queries = queries * extras.query_scales
    attended = _attend(library, plan, queries, keys, values, mask, cache)
    outs = unshared(x, 1 if plan.network is None else 2)
    x = x if extras.residual is None else extras.residual
    layer_input = NONE if extras.layer_input is None else extras.layer_input
    layer = byref(plan.operands), byref(plan.shape)
    library.c.closed(objects(*outs), x, attended, gates, layer_input, *layer)
    return outs, kv


def _project_heads(
    library: Library, plan: Plan, x: mx.array, offset: int | mx.array, extras: Extras
) -> list[mx.array]:
    """Queries, keys and values of x (B, L, columns) after norms and RoPE, then gates if any: (B,
    heads, L, size) each. Queries alone if keys and values are shared. With last_only, queries and
    gates of the last position."""
    heads = unshared(x, 1 if extras.shared_kv else 3 + plan.heads.gated)
    layer, offsets = (byref(plan.operands), byref(plan.shape)), [offset, offset]
    if plan.heads.latent is not None:
        latent_attention.latent_heads(library, heads, x, offset, *layer)
        return [heads[0][:, :, -1:], *heads[1:]] if extras.last_only else heads
    library.c.projected(objects(*heads), x, *layer)
    if extras.last_only:
        heads[0], offsets[0] = heads[0][:, :, -1:], offset + x.shape[1] - 1
        heads[3:] = [gates[:, :, -1:] for gates in heads[3:]]
    rotated = [plan.rope(one, offset=start) for one, start in zip(heads[:2], offsets)]
    if plan.norms_after_rope is not None:
        rotated = [norm(one) for norm, one in zip(plan.norms_after_rope, rotated)]
    return [*rotated, *heads[2:]]


def _attend(
    library: Library, plan: Plan, queries: mx.array, keys: mx.array, values: mx.array, mask: Any,
    cache: Any,
) -> mx.array:  # fmt: skip
    """Attention of queries (B, heads, L, size), lazy, (B, heads, L, value)."""
    scale, cap, heads = plan.shape.scale, plan.shape.cap, plan.heads
    if heads.unembed is not None:
        return latent_attention.attend(library, queries, keys, values, scale, mask)
    if cap:
        return attend(library, queries, keys, values, scale, mask, cap=cap)
    sinks = {} if heads.sinks is None else {"sinks": plan.attention[heads.sinks]}
    return heads.attend(queries, keys, values, cache=cache, scale=scale, mask=mask, **sinks)


def last_position(x: mx.array, mask: Any, extras: Extras) -> tuple[mx.array, Any, Extras]:
    """Restrict the inputs of a layer, x (B, L, columns) float32, to the last position, which sees
    all."""
    query_scales, layer_input, shared_kv, residual, _ = extras
    extras = extras._replace(
        query_scales=None if query_scales is None else query_scales[-1:],
        layer_input=None if layer_input is None else layer_input[:, -1:],
        shared_kv=None if shared_kv is None else shared_kv.last(),
        residual=None if residual is None else residual[:, -1:],
    )
    return x[:, -1:], mask[..., -1:, :] if isinstance(mask, mx.array) else None, extras
