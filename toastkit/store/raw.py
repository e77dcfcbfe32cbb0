"""Tensors as the files hold them, under their stored names, and their bytes."""

from __future__ import annotations

import fcntl
import os
import sys
import threading
import time
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from toastkit.errors import DataError, as_data_error, reported_as
from toastkit.model.files import ModelFiles
from toastkit.model.safetensors import Entry
from toastkit.model.toast_format import ITEM_ALIGNMENT, is_model_tensor
from toastkit.private_files import pread_past_cache
from toastkit.store.direct import PAGE, DirectReads

# dtype in the file -> MLX's dtype for it. MLX reads no F64.
DTYPES = {
    "BOOL": mx.bool_, "U8": mx.uint8, "I8": mx.int8, "U16": mx.uint16, "I16": mx.int16,
    "F16": mx.float16, "BF16": mx.bfloat16, "U32": mx.uint32, "I32": mx.int32, "F32": mx.float32,
    "U64": mx.uint64, "I64": mx.int64, "C64": mx.complex64, "F8_E4M3": mx.uint8,
    "F8_E5M2": mx.uint8, "F8_E8M0": mx.uint8,
}  # fmt: skip
CHUNK_BYTES = 16 << 20  # per system call: a reader can be stopped between two
CALL_SECONDS = 0.004  # target duration of a call that may have to stop at any time
MIN_CALL_BYTES = 64 << 10
CALL_BUFFERS = 1024  # per system call: IOV_MAX of Linux and macOS


class Span(NamedTuple):
    """Bytes start:stop of a file."""

    path: Path
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.stop - self.start

    def precedes(self, other: Span) -> bool:
        """True if there is nothing but padding between this and another."""
        return self.path is other.path and 0 <= other.start - self.stop < ITEM_ALIGNMENT


class RawTensors:
    """The tensors of a checkpoint's files: (rows, columns), or whatever their shape is, in the
    stored dtype. A file is opened on first read and stays open until `close`. Raises what
    from_os_error gives if a file is gone.

    cached: what `fill` reads may stay in the page cache; otherwise it leaves the cache as it was.
    """

    def __init__(self, files: ModelFiles):
        self._files = files
        self.cached = True
        self._places: dict[str, tuple[Path, Entry]] = {}
        self._identities = {header.path: _identity(header.path) for header in files.headers}
        for header in files.headers:
            for name, entry in header.entries.items():
                self._places[name] = (header.path, entry)
        self._sorted = sorted(self._places)
        self._lock = threading.Lock()
        self._opened: dict[Path, int] = {}
        self._direct = DirectReads()
        self._own = threading.local()  # call_bytes: size of a short call
        self.close = weakref.finalize(self, _close_all, self._opened, self._direct.opened)

    def below(self, prefix: str) -> list[str]:
        """The stored names that begin with a prefix, which ends with a dot."""
        names, last = self._sorted, prefix[:-1] + chr(ord(".") + 1)
        return names[bisect_left(names, prefix) : bisect_left(names, last)]

    @property
    def paths(self) -> list[Path]:
        """Paths of the files."""
        return list(self._identities)

    def place(self, name: str) -> tuple[Path, Entry]:
        """The file of a tensor and its entry there. Raises KeyError."""
        return self._places[name]

    def spans(self, name: str, first: int = 0, stop: int | None = None) -> tuple[Span, ...]:
        """The bytes of rows first:stop (all without stop) of a stored tensor. Raises KeyError."""
        path, entry = self._places[name]
        if stop is None and entry.inside is None:
            return (Span(path, entry.start, entry.stop),)
        stop = entry.shape[0] if stop is None else stop
        row = entry.nbytes // entry.shape[0]
        if entry.inside is None:
            return (Span(path, entry.start + first * row, entry.start + stop * row),)
        starts = (entry.start + n * entry.stride for n in range(first, stop))
        return tuple(Span(path, start, start + row) for start in starts)

    def load(self) -> dict[str, mx.array]:
        """All model tensors by stored name, lazy, in new arrays. Raises DataError, NoInputError,
        IOFailure."""
        tensors: dict[str, mx.array] = {}
        for header in self._files.headers:
            _identity(header.path)  # MLX does not say why it cannot read a file
            try:
                # MLX takes UTF-8, whatever the locale's encoding.
                path = os.fsencode(header.path).decode()
                found = mx.load(path, format="safetensors")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"MLX opens no path that is not UTF-8: {str(header.path)!r}"
                ) from error
            except (RuntimeError, ValueError, OSError) as error:
                failed = f"{self._files.name}: cannot read {header.path.name}"
                raise as_data_error(error, failed) from error
            assert isinstance(found, dict)  # as for every safetensors file
            for name, entry in header.entries.items():
                if is_model_tensor(name):
                    tensors[name] = found[name] if entry.inside is None else _part(found, entry)
        return tensors

    def fill(
        self,
        wanted: Iterable[tuple[Span, memoryview]],
        stopped: Callable[[], bool],
        short_calls: bool = False,
    ) -> int:
        """Read spans, one after another, into memory of their size, neighbours with one system
        call; stop when `stopped()`. short_calls: make that possible every CALL_SECONDS or so,
        whatever the medium. Return the bytes read. Raises DataError for a file that was truncated
        or replaced, and what from_os_error gives."""
        read = 0
        for path, start, views in _ranges(wanted):
            with reported_as(f"cannot read {path}"):
                fd = self.descriptor(path)
                while views and not stopped():
                    begun = time.perf_counter()
                    called = self._short(views, start) if short_calls else views
                    count = self._pread(fd, called, start)
                    if not count:
                        raise DataError(f"{self._files.name}: {path.name} is shorter than it was")
                    start, views, read = start + count, _parted(views, count)[1], read + count
                    seconds = max(time.perf_counter() - begun, 1e-9)
                    self._own.call_bytes = count * CALL_SECONDS / seconds
        return read

    def _short(self, views: list[memoryview], start: int) -> list[memoryview]:
        """The part of the views that takes CALL_SECONDS at the rate of this thread's last call, up
        to the end of a page of the file."""
        size = max(MIN_CALL_BYTES, int(getattr(self._own, "call_bytes", CHUNK_BYTES)))
        return _parted(views, (start + size) // PAGE * PAGE - start)[0]

    def _pread(self, fd: int, views: list[memoryview], start: int) -> int:
        """Read into views, one after another; return the number of bytes."""
        if self.cached:
            return os.preadv(fd, views, start)
        count = self._direct.read(fd, views, start)
        if count is not None:
            return count
        count = pread_past_cache(fd, views, start)
        if count is not None:
            return count
        if sys.platform == "darwin":
            fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
        count = os.preadv(fd, views, start)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, start, count, os.POSIX_FADV_DONTNEED)
        return count

    def forget_cached(self, places: Iterable[tuple[Path, Entry]]) -> None:
        """Drop these tensors from the page cache, where the system allows it; on macOS, what is
        read bypassing it is dropped. Raises DataError for a replaced file, and what from_os_error
        gives."""
        for path, entry in places if hasattr(os, "posix_fadvise") else ():
            with reported_as(f"cannot read {path}"):
                fd = self.descriptor(path)
                os.posix_fadvise(fd, entry.start, entry.stop - entry.start, os.POSIX_FADV_DONTNEED)

    def descriptor(self, path: Path) -> int:
        """The descriptor of a file, opened on first use. Raises OSError, DataError for a replaced
        file."""
        with self._lock:
            fd = self._opened.get(path)
            if fd is None:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._opened[path] = fd
                if os.fstat(fd).st_ino != self._identities[path][0]:
                    raise self.changed()
            return fd

    def check_files(self) -> None:
        """Raise DataError if a file is not the one whose header was read, NoInputError if it is
        gone. An open file stays readable when another takes its name."""
        for path, known in self._identities.items():
            if _identity(path) != known:
                raise self.changed()

    def changed(self) -> DataError:
        """The error for files that have changed since they were opened."""
        return DataError(
            f"{self._files.name}: its files have changed since the model was loaded",
            hint="start again; toasted reload has a daemon do so",
        )


def _part(found: dict[str, mx.array], entry: Entry) -> mx.array:
    """A tensor of (experts, ...), lazy, out of one that is stored expert by expert."""
    assert entry.inside is not None
    first, row = entry.start - entry.inside.start, entry.nbytes // entry.shape[0]
    rows = found[entry.inside.name][:, first : first + row]
    return rows.view(DTYPES[entry.dtype]).reshape(entry.shape)


def _ranges(
    wanted: Iterable[tuple[Span, memoryview]],
) -> Iterator[tuple[Path, int, list[memoryview]]]:
    """Group reads into system calls: (file, first byte, memory), of at most CHUNK_BYTES and
    CALL_BUFFERS. A few bytes of padding between neighbours are read and discarded."""
    whole = Span(Path(), 0, 0)  # of the call
    views: list[memoryview] = []
    for span, view in wanted:
        for start in range(span.start, span.stop, CHUNK_BYTES):
            part = Span(span.path, start, min(start + CHUNK_BYTES, span.stop))
            room = part.stop - whole.start <= CHUNK_BYTES and len(views) + 2 <= CALL_BUFFERS
            if views and not (whole.precedes(part) and room):
                yield whole.path, whole.start, views
                views = []
            if not views:
                whole = part
            elif part.start > whole.stop:
                views.append(memoryview(bytearray(part.start - whole.stop)))
            views.append(view[part.start - span.start : part.stop - span.start])
            whole = whole._replace(stop=part.stop)
    if views:
        yield whole.path, whole.start, views


def _parted(views: list[memoryview], count: int) -> tuple[list[memoryview], list[memoryview]]:
    """The memory of the first `count` bytes, and the rest."""
    for n, view in enumerate(views):
        if count < len(view):
            return [*views[:n], view[:count]], [view[count:], *views[n + 1 :]]
        count -= len(view)
    return views, []


def _identity(path: Path) -> tuple[int, int, int]:
    """Identify a file, to detect replacement and modification."""
    with reported_as(f"cannot read {path}"):
        about = os.stat(path)
    return about.st_ino, about.st_size, about.st_mtime_ns


def _close_all(*opened: dict[Any, int]) -> None:
    for descriptors in opened:
        while descriptors:
            os.close(descriptors.popitem()[1])
