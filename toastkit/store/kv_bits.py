"""The bits per key and value in KV caches, and their dtypes."""

from __future__ import annotations

from toastkit.errors import UsageError

# dtype by --kv-bits. int8: one scale per row, see native/kv_caches.py.
KV_DTYPES = {8: "int8", 16: "float16", 32: "float32"}


def kv_dtype(dtype: str | None, kv_bits: int | None) -> str | None:
    """Return the MLX name of the KV cache's dtype; None for that of activations, whatever it is.
    dtype: of activations, or None. kv_bits: a key of KV_DTYPES, or None for theirs. Raises
    UsageError for 32 if activations have fewer."""
    if kv_bits == 32 and dtype != "float32":
        raise UsageError(
            f"--kv-bits 32: activations are in {dtype or 'the dtype of the checkpoint'}",
            hint="--dtype float32 has them in 32 bits",
        )
    if kv_bits is None or (kv_bits == 16 and dtype not in (None, "float32")):
        return dtype
    return KV_DTYPES[kv_bits]
