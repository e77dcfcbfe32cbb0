"""Free space in a data file: first fit over what neither the last commit nor the next one uses.

An extent is a byte offset and a size, both multiples of ALIGNMENT. There is no free list on disk:
the header names what is used, and the rest is free, so nothing can leak when a commit is torn.
"""

from __future__ import annotations

from collections.abc import Iterable

ALIGNMENT = 16384  # a page on Apple silicon and four on Linux: either may map the other's file


def align(size: int) -> int:
    """The size rounded up to whole pages of ALIGNMENT bytes; at least one."""
    return -(-max(size, 1) // ALIGNMENT) * ALIGNMENT


class Space:
    """The holes of one file. used: (offset, size in bytes) of the extents that must be kept,
    which do not overlap."""

    def __init__(self, used: Iterable[tuple[int, int]]):
        self._holes: list[tuple[int, int]] = []
        self._end = 0
        for offset, size in sorted(used):
            if offset > self._end:
                self._holes.append((self._end, offset - self._end))
            self._end = offset + size

    def allocate(self, size: int) -> int:
        """The byte offset of a fresh extent for `size` bytes; the file grows if no hole fits."""
        size = align(size)
        for index, (offset, room) in enumerate(self._holes):
            if room >= size:
                left = [(offset + size, room - size)] if room > size else []
                self._holes[index : index + 1] = left
                return offset
        offset = self._end
        self._end += size
        return offset
