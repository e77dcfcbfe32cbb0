"""Free space in a data file: first fit over what neither the last commit nor the next one uses.

Bytes that a process has mapped are not free, whether a header names them or not (blocks.py).

An extent is a byte offset and a size, both multiples of ALIGNMENT. There is no free list on disk:
the header names what is used, and the rest is free, so a torn commit cannot leak anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

ALIGNMENT = 16384  # a page on Apple silicon and four on Linux: either may map the other's file


def align(size: int) -> int:
    """The size rounded up to whole pages of ALIGNMENT bytes; at least one."""
    return -(-max(size, 1) // ALIGNMENT) * ALIGNMENT


class Space:
    """The free space of one file. used: (offset, size in bytes) of the extents that must be kept,
    which do not overlap. held_until(first, count): the end of the held bytes among these, None if
    none are held. rows: expected in growing tensors, to keep the blocks of each adjacent."""

    def __init__(
        self,
        used: Iterable[tuple[int, int]],
        held_until: Callable[[int, int], int | None] = lambda first, count: None,
        rows: int = 0,
    ):
        self.held_until = held_until
        self.rows = rows
        self._reserved: dict[int, int] = {}  # reserved bytes, by the offset of the first
        self._holes: list[tuple[int, int]] = []
        self._end = 0
        for offset, size in sorted(used):
            if offset > self._end:
                self._holes.append((self._end, offset - self._end))
            self._end = offset + size

    def beside(self, before: int | None, size: int, following: int) -> int:
        """The offset of a fresh extent for `size` bytes, in the room reserved behind the one that
        ends at `before`, if any. following: bytes to reserve behind it, if none are yet."""
        size = align(size)
        if before is not None and (left := self._reserved.pop(before, 0)):
            offset, following = before, left - size
        else:
            offset = self.allocate(size + following)
        if following > 0:
            self._reserved[offset + size] = following
        return offset

    def allocate(self, size: int) -> int:
        """The byte offset of a fresh extent for `size` bytes; the file grows if no hole fits."""
        size = align(size)
        for index, (first, room) in enumerate(self._holes):
            offset, end = first, first + room
            if room >= size:
                offset = self._past_held(first, size)
                self._holes[index] = (min(offset, end), max(end - offset, 0))
            if end - offset >= size:
                left = [(offset + size, end - offset - size)] if end - offset > size else []
                self._holes[index : index + 1] = left
                return offset
        offset = self._past_held(self._end, size)
        self._end = offset + size
        return offset

    def _past_held(self, offset: int, size: int) -> int:
        """The next offset from which `size` bytes are not held."""
        while (end := self.held_until(offset, size)) is not None:
            offset = align(end)
        return offset
