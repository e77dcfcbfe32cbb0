"""The header of a session, session.msgpack, as dataclasses. The meaning of each field, the layout
of tensors in the data files, and what a reader may trust are in toast-session(5).

A growing tensor is stored with that axis first, 256 rows (positions) per block, one range per
block; C order within a row. Blocks that lie side by side are a run, with nothing between them; a
run has an extent. Any other tensor is one block in C order. A tensor without bytes has no ranges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from toastkit.session.extents import align, floor

SCHEMA_VERSION = 2  # 1 has each block in an extent of its own
BLOCK_ROWS = 256  # positions per block; also the step in which mlx_lm's caches grow
ITEM_BYTES = {
    "float32": 4, "float16": 2, "bfloat16": 2, "complex64": 8, "bool": 1,
    "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "int8": 1, "int16": 2, "int32": 4,
    "int64": 8,
}  # fmt: skip
MOVING = ("offset", "idx", "start_position")  # settings that change with the tokens


class Damaged(ValueError):
    """Stored bytes that no commit can have written; the message says what is wrong."""


class NewerSchema(Damaged):
    """A header of a later toastkit."""


class Kind(NamedTuple):
    """A cache class. settings: names. tensors: names of the arrays, () if the class has a list of
    them (ArraysCache: "0", "1", ..., left_padding, lengths). grows: they do, along axis 2."""

    settings: tuple[str, ...]
    tensors: tuple[str, ...]
    grows: bool


KV = ("keys", "values")
_QUANTIZED = ("weight", "scales", "biases")
KINDS = {
    "KVCache": Kind(("offset",), KV, True),
    "ConcatenateKVCache": Kind(("offset",), KV, True),
    "QuantizedKVCache": Kind(
        ("offset", "group_size", "bits"),
        tuple(f"{side}.{part}" for side in KV for part in _QUANTIZED),
        True,
    ),
    "ChunkedKVCache": Kind(("offset", "chunk_size", "start_position"), KV, True),
    "RotatingKVCache": Kind(("offset", "keep", "max_size", "idx"), KV, False),
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
    """An array on disk; the fields as in toast-session(5)."""

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
        """Bytes of one block when it is full."""
        return self.block_rows * self.row_bytes

    def runs(self) -> list[tuple[int, int]]:
        """(offset, size in bytes) of adjacent blocks, with room for all rows of the last."""
        block, found, end = self.block_bytes, [], -1
        for offset, _, _ in self.ranges:
            if offset != end:
                found.append([offset, 0])
            end = offset + block
            found[-1][1] += block
        return [(offset, size) for offset, size in found]


@dataclass(slots=True)
class Layer:
    """One cache on disk; the fields as in toast-session(5)."""

    kind: str
    settings: dict[str, int]
    tensors: list[Tensor] = field(default_factory=list)
    parts: list[Layer] = field(default_factory=list)

    @property
    def start(self) -> int:
        """Position of row 0: how much a ChunkedKVCache has dropped from the front."""
        return self.settings.get("start_position", 0)

    @property
    def fixed(self) -> dict[str, int]:
        """The settings that do not change with the tokens."""
        return {name: n for name, n in self.settings.items() if name not in MOVING}

    def same_class(self, other: Layer) -> bool:
        """True if both are of one class, with equal fixed settings."""
        return self.kind == other.kind and self.fixed == other.fixed


# What a savepoint holds of a layer. None: nothing, the layer can be cut back from the end. A list:
# the parts of a CacheList.
Part = Layer | list["Part"] | None


@dataclass(slots=True)
class SavepointRecord:
    """A savepoint on disk; the fields as in toast-session(5)."""

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
    """One commit; the fields as in toast-session(5)."""

    fingerprint: str
    generation: int = 0
    count: int = 0
    tokens: TokenRecord = field(default_factory=TokenRecord)
    logits: LogitsRecord | None = None
    layers: list[Layer] | None = None
    savepoints: list[SavepointRecord] = field(default_factory=list)
    seal: str | None = None  # of cache.bin, see reading.seal

    def runs(self) -> list[tuple[int, int]]:
        """(offset, size in bytes) of all that this commit uses in cache.bin."""
        return [run for tensor in self.all_tensors() for run in tensor.runs()]

    def extents(self) -> list[tuple[int, int]]:
        """(offset, size in bytes) of all that it owns there: whole pages of ALIGNMENT bytes."""
        return [(floor(first), align(first + n) - floor(first)) for first, n in self.runs()]

    def all_tensors(self) -> list[Tensor]:
        """All tensors of the layers and of the savepoints."""
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
