"""In how many bits caches keep keys and values: the one table of it."""

from __future__ import annotations

from toastkit.errors import UsageError

# The dtype by --kv-bits. int8: each row with a scale of its own, see native/kv_caches.py.
KV_DTYPES = {8: "int8", 16: "float16", 32: "float32"}


def kv_dtype(dtype: str | None, kv_bits: int | None) -> str | None:
    """The dtype of keys and values in caches, by its name in MLX; None for that of activations,
    whatever it is. dtype: of activations, or None. kv_bits: a key of KV_DTYPES, or None for
    theirs. Raises UsageError for 32 where those have fewer."""
    if kv_bits == 32 and dtype != "float32":
        raise UsageError(
            f"--kv-bits 32: activations are in {dtype or 'the dtype of the checkpoint'}",
            hint="--dtype float32 has them in 32 bits",
        )
    if kv_bits is None or (kv_bits == 16 and dtype not in (None, "float32")):
        return dtype
    return KV_DTYPES[kv_bits]
