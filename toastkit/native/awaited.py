"""A token that is not known yet, for a step that is handed to the device before it is.

awaited = Awaited(library)
logits = step(awaited.array)
with awaited.handing_over(logits):
    mx.async_eval(logits)  # waits in MLX's stream, and so does all that comes after it
awaited.name(token)
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.core as mx

from toastkit.native.library import Library, need

SPARE = 16  # tasks for what is handed over with an array


class Awaited:
    """One of them. array: uint32 (), lazy. Once it was handed over nothing may be waited for that
    comes later, before it is named. One that goes without a name, or with its process, is 0."""

    def __init__(self, library: Library):
        make, self._name, self._operations, self._count = _functions(library)
        self.array = mx.array(0, mx.uint32)
        self._place: ctypes.c_void_p | None = ctypes.c_void_p()
        need(make(self.array, ctypes.byref(self._place)))

    def name(self, token: int) -> None:
        """Says which it is; the first one counts."""
        place, self._place = self._place, None
        if place is not None:
            self._name(place, token)

    @contextmanager
    def handing_over(self, hanging: mx.array) -> Iterator[None]:
        """Where an array (...) of any dtype that hangs on it is handed over, and little besides:
        MLX, which else waits while much is unfinished, does not."""
        tasks = self._operations(hanging) + SPARE  # one has room for what few operations dispatch
        self._count(-tasks)
        try:
            yield
        finally:
            self._count(tasks)

    def __del__(self) -> None:
        if getattr(self, "_place", None):
            self.name(0)


@cache
def _functions(library: Library) -> tuple[Any, ...]:
    make, name = library.loaded.toast_awaited_array, library.loaded.toast_name_awaited
    make.restype, make.argtypes = ctypes.c_char_p, [ctypes.py_object, ctypes.c_void_p]
    name.restype, name.argtypes = None, [ctypes.c_void_p, ctypes.c_uint32]
    operations = library.loaded.toast_operations
    operations.restype, operations.argtypes = ctypes.c_int, [ctypes.py_object]
    count = library.loaded.toast_count_tasks
    count.restype, count.argtypes = None, [ctypes.c_int]
    return make, name, operations, count
