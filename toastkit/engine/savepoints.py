"""Positions at which a state in memory can be resumed, and copies of it that share its arrays.

Attention caches can be cut back to any earlier position. A recurrent state (DeltaNet, SSM), or a
window that has begun to slide, cannot: it can be resumed where a copy was kept, and nowhere else.
MLX arrays are values, so a copy costs nothing until one of the two is written to.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from toastkit.session.savepoints import ALWAYS_CUT, Savepoint


def copy_caches(caches: Sequence[Any]) -> list:
    """Caches of their own that share the arrays of these until either is written to."""
    return [_copy(layer) for layer in caches]


def _copy(layer: Any) -> Any:
    """A cache is its attributes. Arrays are copied as objects, because `cache.keys[...] = x`
    changes the object; their data is shared."""
    if layer is None:
        return None
    twin = copy.copy(layer)
    vars(twin).update({name: _copy_value(value) for name, value in vars(layer).items()})
    return twin


def _copy_value(value: Any) -> Any:
    if isinstance(value, mx.array):
        return copy.copy(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_copy_value(item) for item in value)
    return _copy(value) if hasattr(value, "is_trimmable") else value


def take_savepoint(caches: Sequence[Any], count: int) -> Savepoint:
    """What is needed to come back to this position, of `count` tokens, later: the layers that
    cannot be cut back to it. (A window that has not slid yet may do so later.)"""
    return Savepoint(count, [None if _always_cuts(x) else _copy(x) for x in caches])


def always_cut(caches: Sequence[Any]) -> bool:
    """Whether caches can be cut back whatever they read from now on: savepoints are moot."""
    return all(_always_cuts(layer) for layer in caches)


def _always_cuts(layer: Any) -> bool:
    parts = getattr(layer, "caches", None)
    if parts is not None:
        return always_cut(parts)
    return type(layer).__name__ in ALWAYS_CUT


def resume_at(
    caches: Sequence[Any], held: int, n: int, savepoints: Sequence[Savepoint]
) -> list | None:
    """Caches that have read the first n of the `held` tokens that these have; they share arrays.
    None where they cannot be cut back to n and no savepoint is there."""
    twins = copy_caches(caches)
    if n == held:
        return twins
    if all(layer.is_trimmable() for layer in twins) and _cut(twins, held - n):
        return twins
    point = next((point for point in savepoints if point.count == n), None)
    if point is None:
        return None
    twins = [_copy(stored) or _copy(layer) for stored, layer in zip(point.layers, caches)]
    rest = [twin for twin, stored in zip(twins, point.layers) if stored is None]
    return twins if _cut(rest, held - n) else None


def _cut(layers: Sequence[Any], count: int) -> bool:
    """Cuts tokens off the end of each; whether all could."""
    return all(layer.is_trimmable() and layer.trim(count) == count for layer in layers)


def resumable(caches: Sequence[Any], held: int, most: int, savepoints: Sequence[Savepoint]) -> int:
    """The largest n of at most `most` tokens for which `resume_at` gives caches, or 0."""
    if most >= held:
        return held
    if most > 0 and resume_at(caches, held, most, ()) is not None:
        return most
    return max((point.count for point in savepoints if point.count <= most), default=0)


def thinned(savepoints: Sequence[Savepoint], most: int) -> list[Savepoint]:
    """At most `most` savepoints: those go whose loss costs least, which is what lies between them
    and the one before. The last two stay: the next turn wants one of them."""
    kept = sorted(savepoints, key=lambda point: point.count)
    while len(kept) > most:
        gaps = [p.count - (kept[i - 1].count if i else 0) for i, p in enumerate(kept[:-2])]
        del kept[gaps.index(min(gaps)) if gaps else 0]
    return kept
