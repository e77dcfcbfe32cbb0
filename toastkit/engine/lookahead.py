"""The next step's graph, built while the device still computes this one.

Building a step's graph in Python takes as long as running a small model. In one process it hides
behind the device's work, because the next token is an array that need not be known yet. Between
processes the token comes back as a number, so the graph is built on a placeholder: an array whose
memory is written once the token is known, before anything of the graph is evaluated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from toastkit.store.reading import host_writes

if TYPE_CHECKING:
    from toastkit.engine.engine import Engine


def can_look_ahead() -> bool:
    """Whether the device computes on memory that the host can write: the CPU and Metal do."""
    return host_writes()


class Lookahead:
    """One step after `cache`, of a token to be named later.

    The caches count the step from now on; either `run` or `discard` has to follow.
    """

    def __init__(self, engine: Engine, cache: list):
        self._undo = [(layer, _saved(layer)) for layer in cache]
        token = mx.array(0, mx.uint32)
        mx.eval(token)
        self._token = np.array(token, copy=False)
        self._logits = engine.step(token, cache)

    def run(self, token: int) -> mx.array:
        """Names the token; the logits (vocab,) float32 after it, lazy."""
        self._token[...] = token
        return self._logits

    def discard(self) -> None:
        """Puts the caches back to where they were: rows are cut off, states are put back."""
        for layer, saved in self._undo:
            if saved is None:
                layer.trim(1)
            else:
                _put_back(layer, saved)


def _saved(layer: Any) -> Any:
    """What `discard` needs: nothing for a cache that can be cut. (To keep its arrays would make the
    device copy them at every step instead of writing into them.) Of another, its attributes, a
    CacheList's caches among them; lists are copied, because caches write into theirs."""
    if layer.is_trimmable():
        return None
    saved = {k: list(v) if isinstance(v, list) else v for k, v in vars(layer).items()}
    inner = [(part, _saved(part)) for part in getattr(layer, "caches", ())]
    return saved, inner


def _put_back(layer: Any, saved: Any) -> None:
    attributes, inner = saved
    vars(layer).update(attributes)
    for part, kept in inner:
        if kept is None:
            part.trim(1)
        else:
            _put_back(part, kept)
