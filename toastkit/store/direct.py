"""Reading past the system's cache of files: from the disk into the memory of an array.

The system wants whole pages. Where file and memory lie in them alike, bytes go where they belong;
else, and where they share a page with others, they go through memory between and are copied.
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

PAGE = 4096  # no disk or system wants larger ones
BETWEEN_BYTES = 4 << 20  # memory between, of a thread
LARGE_PAGE = 2 << 20
LEAST_STRAIGHT = 64 << 10  # bytes of memory that is worth a place of its own in a call
CACHESTAT = 451  # the system call, on all processors; Linux 6.5


class DirectReads:
    """possible: whether this system can, as far as is known. opened: descriptors, by those of the
    same files with the cache; whoever closes these closes them. For several threads."""

    def __init__(self) -> None:
        self.opened: dict[int, int] = {}
        self._lock = threading.Lock()
        self._own = threading.local()
        self.possible = sys.platform == "linux" and hasattr(os, "O_DIRECT")

    def read(self, fd: int, views: Sequence[memoryview], start: int) -> int | None:
        """Reads what a file has from byte `start` on into views, one after another. fd: the file,
        opened as usual. Returns how many bytes, 0 at the end of the file; None where this system
        cannot, or has most of it in its cache. Raises OSError."""
        size = sum(map(len, views))
        if not self.possible or not self._is_outside_cache(fd, start, size):
            return None
        first = at = start // PAGE * PAGE  # the call is laid out from there to here
        between, used = self._between(), 0
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
                break  # the rest is for the next call
        try:
            count = os.preadv(self._direct(fd), buffers, first)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOENT):
                raise
            self.possible = False  # a file system that cannot, or none at /proc
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

    def _between(self) -> memoryview:
        """Memory of this thread, BETWEEN_BYTES, in large pages."""
        if not hasattr(self._own, "between"):
            found = unwritten(BETWEEN_BYTES + LARGE_PAGE)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                cast(mmap.mmap, found.obj).madvise(mmap.MADV_HUGEPAGE)
            lead = -_address(found) % LARGE_PAGE
            self._own.between = found[lead : lead + BETWEEN_BYTES]
        return self._own.between

    def _is_outside_cache(self, fd: int, start: int, size: int) -> bool:
        """Whether the system's cache has less than half of those bytes of a file."""
        where = (ctypes.c_uint64 * 2)(start, size)
        found = (ctypes.c_uint64 * 5)()  # pages in the cache, and what else there is to know
        if _system().syscall(CACHESTAT, fd, where, found, 0):
            self.possible = False  # an older system does not say
            return False
        return found[0] * mmap.PAGESIZE * 2 < size


@cache
def _system() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _pieces(views: Sequence[memoryview], start: int) -> Iterator[tuple[int, memoryview, bool]]:
    """Memory in the order of a file: first byte in the file, memory, and whether that is whole
    pages in both."""
    for memory in filter(len, views):
        lead = -start % PAGE
        whole = (len(memory) - lead) // PAGE * PAGE
        if whole < LEAST_STRAIGHT or (_address(memory) - start) % PAGE:
            lead, whole = len(memory), 0
        for first, stop in ((0, lead), (lead, lead + whole), (lead + whole, len(memory))):
            if first < stop:
                yield start + first, memory[first:stop], first == lead and whole > 0
        start += len(memory)


def unwritten(size: int) -> memoryview:
    """So many bytes of memory, one or more, that read as zeros and take none before they are
    written: a bytearray is written to, all of it, when it is made."""
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
