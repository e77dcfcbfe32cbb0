"""Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) over many positions."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from toastkit.native.functions import Native
from toastkit.native.kv_caches import kept_of
from toastkit.native.library import Library, in_use
from toastkit.native.operations import is_mask


class LatentAttention(Native):
    """Queries go to where keys and values are kept, as architectures have them go for a single
    position, and not these to each head: what is kept may be long, and stays as it is. What is
    rotated is kept apart, and is put behind the rest for the one operation.
    """

    def __call__(
        self: Any, x: mx.array, mask: mx.array | None = None, cache: Any = None
    ) -> mx.array:
        """x: (B, L, columns), in float32 and of more than one position; else as the architecture's
        own."""
        library = in_use()
        usual = x.dtype == mx.float32 and is_mask(mask) and not hasattr(cache, "bits")
        if library is None or cache is None or x.shape[1] == 1 or not usual:
            return super().__call__(x, mask, cache)  # type: ignore[misc]
        queries, rotated = self._queries(x)
        latent, keys = mx.split(self.kv_a_proj_with_mqa(x), [self.kv_lora_rank], axis=-1)
        latent = mx.expand_dims(self.kv_a_layernorm(latent), 1)
        rotated, keys = (self.rope(one, cache.offset) for one in (rotated, mx.expand_dims(keys, 1)))
        latent, keys = cache.update_and_fetch(latent, keys)
        queries = mx.concatenate([self.embed_q(queries), rotated], -1)
        attended = library.attend(
            queries, _joined(library, latent, keys), kept_of(latent), self.scale, mask
        )
        output = self.unembed_out(attended).transpose(0, 2, 1, 3)
        return self.o_proj(output.flatten(-2))

    def _queries(self: Any, x: mx.array) -> list[mx.array]:
        """(B, heads, L, size) each: those that meet the latent, and those that are rotated."""
        if self.q_lora_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = mx.unflatten(q, -1, (self.num_heads, -1)).transpose(0, 2, 1, 3)
        return [*mx.split(q, [self.qk_nope_head_dim], axis=-1)]


def _joined(library: Library, latent: mx.array, keys: mx.array) -> mx.array:
    """Side by side, (B, 1, positions, both), in the dtype that they are kept in."""
    kept = [kept_of(latent), kept_of(keys)]
    if kept[0].dtype != mx.int8:
        return mx.concatenate(kept, -1)
    return library.quantise(mx.concatenate([latent, keys], -1))
