"""The library that was built, in this process: arrays of MLX in, a lazy array of MLX out.

library = Library(path)            a library that was built here (building.py)
y = library.multiply(x, weight)
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePath

import mlx.core as mx

BITS = (2, 3, 4, 6, 8)
GROUP_SIZES = (32, 64, 128)
FLOATS = (mx.float32, mx.float16, mx.bfloat16)


def processors(root: str = "/") -> int:
    """Threads that this process may run at a time: its processors, as far as the shares of its
    cgroup (version 2) and of those above it go. root: below which proc and sys are."""
    count = len(os.sched_getaffinity(0))
    folder = PurePath("/")
    with suppress(OSError, ValueError, StopIteration):
        lines = Path(root, "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        folder = PurePath(next(line[3:] for line in lines if line.startswith("0::")))
    for group in (folder, *folder.parents):
        with suppress(OSError, ValueError):
            file = Path(root, "sys/fs/cgroup", group.relative_to("/"), "cpu.max")
            share, period = file.read_text(encoding="ascii").split()
            count = min(count, max(1, int(share) // int(period)))
    return count


class Library:
    """A library that was built, in this process. Raises OSError for a file that is none."""

    def __init__(self, path: str):
        loaded = ctypes.PyDLL(path)  # with Python's lock: the arrays are Python's
        loaded.toast_set_head(ctypes.c_int64(object.__basicsize__))
        loaded.toast_set_threads(processors())
        loaded.toast_instructions.restype = ctypes.c_char_p
        self.instructions = loaded.toast_instructions().decode()
        self._describe = loaded.toast_describe
        self._describe.argtypes = [ctypes.py_object, ctypes.c_void_p]
        self._product: Callable = loaded.toast_product
        loaded.toast_product.restype = ctypes.c_char_p
        loaded.toast_product.argtypes = [ctypes.py_object] * 6 + [ctypes.c_int] * 4

    def describe(self, array: mx.array) -> tuple[tuple[int, ...], int, int] | None:
        """What the library finds where it looks for an array (...) of any dtype: shape, bytes of a
        number, count; None where there is none."""
        about = (ctypes.c_int64 * 16)()
        if not self._describe(array, about):
            return None
        axes, *rest = about
        return tuple(rest[:axes]), rest[axes], rest[axes + 1]

    def multiply(
        self,
        x: mx.array,
        weight: mx.array,
        scales: mx.array | None = None,
        biases: mx.array | None = None,
        experts: mx.array | None = None,
        bits: int = 0,
        group_size: int = 0,
        exact: bool = False,
    ) -> mx.array:
        """Products, lazy, of the dtype of x, or float32 where the matrix has another.

        x: (..., columns) float32, float16 or bfloat16. weight: (rows, columns) of such a dtype; or
        packed, (rows, columns * bits / 32) uint32, with scales and biases, (rows, columns / group
        size). experts: of a stack, (experts, rows, ...), the ones to multiply x (..., m, columns)
        with, uint32 (...), broadcast; gives (..., m, rows). exact: see kernels.h.
        Raises ValueError for arrays that do not fit together.
        """
        out = mx.array(0)
        packed = scales is not None and biases is not None
        wrong = self._product(
            out, x, weight, scales if packed else x, biases if packed else x,
            x if experts is None else experts, experts is not None, bits, group_size, exact,
        )  # fmt: skip
        if wrong is not None:
            raise ValueError(wrong.decode())
        return out


@cache
def load(path: str) -> Library:
    """The library of a path, once. Raises OSError."""
    return Library(path)
