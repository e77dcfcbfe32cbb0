"""Builds the next step's graph while the device still computes this one.

Building a step's graph in Python takes as long as running a small model. In one process this
overlaps with the device's work, because the next token is a lazy array. Between processes the token
comes back as a number, so the graph is built on a placeholder. With native operations the step can
be submitted to the device as it is, and begins when the token is named; otherwise the placeholder
is an array whose memory is written before anything is evaluated.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from toastkit.engine.savepoints import (
    Savepoint,
    copy_caches,
    restore_caches,
    roll_back,
    take_savepoint,
)
from toastkit.gears.entropy_graph import NativeSummary
from toastkit.native.library import Library, in_use

SPARE_TASKS = 16  # margin for the few operations besides


class Awaited:
    """A placeholder for a token to be named later. array: uint32 (), lazy. Once it is submitted,
    nothing submitted later may be waited for before the token is named. If never named, or the
    process ends, it is 0."""

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


class Lookahead:
    """One step after `cache`, of a token to be named later. step(token, cache): builds its graph.
    Only for a device that computes on memory that the host can write: store.jobs.host_writes.
    point: a savepoint of the caches as they are, for callers that may roll the step back; kept:
    what is reused then. sure: the step is rolled back only at the end of a run. seconds: spent
    building the graph. summary: of its logits, if submitted with it.

    The caches count the step from now on; either `run` or `discard` has to follow.
    """

    def __init__(
        self,
        step: Callable[[mx.array, list], mx.array],
        cache: list,
        point: Any = None,
        kept: Any = None,
        sure: bool = False,
    ):
        start = time.perf_counter()
        self.point, self.kept = point, kept
        self.summary: NativeSummary | None = None
        self._back: Savepoint | None = None  # of a step that was handed over
        self._sure = sure
        # Copies hold the arrays as they were. They are released before the step is evaluated, or
        # MLX would copy what it can write in place.
        self._cache, self._before = cache, copy_caches(cache)
        library = in_use()
        self._awaited = None if library is None else Awaited(library)
        if self._awaited is None:
            token = mx.array(0, mx.uint32)
            mx.eval(token)
            self._token: Any = memoryview(token)  # type: ignore[arg-type]
        else:
            token = self._awaited.array
        self._logits = step(token, cache)
        self.seconds = time.perf_counter() - start

    def run(self, token: int) -> mx.array:
        """Name the token; return the logits (vocab,) float32 after it, lazy."""
        self._before, self._back = [], None
        if self._awaited is None:
            self._token[()] = token
        else:
            self._awaited.name(token)
        return self._logits

    def hand_over(self, measured: bool = False) -> None:
        """Submit the step to the device, which begins when the token is named; until then it does
        nothing that is submitted later. measured: submit the summary of its logits too. Does
        nothing without native operations, or if policies may have the step rolled back."""
        if self._awaited is None or self._back is not None or not self._sure:
            return
        self._back = take_savepoint(self._before, 0, one_step=True, own=True)
        self._before = []
        with self._awaited.handing_over(self._logits):
            mx.async_eval(self._logits)
            self.summary = NativeSummary(self._logits) if measured else None

    def discard(self) -> None:
        """Restore the caches. A step that was handed over runs, with an arbitrary token, and is
        rolled back."""
        if self._back is None:
            return restore_caches(self._cache, self._before)
        assert self._awaited is not None  # or it was not handed over
        self._awaited.name(0)
        roll_back(self._cache, 1, self._back)
