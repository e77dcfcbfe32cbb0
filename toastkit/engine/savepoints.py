"""Positions at which a state in memory can be resumed, and copies of it that share its arrays.

Attention caches can be cut back to any earlier position. A recurrent state (DeltaNet, SSM), or a
window that has begun to slide, cannot: it can be resumed where a copy was kept, and nowhere else.
MLX arrays are values, so a copy costs nothing until one of the two is written to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import mlx.core as mx

from toastkit.native.kv_caches import leaves, place_in_ring
from toastkit.session.savepoints import ALWAYS_CUT, Savepoint


def copy_caches(caches: Sequence[Any]) -> list:
    """Caches of their own that share the arrays of these until either is written to."""
    return [_copy(layer) for layer in caches]


def _copy(layer: Any) -> Any:
    """A cache is its attributes. Arrays are copied as objects, because `cache.keys[...] = x`
    changes the object; their data is shared."""
    if layer is None:
        return None
    twin = object.__new__(type(layer))  # copy.copy takes twice as long
    vars(twin).update({name: _copy_value(value) for name, value in vars(layer).items()})
    return twin


def _copy_value(value: Any) -> Any:
    if isinstance(value, mx.array):
        return value.__copy__()
    if isinstance(value, (list, tuple)):
        return type(value)(_copy_value(item) for item in value)
    return _copy(value) if hasattr(value, "is_trimmable") else value


def put_back(caches: Sequence[Any], copies: Sequence[Any]) -> None:
    """Gives caches what `copy_caches` made of them; the copies are used up."""
    for layer, twin in zip(caches, copies):
        if layer is not None:
            vars(layer).update(vars(twin))


class _Row(NamedTuple):
    """What one more token overwrites in a ring that is full. settings: its offset and index. keys,
    values: (B, H, 1, D), of the position that is written next."""

    settings: dict[str, int]
    place: int
    keys: mx.array
    values: mx.array


def take_savepoint(
    caches: Sequence[Any], count: int, *, one_step: bool = False, own: bool = False
) -> Savepoint:
    """What is needed to come back to this position, of `count` tokens, later: the layers that
    cannot be cut back to it. (A window that has not slid yet may do so later.)

    one_step: to come back, by `roll_back`, after at most one more token: then no keys and values
    are held, and so none copied when that token is run, but for the row that it overwrites in a
    ring. Waits for that row. What is kept is of the caches' leaves. own: these are copies, which
    may be kept as they are.
    """
    if not one_step:
        return Savepoint(count, [None if always_cut([x]) else _copy(x) for x in caches])
    kept = [_before_a_step(leaf, (lambda x: x) if own else _copy) for leaf in leaves(caches)]
    if rows := [x[2:] for x in kept if isinstance(x, _Row)]:
        mx.eval(rows)
    return Savepoint(count, kept)


def _before_a_step(layer: Any, keep: Callable[[Any], Any] = _copy) -> Any:
    """What one more token changes in a cache for good: None where it can be cut off again."""
    name = type(layer).__name__
    if name == "RotatingKVCache" and layer.keys is not None:
        if layer.keys.shape[2] > layer.max_size:
            return keep(layer)  # the step makes another array: this one may be held
        if layer.offset >= layer.max_size:
            return _row(layer, place_in_ring(layer))
    # Some versions of mlx_lm cut a chunk's room, others what it holds.
    cut = name == "ChunkedKVCache" and layer.keys is not None
    cut = cut and layer.keys.shape[2] >= layer.chunk_size
    if cut or not layer.is_trimmable():
        return keep(layer)
    return None


def _row(layer: Any, place: int) -> _Row:
    """A copy of one row of a ring, as it is now."""
    rows = slice(place, place + 1)
    keys, values = (mx.contiguous(x[..., rows, :]) for x in (layer.keys, layer.values))
    return _Row({"offset": layer.offset, "_idx": layer._idx}, place, keys, values)


def roll_back(caches: Sequence[Any], held: int, point: Savepoint) -> None:
    """Takes caches that have read `held` tokens back to a savepoint of `one_step`, which is used
    up. The caches are then, to the bit, as if they had read no further."""
    for leaf, before in zip(leaves(caches), point.layers):
        _roll_back(leaf, held - point.count, before)


def _roll_back(layer: Any, count: int, before: Any) -> None:
    if isinstance(before, _Row):
        if count:
            rows = slice(before.place, before.place + 1)
            layer.keys[..., rows, :], layer.values[..., rows, :] = before.keys, before.values
        vars(layer).update(before.settings)
    elif before is None:
        _trim(layer, count)
    else:
        vars(layer).update(vars(before))


def ways_forward(
    caches: Sequence[Any], some: Sequence[Any], point: Savepoint | None = None
) -> dict[int, Callable[[], None]]:
    """Of some of the caches' leaves, by id: what gives them back, to the bit, what they hold now,
    one token after a savepoint of `one_step`, once they were rolled back to it; as often as they
    are. point: that one; None for caches of a batch, whose keys and values nobody takes back."""
    befores = repeat(None) if point is None else point.layers
    chosen = {id(leaf) for leaf in some}
    now = {
        id(leaf): (leaf, _row(leaf, before.place) if isinstance(before, _Row) else _copy(leaf))
        for leaf, before in zip(leaves(caches), befores)
        if id(leaf) in chosen
    }
    mx.eval([x[2:] for _, x in now.values() if isinstance(x, _Row)])
    return {key: partial(_bring_forward, *value) for key, value in now.items()}


def _bring_forward(layer: Any, now: Any) -> None:
    _roll_back(layer, 1, now if isinstance(now, _Row) else _copy(now))


@contextmanager
def undone_on_failure(caches: Sequence[Any], tokens: int) -> Iterator[None]:
    """A pass of so many tokens over the caches of one state: where it raises after some layers have
    run, these are put back, to the bit. Keys and values are not held, and so not copied, but for
    what a window loses."""
    before = [_position(leaf, tokens == 1) for leaf in leaves(caches)]
    mx.eval([x.kept[2:] for x in before if isinstance(x.kept, _Row)])
    try:
        yield
    except BaseException:
        for leaf, (offset, kept) in zip(leaves(caches), before):
            if leaf is not None:
                _roll_back(leaf, leaf.offset - offset if kept is None else 1, kept)
        raise


class _Position(NamedTuple):
    """Where a cache stood: its offset, and what `_before_a_step` kept of it, or all."""

    offset: int
    kept: Any


def _position(layer: Any, one_step: bool) -> _Position:
    offset = getattr(layer, "offset", 0)
    if layer is None or not isinstance(offset, int):  # of a batch
        return _Position(0, _copy(layer))
    if one_step:
        return _Position(offset, _before_a_step(layer))
    return _Position(offset, None if always_cut([layer]) else _copy(layer))


def always_cut(caches: Sequence[Any]) -> bool:
    """Whether caches can be cut back whatever they read from now on: savepoints are moot."""
    return all(type(leaf).__name__ in ALWAYS_CUT for leaf in leaves(caches))


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
    return all(layer.is_trimmable() and _trim(layer, count) == count for layer in layers)


def _trim(layer: Any, count: int) -> int:
    """Cuts tokens off the end; how many it could."""
    done = layer.trim(count)
    for part in (layer, *getattr(layer, "caches", ())):
        if type(part).__name__ == "ConcatenateKVCache" and part.keys is not None:
            # It grows from what it has, whatever its offset says.
            part.keys, part.values = (x[..., : part.offset, :] for x in (part.keys, part.values))
    return done


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


def longest(caches: Sequence[Any]) -> int:
    """The tokens in the caches, of the longest state in a batch."""
    for layer in caches:
        for name in ("offset", "_idx"):
            count = getattr(layer, name, None)
            if isinstance(count, int):
                return count
    return 0
