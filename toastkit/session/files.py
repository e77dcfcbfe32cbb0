"""Small helpers over file descriptors: whole reads and writes at an offset, private files.

Session data is written with pwrite and never through a memory map: a full disk is then ENOSPC from
the call that hit it, where a map would be killed by SIGBUS.
"""

from __future__ import annotations

import os
from pathlib import Path


def open_private(path: Path, flags: int) -> int:
    """A descriptor, closed on exec; a file that is created gets mode 0600."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def pwrite_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Writes all of `data` at a byte offset. Raises OSError."""
    view = memoryview(data)
    while view.nbytes:
        written = os.pwrite(fd, view, offset)
        view = view[written:]
        offset += written


def pread_into(fd: int, buffer: memoryview, offset: int) -> bool:
    """Fills the buffer from a byte offset. Returns False if the file ends before that."""
    while buffer.nbytes:
        count = os.preadv(fd, [buffer], offset)
        if not count:
            return False
        buffer = buffer[count:]
        offset += count
    return True


def read_file(path: Path, max_bytes: int) -> bytes:
    """A file's bytes, one more than max_bytes at most. Raises OSError."""
    with open(path, "rb") as file:
        return file.read(max_bytes + 1)


def replace_file(path: Path, data: bytes, sync: bool, beside: Path | None = None) -> None:
    """Puts `data` in the place of a file in one step: write beside it, sync, rename.
    The directory is not synced. beside: where to write first, for files that several processes
    replace. Raises OSError, with the file as it was."""
    beside = beside or path.with_name(path.name + ".tmp")
    try:
        fd = open_private(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            pwrite_all(fd, data, 0)
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(beside, path)
    except BaseException:
        try:
            os.unlink(beside)
        except OSError:
            pass  # the failure to report is the first one
        raise


def sync_directory(path: Path) -> None:
    """Makes renames in a directory durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class DataFiles:
    """The data files of one directory, each opened at its first use. writes: they are opened for
    writing too, and created."""

    def __init__(self, directory: Path, writes: bool):
        self._directory = directory
        self._flags = os.O_RDWR | os.O_CREAT if writes else os.O_RDONLY
        self._fds: dict[str, int] = {}

    def fd(self, name: str) -> int:
        """The descriptor of a file. Raises OSError."""
        if name not in self._fds:
            self._fds[name] = open_private(self._directory / name, self._flags)
        return self._fds[name]

    def size(self, name: str) -> int:
        """Bytes; 0 for a file that is not there. Raises OSError."""
        try:
            return os.stat(self._directory / name).st_size
        except FileNotFoundError:
            return 0

    def read(self, name: str, buffer: memoryview, offset: int) -> bool:
        """Fills the buffer from a byte offset; False if the file ends before. Raises OSError."""
        return not buffer.nbytes or pread_into(self.fd(name), buffer, offset)

    def sync(self) -> None:
        """Makes durable what was written to any of them. Raises OSError."""
        for fd in self._fds.values():
            os.fsync(fd)

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])
