"""The pieces of a checkpoint that is being written: each knows what it writes, and how to get it
without holding more than a tensor, and of one that lies in a file no more than a block of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from toastkit.model.safetensors import Entry
from toastkit.store.dtypes import bytes_of
from toastkit.store.raw import DTYPES
from toastkit.store.store import Store
from toastkit.store.writer import Planned, TensorWriter

READ_BYTES = 8 << 20  # of a tensor, that are read at a time
# Of those, that are converted at a time: it takes several times as much memory, in float32.
BLOCK_BYTES = 2 << 20
DTYPE_NAMES = {mx.float64: "F64", mx.complex64: "C64"}
DTYPE_NAMES.update((kind, name) for name, (_, kind) in DTYPES.items() if not name.startswith("F8"))

Conversion = Callable[[mx.array], dict[str, mx.array]]  # rows -> rows of each part


class Piece(NamedTuple):
    """One or more tensors of the output, in order. write: writes them; raises what TensorWriter and
    Store do, RuntimeError where MLX cannot read a file."""

    planned: list[Planned]
    write: Callable[[TensorWriter], None]


def literal(name: str, data: bytes, group: str) -> Piece:
    """Bytes at hand, such as config.json."""
    planned = [Planned(name, "U8", (len(data),), group)]
    return Piece(planned, lambda writer: writer.write(name, data) if data else None)


def copied(path: Path, entry: Entry, name: str, group: str) -> Piece:
    """A tensor that goes from file to file as it is."""
    planned = [Planned(name, entry.dtype, entry.shape, group)]
    return Piece(planned, lambda writer: writer.copy(name, path, entry.start, entry.stop))


def converted(
    store: Store, name: str, convert: Conversion, names: dict[str, str], group: str
) -> Piece:
    """A tensor of the store that is computed, block by block: cast, quantised or both.

    convert: rows of the tensor -> the same rows of each part; it works along the last axis. names:
    the parts' names in the file, in the order in which they are written: the first goes straight to
    the file, the others, which are much smaller, wait for their turn.
    """
    shape = store.shape(name)
    sample = convert(mx.zeros((*(1 for _ in shape[:-1]), *shape[-1:]), store.dtype(name)))
    first, *others = (part for part in names if part in sample)
    planned = []
    for part in (first, *others):
        sides = (*shape[:-1], *sample[part].shape[-1:])
        planned.append(Planned(names[part], DTYPE_NAMES[sample[part].dtype], sides, group))

    def write(writer: TensorWriter) -> None:
        waiting: dict[str, list[bytes]] = {part: [] for part in others}
        for rows in _row_blocks(store, name):
            parts = convert(rows)
            mx.eval(list(parts.values()))
            if parts[first].nbytes:
                writer.write(names[first], bytes_of(parts[first]))
            for part, chunks in waiting.items():
                chunks.append(bytes(bytes_of(parts[part])))
            del rows, parts
            mx.clear_cache()
        for part, chunks in waiting.items():
            for chunk in chunks:
                writer.write(names[part], chunk)

    return Piece(planned, write)


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
