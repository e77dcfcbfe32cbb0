"""The header of a session, session.msgpack: every field of it, and the words for it here.

    SESSION/            mode 0700, files 0600
        session.msgpack     the header. Replaced as a whole by each commit; the rest is only data
        tokens.u32          token ids, little-endian uint32; a commit appends
        cache.bin           tensors, in extents that begin at multiples of 16 KiB
        logits.f32          float32, in extents as above; two take turns
        lock                flock of the one writer; holds its process id as text
        runs/ID/            a run's feed, logits and handover; see run.py

The file is one msgpack map, the envelope:

    toastkit     the string "session"
    schema       version of this layout, 1. A newer one is refused
    crc          zlib.crc32 of body
    body         bytes: the msgpack map below

The body:

    fingerprint  the model's, hex: weights and tokenizer. Another model's session is refused
    generation   number of commits so far, from 1
    count        number of tokens that the state has read
    tokens       {slices: [[first, count], ...], end, crc}: the history is the concatenation of the
                 slices of tokens.u32, counted in tokens, so history that was cut back and rewritten
                 is appended too. end: tokens of the file that commits own; the next one appends
                 there. crc: of the history's bytes
    logits       nil, or {offset, count, crc}: byte offset in logits.f32, number of float32. They
                 belong to the last token of the history
    layers       nil if no caches were saved, or a list, one a layer:
      kind       class of the cache: a key of KINDS
      settings   map of integers, what the class holds besides arrays (KINDS gives the names)
      parts      layers within this one (CacheList), else empty
      tensors    list of
        name     keys, values, ...; an array that is None is left out
        dtype    a key of ITEM_BYTES
        shape    sizes; along axis, the committed rows only
        axis     the axis that grows with the tokens, or nil
        ranges   [[offset, length, crc], ...] in cache.bin, bytes. length and crc: of the committed
                 bytes; an extent has room for its whole block
    checkpoints  savepoints, earlier positions at which the state can be resumed; a list, empty if
                 it is absent:
      count      tokens that the state had read there: more than 0, fewer than the history, rising
      layers     one a layer of the model: nil where the layer above can be cut back to there,
                 otherwise a layer as it was there, of the same kind and with extents of its own;
                 for a CacheList a list of its parts, each of them one of the three

A tensor that grows is stored with that axis first, 256 rows (positions) a block, one extent and one
range a block; C order within a row. A tensor that does not is one block in C order. A tensor
without bytes has no ranges. Numbers in the data files are little-endian.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from toastkit.session.extents import align

SCHEMA_VERSION = 1
BLOCK_ROWS = 256  # positions in a block; also the step in which mlx_lm's caches grow
ITEM_BYTES = {
    "float32": 4, "float16": 2, "bfloat16": 2, "complex64": 8, "bool": 1,
    "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "int8": 1, "int16": 2, "int32": 4,
    "int64": 8,
}  # fmt: skip


class Damaged(ValueError):
    """Stored bytes that cannot be what a commit wrote; the text says what is wrong."""


class NewerSchema(Damaged):
    """A header of a later toastkit."""


class Kind(NamedTuple):
    """A cache class. settings: names. tensors: names of the arrays, () where the class has a list
    of them (ArraysCache: "0", "1", ..., left_padding, lengths). grows: they do, along axis 2."""

    settings: tuple[str, ...]
    tensors: tuple[str, ...]
    grows: bool


_KV = ("keys", "values")
_QUANTIZED = ("weight", "scales", "biases")
KINDS = {
    "KVCache": Kind(("offset",), _KV, True),
    "ConcatenateKVCache": Kind(("offset",), _KV, True),
    "QuantizedKVCache": Kind(
        ("offset", "group_size", "bits"),
        tuple(f"{side}.{part}" for side in _KV for part in _QUANTIZED),
        True,
    ),
    "ChunkedKVCache": Kind(("offset", "chunk_size", "start_position"), _KV, True),
    "RotatingKVCache": Kind(("offset", "keep", "max_size", "idx"), _KV, False),
    "ArraysCache": Kind(("size",), (), False),
    "CacheList": Kind((), (), False),
}


class Range(NamedTuple):
    """A block on disk. offset, length: bytes. crc: zlib.crc32 of them."""

    offset: int
    length: int
    crc: int


@dataclass(slots=True)
class Tensor:
    """An array on disk; the fields as in the module's text."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    axis: int | None
    ranges: list[Range]

    @property
    def rows(self) -> int:
        """Positions along the growing axis; a whole tensor is one row."""
        return 1 if self.axis is None else self.shape[self.axis]

    @property
    def row_bytes(self) -> int:
        sizes = [n for i, n in enumerate(self.shape) if i != self.axis]
        return ITEM_BYTES[self.dtype] * math.prod(sizes)

    @property
    def block_rows(self) -> int:
        return 1 if self.axis is None else BLOCK_ROWS

    @property
    def block_bytes(self) -> int:
        """Room of one extent."""
        return align(self.block_rows * self.row_bytes)


@dataclass(slots=True)
class Layer:
    """One cache on disk; the fields as in the module's text."""

    kind: str
    settings: dict[str, int]
    tensors: list[Tensor] = field(default_factory=list)
    parts: list[Layer] = field(default_factory=list)

    @property
    def start(self) -> int:
        """Position of row 0: what the front of a ChunkedKVCache has lost."""
        return self.settings.get("start_position", 0)


# What a savepoint holds of a layer. None: nothing, the layer at the end can be cut back. A list:
# the parts of a CacheList.
Part = Layer | list["Part"] | None


@dataclass(slots=True)
class SavepointRecord:
    """A savepoint on disk; the fields as in the module's text."""

    count: int
    layers: list[Part] = field(default_factory=list)


@dataclass(slots=True)
class TokenRecord:
    """Where the history is in tokens.u32; slices: (first, count), in tokens."""

    slices: list[tuple[int, int]] = field(default_factory=list)
    end: int = 0
    crc: int = 0


@dataclass(slots=True)
class LogitsRecord:
    """Where the logits are in logits.f32. offset: bytes. count: float32 values."""

    offset: int
    count: int
    crc: int


@dataclass(slots=True)
class Header:
    """One commit; the fields as in the module's text."""

    fingerprint: str
    generation: int = 0
    count: int = 0
    tokens: TokenRecord = field(default_factory=TokenRecord)
    logits: LogitsRecord | None = None
    layers: list[Layer] | None = None
    savepoints: list[SavepointRecord] = field(default_factory=list)

    def extents(self) -> list[tuple[int, int]]:
        """(offset, size in bytes) of all that this commit owns in cache.bin."""
        return [
            (offset, tensor.block_bytes)
            for tensor in self.all_tensors()
            for offset, _, _ in tensor.ranges
        ]

    def all_tensors(self) -> list[Tensor]:
        """Those of the layers and of the savepoints."""
        found: list[Tensor] = []
        parts: list[Part] = [*(self.layers or ()), *(point.layers for point in self.savepoints)]
        while parts:
            part = parts.pop()
            if isinstance(part, Layer):
                found += part.tensors
                parts += part.parts
            elif part is not None:
                parts += part
        return found
