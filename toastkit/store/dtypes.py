"""The types that weights and activations may be cast to when a model is loaded."""

from __future__ import annotations

import mlx.core as mx

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def activation_dtype(on_cpu: bool) -> str | None:
    """The dtype a checkpoint runs in unless told otherwise: float32 on the CPU, where MLX emulates
    the 16-bit types, and the checkpoint's own (None) elsewhere."""
    return "float32" if on_cpu else None
