"""A placeholder for a token that is not known yet, so that a step can be submitted before it is.

awaited = Awaited(library)
logits = step(awaited.array)
with awaited.handing_over(logits):
    mx.async_eval(logits)  # blocks MLX's stream at the token, and with it all later work
awaited.name(token)
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from toastkit.native.library import Library

SPARE_TASKS = 16  # margin for the few operations besides


class Awaited:
    """A token to be named later. array: uint32 (), lazy. Once it is submitted, nothing submitted
    later may be waited for before the token is named. If never named, or the process ends, it is
    0."""

    def __init__(self, library: Library):
        self._c = library.c
        self.array = mx.array(0, mx.uint32)
        self._handle: ctypes.c_void_p | None = ctypes.c_void_p()
        self._c.awaited(self.array, ctypes.byref(self._handle))

    def name(self, token: int) -> None:
        """Name the token; only the first call counts."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._c.name_awaited(handle, token)

    @contextmanager
    def handing_over(self, waiting: mx.array) -> Iterator[None]:
        """Context in which an array (...) of any dtype that depends on the token, and little else,
        is submitted: without it MLX would block while many tasks are unfinished."""
        tasks = self._c.operations(waiting) + SPARE_TASKS
        self._c.count_tasks(-tasks)
        try:
            yield
        finally:
            self._c.count_tasks(tasks)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.name(0)
