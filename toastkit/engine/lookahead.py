"""The next step's graph, built while the device still computes this one.

Building a step's graph in Python takes as long as running a small model. In one process it hides
behind the device's work, because the next token is an array that need not be known yet. Between
processes the token comes back as a number, so the graph is built on a placeholder: an array whose
memory is written once the token is known, before anything of the graph is evaluated.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from toastkit.engine.savepoints import copy_caches, put_back


class Lookahead:
    """One step after `cache`, of a token to be named later. step(token, cache): builds its graph.
    Only for a device that computes on memory that the host can write: store.jobs.host_writes.
    point: a savepoint of the caches as they are, for who may want to come back from the step; kept:
    what is kept of it then. seconds: that building it took.

    The caches count the step from now on; either `run` or `discard` has to follow.
    """

    def __init__(
        self,
        step: Callable[[mx.array, list], mx.array],
        cache: list,
        point: Any = None,
        kept: Any = None,
    ):
        start = time.perf_counter()
        self.point, self.kept = point, kept
        # Copies hold the arrays as they were. They are let go before the step is evaluated, or
        # MLX would copy what it can write in place.
        self._cache, self._before = cache, copy_caches(cache)
        token = mx.array(0, mx.uint32)
        mx.eval(token)
        self._token = memoryview(token)  # type: ignore[arg-type]
        self._logits = step(token, cache)
        self.seconds = time.perf_counter() - start

    def run(self, token: int) -> mx.array:
        """Names the token; the logits (vocab,) float32 after it, lazy."""
        self._before = []
        self._token[()] = token
        return self._logits

    def discard(self) -> None:
        """Puts the caches back to where they were."""
        put_back(self._cache, self._before)
