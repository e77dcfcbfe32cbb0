"""The dtypes that weights and activations may be cast to on loading, and arrays as bytes."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from toastkit.native.starting import Status
from toastkit.store.kv_bits import kv_dtype

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def activation_dtype(on_cpu: bool) -> str | None:
    """The default dtype of activations: float32 on the CPU, where MLX emulates the 16-bit types;
    elsewhere the checkpoint's own (None)."""
    return "float32" if on_cpu else None


class Loading(NamedTuple):
    """How weights are loaded. dtype: of activations, a key of DTYPES that weights are cast to; None
    for their own. native: matrix products are computed by toastkit.native. narrow: 16-bit weights
    of these products are not cast, which gives the same to the bit. exact: activations are not
    rounded for them. kv_dtype: see kv_bits.py."""

    dtype: str | None = None
    native: bool = False
    narrow: bool = False
    exact: bool = False
    kv_dtype: str | None = None

    @property
    def cast(self) -> mx.Dtype | None:
        """The dtype of activations in MLX."""
        return None if self.dtype is None else DTYPES[self.dtype]

    @property
    def kept(self) -> mx.Dtype | None:
        """The dtype of keys and values in MLX."""
        return None if self.kv_dtype is None else getattr(mx, self.kv_dtype)


AS_STORED = Loading()


def loading(asked: str | None, on_cpu: bool, native: Status, kv_bits: int | None = None) -> Loading:
    """Return how to load weights. asked: the dtype requested, to which all weights are cast.
    native: whether and how products are computed natively. kv_bits: as in `kv_bits.kv_dtype`, with
    its UsageError."""
    narrow, dtype = native.on and asked is None, asked or activation_dtype(on_cpu)
    return Loading(dtype, native.on, narrow, native.exact, kv_dtype(dtype, kv_bits))


def bytes_of(array: mx.array) -> memoryview:
    """The bytes of an array (...) of any dtype, in C order; evaluates it."""
    flat = mx.contiguous(array).reshape(-1).view(mx.uint8)
    mx.eval(flat)
    return memoryview(flat)  # type: ignore[arg-type]
