"""Direct I/O: read from the disk into an array's memory, bypassing the page cache.

Direct reads work in whole pages. Where file and memory are aligned alike, bytes go straight to
their place; elsewhere, and in pages shared with other bytes, through a bounce buffer.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from typing import cast

PAGE = 4096  # no disk or system needs larger ones
BOUNCE_BYTES = 4 << 20  # bounce buffer, per thread
LARGE_PAGE = 2 << 20  # of x86 and ARM
MIN_STRAIGHT = 64 << 10  # bytes of memory that deserve their own buffer in a call
CACHESTAT = 451  # system call number, on all processors; Linux 6.5


class DirectReads:
    """Direct reads; thread-safe. possible: whether this system supports them, as far as is known.
    opened: direct descriptors, by the buffered descriptor of the same file; whoever closes those
    closes them."""

    def __init__(self) -> None:
        self.opened: dict[int, int] = {}
        self._lock = threading.Lock()
        self._own = threading.local()
        self.possible = sys.platform == "linux" and hasattr(os, "O_DIRECT")

    def read(self, fd: int, views: Sequence[memoryview], start: int) -> int | None:
        """Read from byte `start` of a file into views, one after another. fd: the file, opened as
        usual. Return the number of bytes, 0 at the end of the file; None if the system cannot, or
        has most of them in the page cache. Raises OSError."""
        size = sum(map(len, views))
        if not self.possible or not self._is_outside_cache(fd, start, size):
            return None
        first = at = start // PAGE * PAGE  # the call covers everything from there to here
        between, used = self._bounce_buffer(), 0
        buffers: list[memoryview] = []
        copies: list[tuple[int, memoryview, int]] = []
        for position, memory, straight in _pieces(views, start):
            if straight:
                buffers.append(memory)
                at += len(memory)
                continue
            more = min(-(-(position + len(memory)) // PAGE) * PAGE - at, len(between) - used)
            if more > 0:
                buffers.append(between[used : used + more])
                at, used = at + more, used + more
            copies.append((position, memory, used - (at - position)))
            if at < position + len(memory):
                break  # left to the next call
        try:
            count = os.preadv(self._direct(fd), buffers, first)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOENT):
                raise
            self.possible = False  # the file system does not support it, or there is no /proc
            return None
        for position, memory, offset in copies:
            count_here = max(0, min(len(memory), first + count - position))
            memory[:count_here] = between[offset : offset + count_here]
        return max(0, min(first + count - start, size))

    def _direct(self, fd: int) -> int:
        with self._lock:
            if fd not in self.opened:
                flags = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT  # the same file, whatever its name
                self.opened[fd] = os.open(f"/proc/self/fd/{fd}", flags)
            return self.opened[fd]

    def _bounce_buffer(self) -> memoryview:
        """This thread's bounce buffer, BOUNCE_BYTES, in huge pages."""
        if not hasattr(self._own, "between"):
            found = unwritten(BOUNCE_BYTES + LARGE_PAGE)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                cast(mmap.mmap, found.obj).madvise(mmap.MADV_HUGEPAGE)
            lead = -_address(found) % LARGE_PAGE
            self._own.between = found[lead : lead + BOUNCE_BYTES]
        return self._own.between

    def _is_outside_cache(self, fd: int, start: int, size: int) -> bool:
        """True if less than half of those bytes of a file are in the page cache."""
        where = (ctypes.c_uint64 * 2)(start, size)
        found = (ctypes.c_uint64 * 5)()  # cached pages, then other counts
        if _system().syscall(CACHESTAT, fd, where, found, 0):
            self.possible = False  # an older system
            return False
        return found[0] * mmap.PAGESIZE * 2 < size


@cache
def _system() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _pieces(views: Sequence[memoryview], start: int) -> Iterator[tuple[int, memoryview, bool]]:
    """Yield memory in file order: (first byte in the file, memory, whether it is whole pages in
    both)."""
    for memory in filter(len, views):
        lead = -start % PAGE
        whole = (len(memory) - lead) // PAGE * PAGE
        if whole < MIN_STRAIGHT or (_address(memory) - start) % PAGE:
            lead, whole = len(memory), 0
        for first, stop in ((0, lead), (lead, lead + whole), (lead + whole, len(memory))):
            if first < stop:
                yield start + first, memory[first:stop], first == lead and whole > 0
        start += len(memory)


def unwritten(size: int) -> memoryview:
    """Return `size` >= 1 bytes that read as zeros and take no memory until written, unlike a
    bytearray, which is filled when created."""
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
