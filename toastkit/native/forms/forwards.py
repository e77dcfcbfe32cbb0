"""Known forwards of networks, layers, attentions and norms. The forwards of architectures are
compared with these, instruction by instruction (common.py). They are never called, and are written
as in the architectures, whatever they share; since Python 3.13 line breaks matter too: two names
loaded in one line are one instruction. Layers and attentions of one or two architectures are in
known.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

# Globals of the forwards; those of the architectures' forwards are looked up instead.
swiglu: Any = None
scaled_dot_product_attention: Any = None
_toastkit_rms_norm_plus_one: Any = None
PARTS = ("gate", "up", "gate_up", "down")  # architectures may name them differently


def _gated(self: Any, x: Any) -> Any:
    return self.down(swiglu(self.gate(x), self.up(x)))


def _gated_and_named(self: Any, x: Any) -> Any:
    y = self.down(swiglu(self.gate(x), self.up(x)))
    return y


def _gated_up_later(self: Any, x: Any) -> Any:
    g = self.gate(x)
    x = self.up(x)
    return self.down(swiglu(g, x))


def _gated_in_steps(self: Any, x: Any) -> Any:
    y = swiglu(self.gate(x), self.up(x))
    y = self.down(y)
    return y


def _multiplied(self: Any, x: Any) -> Any:
    return self.down(nn.silu(self.gate(x)) * self.up(x))


def _multiplied_gelu(self: Any, x: Any) -> Any:
    return self.down(nn.gelu_approx(self.gate(x)) * self.up(x))


def _multiplied_gelu_erf(self: Any, x: Any) -> Any:
    return self.down(nn.gelu(self.gate(x)) * self.up(x))


def _fused(self: Any, x: Any) -> Any:
    x = self.gate_up(x)
    gate, x = mx.split(x, 2, axis=-1)
    return self.down(swiglu(gate, x))


def _fused_by_names(self: Any, x: Any) -> Any:
    x = self.gate_up(x)
    gate, up = mx.split(x, 2, axis=-1)
    return self.down(swiglu(gate, up))


def _fused_at_once(self: Any, x: Any) -> Any:
    gate, up = mx.split(self.gate_up(x), 2, axis=-1)
    return self.down(swiglu(gate, up))


def _ungated(self: Any, x: Any) -> Any:
    return self.down(nn.relu2(self.up(x)))


def _ungated_gelu(self: Any, x: Any) -> Any:
    return self.down(nn.gelu_approx(self.up(x)))


def _ungated_gelu_erf(self: Any, x: Any) -> Any:
    return self.down(nn.gelu(self.up(x)))


# Each with what `swiglu` stands for, by module and name, and its activation.
SWIGLU = ("mlx_lm.models.activations", "swiglu")
NETWORKS: list[tuple[Callable, tuple[str, str], str]] = [
    (_gated, SWIGLU, "silu"),
    (_gated, ("mlx_lm.models.gemma4_text", "geglu"), "gelu"),
    (_gated_and_named, SWIGLU, "silu"),
    (_gated_up_later, SWIGLU, "silu"),
    (_gated_in_steps, SWIGLU, "silu"),
    (_multiplied, SWIGLU, "silu"),
    (_multiplied_gelu, SWIGLU, "gelu"),
    (_multiplied_gelu_erf, SWIGLU, "gelu_erf"),
    (_fused, SWIGLU, "silu"),
    (_fused_by_names, SWIGLU, "silu"),
    (_fused_at_once, SWIGLU, "silu"),
    (_ungated, SWIGLU, "relu2"),
    (_ungated_gelu, SWIGLU, "gelu"),
    (_ungated_gelu_erf, SWIGLU, "gelu_erf"),
]


def _block(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
    r = self.attention(self.first_norm(x), mask, cache)
    h = x + r
    r = self.network(self.second_norm(h))
    out = h + r
    return out


def _block_returned(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
    r = self.attention(self.first_norm(x), mask, cache)
    h = x + r
    r = self.network(self.second_norm(h))
    return h + r


def _block_sandwich_normed(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
    r = self.attention(self.first_norm(x), mask, cache)
    h = x + self.attended_norm(r)
    r = self.network(self.second_norm(h))
    out = h + self.fed_norm(r)
    return out


def _block_post_normed(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
    r = self.attended_norm(self.attention(x, mask, cache))
    h = x + r
    r = self.fed_norm(self.network(h))
    out = h + r
    return out


def _block_multiplied(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
    r = self.attention(self.first_norm(x), mask, cache)
    h = x + r * self.multiplier
    r = self.network(self.second_norm(h))
    out = h + r * self.multiplier
    return out


def _block_multiplied_by_depth(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
    r = self.attention(self.first_norm(x), mask, cache)
    h = x + r * (self.multiplier / self.depth**0.5)
    r = self.network(self.second_norm(h))
    out = h + r * (self.multiplier / self.depth**0.5)
    return out


def _block_parallel(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
    h = self.first_norm(x)
    attn_h = self.attention(h, mask, cache)
    ff_h = self.network(h)
    return attn_h + ff_h + x


BLOCKS = (
    _block, _block_returned, _block_sandwich_normed, _block_post_normed, _block_multiplied,
    _block_multiplied_by_depth, _block_parallel,
)  # fmt: skip
PARALLEL = (_block_parallel,)


def _heads(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
    B, L, D = x.shape
    queries, keys, values = self.q(x), self.k(x), self.v(x)
    queries = queries.reshape(B, L, self.heads, -1).transpose(0, 2, 1, 3)
    keys = keys.reshape(B, L, self.key_heads, -1).transpose(0, 2, 1, 3)
    values = values.reshape(B, L, self.key_heads, -1).transpose(0, 2, 1, 3)
    if cache is not None:
        queries = self.rope(queries, offset=cache.offset)
        keys = self.rope(keys, offset=cache.offset)
        keys, values = cache.update_and_fetch(keys, values)
    else:
        queries = self.rope(queries)
        keys = self.rope(keys)
    output = scaled_dot_product_attention(
        queries, keys, values, cache=cache, scale=self.scale, mask=mask
    )
    output = output.transpose(0, 2, 1, 3).reshape(B, L, -1)
    return self.out(output)


def _heads_normed(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
    B, L, D = x.shape
    queries, keys, values = self.q(x), self.k(x), self.v(x)
    queries = self.q_norm(queries.reshape(B, L, self.heads, -1)).transpose(0, 2, 1, 3)
    keys = self.k_norm(keys.reshape(B, L, self.key_heads, -1)).transpose(0, 2, 1, 3)
    values = values.reshape(B, L, self.key_heads, -1).transpose(0, 2, 1, 3)
    if cache is not None:
        queries = self.rope(queries, offset=cache.offset)
        keys = self.rope(keys, offset=cache.offset)
        keys, values = cache.update_and_fetch(keys, values)
    else:
        queries = self.rope(queries)
        keys = self.rope(keys)
    output = scaled_dot_product_attention(
        queries, keys, values, cache=cache, scale=self.scale, mask=mask
    )
    output = output.transpose(0, 2, 1, 3).reshape(B, L, -1)
    return self.out(output)


HEADS = (_heads, _heads_normed)
# The function that every attention calls.
ATTEND = ("mlx_lm.models.base", "scaled_dot_product_attention")


def _normed_plus_one(self: Any, x: Any) -> Any:
    return _toastkit_rms_norm_plus_one(x, self.weight, self.eps)


NORMS_PLUS_ONE = (_normed_plus_one,)
