"""Address ranges that files are mapped into, and MLX arrays over them.

    region = Region(library, nbytes)          addresses, not readable yet
    region.map_file(0, fd, offset, nbytes)    bytes of a file, copy on write
    region.room(at, nbytes)                   zeros
    array = region.array(0, mx.float32, shape)

A region lives as long as it or any of its arrays. A mapping costs no memory but the file's page
cache, shared by all processes, until a page is written to: then this process has its own copy.
Files are never written to. Unwritten pages keep showing the file as others write to it. Reading
beyond the end of a file that was truncated ends the process (SIGBUS), with a line and exit code 74
unless someone else handles that signal: map only files that nobody truncates. Those of models and
sessions are moved into place whole, or locked while mapped.

MLX reads such an array as any other, and never writes to its memory. Operations of the glue may, if
the array is unshared: see glue/arrays.h."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

import mlx.core as mx

from toastkit.errors import IOFailure
from toastkit.native.library import Library

LOST = (
    "toastkit: a file of the model, or of a session, became shorter while it was in use, "
    "or cannot be read\n"
)
PAGE = os.sysconf("SC_PAGE_SIZE")  # bytes; the alignment of mappings and file offsets


class Region:
    """An address range, rounded up to whole pages of PAGE bytes. Raises OSError if the system has
    none left (RLIMIT_AS).

    nbytes: of all of it. A forked process has its own, with the same content."""

    def __init__(self, library: Library, nbytes: int):
        self._c = library.c
        self._c.end_with_line(LOST.encode(), IOFailure.code)
        self.nbytes = -(-nbytes // PAGE) * PAGE
        self._handle = ctypes.c_void_p()
        self._c.region_open(nbytes, ctypes.byref(self._handle))

    def map_file(self, at: int, fd: int, offset: int, nbytes: int) -> None:
        """Map nbytes of a file from byte `offset` on to byte `at` of the region, both multiples of
        PAGE, in place of what was there. The descriptor may be closed afterwards. Raises OSError:
        EINVAL for misplaced bytes, ENOMEM for too many mappings."""
        if fd < 0:
            raise ValueError(f"no descriptor: {fd}")
        self._c.region_map(self._handle, at, nbytes, fd, offset)

    def room(self, at: int, nbytes: int) -> None:
        """Make nbytes from byte `at`, a multiple of PAGE, writable zeros; they take memory when
        touched. Raises OSError."""
        self._c.region_map(self._handle, at, nbytes, -1, 0)

    def grow(self, at: int, nbytes: int) -> None:
        """Let a cache's array that begins with byte `at` grow to so many bytes, all writable, in
        place. Raises OSError."""
        self._c.region_grow(self._handle, at, nbytes)

    def keep(self, fd: int) -> None:
        """Close a descriptor, one at most, when the region ends."""
        self._c.region_keep(self._handle, fd)

    def advise(self, at: int, nbytes: int, how: int) -> None:
        """Advise the system about the pages of these bytes; how: mmap.MADV_WILLNEED or others.
        Raises OSError."""
        self._c.region_advise(self._handle, at, nbytes, how)

    def array(self, at: int, dtype: mx.Dtype, shape: Sequence[int]) -> mx.array:
        """Return an array (...) of any dtype over the bytes from `at` on, a multiple of the item
        size, in row-major order; evaluated. All of it must be mapped. Raises ValueError beyond the
        region."""
        out, sizes = mx.array(0), (ctypes.c_int32 * len(shape))(*shape)
        self._c.region(out, self._handle, at, mx.zeros((), dtype), sizes, len(shape))
        return out

    def __del__(self) -> None:
        if self._handle:
            self._c.region_close(self._handle)
