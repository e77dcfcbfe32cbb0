"""Positions at which a state in memory can be resumed, and copies of it that share its arrays.

Attention caches can be trimmed to any earlier position. A recurrent state (DeltaNet, SSM), or a
sliding window that has begun to slide, cannot: it can be resumed only where a copy was kept. MLX
arrays are values, so a copy costs nothing until one of the two is written to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import mlx.core as mx

from toastkit.native.kv_caches import leaves, place_in_ring
from toastkit.session.savepoints import ALWAYS_TRIMMABLE, Savepoint


def copy_caches(caches: Sequence[Any]) -> list:
    """Copy caches; the arrays are shared until either copy is written to."""
    return [_copy(layer) for layer in caches]


def _copy(layer: Any) -> Any:
    """Copy a cache, attribute by attribute. Arrays are copied as objects, because `cache.keys[...]
    = x` changes the object; their data is shared."""
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


def hold_no_views(caches: Iterable[Any]) -> None:
    """Have recurrent states hold their own numbers alone; lazy. mlx_lm slices them from what a pass
    computed for all positions, or for all rows of a batch, and MLX's slice is a view of that."""
    for leaf in leaves(caches):
        if hasattr(leaf, "cache"):
            leaf.cache = [None if a is None else mx.contiguous(a) for a in leaf.cache]


def restore_caches(caches: Sequence[Any], copies: Sequence[Any]) -> None:
    """Restore caches from the result of `copy_caches`; the copies are used up."""
    for layer, twin in zip(caches, copies):
        if layer is not None:
            vars(layer).update(vars(twin))


class _Row(NamedTuple):
    """The row that one more token overwrites in a full ring buffer. settings: the ring's offset and
    index. keys, values: (B, H, 1, D), of the position that is written next."""

    settings: dict[str, int]
    place: int
    keys: mx.array
    values: mx.array


def take_savepoint(
    caches: Sequence[Any], count: int, *, one_step: bool = False, own: bool = False
) -> Savepoint:
    """Save what is needed to return to this position, of `count` tokens: the layers that cannot be
    trimmed to it. (A window that has not slid yet may do so later.)

    one_step: for `roll_back` after at most one more token. Then no keys and values are held, so
    none are copied when that token is run, except the row that it overwrites in a ring; waits for
    that row. What is kept is per leaf of the caches. own: the caches are copies already, and may be
    kept as they are.
    """
    if not one_step:
        return Savepoint(count, [None if always_trimmable([x]) else _copy(x) for x in caches])
    kept = [_before_a_step(leaf, (lambda x: x) if own else _copy) for leaf in leaves(caches)]
    if rows := [x[2:] for x in kept if isinstance(x, _Row)]:
        mx.eval(rows)
    return Savepoint(count, kept)


def _before_a_step(layer: Any, keep: Callable[[Any], Any] = _copy) -> Any:
    """Save what one more token changes irreversibly in a cache; None if it can be trimmed
    instead."""
    name = type(layer).__name__
    if name == "RotatingKVCache" and layer.keys is not None:
        if layer.keys.shape[2] > layer.max_size:
            return keep(layer)  # the step makes a new array: holding this one costs no copy
        if layer.offset >= layer.max_size:
            return _row(layer, place_in_ring(layer))
    # Some versions of mlx_lm trim a chunk's capacity, others its content.
    cut = name == "ChunkedKVCache" and layer.keys is not None
    cut = cut and layer.keys.shape[2] >= layer.chunk_size
    if cut or not layer.is_trimmable():
        return keep(layer)
    return None


def _row(layer: Any, place: int) -> _Row:
    """Copy one row of a ring as it is now."""
    rows = slice(place, place + 1)
    keys, values = (mx.contiguous(x[..., rows, :]) for x in (layer.keys, layer.values))
    return _Row({"offset": layer.offset, "_idx": layer._idx}, place, keys, values)


def roll_back(caches: Sequence[Any], held: int, point: Savepoint) -> None:
    """Roll caches that have read `held` tokens back to a savepoint of `one_step`, which is used up.
    They are then, to the bit, as if they had read no further."""
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


def redo_functions(
    caches: Sequence[Any], some: Sequence[Any], point: Savepoint | None = None
) -> dict[int, Callable[[], None]]:
    """Return, by id, functions that undo a rollback of some of the caches' leaves: each restores,
    to the bit, what its leaf holds now, one token after a savepoint of `one_step`, and may be
    called after every rollback to it. point: that savepoint; None for the caches of a batch, whose
    keys and values are not rolled back."""
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
    """Restore the caches of one state, to the bit, if a pass of `tokens` tokens raises after some
    layers have run. Keys and values are not held, so not copied, except what a window loses."""
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
    """Where a cache stood: its offset, and what `_before_a_step` kept of it, or a copy of it
    all."""

    offset: int
    kept: Any


def _position(layer: Any, one_step: bool) -> _Position:
    offset = getattr(layer, "offset", 0)
    if layer is None or not isinstance(offset, int):  # of a batch
        return _Position(0, _copy(layer))
    if one_step:
        return _Position(offset, _before_a_step(layer))
    return _Position(offset, None if always_trimmable([layer]) else _copy(layer))


def always_trimmable(caches: Sequence[Any]) -> bool:
    """True if these caches can be trimmed whatever they read from now on: savepoints are moot."""
    return all(type(leaf).__name__ in ALWAYS_TRIMMABLE for leaf in leaves(caches))


def resume_at(
    caches: Sequence[Any], held: int, n: int, savepoints: Sequence[Savepoint]
) -> list | None:
    """Return caches that have read the first n of the `held` tokens of these, sharing arrays; None
    if they cannot be trimmed to n and there is no savepoint."""
    twins = copy_caches(caches)
    if n == held:
        return twins
    if _cut(twins, held - n):
        return twins
    point = next((point for point in savepoints if point.count == n), None)
    if point is None:
        return None
    twins = [_copy(stored) or _copy(layer) for stored, layer in zip(point.layers, caches)]
    rest = [twin for twin, stored in zip(twins, point.layers) if stored is None]
    return twins if _cut(rest, held - n) else None


def _cut(layers: Sequence[Any], count: int) -> bool:
    """Trim tokens off the end of each layer; True if all could. Of none if one cannot."""
    return can_cut(layers, count) and all(_trim(layer, count) == count for layer in layers)


def can_cut(layers: Sequence[Any], count: int) -> bool:
    """True if so many tokens can be trimmed off the end of each layer, and all that the next one
    attends to is then there: a chunk drops its beginning while the next one is read."""
    chunks = (x for x in leaves(layers) if type(x).__name__ == "ChunkedKVCache")
    return all(layer.is_trimmable() for layer in layers) and all(
        x.start_position <= (x.offset - count) // x.chunk_size * x.chunk_size for x in chunks
    )


def _trim(layer: Any, count: int) -> int:
    """Trim tokens off the end; return how many were trimmed."""
    done = layer.trim(count)
    for part in (layer, *getattr(layer, "caches", ())):
        if type(part).__name__ == "ConcatenateKVCache" and part.keys is not None:
            # It appends to its arrays, whatever its offset says.
            part.keys, part.values = (x[..., : part.offset, :] for x in (part.keys, part.values))
    return done


def drop_room(caches: Iterable[Any]) -> None:
    """Have caches that were cut back hold the blocks of rows that they have read, and no others;
    lazy. The rows are copied: an array that others hold would be, as a whole, at the first write.
    """
    for leaf in leaves(caches):
        if type(leaf).__name__ == "KVCache" and leaf.keys is not None:
            rows = -(-leaf.offset // leaf.step) * leaf.step
            if rows < leaf.keys.shape[2]:
                whole = leaf.keys, leaf.values
                leaf.keys, leaf.values = (mx.contiguous(x[..., :rows, :]) for x in whole)


def resumable(caches: Sequence[Any], held: int, most: int, savepoints: Sequence[Savepoint]) -> int:
    """Return the largest n <= `most` for which `resume_at` gives caches, or 0."""
    if most >= held:
        return held
    if most > 0 and resume_at(caches, held, most, ()) is not None:
        return most
    return max((point.count for point in savepoints if point.count <= most), default=0)


def thinned(savepoints: Sequence[Savepoint], most: int) -> list[Savepoint]:
    """Keep at most `most` savepoints, dropping those whose loss costs least: the distance to the
    one before. The last two stay, because the next turn needs one of them."""
    kept = sorted(savepoints, key=lambda point: point.count)
    while len(kept) > most:
        gaps = [p.count - (kept[i - 1].count if i else 0) for i, p in enumerate(kept[:-2])]
        del kept[gaps.index(min(gaps)) if gaps else 0]
    return kept


def longest(caches: Sequence[Any]) -> int:
    """Return the tokens in the caches, of the longest state in a batch."""
    for layer in caches:
        for name in ("offset", "_idx"):
            count = getattr(layer, name, None)
            if isinstance(count, int):
                return count
    return 0
