"""Caches read where they lie in cache.bin: mapped, and not copied.

The rows of a tensor that grows are in extents of 256 positions, position by position. Mapped side
by side they are one array, with room for more behind them, which attention reads as it reads any;
what is appended is written to the room, or to copies of the pages, never to the file. So a state is
there when the maps are, whatever its size, and its bytes are read when attention wants them. A
recurrent state, which does not grow, is one extent and one array.

A map goes on to show the file, and the file goes on to be written. The rows that are mapped are
therefore held, by a lock on these bytes (private_files.hold_bytes): no commit of any process writes
there until the last array is gone (blocks.py). The bytes behind them, up to a whole page, may
change: nothing reads them before it has written them, and that goes to a copy.

Their checksums are not looked at: only a file that nobody has written to since its commit, and
since the machine was started, is read in place (reading.seal).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import mlx.core as mx

from toastkit.native.library import Library, in_use
from toastkit.native.regions import PAGE, Region
from toastkit.private_files import hold_bytes
from toastkit.session.blocks import Stored
from toastkit.session.layout import BLOCK_ROWS, Tensor

LEAST = 1 << 18  # bytes of a tensor; a smaller one is copied as fast
ROOM = BLOCK_ROWS  # positions to append, at least, before a cache moves to memory of its own
SHARE = 8  # and as a share of those there are
MOST_PIECES = 1 << 12  # maps: a process has 65,530 by default


def read_in_place(
    stored: Stored, caches: Sequence[Sequence[Tensor]], dtypes: Mapping[str, mx.Dtype]
) -> dict[int, mx.array]:
    """Arrays of the dtype that is stored over stored tensors, those of each cache, by their id: of
    those of axis 2 (B, heads, positions, size), of which positions are whole blocks of 256, some of
    them room, and what is behind the rows is unspecified; of others in their shape. dtypes: of MLX,
    by name. What cannot be read in place is left out: the caller reads it as ever."""
    library = in_use()
    fit = [tensor for tensors in caches for tensor in _fitting(tensors)]
    if library is None or stored.reopen is None or not fit:
        return {}
    if sum(1 for tensor in fit for _ in _pieces(tensor)) > MOST_PIECES:
        return {}
    try:
        return _mapped(library, stored, fit, dtypes)
    except OSError:  # no such locks, or maps, or room for them
        return {}


def _fitting(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Those of a cache that are to be read in place. What grows in it is, all of it or nothing: it
    takes keys and values to have the same room."""
    large = [tensor for tensor in tensors if tensor.rows * tensor.row_bytes >= LEAST]
    growing = [tensor for tensor in tensors if tensor.axis == 2]
    whole = all(BLOCK_ROWS * tensor.row_bytes % PAGE == 0 for tensor in growing)
    some = growing if whole and any(tensor.axis == 2 for tensor in large) else []
    return [*some, *(tensor for tensor in large if tensor.axis is None)]


def _size(tensor: Tensor) -> int:
    """Bytes of the map of a tensor, in whole pages."""
    rows = 1 if tensor.axis is None else _positions(tensor)
    return -(-rows * tensor.row_bytes // PAGE) * PAGE


def _positions(tensor: Tensor) -> int:
    room = max(ROOM, tensor.rows // SHARE)
    return sum(-(-rows // BLOCK_ROWS) * BLOCK_ROWS for rows in (tensor.rows, room))


def _pieces(tensor: Tensor) -> Iterator[tuple[int, int, int]]:
    """(byte of the tensor, offset in the file, bytes) of its rows, blocks that lie together in
    one."""
    block = BLOCK_ROWS * tensor.row_bytes
    at = offset = size = 0
    for first in range(0, tensor.rows * tensor.row_bytes, block):
        there = tensor.ranges[first // block].offset
        if size and there != offset + size:
            yield at, offset, size
            size = 0
        if not size:
            at, offset = first, there
        size += min(block, tensor.rows * tensor.row_bytes - first)
    yield at, offset, size


def _mapped(
    library: Library, stored: Stored, tensors: Sequence[Tensor], dtypes: Mapping[str, mx.Dtype]
) -> dict[int, mx.array]:
    """The arrays, by the id of their tensors. Raises OSError where the system cannot map them."""
    assert stored.reopen is not None
    sizes = [_size(tensor) for tensor in tensors]
    region = Region(library, sum(sizes))
    fd = stored.reopen()
    region.keep(fd)  # and what it holds, until nobody has any of the arrays
    region.room(0, region.nbytes)
    arrays, start = {}, 0
    for tensor, size in zip(tensors, sizes):
        for at, offset, count in _pieces(tensor):
            hold_bytes(fd, offset, count)
            region.map_file(start + at, fd, offset, count)
        shape = tensor.shape if tensor.axis is None else _by_position(tensor)
        array = region.array(start, dtypes[tensor.dtype], shape)
        arrays[id(tensor)] = array if tensor.axis is None else mx.moveaxis(array, 0, 2)
        start += size
    mx.eval(list(arrays.values()))
    stored.held = True
    return arrays


def _by_position(tensor: Tensor) -> tuple[int, ...]:
    """The shape in which a tensor's rows lie in memory."""
    batch, heads, _, size = tensor.shape
    return _positions(tensor), batch, heads, size
