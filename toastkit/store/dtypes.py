"""The types that weights and activations may be cast to when a model is loaded, and their bytes."""

from __future__ import annotations

import mlx.core as mx

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def activation_dtype(on_cpu: bool) -> str | None:
    """The dtype a checkpoint runs in unless told otherwise: float32 on the CPU, where MLX emulates
    the 16-bit types, and the checkpoint's own (None) elsewhere."""
    return "float32" if on_cpu else None


def bytes_of(array: mx.array) -> memoryview:
    """The bytes of an array (...) of any dtype, in C order; evaluates it."""
    flat = mx.contiguous(array).reshape(-1).view(mx.uint8)
    mx.eval(flat)
    return memoryview(flat)  # type: ignore[arg-type]
