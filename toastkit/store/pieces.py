"""Pieces of a checkpoint being written. Each produces its tensors holding no more than one at a
time, or a block of rows of one that lies in a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from toastkit.errors import DataError, UsageError
from toastkit.model.toast_format import EXPERTS_PREFIX, FILE_PREFIX, FILES_GROUP, Part, offsets_of
from toastkit.store.dtypes import bytes_of
from toastkit.store.raw import DTYPES
from toastkit.store.store import Store
from toastkit.store.writer import Planned, TensorWriter

READ_BYTES = 8 << 20  # of a tensor, per read
# of those, per conversion: it takes several times as much memory, in float32
BLOCK_BYTES = 2 << 20
DTYPE_NAMES = {kind: name for name, kind in DTYPES.items() if not name.startswith("F8")}

Conversion = Callable[[mx.array], dict[str, mx.array]]  # rows -> rows of each part


class Piece(NamedTuple):
    """One or more output tensors, in order. write: writes them; raises what TensorWriter and Store
    do, and RuntimeError if MLX cannot read a file."""

    planned: list[Planned]
    write: Callable[[TensorWriter], None]


class Recipe(NamedTuple):
    """A tensor of the store and what is written of it. names: names in the file of those of its
    parts that are present, in order. convert: casts, quantises or both: rows of the tensor -> the
    same rows of each part, working along the last axis; None if it is written unchanged."""

    tensor: str
    names: dict[str, str]
    convert: Conversion | None = None

    def parts(self, store: Store) -> list[Part]:
        """The parts to write, each with its name in the file, dtype and full shape."""
        shape, source = store.shape(self.tensor), store.source(self.tensor)
        sample = self.converted(
            mx.zeros((*(1 for _ in shape[:-1]), *shape[-1:]), store.dtype(self.tensor))
        )
        found = []
        for part, name in self.names.items():
            if part in sample:
                dtype = DTYPE_NAMES[sample[part].dtype]
                if self.convert is None and source is not None:
                    dtype = source[1].dtype
                found.append(Part(name, dtype, (*shape[:-1], *sample[part].shape[-1:])))
        return found

    def converted(self, rows: mx.array) -> dict[str, mx.array]:
        """Convert rows of the tensor, (..., columns) in its dtype, to those of each part,
        lazily."""
        return {next(iter(self.names)): rows} if self.convert is None else self.convert(rows)


def small_file(name: str, data: bytes) -> Piece:
    """A piece of given bytes, such as config.json."""
    tensor = FILE_PREFIX + name
    planned = [Planned(tensor, "U8", (len(data),), FILES_GROUP)]
    return Piece(planned, lambda writer: writer.write(tensor, data) if data else None)


def tensor_by_tensor(store: Store, recipe: Recipe, group: str) -> Piece:
    """One tensor of the store, (..., columns): copied, or converted block by block. The first part
    goes straight to the file; the others, much smaller, are buffered until their turn."""
    planned = [Planned(*part, group) for part in recipe.parts(store)]
    source = store.source(recipe.tensor)
    if recipe.convert is None and source is not None and source[1].inside is None:
        (path, entry), (copy,) = source, planned
        return Piece(planned, lambda writer: writer.copy(copy.name, path, entry.start, entry.stop))

    def write(writer: TensorWriter) -> None:
        waiting: dict[str, list[bytes]] = {item.name: [] for item in planned[1:]}
        for block in _read_blocks(store, recipe.tensor):
            for parts in _converted_blocks(recipe, block):
                first, *others = parts.items()
                if first[1].nbytes:
                    writer.write(*first)
                for name, data in others:
                    waiting[name].append(bytes(data))
        for name, chunks in waiting.items():
            for chunk in chunks:
                writer.write(name, chunk)

    return Piece(planned, write)


def expert_by_expert(store: Store, path: str, recipes: Sequence[Recipe], group: str) -> Piece:
    """Pack a module's stacks of experts, (experts, ...) each, into one tensor of bytes,
    (experts, bytes of an expert), so that each expert's parts are contiguous. path: of the module.
    Raises UsageError if the stacks differ in their number of experts."""
    whole = [part for recipe in recipes for part in recipe.parts(store)]
    experts = {part.shape[0] for part in whole}
    if len(experts) != 1 or any(part.dtype == "C64" for part in whole):
        raise UsageError(f"{store.files.name}: {path} cannot be written expert by expert")
    parts = [Part(part.name[len(path) + 1 :], part.dtype, part.shape[1:]) for part in whole]
    *offsets, row = offsets_of(parts)
    name, count = EXPERTS_PREFIX + path, experts.pop()
    places = {full.name: (at, part.nbytes) for full, at, part in zip(whole, offsets, parts)}

    def write(writer: TensorWriter) -> None:
        # What must be computed whole is computed once, not per block.
        made = store.read([r.tensor for r in recipes if store.row_reading.is_whole(r.tensor)])
        step = max(1, READ_BYTES // row)
        for start in range(0, count, step):
            stop = min(start + step, count)
            block = np.zeros((stop - start, row), np.uint8)
            for recipe in recipes:
                rows = made.get(recipe.tensor)
                rows = store.rows(recipe.tensor, start, stop) if rows is None else rows[start:stop]
                chunks: dict[str, list[np.ndarray]] = {}
                for found in _converted_blocks(recipe, rows):
                    for part, data in found.items():
                        chunks.setdefault(part, []).append(np.frombuffer(bytes(data), np.uint8))
                del rows
                for part, of in chunks.items():
                    at, size = places[part]
                    block[:, at : at + size] = np.concatenate(of).reshape(stop - start, size)
            writer.write(name, block.data)
            mx.clear_cache()

    return Piece([Planned(name, "U8", (count, row), group, parts=tuple(parts))], write)


def cast_to(dtype: mx.Dtype | None) -> Callable[[mx.array], mx.array]:
    """Return a function that casts rows, (rows, columns) of any dtype; None leaves them. Only
    floating tensors are cast. It raises DataError for numbers that would become infinite."""

    def cast(rows: mx.array) -> mx.array:
        floating = mx.issubdtype(rows.dtype, mx.floating)
        if dtype is None or not floating or rows.dtype == dtype:
            return rows
        made = rows.astype(dtype)
        if (mx.isinf(made) & mx.isfinite(rows)).any().item():
            raise DataError(f"weights too large for {str(dtype).rpartition('.')[2]}")
        return made

    return cast


def _converted_blocks(recipe: Recipe, rows: mx.array) -> Iterator[dict[str, memoryview]]:
    """Yield rows of a tensor, (..., columns), as bytes of each part by name, BLOCK_BYTES at a time;
    vectors and scalars unsplit."""
    blocks: Iterable[mx.array] = [rows]
    if rows.ndim >= 2:
        flat = rows.reshape(-1, rows.shape[-1])
        step = max(1, BLOCK_BYTES * flat.shape[0] // max(flat.nbytes, 1))
        blocks = (flat[start : start + step] for start in range(0, flat.shape[0], step))
    for block in blocks:
        parts = recipe.converted(block)
        mx.eval(list(parts.values()))
        yield {n: bytes_of(parts[part]) for part, n in recipe.names.items() if part in parts}
        del parts
        mx.clear_cache()


def _read_blocks(store: Store, name: str) -> Iterator[mx.array]:
    """Yield a tensor, evaluated: in blocks along its first axis if it lies in a file, else
    whole."""
    shape, size = store.shape(name), store.nbytes(name)
    if len(shape) < 2 or size <= READ_BYTES or store.source(name) is None:
        whole = store.tensor(name)
        mx.clear_cache()
        yield whole
        return
    step = max(1, READ_BYTES * shape[0] // size)
    for start in range(0, shape[0], step):
        yield store.rows(name, start, min(start + step, shape[0]))
