"""Caches read in place: cache.bin is mapped, not copied.

The rows of a growing tensor are in blocks of 256 positions. Mapped side by side they form one
array, with addresses behind it to grow in, which attention reads like any other; appended rows go
there, or to private copies of the pages, never to the file. Where two runs of blocks meet within a
page, the first one's is mapped and gets a copy of the other's bytes there. So a state of any size
is restored as soon as it is mapped, and its bytes are read when attention needs them. A recurrent
state, which does not grow, is one extent and one array.

A map keeps showing the file, and the file keeps being written. The mapped rows are therefore held
by a lock on these bytes (private_files.hold_bytes): no process commits to them until the last array
is gone (blocks.py). The bytes behind them, up to a page boundary, may change: nothing reads them
before writing them, which goes to a private copy.

Their checksums are not verified: only a file that nobody has written to since its commit and the
machine's boot is read in place (reading.seal).
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Sequence

import mlx.core as mx

from toastkit.native.library import Library, in_use
from toastkit.native.regions import PAGE, Region
from toastkit.private_files import hold_bytes, pread_into
from toastkit.session.blocks import Stored
from toastkit.session.extents import align, floor
from toastkit.session.layout import BLOCK_ROWS, ITEM_BYTES, Tensor

# MLX's dtypes of stored tensors.
DTYPES = {name: getattr(mx, "bool_" if name == "bool" else name) for name in ITEM_BYTES}
MIN_BYTES = 1 << 18  # bytes of a tensor; copying a smaller one is as fast
MAX_PIECES = 1 << 13  # maps: a process has 65,530 by default


def read_in_place(stored: Stored, caches: Sequence[Sequence[Tensor]]) -> dict[int, mx.array]:
    """Map stored tensors, grouped by cache, as arrays of the stored dtype, keyed by the tensors'
    ids. Growing ones are (B, heads, positions, size), with positions in whole blocks of 256, the
    last of them room whose contents are unspecified; others have their shape. What cannot be read
    in place is left out, for the caller to read as usual."""
    library = in_use()
    fit = [tensor for tensors in caches for tensor in _fitting(tensors)]
    if library is None or stored.reopen is None or not fit:
        return {}
    pieces = [_pieces(tensor) for tensor in fit]
    if sum(map(len, pieces)) > MAX_PIECES:
        return {}
    try:
        return _mapped(library, stored, fit, pieces)
    except OSError:  # locks, maps, or address space unavailable
        return {}


def _fitting(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of a cache to read in place. Growing ones all or none: keys and values must have
    the same room."""
    large = [tensor for tensor in tensors if tensor.rows * tensor.row_bytes >= MIN_BYTES]
    growing = [tensor for tensor in tensors if tensor.axis == 2]
    worth = any(tensor.axis == 2 for tensor in large) and all(map(_is_in_step, growing))
    some = growing if worth else []
    return [*some, *(tensor for tensor in large if tensor.axis is None)]


def _is_in_step(tensor: Tensor) -> bool:
    """True if its blocks lie in pages as they would side by side. (Those of schema 1 may not.)"""
    return tensor.row_bytes > 0 and all(
        (offset - at) % PAGE == 0 for at, offset, _ in _pieces(tensor)
    )


def _size(library: Library, tensor: Tensor) -> int:
    """Bytes of a tensor's addresses, in whole pages, those to grow in included."""
    nbytes = tensor.rows * tensor.row_bytes
    if tensor.axis is not None:
        nbytes = library.c.room_to_grow(_positions(tensor) * tensor.row_bytes)
    return -(-nbytes // PAGE) * PAGE


def _positions(tensor: Tensor) -> int:
    """Rows of a growing tensor's array: whole blocks, one of them empty."""
    return (-(-tensor.rows // BLOCK_ROWS) + 1) * BLOCK_ROWS


def _pieces(tensor: Tensor) -> list[tuple[int, int, int]]:
    """(byte of the tensor, offset in the file, bytes) of its rows, adjacent blocks merged."""
    found, at, whole = [], 0, tensor.rows * tensor.row_bytes
    for offset, size in tensor.runs():
        if at < whole:  # it may have been cut back
            found.append((at, offset, min(size, whole - at)))
        at += size
    return found


def _held(pieces: Iterable[Sequence[tuple[int, int, int]]]) -> Iterator[tuple[int, int]]:
    """Yield (offset in the file, bytes) of the pieces of tensors, adjacent extents merged with the
    unused bytes between them: for each lock the system goes through all that a file has. Behind the
    last piece of a tensor there are none, for it goes on there."""
    spans = sorted(
        (offset, size, n) for own in pieces for n, (_, offset, size) in enumerate(own, -len(own))
    )
    first = end = last = 0
    for offset, size, n in spans:
        if end and (last == -1 or floor(offset) != align(end)):
            yield first, end - first
            end = 0
        first, end, last = first if end else offset, offset + size, n
    yield first, end - first


def _mapped(
    library: Library,
    stored: Stored,
    tensors: Sequence[Tensor],
    pieces: Sequence[Sequence[tuple[int, int, int]]],
) -> dict[int, mx.array]:
    """The arrays, by the id of their tensors. pieces: of each. Raises OSError if they cannot be
    mapped."""
    assert stored.reopen is not None
    sizes = [_size(library, tensor) for tensor in tensors]
    region = Region(library, sum(sizes))
    fd = stored.reopen()
    region.keep(fd)  # and the lock, until all arrays are gone
    region.room(0, region.nbytes)
    arrays, start = {}, 0
    for offset, count in _held(pieces):
        hold_bytes(fd, offset, count)
    for tensor, size, places in zip(tensors, sizes, pieces):
        for at, offset, count in places:
            _map_piece(region, start + at, fd, offset, count)
        shape = tensor.shape if tensor.axis is None else _by_position(tensor)
        array = region.array(start, DTYPES[tensor.dtype], shape)
        if tensor.axis is not None:
            region.grow(start, size)
        arrays[id(tensor)] = array if tensor.axis is None else mx.moveaxis(array, 0, 2)
        start += size
    mx.eval(list(arrays.values()))
    stored.held = True
    return arrays


def _map_piece(region: Region, at: int, fd: int, offset: int, count: int) -> None:
    """Map bytes of the file, those excepted that share a page with the ones before: these are
    copied to it. Raises OSError."""
    if head := min(-at % PAGE, count):
        there = memoryview(region.array(at, mx.uint8, (head,)))  # type: ignore[arg-type]
        if not pread_into(fd, there, offset):
            raise OSError(errno.EIO, "the file ends before that")
    if count > head:
        region.map_file(at + head, fd, offset + head, count - head)


def _by_position(tensor: Tensor) -> tuple[int, ...]:
    """The shape of a tensor's rows in memory."""
    batch, heads, _, size = tensor.shape
    return _positions(tensor), batch, heads, size
