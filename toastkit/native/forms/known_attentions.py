"""Attentions recognised by their source (known.py), and the names of their parts."""

from __future__ import annotations

from math import sqrt
from typing import Any

from toastkit.native.forms.common import HEADS, Heads, KnownAttention

GEMMA = HEADS._replace(q_norm="q_norm", k_norm="k_norm", v_norm="v_norm", size="head_dim")
# It has no projections of keys and values: q_proj is a placeholder that is never used.
GEMMA_SHARING = GEMMA._replace(k="q_proj", v="q_proj", k_norm=None, v_norm=None, shares_cache=True)


class AfmoeAttention(KnownAttention):
    """Trinity's: RoPE in sliding-window layers only."""

    def parts(self: Any) -> Heads:
        rope = "rope" if self.is_local_attention and self.rope is not None else None
        return HEADS._replace(
            q_norm="q_norm", k_norm="k_norm", rope=rope, gated=True, gate="gate_proj"
        )


class CohereAttention(KnownAttention):
    """Cohere 2's: RoPE in sliding-window layers only."""

    _parts = HEADS._replace(use_rope="use_sliding_window")


class FalconAttention(KnownAttention):
    _parts = HEADS._replace(heads="num_heads", key_heads="num_kv_heads")


class GemmaAttention(KnownAttention):
    """Gemma 4's."""

    def parts(self: Any) -> Heads:
        if not self.has_kv:
            return GEMMA_SHARING
        return GEMMA._replace(v="k_proj" if self.use_k_eq_v else "v_proj")


class GraniteAttention(KnownAttention):
    """Granite 4's, which may have no RoPE."""

    def parts(self: Any) -> Heads:
        return HEADS._replace(rope=None if self.rope is None else "rope")


class NemotronAttention(KnownAttention):
    _parts = HEADS._replace(heads="num_heads", key_heads="num_key_value_heads", rope=None)


class PhiAttention(KnownAttention):
    _parts = HEADS._replace(
        heads="num_heads", key_heads="num_key_value_heads", out="dense", scale="root"
    )

    @property
    def root(self: Any) -> float:
        """The scale of scores."""
        return sqrt(1 / self.head_dim)
