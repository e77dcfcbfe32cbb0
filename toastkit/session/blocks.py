"""Tensors <-> extents of cache.bin: blocks of 256 positions, copy on write.

A row that the last commit owns is never overwritten. Rows past it may be written into the same
block, in place, and blocks right behind it, as no header points at them yet. So committing one more
token writes one row per tensor, and whenever the process dies, the last header's bytes are intact.
(A torn write within a device sector at a power failure is the file system's to prevent.) Behind a
block where history is cut back lie the last commit's next ones, if only up to the end of a page:
what follows it begins elsewhere (Space.beside).

Nor are bytes overwritten that some process reads in place (mapped.py): it holds a lock on these
bytes of the file until the last array over them is gone. A writer checks for locks before it writes
into a hole of the file, or behind rows or blocks that history was cut back to.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TypeVar

from toastkit.private_files import copy_range, pread_into, pwrite_all
from toastkit.session.extents import Space
from toastkit.session.layout import Damaged, Layer, Range, Tensor

PIECE_BYTES = 2 << 20  # of a tensor read and written at once; at least one block of it

Result = TypeVar("Result")
Pieces = Generator[int, None, Result]  # yields the bytes of each piece that was written


def written(pieces: Pieces[Result]) -> Result:
    """Write all pieces, one after another, and return what comes of it. Raises OSError."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value


@dataclass(slots=True)
class TensorSource:
    """An array to be saved. axis: the growing one, or None. shape: of what is saved.

    read(first, last): the bytes of rows [first, last) with `axis` moved to the front, C order,
    little-endian; for a whole tensor read(0, 1) gives all of it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    axis: int | None
    read: Callable[[int, int], bytes | memoryview]


@dataclass(slots=True)
class LayerSource:
    """A cache to be saved: kind, settings and parts as in layout.Layer."""

    kind: str
    settings: dict[str, int]
    tensors: list[TensorSource] = field(default_factory=list)
    parts: list[LayerSource] = field(default_factory=list)


def store_tensor(
    fd: int, space: Space, source: TensorSource, old: Tensor | None, keep: int
) -> Pieces[Tensor]:
    """Write what changed and return the tensor's new ranges; yield after each piece, for others
    to use the device. Nothing is synced.

    old: the tensor as last committed. keep: leading rows known to equal those of `old`.
    Raises OSError.
    """
    new = Tensor(source.name, source.dtype, tuple(source.shape), source.axis, [])
    rows, step = new.rows, new.block_rows
    if not new.row_bytes:
        return new
    if old is None or not _same_form(old, new):
        old = None
    stored = old.rows if old is not None else 0
    keep = min(keep, stored, rows) if new.axis is not None else 0
    # Otherwise history was cut back, or the tensor is replaced as a whole.
    appends = keep == stored and not (old and _is_tail_held(space, old, rows))
    first = keep if appends else keep // step * step
    if old is not None:
        new.ranges = old.ranges[: -(-first // step)]
    if first < rows == keep and old is not None:
        # Cut back within a block: same extent, checksum over fewer rows.
        data = memoryview(source.read(first, rows)).cast("B")
        offset = old.ranges[first // step].offset
        new.ranges.append(Range(offset, data.nbytes, zlib.crc32(data)))
        return new
    at_once = max(PIECE_BYTES // new.block_bytes, 1) * step
    while first < rows:
        last = min(first // step * step + at_once, rows)
        data = memoryview(source.read(first, last)).cast("B")
        rest = _fill_last_block(fd, new, first, data) if first % step else data
        _write_blocks(fd, space, new, rest)
        yield data.nbytes
        first = last
    return new


def _is_tail_held(space: Space, old: Tensor, rows: int) -> bool:
    """True if the place of the rows to append, up to `rows` in all, is locked by a reader."""
    count = min(rows - old.rows, -old.rows % old.block_rows)
    if count <= 0:
        return False
    offset, length, _ = old.ranges[-1]
    return space.held_until(offset + length, count * old.row_bytes) is not None


def _same_form(a: Tensor, b: Tensor) -> bool:
    return (a.dtype, a.axis, len(a.shape)) == (b.dtype, b.axis, len(b.shape)) and all(
        m == n for i, (m, n) in enumerate(zip(a.shape, b.shape)) if i != a.axis
    )


def _fill_last_block(fd: int, tensor: Tensor, first: int, data: memoryview) -> memoryview:
    """Append rows in place to the partly filled last block; return those that did not fit."""
    count = min(tensor.rows - first, -first % tensor.block_rows)
    piece = data[: count * tensor.row_bytes]
    offset, length, crc = tensor.ranges.pop()
    pwrite_all(fd, piece, offset + length)
    tensor.ranges.append(Range(offset, length + piece.nbytes, zlib.crc32(piece, crc)))
    return data[piece.nbytes :]


def _write_blocks(fd: int, space: Space, tensor: Tensor, data: memoryview) -> None:
    """Write the rest to fresh blocks."""
    size = tensor.block_bytes
    while data.nbytes:
        piece = data[:size]
        offset = _next_block(space, tensor)
        pwrite_all(fd, piece, offset)
        tensor.ranges.append(Range(offset, piece.nbytes, zlib.crc32(piece)))
        data = data[size:]


def _next_block(space: Space, tensor: Tensor) -> int:
    """The offset of the next block, with room reserved behind it for later ones."""
    size, index = tensor.block_bytes, len(tensor.ranges)
    last = -(-max(space.rows, tensor.rows) // tensor.block_rows) if tensor.axis is not None else 0
    before = tensor.ranges[-1].offset + size if index else None
    return space.beside(before, index * size, size, max(last - index - 1, 0) * size)


def copy_layer(fd: int, space: Space, layer: Layer, source: int) -> Layer:
    """Copy the growing part of a layer in another file, `source`, to this one: its blocks, except a
    last one that the layer has been cut back within. Raises OSError."""
    copy = Layer(layer.kind, dict(layer.settings))
    for tensor in layer.tensors:
        if tensor.axis is not None:
            copy.tensors.append(_copy_blocks(fd, space, tensor, source))
    copy.parts = [copy_layer(fd, space, part, source) for part in layer.parts]
    return copy


def _copy_blocks(fd: int, space: Space, tensor: Tensor, source: int) -> Tensor:
    assert tensor.axis is not None
    rows, step, row = tensor.rows, tensor.block_rows, tensor.row_bytes
    new = Tensor(tensor.name, tensor.dtype, tensor.shape, tensor.axis, [])
    while row and rows > (done := len(new.ranges) * step):
        offset, length, crc = tensor.ranges[len(new.ranges)]
        if length != min(step, rows - done) * row:
            rows = done
            break
        to = _next_block(space, new)
        copy_range(source, offset, fd, to, length)
        new.ranges.append(Range(to, length, crc))
    new.shape = (*tensor.shape[: tensor.axis], rows, *tensor.shape[tensor.axis + 1 :])
    return new


def store_layer(
    fd: int,
    space: Space,
    source: LayerSource,
    old: Layer | None,
    shared: int,
    counts: tuple[int, int],
) -> Pieces[Layer]:
    """Write a layer, piece by piece. shared: leading tokens whose rows are as last committed.
    counts: tokens of the last commit and of this one. Rows are kept only if there is one per token,
    so that shared tokens mean shared rows. Raises OSError."""
    layer = Layer(source.kind, dict(source.settings))
    if old is not None and not (layer.same_class(old) and layer.start == old.start):
        old = None
    offsets = (old.settings.get("offset") if old else None, layer.settings.get("offset"))
    keep = max(shared - layer.start, 0) if offsets == counts else 0
    before = {tensor.name: tensor for tensor in old.tensors} if old else {}
    for tensor in source.tensors:
        stored = yield from store_tensor(fd, space, tensor, before.get(tensor.name), keep)
        layer.tensors.append(stored)
    for index, part in enumerate(source.parts):
        former = old.parts[index] if old and index < len(old.parts) else None
        layer.parts.append((yield from store_layer(fd, space, part, former, shared, counts)))
    return layer


@dataclass(slots=True)
class Stored:
    """The tensors of a file. fd: of the file. reopen: returns a second descriptor of it, if its
    contents are known to be as committed and may be read in place; else None. held: whether it was
    used."""

    fd: int
    reopen: Callable[[], int] | None = None
    held: bool = False

    def __call__(self, tensor: Tensor) -> bytearray:
        """Read a tensor's rows, axis first, into a buffer with room for whole blocks of rows
        (the rest is unspecified); a whole tensor as it is. Every range is verified. A tensor that
        was cut back has more ranges, or longer ones, than its rows need.

        Raises Damaged for a wrong checksum or a file that is too short, OSError.
        """
        step, row = tensor.block_rows, tensor.row_bytes
        blocks = -(-tensor.rows // step) if row else 0
        buffer = bytearray(blocks * step * row)
        view = memoryview(buffer)
        for index in range(blocks):
            offset, length, crc = tensor.ranges[index]
            piece = view[index * step * row :][:length]
            if not pread_into(self.fd, piece, offset):
                raise Damaged(f"{tensor.name} ends before its range")
            if zlib.crc32(piece) != crc:
                raise Damaged(f"the checksum of {tensor.name} is wrong")
        return buffer
