"""Ranges of memory that files are mapped into, and MLX arrays over them.

    region = Region(library, nbytes)          addresses; nothing may be read there yet
    region.map_file(0, fd, offset, nbytes)    bytes of a file, copied where they are written to
    region.room(at, nbytes)                   zeros
    array = region.array(0, mx.float32, shape)

A region is there until both it and its arrays are gone. What is mapped costs no memory but the
system's cached pages of the file, which all processes have in common, until a page is written to;
then that page is this process's own. No file is ever written to by way of a region. Unwritten pages
go on to show what the file has there, whoever writes it. A file that ends before what is mapped
of it ends the process that reads there (SIGBUS), with a line and exit code 74 where nobody else
takes that signal: map files only that nobody makes shorter. Those of models and sessions are put in
place whole, or have a lock while they are mapped.

MLX reads such an array as any other, and never writes to its memory. Operations of the glue may,
where nobody else has the array: see glue/arrays.h.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

import mlx.core as mx

from toastkit.errors import IOFailure
from toastkit.native.library import Library, need

LOST = (
    "toastkit: a file of the model, or of a session, became shorter while it was in use, "
    "or cannot be read\n"
)
PAGE = os.sysconf("SC_PAGE_SIZE")  # bytes; where maps, and what is mapped of files, begin


class Region:
    """So many bytes of addresses, in whole pages of PAGE bytes. Raises OSError where the system has
    none (RLIMIT_AS).

    nbytes: of all of it. A process that is forked has its own, as it was."""

    def __init__(self, library: Library, nbytes: int):
        loaded = library.loaded
        loaded.toast_end_with_line(LOST.encode(), IOFailure.code)
        make, self._close = loaded.toast_region, loaded.toast_region_close
        make.argtypes = [ctypes.c_int64, ctypes.c_void_p]
        self._close.restype, self._close.argtypes = None, [ctypes.c_void_p]
        whole, number = ctypes.c_int64, ctypes.c_int
        self._keep = loaded.toast_region_keep
        self._keep.restype, self._keep.argtypes = None, [ctypes.c_void_p, number]
        self._map, self._advise = loaded.toast_region_map, loaded.toast_region_advise
        self._map.argtypes = [ctypes.c_void_p, whole, whole, number, whole]
        self._advise.argtypes = [ctypes.c_void_p, whole, whole, number]
        self._array, array = loaded.toast_region_array, ctypes.py_object
        self._array.restype = ctypes.c_char_p
        self._array.argtypes = [array, ctypes.c_void_p, whole, array, ctypes.c_void_p, number]
        self.nbytes = -(-nbytes // PAGE) * PAGE
        self._handle = ctypes.c_void_p()
        self._need(make(nbytes, ctypes.byref(self._handle)))

    def map_file(self, at: int, fd: int, offset: int, nbytes: int) -> None:
        """Maps nbytes of a file, of which the descriptor may be closed then, from byte `offset` on
        to byte `at` of the region, both where pages begin; what was there before is gone. Raises
        OSError; EINVAL for places that are none, ENOMEM for too many maps."""
        if fd < 0:
            raise ValueError(f"no descriptor: {fd}")
        self._need(self._map(self._handle, at, nbytes, fd, offset))

    def room(self, at: int, nbytes: int) -> None:
        """Has nbytes from byte `at` on, where a page begins, be zeros that may be written to. They
        take memory where they are. Raises OSError."""
        self._need(self._map(self._handle, at, nbytes, -1, 0))

    def keep(self, fd: int) -> None:
        """Has a descriptor closed when the region ends; one at most."""
        self._keep(self._handle, fd)

    def advise(self, at: int, nbytes: int, how: int) -> None:
        """Tells the system about pages in which these bytes are; how: as of mmap.MADV_WILLNEED and
        others. Raises OSError."""
        self._need(self._advise(self._handle, at, nbytes, how))

    def array(self, at: int, dtype: mx.Dtype, shape: Sequence[int]) -> mx.array:
        """An array (...) of any dtype over what lies there, in rows from byte `at` on, a multiple
        of a number's bytes; evaluated. All of it must be mapped. Raises ValueError for one beyond
        the region."""
        out, sizes = mx.array(0), (ctypes.c_int32 * len(shape))(*shape)
        need(self._array(out, self._handle, at, mx.zeros((), dtype), sizes, len(shape)))
        return out

    def _need(self, code: int) -> None:
        if code:
            raise OSError(code, os.strerror(code))

    def __del__(self) -> None:
        if self._handle:
            self._close(self._handle)
