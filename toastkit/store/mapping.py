"""Memory-mapped tensors: read on first use, and shared by all processes through the page cache.

A file that is replaced stays as it was for whoever has mapped it. Writing to one is detected
(`check`); truncating one ends the process that reads what is gone, with a message
(see glue/memory.cpp).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from toastkit.model.safetensors import Entry
from toastkit.store.direct import LARGE_PAGE
from toastkit.store.raw import DTYPES, RawTensors
from toastkit.threads import start_optional

POPULATE_READ = 22  # of madvise: prefaults pages for reading; Linux 5.14
AHEAD_BYTES = 64 << 20  # per madvise call, which needs no GIL; `close` can stop between two

Place = tuple[Path, Entry]  # of a tensor, as in Store.source


class _File(NamedTuple):
    """A mapped file. region: it is mapped into this, from byte `lead` on. address: of the file's
    first byte. fd, size, time: the file when it was mapped."""

    region: Any
    lead: int
    address: int
    fd: int
    size: int
    time: int


class MappedFiles:
    """The mapped files of a checkpoint. make_region(nbytes): a regions.Region.

    Raises OSError if the system will not map one, or has no addresses left.
    """

    def __init__(self, raw: RawTensors, make_region: Callable[[int], Any]):
        self._raw = raw
        self._files = {path: _mapped(raw, path, make_region) for path in raw.paths}
        self._ahead: list[tuple[int, int]] = []
        self._thread: threading.Thread | None = None
        self.closed = False

    def arrays(self, places: Mapping[Any, Place | None]) -> dict[Any, mx.array]:
        """Return tensors, each of its stored shape, such as (rows, columns), and dtype, evaluated;
        nothing is read. Those that it does not hold are left out."""
        found = {}
        for key, place in places.items():
            if place is not None and self.holds(place):
                file, entry = self._files[place[0]], place[1]
                dtype = DTYPES[entry.dtype]
                found[key] = file.region.array(file.lead + entry.start, dtype, entry.shape)
        return found

    def holds(self, place: Place) -> bool:
        """True if a tensor is stored unchanged, and aligned for an array."""
        path, entry = place
        whole = entry.inside is None and entry.nbytes > 0 and entry.stop <= self._files[path].size
        return whole and entry.start % DTYPES[entry.dtype].size == 0

    def check(self) -> None:
        """Raise DataError if a file is not the one that was mapped. One system call per file."""
        for file in () if self.closed else self._files.values():
            now = os.fstat(file.fd)
            if (now.st_size, now.st_mtime_ns) != (file.size, file.time):
                raise self._raw.changed()

    def read_ahead(self, places: Iterable[Place]) -> None:
        """Prefault the pages of tensors on a thread, in the order of the files, so that no product
        waits for a page fault or the disk. `close` drops the rest."""
        self._ahead = [
            (start, min(start + AHEAD_BYTES, stop))
            for first, stop in _joined(sorted(starmap(self._pages, places)))
            for start in range(first, stop, AHEAD_BYTES)
        ]
        self._ahead.reverse()
        if self._thread is None and self._ahead:
            self._thread = start_optional(self._prefault, "pages")  # without it products wait

    def _prefault(self) -> None:
        advise = ctypes.CDLL(None, use_errno=True).madvise  # releases the GIL
        advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        while self._ahead:
            start, stop = self._ahead.pop()
            if advise(start, stop - start, POPULATE_READ):
                advise(start, stop - start, mmap.MADV_WILLNEED)

    def _pages(self, path: Path, entry: Entry) -> tuple[int, int]:
        """The address range of a tensor's pages."""
        start = self._files[path].address
        first, stop = start + entry.start, start + entry.stop
        return first // mmap.PAGESIZE * mmap.PAGESIZE, -(-stop // mmap.PAGESIZE) * mmap.PAGESIZE

    def close(self) -> None:
        """Stop prefaulting and checking files. Arrays stay usable."""
        self._ahead, self.closed = [], True
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _mapped(raw: RawTensors, path: Path, make_region: Callable[[int], Any]) -> _File:
    """Map a file at an address where it can be backed by huge pages."""
    fd = raw.descriptor(path)
    about = os.fstat(fd)
    region = make_region(about.st_size + LARGE_PAGE)
    view = memoryview(region.array(0, mx.uint8, (1,)))
    first = ctypes.addressof(ctypes.c_char.from_buffer(view))
    lead = -first % LARGE_PAGE
    region.map_file(lead, fd, 0, about.st_size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # not supported
            region.advise(lead, about.st_size, mmap.MADV_HUGEPAGE)
    return _File(region, lead, first + lead, fd, about.st_size, about.st_mtime_ns)


def _joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge consecutive address ranges that touch."""
    found: list[tuple[int, int]] = []
    for first, stop in spans:
        if found and found[-1][0] <= first <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((first, stop))
    return found
