"""The pieces of a checkpoint that is being written: each knows what it writes, and how to get it
without holding more than a tensor, and of one that lies in a file no more than a block of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import mlx.core as mx

from toastkit.model.safetensors import Entry
from toastkit.store.store import Store
from toastkit.store.writer import Planned, TensorWriter

READ_BYTES = 8 << 20  # of a tensor, that are read at a time
# Of those, that are converted at a time: it takes several times as much memory, in float32.
BLOCK_BYTES = 2 << 20
DTYPE_NAMES = {
    mx.bool_: "BOOL", mx.uint8: "U8", mx.int8: "I8", mx.uint16: "U16", mx.int16: "I16",
    mx.float16: "F16", mx.bfloat16: "BF16", mx.uint32: "U32", mx.int32: "I32", mx.float32: "F32",
    mx.uint64: "U64", mx.int64: "I64", mx.float64: "F64", mx.complex64: "C64",
}  # fmt: skip

Conversion = Callable[[mx.array], dict[str, mx.array]]  # rows -> rows of each part


class Piece(Protocol):
    """One or more tensors of the output. planned: them, in order."""

    planned: list[Planned]

    def write(self, writer: TensorWriter) -> None:
        """Writes them. Raises what TensorWriter and Store do, RuntimeError where MLX cannot read
        a file."""


class Literal:
    """Bytes at hand, such as config.json."""

    def __init__(self, name: str, data: bytes, group: str):
        self.planned = [Planned(name, "U8", (len(data),), group)]
        self._data = data

    def write(self, writer: TensorWriter) -> None:
        if self._data:
            writer.write(self.planned[0].name, self._data)


class Copied:
    """A tensor that goes from file to file as it is."""

    def __init__(self, path: Path, entry: Entry, name: str, group: str):
        self.planned = [Planned(name, entry.dtype, entry.shape, group)]
        self._path, self._entry = path, entry

    def write(self, writer: TensorWriter) -> None:
        entry = self._entry
        writer.copy(self.planned[0].name, self._path, entry.start, entry.stop)


class Converted:
    """A tensor of the store that is computed, block by block: cast, quantised or both.

    convert: rows of the tensor -> the same rows of each part; it works along the last axis. names:
    the parts' names in the file, in the order in which they are written: the first goes straight to
    the file, the others, which are much smaller, wait for their turn.
    """

    def __init__(
        self, store: Store, name: str, convert: Conversion, names: dict[str, str], group: str
    ):
        self._store, self._name, self._convert = store, name, convert
        shape = store.shape(name)
        sample = convert(mx.zeros((*(1 for _ in shape[:-1]), *shape[-1:]), store.dtype(name)))
        self._names = {part: full for part, full in names.items() if part in sample}
        self.planned = [
            Planned(
                full,
                DTYPE_NAMES[sample[part].dtype],
                (*shape[:-1], *sample[part].shape[-1:]),
                group,
            )
            for part, full in self._names.items()
        ]

    def write(self, writer: TensorWriter) -> None:
        first, *others = self._names
        waiting: dict[str, list[bytes]] = {part: [] for part in others}
        for rows in _row_blocks(self._store, self._name):
            parts = self._convert(rows)
            mx.eval(list(parts.values()))
            if parts[first].nbytes:
                writer.write(self._names[first], _bytes_of(parts[first]))
            for part, chunks in waiting.items():
                chunks.append(bytes(_bytes_of(parts[part])))
            del rows, parts
            mx.clear_cache()
        for part, chunks in waiting.items():
            for chunk in chunks:
                writer.write(self._names[part], chunk)


def cast_to(dtype: mx.Dtype | None) -> Callable[[mx.array], mx.array]:
    """Rows, (rows, columns) of any dtype -> the same in another dtype; None leaves them. Only
    floating tensors are ever cast."""

    def cast(rows: mx.array) -> mx.array:
        floating = mx.issubdtype(rows.dtype, mx.floating)
        return rows.astype(dtype) if dtype is not None and floating else rows

    return cast


def _row_blocks(store: Store, name: str) -> Iterator[mx.array]:
    """A tensor's rows, (rows, columns), a block at a time; a vector or a number as it is."""
    columns = store.shape(name)[-1:]
    for read in _read_blocks(store, name):
        if read.ndim < 2:
            yield read
            continue
        rows = read.reshape(-1, *columns)
        del read
        step = max(1, BLOCK_BYTES * rows.shape[0] // max(rows.nbytes, 1))
        for start in range(0, rows.shape[0], step):
            yield rows[start : start + step]


def _read_blocks(store: Store, name: str) -> Iterator[mx.array]:
    """A tensor, evaluated: in blocks along its first axis if it lies in a file, else whole."""
    shape, size = store.shape(name), store.nbytes(name)
    if len(shape) < 2 or size <= READ_BYTES or store.source(name) is None:
        whole = store.tensor(name)
        mx.clear_cache()
        yield whole
        return
    step = max(1, READ_BYTES * shape[0] // size)
    for start in range(0, shape[0], step):
        yield store.rows(name, start, min(start + step, shape[0]))


def _bytes_of(array: mx.array) -> memoryview:
    """The bytes of an array, C order."""
    flat = mx.contiguous(array).reshape(-1).view(mx.uint8)
    mx.eval(flat)
    return memoryview(flat)  # type: ignore[arg-type]
