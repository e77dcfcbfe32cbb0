"""Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), of which a layer is one node or
two, as of other attention (blocks.py): see glue/latent.h. Known by its source (known.py).

Queries go to where keys and values are kept, as architectures have them go for a single position,
and not these to each head: what is kept may be long, and stays as it is. For many positions, what
is turned of keys is put behind the rest, for the one operation; for one it is scored by itself: to
put it there would be most of the time at a long context.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import mlx.core as mx

from toastkit.native.forms.common import HEADS, Heads, KnownAttention
from toastkit.native.kv_caches import kept_of
from toastkit.native.library import NONE, Library, need
from toastkit.native.operations import matmul

OPENED = HEADS._replace(
    q="q_b_proj", k="kv_a_proj_with_mqa", v="kv_b_proj", heads="num_heads", key_heads="num_heads",
    q_norm="q_a_layernorm", k_norm="kv_a_layernorm", narrow="q_a_proj", latent="kv_lora_rank",
    still="qk_nope_head_dim",
)  # fmt: skip
KEPT = OPENED._replace(v="embed_q", unembed="unembed_out", key_heads=None)


class LatentAttention(KnownAttention):
    """One whose latent is kept."""

    _parts = KEPT

    def parts(self: Any) -> Heads:
        own = self._parts
        return own._replace(q="q_proj", narrow=None, q_norm=None) if "q_proj" in self else own


class UnturnedLatentAttention(LatentAttention):
    """Kimi's."""

    _parts = KEPT._replace(turn=None)


class ScaledLatentAttention(LatentAttention):
    """Mistral's, which is given what queries are multiplied by."""

    _parts = KEPT._replace(scaled=True)


class OpenedAttention(LatentAttention):
    """One of which keys and values of each head are kept."""

    _parts = OPENED


class OpenedAttentionOfMiniCPM(LatentAttention):
    _parts = OPENED._replace(scale="softmax_scale")


def latent_heads(
    library: Library, made: list[Any], x: mx.array, offset: int | mx.array, *places: Any
) -> None:
    """Makes `made`, three arrays that nobody else has, queries, keys and values of x (B, L,
    columns) float32, turned: (B, heads, L, size) each. offset: of the first position, or of each
    row, int32 (B,). places: as toast_latent_array has them."""
    one = isinstance(offset, int)
    arrays = (ctypes.py_object * 3)(*made)
    given = (NONE, offset) if one else (offset, 0)
    need(_function(library)(arrays, x, *given, *places))


def attend(
    library: Library, queries: mx.array, latent: mx.array, keys: mx.array, scale: float, mask: Any
) -> mx.array:
    """What queries (B, heads, L, latent and turned) attend to, float32 (B, heads, L, latent), lazy.
    latent, keys: (B, 1, M, size), as caches give them."""
    kept, size = kept_of(latent), latent.shape[-1]
    if queries.shape[2] > 1 or (isinstance(mask, mx.array) and mask.dtype != mx.bool_):
        return library.attend(queries, _joined(library, latent, keys), kept, scale, mask)
    still, turned = mx.split(queries, [size], axis=-1)
    scores = matmul(turned * scale, keys.swapaxes(-1, -2))
    if isinstance(mask, mx.array):
        scores = mx.where(mask, scores, mx.finfo(mx.float32).min)
    return library.attend(still, kept, kept, scale, scores)


def _joined(library: Library, latent: mx.array, keys: mx.array) -> mx.array:
    """Side by side, (B, 1, positions, both), in the dtype that they are kept in."""
    kept = [kept_of(latent), kept_of(keys)]
    if kept[0].dtype != mx.int8:
        return mx.concatenate(kept, -1)
    return library.quantise(mx.concatenate([latent, keys], -1))


@cache
def _function(library: Library) -> Any:
    array, place = ctypes.py_object, ctypes.c_void_p
    return library.function("latent", place, array, array, ctypes.c_int, place, place)
