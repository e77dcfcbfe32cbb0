"""KV caches that are kept in another dtype than activations, and read as stored.

A cache of mlx_lm changes its class, as native modules do: what is appended is rounded, and what is
returned has the dtype of what was appended, so that architectures notice nothing. It is lazily
widened, only if used: native attention reads the kept array instead.

In 8 bits a row is its numbers as int8, followed by their float32 scale in four bytes. It is still
one row: caches move, trim and concatenate it, and sessions save it, as any other."""

from __future__ import annotations

import hashlib
import linecache
import weakref
from collections.abc import Iterable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import mlx.core as mx

from toastkit.native.functions import under_its_name
from toastkit.native.library import FLOATS, in_use

MODULE = "mlx_lm.models.cache"
CLASSES = (
    "KVCache", "ConcatenateKVCache", "RotatingKVCache", "ChunkedKVCache", "BatchKVCache",
    "BatchRotatingKVCache",
)  # fmt: skip
ROTATIONS = frozenset({"c35f2b94adeaab86", "557d06348de18238"})  # of 0.31, 0.32: see _rotating
LARGEST = mx.finfo(mx.float16).max
MAX_KEPT = 3e38  # in 8 bits: 127 times its scale is finite
SCALE_BYTES = 4
MOST = 127  # the largest number of a row in 8 bits

# The kept array by the id of the wide one, while that lives: arrays of MLX take no attributes, and
# compare by their numbers.
_kept: dict[int, tuple[weakref.ref, mx.array]] = {}


def leaves(caches: Iterable[Any]) -> Iterator[Any]:
    """The caches of layers, those that are made of several part by part. Some may be None."""
    for layer in caches:
        if (parts := getattr(layer, "caches", None)) is not None:
            yield from leaves(parts)
        else:
            yield layer


def nbytes_of(layer: Any) -> int:
    """Bytes of a cache's arrays; 0 of None, of one that was not used, and while another thread is
    just filling it."""
    try:
        return 0 if layer is None else layer.nbytes
    except (AttributeError, TypeError):
        return 0


def keep_in(dtype: mx.Dtype, caches: Iterable[Any]) -> set[str]:
    """Make fresh caches keep keys and values in a dtype. Returns the names of classes that are not
    known here: caches of an architecture's own."""
    unknown: set[str] = set()
    for layer in leaves(caches):
        cls: type = type(layer)
        if cls.__module__ == MODULE and cls.__name__ in CLASSES:
            layer.__class__ = _keeping(cls, dtype)
        elif layer is not None and cls.__module__ != MODULE:
            unknown.add(cls.__name__)
    return unknown


def as_kept(array: mx.array, dtype: mx.Dtype) -> mx.array:
    """Convert keys or values (B, heads, positions, size), of any dtype or as kept, to the dtype
    that they are to be kept in. Beyond the range of float16 they become its largest number."""
    return rounded(array, _kept_dtype(array.dtype, dtype))


def is_kept(given: mx.Dtype, dtype: mx.Dtype) -> bool:
    """True if `as_kept` leaves keys and values of a dtype as they are."""
    return _kept_dtype(given, dtype) == given


def _kept_dtype(given: mx.Dtype, dtype: mx.Dtype) -> mx.Dtype:
    """float16 replaces dtypes with more or fewer bits: bfloat16 stays as it is."""
    return given if dtype == mx.float16 and given == mx.bfloat16 else dtype


def rounded(array: mx.array, dtype: mx.Dtype) -> mx.array:
    """The same to exactly this dtype, of (B, heads, positions, size): bfloat16 does not stay."""
    if array.dtype == dtype:
        return array
    if dtype == mx.int8:
        return quantise(array)
    if array.dtype == mx.int8:
        array = dequantise(array)
    if dtype == mx.float16:
        array = mx.clip(array.astype(mx.float32), -LARGEST, LARGEST)
    return array.astype(dtype)


def quantise(x: mx.array) -> mx.array:
    """Quantise rows x (..., n) of floats to 8 bits, int8 (..., n + 4), lazy; rows of no numbers
    have no bytes. The same as Library.quantise, to the bit."""
    if not x.shape[-1]:
        return x.astype(mx.int8)
    if (library := in_use()) is not None:
        return library.quantise(x)
    x = mx.clip(x.astype(mx.float32), -MAX_KEPT, MAX_KEPT)
    scale = mx.max(mx.abs(x), -1, keepdims=True) / MOST
    numbers = mx.clip(mx.round(x / scale), -MOST, MOST)
    bytes_ = mx.where(scale > 0, numbers, 0).astype(mx.int8)  # scale may be 0 or NaN
    return mx.concatenate([bytes_, scale.view(mx.int8)], -1)


def dequantise(rows: mx.array) -> mx.array:
    """The numbers of such rows (..., n + 4), float32 (..., n), lazy. Raises ValueError for rows
    that are no longer than a scale."""
    if not rows.shape[-1]:
        return rows.astype(mx.float32)
    if rows.shape[-1] <= SCALE_BYTES:
        raise ValueError("rows that are shorter than their scale")
    if (library := in_use()) is not None:
        return library.dequantise(rows)
    numbers, scale = mx.split(rows, [-SCALE_BYTES], -1)
    return numbers.astype(mx.float32) * scale.view(mx.float32)


def kept_of(array: mx.array) -> mx.array:
    """The kept array, (B, heads, positions, size) of any dtype, for one that a cache returned in
    its place; else the array itself."""
    found = _kept.get(id(array))
    return array if found is None else found[1]


class Room(NamedTuple):
    """Where new positions go in the arrays of a cache, and how many are attended to afterwards,
    from the first one."""

    first: int
    length: int


class LayerKV(NamedTuple):
    """What a layer attended to, for later layers that share its cache: keys and values (B, heads,
    M, size) as kept. positions: of this pass, the last of `length`. offset: position of the first
    of them, per row of a batch if an array."""

    keys: mx.array
    values: mx.array
    offset: int | mx.array
    positions: int
    length: int

    def room(self) -> Room | None:
        """The place of these positions; None if it differs between rows."""
        one = isinstance(self.offset, int)
        return Room(self.length - self.positions, self.length) if one else None

    def last(self) -> LayerKV:
        """The same for the last position alone."""
        return self._replace(positions=1, offset=self.offset + self.positions - 1)

    def fetched(self) -> tuple[mx.array, mx.array]:
        """(B, heads, length, size) float32, as update_and_fetch returns them."""
        some = (a if a.shape[2] == self.length else a[:, :, : self.length] for a in self[:2])
        keys, values = (widened(array, mx.float32) for array in some)
        return keys, values


def offset_of(layer: Any) -> Any:
    """A copy of a cache's offset, int or int32 (B,): caches add to it in place."""
    offset = layer.offset
    return offset if isinstance(offset, int) else offset.__copy__()


def room_in(layer: Any, positions: int) -> Room | None:
    """The room for keys and values of float32 activations, of so many more positions, in mlx_lm's
    KVCache, or of a single position in its RotatingKVCache; None if there is none, or their dtype
    is another."""
    cls: Any = type(layer)
    if (wanted := _usual(cls) or _rotating(cls)) is None or (keys := layer.keys) is None:
        return None
    if not keys.dtype == wanted == layer.values.dtype:
        return None
    size, first = min(keys.shape[2], layer.values.shape[2]), layer.offset
    if _usual(cls) is not None:
        return Room(first, first + positions) if first + positions <= size else None
    if positions != 1 or size > layer.max_size or (first >= size < layer.max_size):
        return None  # it would be trimmed, or grow
    return Room(place_in_ring(layer), min(first + 1, size))


def place_in_ring(layer: Any) -> int:
    """Where mlx_lm's rotating cache puts its next position, once its arrays are full."""
    return layer.keep if layer._idx == layer.max_size else layer._idx


def appended_first(layer: Any, keys: mx.array, values: mx.array) -> tuple[mx.array, ...] | None:
    """update_and_fetch of float32 (B, heads, positions, size) for an empty KVCache of mlx_lm, in
    one operation, which leaves unused room uninitialised; None for another cache."""
    cls: Any = type(layer)
    wanted, library = _usual(cls), in_use()
    if library is None or wanted is None or layer.keys is not None or layer.offset:
        return None
    room = -(-keys.shape[2] // layer.step) * layer.step
    given = [
        mx.broadcast_to(mx.array(0, wanted), (*new.shape[:2], room, _width(new.shape[3], wanted)))
        for new in (keys, values)
    ]
    *caches, kept_keys, kept_values = library.append(given, (keys, values), 0)
    set_appended(layer, caches, keys.shape[2], 0)
    return widened(kept_keys, mx.float32), widened(kept_values, mx.float32)


def _width(size: int, dtype: mx.Dtype) -> int:
    """Size of a row as kept."""
    return size + SCALE_BYTES if dtype == mx.int8 else size


def set_appended(layer: Any, arrays: Iterable[mx.array], positions: int, first: int) -> None:
    """Set the arrays (B, heads, M, size) of a cache, of its dtype, after appending so many
    positions, of which the first is at that place."""
    layer.keys, layer.values = arrays
    layer.offset += positions
    cls: Any = type(layer)
    if _usual(cls) is None:
        layer._idx = first + positions
    if isinstance(layer, _Keeping) and layer.appended != "float32":
        layer.appended = "float32"


def usual_dtype(layer: Any) -> mx.Dtype | None:
    """The dtype in which a cache, if it is mlx_lm's KVCache, keeps float32 keys and values; else
    None."""
    cls: Any = type(layer)
    return _usual(cls)


def rotating_dtype(layer: Any) -> mx.Dtype | None:
    """The same of mlx_lm's RotatingKVCache, if the source of its update is known."""
    cls: Any = type(layer)
    return _rotating(cls)


@cache
def _usual(cls: type) -> mx.Dtype | None:
    return _kept_by(cls) if (cls.__module__, cls.__qualname__) == (MODULE, "KVCache") else None


@cache
def _rotating(cls: Any) -> mx.Dtype | None:
    if (cls.__module__, cls.__qualname__) != (MODULE, "RotatingKVCache"):
        return None
    code = cls._update_in_place.__code__
    last = max(line for _, _, line in code.co_lines() if line is not None)
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 : last]
    known = hashlib.sha256("".join(lines).encode()).hexdigest()[:16] in ROTATIONS
    return _kept_by(cls) if known else None


def _kept_by(cls: type) -> mx.Dtype:
    return _kept_dtype(mx.float32, getattr(cls, "kv_dtype", mx.float32))


def widened(kept: mx.array, dtype: mx.Dtype) -> mx.array:
    """Convert a kept array, (B, heads, positions, size) of any dtype, lazily to a dtype of
    activations, and register it for `kept_of`."""
    if kept.dtype == dtype:
        return kept
    wide = rounded(kept, dtype)
    key = id(wide)
    _kept[key] = weakref.ref(wide, lambda _: _kept.pop(key, None)), kept
    return wide


class _Keeping:
    """Base of caches that keep another dtype. kv_dtype: of keys and values (B, heads, positions,
    size), which are None at first. appended: dtype of the last appended, by its name in MLX: caches
    are copied, and a Dtype cannot be."""

    kv_dtype: mx.Dtype
    appended: str = "float32"
    keys: Any
    values: Any

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """As the base class: (B, heads, positions, size), of the dtype of activations."""
        self.appended = str(keys.dtype).rpartition(".")[2]  # MLX's asks for keys_and_values
        fetched = self._append(keys, values)
        if fetched is None:
            fetched = self._update(keys, values)
        return widened(fetched[0], keys.dtype), widened(fetched[1], values.dtype)

    def _append(self: Any, keys: mx.array, values: mx.array) -> tuple[mx.array, ...] | None:
        """Append in one operation; None if there is none."""
        library, after = in_use(), self.offset + keys.shape[2]
        if library is None or type(self).__name__ != "KVCache" or self.keys is None:
            return None
        if any(
            new.dtype not in FLOATS or old.dtype != _kept_dtype(new.dtype, self.kv_dtype)
            for old, new in ((self.keys, keys), (self.values, values))
        ):
            return None
        room = -(-after // self.step) * self.step
        made = library.append((self.keys, self.values), (keys, values), self.offset, room)
        self.keys, self.values, self.offset = *made[:2], after
        return made[2:]

    def _update(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        own = as_kept(keys, self.kv_dtype), as_kept(values, self.kv_dtype)
        if self.keys is not None and self.keys.dtype != own[0].dtype:  # of a session from elsewhere
            self.keys, self.values = (rounded(x, own[0].dtype) for x in (self.keys, self.values))
        return super().update_and_fetch(*own)  # type: ignore[misc]

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The cache's arrays, widened, for layers that share the cache of an earlier one."""
        keys, values = super().keys_and_values()  # type: ignore[misc]
        appended = getattr(mx, self.appended)
        return widened(keys, appended), widened(values, appended)


def _widened_state(base: Any, layer: Any) -> Any:
    """The state of a cache as its class has it, keys and values in the dtype of activations."""
    keys, values, *rest = base.state.fget(layer)
    appended = getattr(mx, layer.appended)
    return widened(keys, appended), widened(values, appended), *rest


@cache
def _keeping(base: type, dtype: mx.Dtype) -> type:
    """The class that keeps a dtype, under the name of its base: sessions and savepoints look for
    it. Batches made of such caches, and rows taken out of them, keep the same dtype."""
    if issubclass(base, _Keeping):
        base = base.__mro__[2]
    own: dict[str, Any] = {"kv_dtype": dtype}

    def made(layer: Any) -> Any:
        keep_in(dtype, [layer])
        return layer

    if not hasattr(base, "keys_and_values"):  # mlx_lm before 0.32, which asks for the state
        theirs: Any = base
        own["state"] = property(partial(_widened_state, base), theirs.state.fset)
    if hasattr(base, "merge"):
        own["merge"] = classmethod(lambda cls, caches: made(base.merge(caches)))
    if hasattr(base, "extract"):
        own["extract"] = lambda self, row: made(base.extract(self, row))
    return under_its_name(base, _Keeping, **own)
