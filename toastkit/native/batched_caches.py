"""Caches of states that step together.

KV caches stay in each state's own arrays, rings of a sliding window among them: a state that joins
or leaves a batch is not copied, and a short one is not padded to a long one. Native attention reads
them where they are. Another attention gets them padded on the left, with a mask, as mlx_lm's
batches are.

Recurrent states are rows of one array with room for more: who joins or leaves is copied, the others
stay where they are."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from copy import copy
from typing import Any

import mlx.core as mx

from toastkit.native.functions import under_its_name
from toastkit.native.kv_caches import (
    MODULE,
    kept_of,
    leaves,
    place_in_ring,
    rotating_dtype,
    rounded,
    usual_dtype,
    widened,
)
from toastkit.native.library import NONE, Library, in_use, objects, unshared

BOUNDED = ("ArraysCache", "RotatingKVCache")  # caches of mlx_lm that stop growing: may be merged

# By the id of an array, while that lives: of keys, the batch's cache that returned it, with the
# lengths and values then; of a mask, the lengths that it is made of.
_owners: dict[int, tuple[weakref.ref, tuple[ApartKVCache, list[int], mx.array]]] = {}
_masks: dict[int, tuple[weakref.ref, list[int]]] = {}


class ApartKVCache:
    """The KV caches of several states, each in its own arrays. arrays: keys and values of each in
    turn, (1, heads, M, size), as kept. lengths: positions of each. unread: how often keys and
    values were returned that native attention did not read there."""

    def __init__(self, rows: Sequence[Any]):
        """rows: mlx_lm's KVCache of each, which has read a token or more. They are left as they
        are; with them gone nobody else holds the arrays."""
        self.arrays: list[mx.array] = []
        self.lengths = [row.offset for row in rows]
        self.unread = 0
        self._seen: list[int] = []  # positions of each that the last ones attend to
        self._rows = list(map(copy, rows))  # what else is in them
        for row in self._rows:
            kept = usual_dtype(row) or rotating_dtype(row)
            if kept is not None and row.keys.dtype != kept:  # of a session from elsewhere
                row.keys, row.values = (rounded(x, kept) for x in (row.keys, row.values))
            self.arrays += row.keys, row.values
            row.keys = row.values = None

    @property
    def offset(self) -> mx.array:
        """The lengths, int32 (B,)."""
        return mx.array(self.lengths)

    def size(self) -> int:
        """Positions of the longest."""
        return max(self.lengths)

    _idx = property(size)  # as mlx_lm's batches call it

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys and values, float32 (B, heads, N, size), and return those of all positions,
        float32 (B, heads, longest, size), lazily padded."""
        library, new, count = in_use(), keys.shape[2], len(self.lengths)
        if library is None or keys.dtype != mx.float32:
            raise NotImplementedError("separate caches of another dtype, or without the library")
        made, given = unshared(keys, 2 * count), objects(*self.arrays, keys, values)
        firsts, seen, room = self._next(new)
        library.c.append_apart(objects(*made), given, _ints(firsts), _ints(room), count)
        padded = unshared(keys, 2)
        library.c.padded(objects(*padded), objects(*made), _ints(seen), count)
        self.arrays, self._seen = made, seen
        self.lengths = [length + new for length in self.lengths]
        _remember(_owners, padded[0], (self, self.lengths, padded[1]))
        self.unread += 1
        return widened(padded[0], mx.float32), widened(padded[1], mx.float32)

    def _next(self, new: int) -> tuple[list[int], list[int], list[int]]:
        """Where so many positions of each go, how many they then attend to, and how many there is
        to be room for."""
        after = [length + new for length in self.lengths]
        room = [-(-n // row.step) * row.step for n, row in zip(after, self._rows)]
        return self.lengths, after, room

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """Which positions the next N see, bool (B, 1, N, longest + N): those of their row."""
        longest, lengths = self.size(), self.lengths
        positions, queries = mx.arange(longest + N), mx.arange(longest, longest + N)[:, None]
        padding = mx.array([longest - length for length in lengths]).reshape(-1, 1, 1, 1)
        mask = (positions <= queries) & (positions >= padding)
        if window_size is not None:
            return mask & (queries < positions + window_size)
        _remember(_masks, mask, [length + N for length in lengths])
        return mask

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        """Remove the last n positions of each, or as many as all have."""
        n = min(n, *self.lengths)
        self.lengths = [length - n for length in self.lengths]
        return n

    def filter(self, kept: mx.array) -> None:
        """Keep those of these indices, int32 (R,), alone."""
        which: Any = kept.tolist()
        self._rows = [self._rows[i] for i in which]
        self.lengths = [self.lengths[i] for i in which]
        self.arrays = [array for i in which for array in self.arrays[2 * i : 2 * i + 2]]

    def extend(self, other: ApartKVCache) -> None:
        """Add another's."""
        self._rows += other._rows
        self.lengths += other.lengths
        self.arrays += other.arrays

    def extract(self, row: int) -> Any:
        """Give one its own cache back. It has to be filtered out before the next step."""
        own = self._rows[row]
        own.keys, own.values = self.arrays[2 * row : 2 * row + 2]
        own.offset = self.lengths[row]
        return own

    def attend(
        self, library: Library, queries: mx.array, scale: float, sinks: mx.array | None, cap: float
    ) -> mx.array:
        """As Library.attend of one query each, float32 (B, heads, 1, size), to all its
        positions."""
        [out], given = unshared(queries, 1), self._given(queries)
        library.c.attend_apart(out, *given, NONE if sinks is None else sinks, scale, cap)
        return out

    def attend_latents(self, library: Library, queries: mx.array, scale: float) -> mx.array:
        """Latent attention of one query each, float32 (B, heads, 1, latent + RoPE part), to the
        latents that are kept as keys and the RoPE parts that are kept as values: (B, heads, 1,
        latent)."""
        [out], given = unshared(queries, 1), self._given(queries)
        library.c.attend_latents(out, *given, scale)
        return out

    def _given(self, queries: mx.array) -> tuple[Any, ...]:
        """Queries (B, heads, 1, size) and what they attend to, for the library."""
        self.unread -= 1
        return objects(queries, *self.arrays), _ints(self._seen), len(self._seen)


class ApartRotatingKVCache(ApartKVCache):
    """The same of mlx_lm's RotatingKVCache, each a ring of its own. One position a step."""

    def __init__(self, rows: Sequence[Any]):
        super().__init__(rows)
        for i, row in enumerate(self._rows):
            own = slice(2 * i, 2 * i + 2)
            if (more := self.arrays[2 * i].shape[2] - row.max_size) > 0:  # a long prompt was read
                self.arrays[own] = [row._trim(more, array) for array in self.arrays[own]]
                row._idx = row.max_size

    @property
    def max_size(self) -> int:
        """Positions of a ring."""
        return self._rows[0].max_size

    def size(self) -> int:
        """Positions of the longest that are kept."""
        return min(super().size(), self.max_size)

    _idx = property(size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """The same of one position, float32 (B, heads, 1, size): up to max_size, in a ring's
        order."""
        fetched = super().update_and_fetch(keys, values)
        for row in self._rows:
            row._idx = place_in_ring(row) + 1
        return fetched

    def _next(self, new: int) -> tuple[list[int], list[int], list[int]]:
        if new != 1:
            raise NotImplementedError("rings that take one position a step")
        _, after, room = super()._next(new)
        after, room = ([min(n, self.max_size) for n in some] for some in (after, room))
        return [place_in_ring(row) for row in self._rows], after, room

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """Which positions the next one sees, bool (B, 1, 1, longest): those of its row."""
        if N != 1 or (window_size or self.max_size) < self.max_size:
            raise NotImplementedError("rings of which a part is seen, or several positions")
        seen = [min(length + 1, self.max_size) for length in self.lengths]
        padding = mx.array([max(seen) - n for n in seen]).reshape(-1, 1, 1, 1)
        mask = mx.arange(max(seen)) >= padding
        _remember(_masks, mask, [length + 1 for length in self.lengths])
        return mask

    def is_trimmable(self) -> bool:
        return max(self.lengths) < self.max_size

    def trim(self, n: int) -> int:
        n = super().trim(n)
        for row in self._rows:
            row._idx -= n
        return n


def attend(
    library: Library, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any,
    sinks: mx.array | None = None, cap: float = 0.0,
) -> mx.array:  # fmt: skip
    """Library.attend, float32 (B, heads, N, value size), to keys and values (B, key heads, M, size)
    of its dtypes that a cache returned: as that keeps them and, of a batch, each where it is."""
    keys, values = kept_of(keys), kept_of(values)
    if queries.shape[2] == 1 and (owner := owner_of(keys, values, mask)):
        return owner.attend(library, queries, scale, sinks, cap)
    return library.attend(queries, keys, values, scale, mask, sinks, cap)


def owner_of(keys: mx.array, values: mx.array, mask: Any) -> ApartKVCache | None:
    """The batch's cache that holds keys and values (B, heads, M, size), as kept in any dtype, if
    they are of its last update and a mask (...), if any, hides nothing else than padding."""
    if (found := _remembered(_owners, keys)) is None:
        return None
    owner, lengths, own = found
    now = values is own and lengths is owner.lengths
    return owner if now and (mask is None or _remembered(_masks, mask) == lengths) else None


class RecurrentRows:
    """Base of mlx_lm's ArraysCache for a batch. cache: states (B, ...) of its rows, all of which
    have read a token or more."""

    cache: list[mx.array]

    def extend(self, other: Any) -> None:
        """Add another's rows."""
        rows = range(len(self.cache[0]))
        self.cache = [_gathered(rows, *pair) for pair in zip(self.cache, other.cache)]

    def filter(self, kept: mx.array) -> None:
        """Keep those rows of these indices, int32 (R,), alone."""
        which: Any = kept.tolist()
        self.cache = [_gathered(which, state) for state in self.cache]


def _gathered(kept: Sequence[int], state: mx.array, *more: mx.array) -> mx.array:
    """Some rows of a state (B, ...), then all of more of them: (R, ...), lazy. Of other dtypes, as
    a session from elsewhere may have them, they become one that holds the numbers of all."""
    dtype = mx.result_type(state, *more)
    given = [x.astype(dtype) for x in (state, *more)]
    library, [out] = in_use(), unshared(state, 1)
    if library is None:  # it was in use when they joined
        return mx.concatenate([given[0][mx.array(list(kept), mx.uint32)], *given[1:]])
    library.c.gather(out, objects(*given), len(given), _ints(kept), len(kept))
    return out


def _are_recurrent(layers: Sequence[Any]) -> bool:
    """True if caches for one layer are mlx_lm's ArraysCache, all with states of one shape."""
    cls: Any = type(layers[0])
    if (cls.__module__, cls.__qualname__) != (MODULE, "ArraysCache") or in_use() is None:
        return False
    if not all(isinstance(x, mx.array) for layer in layers for x in layer.cache):
        return False  # one has read nothing
    return len({tuple(x.shape[1:] for x in layer.cache) for layer in layers}) == 1


def can_stay_apart(caches: Sequence[Any]) -> bool:
    """True if all that grows in a state's caches can stay in its own arrays, so that states of any
    lengths may step together. Recurrent states do not grow."""
    kinds = [type(leaf).__name__ for leaf in leaves(caches)]
    apart = [_apart_of(leaf) is not None for leaf in leaves(caches)]
    bounded = [kind in BOUNDED for kind in kinds]
    some = any(apart) or "ArraysCache" in kinds
    return in_use() is not None and some and all(map(max, apart, bounded))


def _apart_of(layer: Any) -> type[ApartKVCache] | None:
    """The class that keeps caches like this one apart."""
    if usual_dtype(layer) is not None:
        return ApartKVCache
    return None if rotating_dtype(layer) is None else ApartRotatingKVCache


def merged(layers: Sequence[Any], apart: bool) -> Any:
    """The cache of a batch from those of its states for one layer. apart: those that
    `can_stay_apart` do."""
    first = layers[0]
    if apart and (own := _apart_of(first)) is not None:
        return own(layers)
    if apart and hasattr(first, "caches"):
        parts = zip(*(layer.caches for layer in layers))
        return type(first)(*(merged(part, apart) for part in parts))
    if _are_recurrent(layers):
        cls: Any = type(first)
        rows: Any = under_its_name(cls, RecurrentRows)(len(first.cache))
        one = range(len(first.cache[0]))
        rows.cache = [_gathered(one, *states) for states in zip(*(x.cache for x in layers))]
        return rows
    return type(first).merge(list(layers))


def _ints(numbers: Sequence[int]) -> ctypes.Array[ctypes.c_int]:
    return (ctypes.c_int * len(numbers))(*numbers)


def _remember(found: dict, array: mx.array, what: Any) -> None:
    """Keep something for an array object (...) for as long as that lives."""
    key = id(array)
    found[key] = weakref.ref(array, lambda _: found.pop(key, None)), what


def _remembered(found: dict, array: Any) -> Any:
    """What is kept for an array (...), or None."""
    entry = found.get(id(array))
    return None if entry is None else entry[1]
