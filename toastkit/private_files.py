"""Files and directories private to this user: opened, replaced, read and written whole.

A directory may come from anywhere, such as an archive. So what is opened by name here must be a
regular file of this user's, or Misplaced is raised: nothing that somebody planted in its place is
followed, waited for or written to.

Data is written with pwrite and never through a memory map: a full disk is then ENOSPC from the call
that hit it, where a map would be killed by SIGBUS.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import sys
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from toastkit.errors import Misplaced, SecondName, reported_as

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from threading import Thread

STALE_SECONDS = 3600.0  # a file that is being written is no older
RWF_DONTCACHE = 0x80  # of preadv2; Linux 6.14
_FLOCK = "hhqqi4x"  # struct flock of Linux
_KINDS = {
    stat.S_IFREG: "a regular file", stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO",
    stat.S_IFLNK: "a symbolic link", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}  # fmt: skip


def open_private(
    path: Path | str, flags: int, at: int | None = None, kind: int = stat.S_IFREG
) -> int:
    """Open a file of this user's; return its descriptor. A file that is created gets mode 0600.

    at: the descriptor of the directory that a relative path is in. kind: required file type, as in
    st_mode. Raises OSError, Misplaced for anything else: a symbolic link, another user's file, or
    one that is to be written and has a second name (a hard link).
    """
    # O_NONBLOCK: opening a FIFO would wait for its other end.
    safe = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    try:
        fd = os.open(path, flags | safe, 0o600, dir_fd=at)
    except OSError as error:
        try:
            about = os.stat(path, dir_fd=at, follow_symlinks=False)
        except OSError:
            raise error from None  # nothing is there: it could not be created
        check_private(path, about, kind, 0)
        raise
    try:
        check_private(path, os.fstat(fd), kind, flags)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_private(path: Path | str, about: os.stat_result, kind: int, flags: int) -> None:
    """Raise Misplaced for what `open_private` refuses. about: of the file. Rest: as there."""
    found = stat.S_IFMT(about.st_mode)
    problem, error = "", Misplaced
    if found != kind:
        problem = f"is {_KINDS.get(found, 'no file')}"
    elif about.st_uid != os.geteuid():
        problem = "is another user's"
    elif kind == stat.S_IFREG and flags & (os.O_WRONLY | os.O_RDWR) and about.st_nlink > 1:
        problem = "is to be written and has a second name (a hard link)"
        error = SecondName
    if problem:
        raise error(errno.EEXIST, f"{os.path.basename(path)} {problem}")


def open_directory(path: Path | str, follow: bool = False) -> int:
    """Open a directory of this user's; return its descriptor. follow: the user named it, so it may
    be a link, or another user's. Raises OSError, Misplaced."""
    if follow:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return open_private(path, os.O_RDONLY | os.O_DIRECTORY, kind=stat.S_IFDIR)


@contextmanager
def closing_fd(fd: int) -> Iterator[int]:
    """Close a descriptor at the end."""
    try:
        yield fd
    finally:
        os.close(fd)


def pwrite_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at a byte offset. Raises OSError."""
    view = memoryview(data)
    while view.nbytes:
        written = os.pwrite(fd, view, offset)
        view = view[written:]
        offset += written


def copy_range(source: int, first: int, fd: int, offset: int, count: int) -> None:
    """Copy bytes between files inside the kernel; file systems that can (btrfs, xfs) share them.
    Raises OSError, also if the system cannot."""
    if not hasattr(os, "copy_file_range"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    while count:
        copied = os.copy_file_range(source, fd, count, first, offset)
        if not copied:
            raise OSError(errno.EIO, "the file ends before that")
        first, offset, count = first + copied, offset + copied, count - copied


def pread_past_cache(fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int | None:
    """Read into buffers from a byte offset, and have the page cache not keep what was not there;
    return how many bytes. None if the system or the file system cannot. Raises OSError."""
    if sys.platform != "linux":
        return None
    try:
        return os.preadv(fd, buffers, offset, RWF_DONTCACHE)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        return None


def pread_into(fd: int, buffer: memoryview, offset: int) -> bool:
    """Fill the buffer from a byte offset. Returns False if the file ends before that."""
    while buffer.nbytes:
        count = os.preadv(fd, [buffer], offset)
        if not count:
            return False
        buffer = buffer[count:]
        offset += count
    return True


def read_file(path: Path | str, max_bytes: int, at: int | None = None) -> bytes:
    """Read a file of this user's, at most one byte more than max_bytes. at: as in open_private.
    Raises OSError, Misplaced."""
    with open(open_private(path, os.O_RDONLY, at), "rb") as file:
        # Request no more than there is: allocating max_bytes takes longer than reading most files.
        return file.read(min(os.fstat(file.fileno()).st_size, max_bytes) + 1)


def replace_file(
    path: Path | str, data: bytes, sync: bool, contended: bool = False, at: int | None = None
) -> None:
    """Replace a file by `data` atomically: write a temporary file beside it, sync, rename. The
    directory is not synced. contended: several processes may do so at once; what killed ones have
    left is removed. at: as in open_private. Raises OSError, with the file unchanged."""
    temporary = f"{path}.{os.getpid()}.tmp" if contended else f"{path}.tmp"
    _remove(temporary, at)  # left by a killed process, or planted
    if contended:
        _sweep(path)
    try:
        with closing_fd(open_private(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, at)) as fd:
            pwrite_all(fd, data, 0)
            if sync:
                os.fsync(fd)
        os.replace(temporary, path, src_dir_fd=at, dst_dir_fd=at)
    except BaseException:
        with suppress(OSError):  # the failure to report is the first one
            _remove(temporary, at)
        raise


def _remove(path: Path | str, at: int | None) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path, dir_fd=at)


def _sweep(path: Path | str) -> None:
    """Remove the temporary files of other replacements of a file that are old: their processes were
    killed. (The numbers in their names may be other processes' by now, or another machine's.)"""
    folder, name = os.path.split(path)
    with suppress(OSError), os.scandir(folder or ".") as entries:
        for entry in entries:
            temporary = entry.name.startswith(f"{name}.") and entry.name.endswith(".tmp")
            since = time.time() - STALE_SECONDS
            if temporary and entry.stat(follow_symlinks=False).st_mtime < since:
                os.unlink(entry.path)


def try_lock(fd: int) -> bool:
    """Take the lock (flock, exclusive) of an open file, without waiting; False if another holds it.
    Raises OSError."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def lock_file(path: Path | str) -> int | None:
    """Lock a file, created if absent, and return its descriptor; None if another process holds the
    lock. A lock on a file that was removed meanwhile is no lock: the next process would create a
    new file and lock that. Raises OSError, Misplaced."""
    while True:
        fd = open_private(path, os.O_RDWR | os.O_CREAT)
        try:
            if not try_lock(fd):
                os.close(fd)
                return None
            if os.path.samestat(os.fstat(fd), os.lstat(path)):
                return fd
        except FileNotFoundError:
            pass
        except OSError:
            os.close(fd)
            raise
        os.close(fd)


def hold_bytes(fd: int, first: int, count: int) -> None:
    """Hold a read lock on bytes of a file, which asks writers not to change them, for as long as
    this open file description lasts, here or in a process that inherited it. Raises OSError if the
    system has no such locks (Linux has)."""
    setting = getattr(fcntl, "F_OFD_SETLK", None)
    if setting is None or sys.platform != "linux":
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    fcntl.fcntl(fd, setting, struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, first, count, 0))


def held_until(fd: int, first: int, count: int) -> int | None:
    """Return the end of a range among these bytes that another open file description holds; None if
    there is none. Raises OSError if it extends to infinity, which none of ours does."""
    if sys.platform != "linux" or not count:
        return None
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, first, count, 0)
    try:
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked)
    except OSError:
        return None  # then nobody could hold them
    kind, _, start, length, _ = struct.unpack(_FLOCK, answer)
    if kind == fcntl.F_UNLCK:
        return None
    if not length:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
    return start + length


class Descriptor:
    """Owns a descriptor, _fd, until it is closed. path: of its file, or of what it stands for."""

    def __init__(self, path: Any, fd: int):
        self.path, self._fd = path, fd

    def close(self) -> None:
        """Close it. May be called again."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def sync_directory(path: Path) -> None:
    """Make renames in a directory durable. Raises OSError."""
    with closing_fd(open_directory(path, follow=True)) as fd:
        os.fsync(fd)


def make_private_directories(path: str | os.PathLike[str]) -> None:
    """Create the directory and its missing parents, all with mode 0700. Raises OSError, with those
    removed that it created."""
    missing, made = [], []
    current = os.fspath(path)
    while current and not os.path.isdir(current):
        missing.append(current)
        current = os.path.dirname(current)
    for directory in reversed(missing):
        try:
            os.mkdir(directory, 0o700)
            made.append(directory)
        except OSError as error:
            if isinstance(error, FileExistsError) and os.path.isdir(directory):
                continue
            with suppress(OSError):
                for one in reversed(made):
                    os.rmdir(one)
            raise


def keep_text(path: Path, text: str, what: str) -> None:
    """Save ASCII text, named `what` in errors, replacing the file, and create its directories.
    Raises CannotCreateError, IOFailure; the old file is then unchanged."""
    with reported_as(f"cannot save {what} in {path}", creating=True):
        make_private_directories(path.parent)
        replace_file(path, text.encode("ascii"), sync=True, contended=True)


def not_private(directory: str) -> str | None:
    """Return why others could put something in a directory: it is not a real directory, not ours,
    or its mode is not 0700. None if it is private. Raises OSError if nothing is there."""
    info = os.lstat(directory)
    if not stat.S_ISDIR(info.st_mode):
        return f"is {_KINDS.get(stat.S_IFMT(info.st_mode), 'no file')}, not a directory"
    if info.st_uid != os.geteuid():
        return "belongs to another user"
    if stat.S_IMODE(info.st_mode) != 0o700:
        return f"has mode {stat.S_IMODE(info.st_mode):04o} instead of 0700"
    return None


class DataFiles:
    """The files of one directory; the directory and each data file are opened on first use. writes:
    open data files for writing too, and create them."""

    def __init__(self, directory: Path, writes: bool):
        self._directory = directory
        self._flags = os.O_RDWR | os.O_CREAT if writes else os.O_RDONLY
        self._fds: dict[str, int] = {}
        self._ahead: Thread | None = None
        self._failed: OSError | None = None

    @property
    def at(self) -> int:
        """The descriptor of the directory. Raises OSError."""
        if "" not in self._fds:
            self._fds[""] = open_directory(self._directory, follow=True)
        return self._fds[""]

    def fd(self, name: str) -> int:
        """Return the descriptor of a file. Raises OSError, Misplaced."""
        if name not in self._fds:
            self._fds[name] = open_private(name, self._flags, self.at)
        return self._fds[name]

    def again(self, name: str) -> int:
        """Open a file that was opened by `fd` once more, to read; the caller closes it. Raises
        OSError if another file has its name by now."""
        fd = open_private(name, os.O_RDONLY, self.at)
        if not os.path.samestat(os.fstat(fd), os.fstat(self.fd(name))):
            os.close(fd)
            raise FileNotFoundError(errno.ENOENT, f"{name} is gone")
        return fd

    def size(self, name: str) -> int:
        """Return the size in bytes; 0 for a missing file. Raises OSError, Misplaced."""
        try:
            about = os.stat(name, dir_fd=self.at, follow_symlinks=False)
        except FileNotFoundError:
            return 0
        check_private(name, about, stat.S_IFREG, self._flags)
        return about.st_size

    def whole(self, name: str, max_bytes: int) -> bytes:
        """Read all of a file that commits replace, as read_file."""
        return read_file(name, max_bytes, self.at)

    def replace(self, name: str, data: bytes, sync: bool) -> None:
        """Replace a file, as replace_file."""
        replace_file(name, data, sync, at=self.at)

    def sync_directory(self) -> None:
        """Make renames in the directory durable. Raises OSError."""
        os.fsync(self.at)

    def read(self, name: str, buffer: memoryview, offset: int) -> bool:
        """Fill the buffer from a byte offset; False if the file ends before. Raises OSError."""
        return not buffer.nbytes or pread_into(self.fd(name), buffer, offset)

    def sync_ahead(self, name: str) -> None:
        """Start to sync a file in the background, unless the last such sync is still running.
        `sync` then has less to wait for, and reports a failure."""
        if self._ahead is None or not self._ahead.is_alive():
            from toastkit.threads import start_optional

            fd = self.fd(name)
            # Without a thread `sync` does it all.
            self._ahead = start_optional(lambda: self._sync_one(fd), "sync")

    def _sync_one(self, fd: int) -> None:
        try:
            os.fsync(fd)
        except OSError as error:  # the system reports it only once
            self._failed = error

    def sync(self) -> None:
        """Make durable what was written to any of them. Raises OSError."""
        if self._ahead is not None:
            self._ahead.join()
        if (failed := self._failed) is not None:
            self._failed = None
            raise failed
        for name, fd in self._fds.items():
            if name:
                os.fsync(fd)

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.join()  # or another file might get its descriptor
        while self._fds:
            os.close(self._fds.popitem()[1])
