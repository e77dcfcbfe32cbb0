"""Free space in a data file: first fit over what neither the last commit nor the next one uses.

Bytes that a process has mapped are not free, whether a header names them or not (blocks.py).

An extent is a byte offset and a size, both multiples of ALIGNMENT. What one tensor has side by side
there is a run: its bytes lie where they would in one extent from the tensor's first byte on,
modulo ALIGNMENT, so that runs mapped side by side are the tensor. There is no free list on disk:
the header names what is used, and the rest is free, so a torn commit cannot leak anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

ALIGNMENT = 16384  # a page on Apple silicon and four on Linux: either may map the other's file


def align(size: int) -> int:
    """The size rounded up to whole pages of ALIGNMENT bytes; at least one."""
    return -(-max(size, 1) // ALIGNMENT) * ALIGNMENT


def floor(offset: int) -> int:
    """Where the page of ALIGNMENT bytes with this one begins."""
    return offset // ALIGNMENT * ALIGNMENT


class Space:
    """The free space of one file. used: (offset, size in bytes) of the runs that must be kept, of
    which no two have a page of ALIGNMENT bytes in common. held_until(first, count): the end of the
    held bytes among these, None if none are held. rows: expected in growing tensors, to keep the
    blocks of each adjacent."""

    def __init__(
        self,
        used: Iterable[tuple[int, int]],
        held_until: Callable[[int, int], int | None] = lambda first, count: None,
        rows: int = 0,
    ):
        self.held_until = held_until
        self.rows = rows
        self._kept: set[int] = set()  # where kept runs end
        self._reserved: dict[int, int] = {}  # where fresh ones end: the end of what is theirs
        self._holes: list[tuple[int, int]] = []
        self._end = 0
        for offset, size in sorted(used):
            if floor(offset) > self._end:
                self._holes.append((self._end, floor(offset) - self._end))
            self._end = align(offset + size)
            self._kept.add(offset + size)

    def beside(self, before: int | None, at: int, size: int, following: int) -> int:
        """The offset of fresh bytes for `size` of a tensor, from its byte `at` on: behind a run of
        it that ends at `before`, where there is room, otherwise in an extent of their own.
        following: bytes to reserve behind them then."""
        if before is not None and (before - at) % ALIGNMENT == 0 and self._go_on(before, size):
            return before
        lead = at % ALIGNMENT
        first = self.allocate(lead + size + following)
        self._reserved[first + lead + size] = first + align(lead + size + following)
        return first + lead

    def _go_on(self, before: int, size: int) -> bool:
        """Have a run go on for `size` bytes, if those are free. Behind a block with which no run
        ends there may be bytes of the last commit's."""
        end = align(before)
        if before in self._kept:
            self._kept.remove(before)
            if end > before and self.held_until(before, end - before) is not None:
                return False
        elif before in self._reserved:
            end = self._reserved.pop(before)
        else:
            return False
        more = align(before + size) - end
        if more > 0 and not self._claim(end, more):
            return False
        self._reserved[before + size] = end + max(more, 0)
        return True

    def _claim(self, offset: int, size: int) -> bool:
        """Take these bytes, both multiples of ALIGNMENT, if they are free; behind all that is used
        only if no hole has as many."""
        if self.held_until(offset, size) is not None:
            return False
        if offset == self._end and all(room < size for _, room in self._holes):
            self._end += size
            return True
        for index, (first, room) in enumerate(self._holes):
            if first == offset and room >= size:
                left = [(first + size, room - size)] if room > size else []
                self._holes[index : index + 1] = left
                return True
        return False

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
