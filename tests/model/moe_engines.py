"""Engines of the random mixtures of experts, prompts for them, and what their caches hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from tests.model.checkpoints import open_model, read
from tests.model.moe_checkpoints import write_moe
from toastkit.engine.batch import Batch
from toastkit.engine.engine import Engine
from toastkit.engine.savepoints import copy_caches
from toastkit.engine.state import ModelState
from toastkit.experts.experts_options import ExpertsOptions

MIDDLE = 0.022  # about as sure as these random models are of a token
Made = Callable[..., Engine]


def engines(folder: Path) -> Made:
    """Opens engines of the checkpoints of moe_checkpoints.NAMES: of a name, a mode, a gamma, with
    other fields of ExpertsOptions and other policies; each set of options once."""
    kept: dict[tuple, Engine] = {}

    def engine(name: str, mode: str, gamma: float = 0.7, **rest: Any) -> Engine:
        experts = {k: rest.pop(k) for k in ("little_k", "prompt") if k in rest}
        key = (name, mode, gamma, repr(experts), repr(rest))
        if key not in kept:
            path = folder / name
            if not path.exists():
                write_moe(path, name)
            options = ExpertsOptions(mode, gamma, **experts)
            kept[key] = open_model(path, device_name="cpu", experts=options, **rest)
        return kept[key]

    return engine


def prompt_of(engine: Engine, count: int = 40) -> list[int]:
    """Longer than a window of those that have one."""
    return [(37 * n + 5) % engine.vocab for n in range(count)]


_states: WeakKeyDictionary[Engine, dict[tuple[int, ...], ModelState]] = WeakKeyDictionary()


def read_once(engine: Engine, ids: Sequence[int]) -> ModelState:
    """As `read`, for tests that are about what follows a prompt: where this engine has read it
    already, a state with copies of what that left."""
    states = _states.setdefault(engine, {})
    if tuple(ids) not in states:
        states[tuple(ids)] = read(engine, ids)
    state = states[tuple(ids)]
    return replace(state, cache=copy_caches(state.cache), tokens=list(state.tokens))


def batched_and_alone(
    engine: Engine, joining: Sequence[Sequence[int]], steps: int, apart: bool = False
) -> Iterator[tuple[Batch, list[ModelState]]]:
    """Conversations read twice, in a batch and alone. joining: how long the prompts are of those
    that join at a time. apart: as of Batch. Gives both before the first step and after each."""
    lengths = [count for some in joining for count in some]
    together, alone = ([read(engine, prompt_of(engine, n)) for n in lengths] for _ in "ab")
    batch = Batch(engine, apart)
    for some in joining:
        batch.join(together[: len(some)])
        del together[: len(some)]
    yield batch, alone
    for n in range(steps):
        tokens = [(100 * n + i) % engine.vocab for i in range(len(alone))]
        batch.step(tokens)
        for state, token in zip(alone, tokens):
            engine.consume(state, token)
        yield batch, alone


def arrays(caches: Sequence[Any]) -> list[np.ndarray]:
    """All that caches hold, as far as they count it: rows after the last token are no part of a
    state."""
    flat: list[np.ndarray] = []
    for layer in caches:
        cut = type(layer).__name__ == "KVCache"
        for name, value in sorted(vars(layer).items()):
            if name in ("caches", "state"):
                flat += arrays(value)
            elif cut and name in ("keys", "values"):
                flat.append(np.array(value[..., : layer.offset, :]))
            elif isinstance(value, (list, tuple)):
                flat += [np.array(v) for v in value if isinstance(v, mx.array)]
            elif isinstance(value, (mx.array, int)):
                flat.append(np.array(value))
    assert len(flat) >= 2 * len(caches)
    return flat


def same(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> bool:
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b))
