"""What a reader is told to read: an array of its own, or memory that somebody has for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx

from toastkit.store.raw import DTYPES, Span


def host_writes() -> bool:
    """Whether the device computes on memory that the host can write: the CPU and Metal do."""
    return mx.default_device() == mx.Device(mx.cpu) or mx.metal.is_available()


@dataclass(frozen=True)
class Job:
    """One array to be read. spans: of the files, in the order of its bytes. dtype: as safetensors
    names it. widened: "BF16" or "F16" is to become float32 as it is read. inside: the same for
    arrays whose spans alternate in a file, and which are read together if they are waited for
    together; None for one by itself."""

    spans: tuple[Span, ...]
    dtype: str
    shape: tuple[int, ...]
    widened: bool = False
    inside: Any = field(default=None, compare=False)

    @property
    def stored_bytes(self) -> int:
        """Size in bytes in the files."""
        return sum(span.stop - span.start for span in self.spans)

    @property
    def nbytes(self) -> int:
        """Size of the array in bytes."""
        return self.stored_bytes * (2 if self.widened else 1)

    @property
    def result_dtype(self) -> mx.Dtype:
        """Dtype of the array."""
        return mx.float32 if self.widened else DTYPES[self.dtype][1]

    def array(self, memory: mx.array) -> mx.array:
        """The array, of `shape`, such as (rows, columns), and `result_dtype`, whose bytes lie in
        memory, uint8 (N, M): one of its own for each who asks."""
        return memory.view(self.result_dtype).reshape(self.shape)


class Piece(NamedTuple):
    """Memory to be read into. spans, widened: as of Job. dtype: of what is widened, as of Job.
    view: its bytes."""

    spans: tuple[Span, ...]
    dtype: str
    view: memoryview
    widened: bool = False

    @property
    def stored_bytes(self) -> int:
        """Size in bytes in the files."""
        return sum(span.stop - span.start for span in self.spans)


@dataclass(frozen=True, eq=False)
class Filling:
    """Pieces of memory, an expert's say, that one thread reads into, those that lie side by side in
    the file at once. Whoever asks for it keeps the memory, and leaves it alone until it is read, or
    was withdrawn."""

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
        """No array is made of it."""
