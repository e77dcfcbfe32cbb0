"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). A layer of it is one
node or two, as with other attention (blocks.py); see glue/latent.h. Recognised by its source
(known.py).

Absorbed: queries are projected to the latent space of the cache, as architectures do for a single
position, rather than the cache expanded to each head: it may be long, and is read as stored. For
many positions the RoPE part of keys is put beside the latent, for one attention operation. For a
single position it is scored separately: the copy would take most of the time at a long context."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from toastkit.native.batched_caches import owner_of
from toastkit.native.forms.common import HEADS, Heads, KnownAttention
from toastkit.native.kv_caches import MOST, SCALE_BYTES, kept_of
from toastkit.native.library import NONE, Library, objects
from toastkit.native.operations import matmul

LEAST = 1e-30  # to divide by
EXPANDED = HEADS._replace(
    q="q_b_proj", k="kv_a_proj_with_mqa", v="kv_b_proj", heads="num_heads", key_heads="num_heads",
    q_norm="q_a_layernorm", k_norm="kv_a_layernorm", query_down="q_a_proj", latent="kv_lora_rank",
    nope="qk_nope_head_dim",
)  # fmt: skip
ABSORBED = EXPANDED._replace(v="embed_q", unembed="unembed_out", key_heads=None)


class LatentAttention(KnownAttention):
    """Attention whose cache holds the latent, or, expanded, keys and values of each head."""

    _parts = ABSORBED

    def parts(self: Any) -> Heads:
        own = self._parts
        return own._replace(q="q_proj", query_down=None, q_norm=None) if "q_proj" in self else own


def latent_heads(
    library: Library, outs: list[Any], x: mx.array, offset: int | mx.array, *layer: Any
) -> None:
    """Set `outs`, three unshared arrays, to queries, keys and values of x (B, L, columns) float32,
    with RoPE applied: (B, heads, L, size) each. offset: position of the first token, or of each
    row's, int32 (B,). layer: the last arguments of toast_latent_array."""
    is_number = isinstance(offset, int)
    offsets = (NONE, offset) if is_number else (offset, 0)
    library.c.latent(objects(*outs), x, *offsets, *layer)


def attend(
    library: Library, queries: mx.array, latent: mx.array, keys: mx.array, scale: float, mask: Any
) -> mx.array:
    """Attention of queries (B, heads, L, latent + RoPE part): float32 (B, heads, L, latent), lazy.
    latent, keys: (B, 1, M, size), as caches return them."""
    stored, size = kept_of(latent), latent.shape[-1]
    if queries.shape[2] == 1 and (owner := owner_of(stored, kept_of(keys), mask)):
        return owner.attend_latents(library, queries, scale)
    absorbed, rope_part = mx.split(queries, [size], axis=-1)
    if queries.shape[2] > 1 or (isinstance(mask, mx.array) and mask.dtype != mx.bool_):
        if stored.dtype == mx.int8:
            rows, factors = _in_one_row(stored, keys)
            queries = mx.concatenate([absorbed, *(rope_part * one for one in factors)], -1)
        else:
            rows = mx.concatenate([stored, kept_of(keys)], -1)
        return library.attend(queries, rows, stored, scale, mask)
    scores = matmul(rope_part * scale, keys.swapaxes(-1, -2))
    if isinstance(mask, mx.array):
        scores = mx.where(mask, scores, mx.finfo(mx.float32).min)
    return library.attend(absorbed, stored, stored, scale, scores)


def _in_one_row(latent: mx.array, keys: mx.array) -> tuple[mx.array, list[mx.array]]:
    """Latents as kept in 8 bits, unchanged, and the RoPE part of keys (B, 1, M, size) floats, in
    rows of one scale, the latent's: (B, 1, M, latent + 2 size + scale). That may be far from their
    own, so keys become two numbers each, in blocks: of a unit, and of a 254th of it. Also returns
    the factors of the queries' RoPE part for these blocks."""
    numbers, scale_bytes = mx.split(latent, [-SCALE_BYTES], -1)
    scale = scale_bytes.view(mx.float32)
    scale = mx.where(scale > 0, scale, 1)  # of a latent that is 0
    keys = keys / scale
    unit = mx.maximum(mx.max(mx.abs(keys)), LEAST) / MOST
    blocks, factors = [numbers], [unit, unit / (2 * MOST)]
    for factor in factors:
        digits = mx.round(keys / factor)
        keys = keys - digits * factor
        blocks.append(digits.astype(mx.int8))
    return mx.concatenate([*blocks, scale.view(mx.int8)], -1), factors
