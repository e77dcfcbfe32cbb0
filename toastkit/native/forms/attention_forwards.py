"""Known forwards of attentions, as forwards.py has those of other modules: never called, and
compared instruction by instruction."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

# Globals of the forwards; those of the architectures' forwards are looked up instead.
scaled_dot_product_attention: Any = None
_get_llama_4_attn_scale: Any = None
_toastkit_matmul: Any = None
# Module and name of the function that every attention calls.
BASE, ATTEND = "mlx_lm.models.base", "scaled_dot_product_attention"


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


def _heads_normed_masked_first(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
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
        queries, keys, values, cache=cache, mask=mask, scale=self.scale
    )
    output = output.transpose(0, 2, 1, 3).reshape(B, L, -1)
    return self.out(output)


def _heads_normed_together(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
    B, L, D = x.shape
    queries, keys, values = self.q(x), self.k(x), self.v(x)
    queries = self.q_norm(queries)
    keys = self.k_norm(keys)
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


def _heads_normed_later(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
    B, L, D = x.shape
    queries, keys, values = self.q(x), self.k(x), self.v(x)
    queries = queries.reshape(B, L, self.heads, -1).transpose(0, 2, 1, 3)
    keys = keys.reshape(B, L, self.key_heads, -1).transpose(0, 2, 1, 3)
    values = values.reshape(B, L, self.key_heads, -1).transpose(0, 2, 1, 3)
    queries = self.q_norm(queries)
    keys = self.k_norm(keys)
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


def _heads_normed_or_not(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
    B, L, D = x.shape
    queries, keys, values = self.q(x), self.k(x), self.v(x)
    queries = queries.reshape(B, L, self.heads, -1)
    keys = keys.reshape(B, L, self.key_heads, -1)
    if self.use_norms:
        queries = self.q_norm(queries)
        keys = self.k_norm(keys)
    queries = queries.transpose(0, 2, 1, 3)
    keys = keys.transpose(0, 2, 1, 3)
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


def _heads_normed_rope_or_not(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
    B, L, D = x.shape
    queries, keys, values = self.q(x), self.k(x), self.v(x)
    queries = self.q_norm(queries.reshape(B, L, self.heads, -1)).transpose(0, 2, 1, 3)
    keys = self.k_norm(keys.reshape(B, L, self.key_heads, -1)).transpose(0, 2, 1, 3)
    values = values.reshape(B, L, self.key_heads, -1).transpose(0, 2, 1, 3)
    if cache is not None:
        if self.use_rope:
            queries = self.rope(queries, offset=cache.offset)
            keys = self.rope(keys, offset=cache.offset)
        keys, values = cache.update_and_fetch(keys, values)
    elif self.use_rope:
        queries = self.rope(queries)
        keys = self.rope(keys)
    output = scaled_dot_product_attention(
        queries, keys, values, cache=cache, scale=self.scale, mask=mask
    )
    output = output.transpose(0, 2, 1, 3).reshape(B, L, -1)
    return self.out(output)


def _heads_norm_after_rope(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
    B, L, D = x.shape
    queries, keys, values = self.q(x), self.k(x), self.v(x)
    queries = queries.reshape(B, L, self.heads, self.size).transpose(0, 2, 1, 3)
    keys = keys.reshape(B, L, self.key_heads, self.size).transpose(0, 2, 1, 3)
    values = values.reshape(B, L, self.key_heads, self.size).transpose(0, 2, 1, 3)
    if cache is not None:
        queries = self.rope(queries, offset=cache.offset)
        keys = self.rope(keys, offset=cache.offset)
    else:
        queries = self.rope(queries)
        keys = self.rope(keys)
    if self.use_norms:
        queries = self.q_norm(queries)
        keys = self.k_norm(keys)
    if cache is not None:
        keys, values = cache.update_and_fetch(keys, values)
    output = scaled_dot_product_attention(
        queries, keys, values, cache=cache, scale=self.scale, mask=mask
    )
    output = output.transpose(0, 2, 1, 3).reshape(B, L, -1)
    return self.out(output)


def _heads_normed_at_once(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
    B, L, D = x.shape
    queries = self.q_norm(self.q(x))
    keys = self.k_norm(self.k(x))
    values = self.v(x)
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


def _heads_split(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
    B, L, D = x.shape
    qkv = self.qkv(x)
    query_pos = self.heads * self.size
    queries, keys, values = mx.split(
        qkv, [query_pos, query_pos + self.key_heads * self.size], axis=-1
    )
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


def _heads_split_normed_or_not(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
    B, L, D = x.shape
    qkv = self.qkv(x)
    q_size = self.heads * self.size
    kv_size = self.key_heads * self.size
    q, k, v = mx.split(qkv, [q_size, q_size + kv_size], axis=-1)
    queries = q.reshape(B, L, self.heads, self.size).transpose(0, 2, 1, 3)
    keys = k.reshape(B, L, self.key_heads, self.size).transpose(0, 2, 1, 3)
    values = v.reshape(B, L, self.key_heads, self.size).transpose(0, 2, 1, 3)
    if self.use_norms:
        queries = self.q_norm(queries)
        keys = self.k_norm(keys)
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


def _heads_with_sinks(self: Any, x: Any, mask: Any, cache: Any = None) -> Any:
    B, L, _ = x.shape
    D = self.size
    q = self.q(x).reshape(B, L, -1, D).swapaxes(1, 2)
    k = self.k(x).reshape(B, L, -1, D).swapaxes(1, 2)
    v = self.v(x).reshape(B, L, -1, D).swapaxes(1, 2)
    if cache is not None:
        q = self.rope(q, offset=cache.offset)
        k = self.rope(k, offset=cache.offset)
        k, v = cache.update_and_fetch(k, v)
    else:
        q = self.rope(q)
        k = self.rope(k)
    v_hat = scaled_dot_product_attention(q, k, v, cache, self.scale, mask=mask, sinks=self.sinks)
    return self.out(v_hat.swapaxes(1, 2).reshape(B, L, -1))


def _heads_scaled(
    self: Any, x: Any, attn_scale: Any = None, mask: Any = None, cache: Any = None
) -> Any:
    B, L, D = x.shape
    queries, keys, values = self.q(x), self.k(x), self.v(x)
    queries = queries.reshape(B, L, self.heads, -1).transpose(0, 2, 1, 3)
    keys = keys.reshape(B, L, self.key_heads, -1).transpose(0, 2, 1, 3)
    values = values.reshape(B, L, self.key_heads, -1).transpose(0, 2, 1, 3)
    offset = 0
    if cache is not None:
        offset = cache.offset
        queries = self.rope(queries, offset=offset)
        keys = self.rope(keys, offset=offset)
        keys, values = cache.update_and_fetch(keys, values)
    else:
        queries = self.rope(queries)
        keys = self.rope(keys)
    if attn_scale is None:
        attn_scale = _get_llama_4_attn_scale(
            L,
            offset,
            self.scaling_beta,
            self.original_max_position_embeddings,
        ).astype(x.dtype)
    queries = queries * attn_scale
    output = scaled_dot_product_attention(
        queries, keys, values, cache=cache, scale=self.scale, mask=mask
    )
    output = output.transpose(0, 2, 1, 3).reshape(B, L, -1)
    return self.out(output)


def _heads_gated(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
    B, L, D = x.shape
    q_proj_output = self.q(x)
    queries, gate = mx.split(q_proj_output.reshape(B, L, self.heads, -1), 2, axis=-1)
    gate = gate.reshape(B, L, -1)
    keys, values = self.k(x), self.v(x)
    queries = self.q_norm(queries).transpose(0, 2, 1, 3)
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
    return self.out(output * mx.sigmoid(gate))


# fmt: off
def _heads_capped(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
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
    queries = queries * self.scale
    if self.repeats > 1:
        queries = queries.reshape(
            B, self.key_heads, self.repeats, L, self.size
        )
        keys = mx.expand_dims(keys, 2)
        values = mx.expand_dims(values, 2)
    scores = _toastkit_matmul(queries, keys.swapaxes(-1, -2))
    scores = mx.tanh(scores / self.cap)
    scores *= self.cap
    if mask is not None:
        if mask.dtype == mx.bool_:
            scores = mx.where(
                mask, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype)
            )
        else:
            scores = scores + mask
    scores = mx.softmax(scores, precise=True, axis=-1)
    output = _toastkit_matmul(scores, values)
    if self.repeats > 1:
        output = output.reshape(B, self.heads, L, self.size)
    output = output.transpose(0, 2, 1, 3).reshape(B, L, -1)
    return self.out(output)
# fmt: on


HEADS = (
    _heads, _heads_normed, _heads_normed_masked_first, _heads_normed_together, _heads_normed_later,
    _heads_normed_at_once,
    _heads_normed_or_not, _heads_normed_rope_or_not, _heads_split, _heads_split_normed_or_not,
    _heads_norm_after_rope, _heads_with_sinks, _heads_scaled, _heads_gated, _heads_capped,
)  # fmt: skip
GATED, SCALED, CAPPED = _heads_gated, _heads_scaled, _heads_capped
NORM_AFTER_ROPE = _heads_norm_after_rope
