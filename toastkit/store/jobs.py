"""Units of work for a reader: an array of its own, or caller-owned memory to fill."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import mlx.core as mx

from toastkit.store.raw import DTYPES, Span


def host_writes() -> bool:
    """True if the device computes on memory that the host can write, as the CPU and Metal do."""
    return mx.default_device() == mx.Device(mx.cpu) or mx.metal.is_available()


@dataclass(frozen=True)
class Job:
    """One array to read. spans: of the files, in byte order of the array. dtype: in safetensors'
    terms. widened: "BF16" or "F16" becomes float32 while reading. inside: equal for arrays whose
    spans interleave in a file, which are read together if they are waited for together; None for an
    array by itself."""

    spans: tuple[Span, ...]
    dtype: str
    shape: tuple[int, ...]
    widened: bool = False
    inside: Any = field(default=None, compare=False)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Kept: a layer that is streamed is looked up in every step."""
        return hash((self.spans, self.shape, self.widened))

    @cached_property
    def stored_bytes(self) -> int:
        """Size in bytes in the files."""
        return sum(span.size for span in self.spans)

    @property
    def nbytes(self) -> int:
        """Size of the array in bytes."""
        return self.stored_bytes * (2 if self.widened else 1)

    @property
    def result_dtype(self) -> mx.Dtype:
        """Dtype of the array."""
        return mx.float32 if self.widened else DTYPES[self.dtype]

    def array(self, memory: mx.array) -> mx.array:
        """View memory, uint8 (N, M), as the array, of `shape`, such as (rows, columns), and
        `result_dtype`; a new object for each caller."""
        return memory.view(self.result_dtype).reshape(self.shape)


class Piece(NamedTuple):
    """Memory to read into. spans: as in Job. view: its bytes. widened: the dtype, in safetensors'
    terms, of what becomes float32 while reading; None for bytes as they are."""

    spans: tuple[Span, ...]
    view: memoryview
    widened: str | None = None

    @property
    def stored_bytes(self) -> int:
        """Size in bytes in the files."""
        return sum(span.size for span in self.spans)


@dataclass(frozen=True, eq=False)
class Filling:
    """Caller-owned memory, of an expert, say, that one thread fills, reading file neighbours in one
    call. The caller keeps the memory alive, and does not touch it until it is read or withdrawn."""

    pieces: tuple[Piece, ...]
    inside: None = None

    @property
    def stored_bytes(self) -> int:
        """Size in bytes in the files."""
        return sum(piece.stored_bytes for piece in self.pieces)

    @property
    def nbytes(self) -> int:
        """Size of the memory in bytes."""
        return sum(len(piece.view) for piece in self.pieces)

    def array(self, memory: object) -> None:
        """Return None: it makes no array."""
