"""The heap of the C library."""

from __future__ import annotations

import sys


def trim_heap() -> None:
    """Return freed memory to the system; glibc keeps it otherwise."""
    if sys.platform == "linux":
        import ctypes

        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
