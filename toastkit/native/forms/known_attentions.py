"""Attentions that are known by their source (known.py), and what each calls its parts."""

from __future__ import annotations

from math import sqrt
from typing import Any

from toastkit.native.forms.common import HEADS, Heads, KnownAttention

KEPT_OF_GEMMA = HEADS._replace(q_norm="q_norm", k_norm="k_norm", v_norm="v_norm", size="head_dim")
# Of its own it has queries: they stand for the others, which nobody looks at.
SHARED_OF_GEMMA = KEPT_OF_GEMMA._replace(
    k="q_proj", v="q_proj", k_norm=None, v_norm=None, shares=True
)


class AfmoeAttention(KnownAttention):
    """Trinity's, whose heads are turned where it slides."""

    def parts(self: Any) -> Heads:
        turn = "rope" if self.is_local_attention and self.rope is not None else None
        return HEADS._replace(
            q_norm="q_norm", k_norm="k_norm", turn=turn, gated=True, gate="gate_proj"
        )


class CohereAttention(KnownAttention):
    """Cohere 2's, whose heads are turned where it slides."""

    _parts = HEADS._replace(turning="use_sliding_window")


class FalconAttention(KnownAttention):
    _parts = HEADS._replace(heads="num_heads", key_heads="num_kv_heads")


class GemmaAttention(KnownAttention):
    """Gemma 4's."""

    def parts(self: Any) -> Heads:
        if not self.has_kv:
            return SHARED_OF_GEMMA
        return KEPT_OF_GEMMA._replace(v="k_proj" if self.use_k_eq_v else "v_proj")


class GraniteAttention(KnownAttention):
    """Of a Granite 4, which may turn nothing."""

    def parts(self: Any) -> Heads:
        return HEADS._replace(turn=None if self.rope is None else "rope")


class NemotronAttention(KnownAttention):
    _parts = HEADS._replace(heads="num_heads", key_heads="num_key_value_heads", turn=None)


class PhiAttention(KnownAttention):
    _parts = HEADS._replace(
        heads="num_heads", key_heads="num_key_value_heads", out="dense", scale="root"
    )

    @property
    def root(self: Any) -> float:
        """What scores are multiplied by."""
        return sqrt(1 / self.head_dim)
