"""Tensors as the files hold them, under their stored names, and their bytes."""

from __future__ import annotations

import errno
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

from toastkit.errors import DataError, from_os_error, reported_as
from toastkit.model.files import ModelFiles
from toastkit.model.safetensors import Entry
from toastkit.model.toast_format import ITEM_ALIGNMENT, is_model_tensor
from toastkit.store.direct import PAGE, DirectReads

# dtype in the file -> how numpy sees the bytes, and as what MLX takes them.
DTYPES = {
    "BOOL": ("?", mx.bool_), "U8": ("u1", mx.uint8), "I8": ("i1", mx.int8),
    "U16": ("<u2", mx.uint16), "I16": ("<i2", mx.int16), "F16": ("<f2", mx.float16),
    "BF16": ("<u2", mx.bfloat16), "U32": ("<u4", mx.uint32), "I32": ("<i4", mx.int32),
    "F32": ("<f4", mx.float32), "U64": ("<u8", mx.uint64), "I64": ("<i8", mx.int64),
    "F8_E4M3": ("u1", mx.uint8), "F8_E5M2": ("u1", mx.uint8), "F8_E8M0": ("u1", mx.uint8),
}  # fmt: skip
CHUNK_BYTES = 16 << 20  # of one system call: between two, a reader can be stopped
CALL_SECONDS = 0.004  # that one system call is to take, of what may be left off at any time
LEAST_CALL_BYTES = 64 << 10
CALL_BUFFERS = 1024  # of one system call: IOV_MAX of Linux and macOS
RWF_DONTCACHE = 0x80  # Linux 6.14: pages that this read brought into the cache leave it again


class Span(NamedTuple):
    """Bytes start:stop of a file."""

    path: Path
    start: int
    stop: int

    def precedes(self, other: Span) -> bool:
        """Whether there is nothing but padding between this and another."""
        return self.path is other.path and 0 <= other.start - self.stop < ITEM_ALIGNMENT


class RawTensors:
    """The tensors of a checkpoint's files, as these have them: (rows, columns) in the stored dtype,
    or whatever their shape is. A file is opened when it is first read, and stays open
    until `close`. Raises what from_os_error gives where a file is gone.

    cached: whether what `fill` reads may stay in the system's cache of files. Else what was not
    there before is not left there. throttle: for measurements, told the bytes of each read when it
    is done, and when it began, by time.perf_counter: who sleeps there makes the files as slow as
    some other medium.
    """

    def __init__(self, files: ModelFiles):
        self._files = files
        self.cached = True
        self.throttle: Callable[[int, float], None] | None = None
        self._dropping = RWF_DONTCACHE if sys.platform == "linux" else 0
        self._places: dict[str, tuple[Path, Entry]] = {}
        self._identities = {header.path: _identity(header.path) for header in files.headers}
        for header in files.headers:
            for name, entry in header.entries.items():
                self._places[name] = (header.path, entry)
        self._sorted = sorted(self._places)
        self._lock = threading.Lock()
        self._opened: dict[Path, int] = {}
        self._direct = DirectReads()
        self._own = threading.local()  # call_bytes: what a short call reads
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
        """The file of a tensor, and where in it. Raises KeyError."""
        return self._places[name]

    def spans(self, name: str, first: int = 0, stop: int | None = None) -> tuple[Span, ...]:
        """Where rows first:stop (all without stop) of a stored tensor lie. Raises KeyError."""
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
        """All tensors of the model by stored name, lazy and fresh. Raises DataError, NoInputError,
        IOFailure."""
        tensors: dict[str, mx.array] = {}
        for header in self._files.headers:
            _identity(header.path)  # MLX does not say why it cannot read a file
            try:
                path = str(header.path)
                path.encode()
                found = mx.load(path, format="safetensors")
            except UnicodeEncodeError as error:
                raise DataError(f"MLX opens no path that is not UTF-8: {path!r}") from error
            except (RuntimeError, ValueError, OSError) as error:
                reason = str(error).strip().split("\n")[0]
                raise DataError(
                    f"{self._files.name}: cannot read {header.path.name}: {reason}"
                ) from error
            assert isinstance(found, dict)  # what a safetensors file gives
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
        """Reads spans, one after another, into memory of their size in bytes, by one system call
        those that lie side by side; leaves off where `stopped` says so. short_calls: so that it
        does within CALL_SECONDS or so, whatever the medium. Returns the bytes that were read.
        Raises DataError for a file that has become shorter or another one, and what from_os_error
        gives."""
        read = 0
        for path, start, views in _ranges(wanted):
            try:
                fd = self.descriptor(path)
                while views and not stopped():
                    begun = time.perf_counter()
                    called = self._short(views, start) if short_calls else views
                    count = self._pread(fd, called, start)
                    if not count:
                        raise DataError(f"{self._files.name}: {path.name} is shorter than it was")
                    start, views, read = start + count, _after(views, count), read + count
                    if self.throttle is not None:
                        self.throttle(count, begun)
                    seconds = max(time.perf_counter() - begun, 1e-9)
                    self._own.call_bytes = count * CALL_SECONDS / seconds
            except OSError as error:
                raise from_os_error(error, f"cannot read {path}") from error
        return read

    def _short(self, views: list[memoryview], start: int) -> list[memoryview]:
        """The memory that is filled within CALL_SECONDS, as fast as this thread's last call was, up
        to the end of a page of the file."""
        size = max(LEAST_CALL_BYTES, int(getattr(self._own, "call_bytes", CHUNK_BYTES)))
        return _before(views, (start + size) // PAGE * PAGE - start)

    def _pread(self, fd: int, views: list[memoryview], start: int) -> int:
        """Reads into views, one after another; how many bytes."""
        if self.cached:
            return os.preadv(fd, views, start)
        count = self._direct.read(fd, views, start)
        if count is not None:
            return count
        if self._dropping:
            try:
                return os.preadv(fd, views, start, self._dropping)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
                self._dropping = 0  # an older system, or a file system that cannot
        if sys.platform == "darwin":
            fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
        count = os.preadv(fd, views, start)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, start, count, os.POSIX_FADV_DONTNEED)
        return count

    def forget_cached(self, places: Iterable[tuple[Path, Entry]]) -> None:
        """Has the system's cache of files forget what lies there, where it can be told to: on macOS
        what is read past it is. Raises DataError for another file, and what from_os_error gives."""
        for path, entry in places if hasattr(os, "posix_fadvise") else ():
            with reported_as(f"cannot read {path}"):
                fd = self.descriptor(path)
                os.posix_fadvise(fd, entry.start, entry.stop - entry.start, os.POSIX_FADV_DONTNEED)

    def descriptor(self, path: Path) -> int:
        """The descriptor of a file, opened when first asked for. Raises OSError, DataError for
        another file."""
        with self._lock:
            fd = self._opened.get(path)
            if fd is None:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._opened[path] = fd
                if os.fstat(fd).st_ino != self._identities[path][0]:
                    raise self.changed()
            return fd

    def check_files(self) -> None:
        """Raises DataError where a file is no longer the one whose header was read, NoInputError
        where it is gone. A file that is open stays readable when another takes its name."""
        for path, known in self._identities.items():
            if _identity(path) != known:
                raise self.changed()

    def changed(self) -> DataError:
        """The error for files that are no longer those that were opened."""
        return DataError(
            f"{self._files.name}: its files have changed since the model was loaded",
            hint="start again; toasted reload has a daemon do so",
        )


def _part(found: dict[str, mx.array], entry: Entry) -> mx.array:
    """A tensor of (experts, ...), lazy, out of what holds it expert by expert."""
    assert entry.inside is not None
    first, row = entry.start - entry.inside.start, entry.nbytes // entry.shape[0]
    rows = found[entry.inside.name][:, first : first + row]
    return rows.view(DTYPES[entry.dtype][1]).reshape(entry.shape)


def _ranges(
    wanted: Iterable[tuple[Span, memoryview]],
) -> Iterator[tuple[Path, int, list[memoryview]]]:
    """What is read by one system call each: (file, first byte, memory), of at most CHUNK_BYTES and
    CALL_BUFFERS. Between neighbours a few bytes of padding are read too, and forgotten."""
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


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """The memory that is left when `count` bytes have been read."""
    for n, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[n + 1 :]]
        count -= len(view)
    return []


def _before(views: list[memoryview], count: int) -> list[memoryview]:
    """The memory of the first `count` bytes."""
    for n, view in enumerate(views):
        if count <= len(view):
            return [*views[:n], view[:count]]
        count -= len(view)
    return views


def _identity(path: Path) -> tuple[int, int, int]:
    """What tells a file from another that took its name, and from one that was written to."""
    with reported_as(f"cannot read {path}"):
        about = os.stat(path)
    return about.st_ino, about.st_size, about.st_mtime_ns


def _close_all(*opened: dict[Any, int]) -> None:
    for descriptors in opened:
        while descriptors:
            os.close(descriptors.popitem()[1])
