"""Files and directories of this user's alone: opened, replaced, read and written whole.

A directory may come from anywhere, such as an archive. So what is opened by its name here is what
it should be, a regular file of this user's, or Misplaced is raised: nothing is followed, waited
for or written to that somebody put in its place.

Data is written with pwrite and never through a memory map: a full disk is then ENOSPC from
the call that hit it, where a map would be killed by SIGBUS.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import sys
from typing import TYPE_CHECKING

from toastkit.errors import Misplaced, SecondName, reported_as

if TYPE_CHECKING:
    from pathlib import Path
    from threading import Thread

_FLOCK = "hhqqi4x"  # struct flock of Linux
_KINDS = {
    stat.S_IFREG: "a regular file", stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO",
    stat.S_IFLNK: "a symbolic link", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}  # fmt: skip


def open_private(
    path: Path | str, flags: int, at: int | None = None, kind: int = stat.S_IFREG
) -> int:
    """A descriptor of a file of this user's; one that is created gets mode 0600.

    at: the descriptor of the directory that a relative path lies in. kind: what it has to be, as in
    st_mode. Raises OSError, Misplaced for anything else: a symbolic link, another user's file, or
    one that is to be written and has a second name (a hard link).
    """
    # O_NONBLOCK: a FIFO would wait for its other end.
    safe = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    try:
        fd = os.open(path, flags | safe, 0o600, dir_fd=at)
    except FileNotFoundError:
        raise
    except OSError:
        _check(path, os.stat(path, dir_fd=at, follow_symlinks=False), kind, 0)
        raise
    try:
        _check(path, os.fstat(fd), kind, flags)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check(path: Path | str, about: os.stat_result, kind: int, flags: int) -> None:
    """Raises Misplaced for a file that is not of this kind, and this user's."""
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
    """A descriptor of a directory of this user's. follow: it was named by the user, who may name a
    link, and another's. Raises OSError, Misplaced."""
    if follow:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return open_private(path, os.O_RDONLY | os.O_DIRECTORY, kind=stat.S_IFDIR)


def pwrite_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Writes all of `data` at a byte offset. Raises OSError."""
    view = memoryview(data)
    while view.nbytes:
        written = os.pwrite(fd, view, offset)
        view = view[written:]
        offset += written


def copy_range(source: int, first: int, fd: int, offset: int, count: int) -> None:
    """Copies bytes from one file to another without reading them here; where a file system can
    (btrfs, xfs), both have them from then on. Raises OSError, also where the system cannot."""
    if not hasattr(os, "copy_file_range"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    while count:
        copied = os.copy_file_range(source, fd, count, first, offset)
        if not copied:
            raise OSError(errno.EIO, "the file ends before that")
        first, offset, count = first + copied, offset + copied, count - copied


def pread_into(fd: int, buffer: memoryview, offset: int) -> bool:
    """Fills the buffer from a byte offset. Returns False if the file ends before that."""
    while buffer.nbytes:
        count = os.preadv(fd, [buffer], offset)
        if not count:
            return False
        buffer = buffer[count:]
        offset += count
    return True


def read_file(path: Path | str, max_bytes: int, at: int | None = None) -> bytes:
    """The bytes of a file of this user's, one more than max_bytes at most. at: as of open_private.
    Raises OSError, Misplaced."""
    with open(open_private(path, os.O_RDONLY, at), "rb") as file:
        # Asked for no more than there is: a buffer of the most takes longer than most files.
        return file.read(min(os.fstat(file.fileno()).st_size, max_bytes) + 1)


def replace_file(
    path: Path | str, data: bytes, sync: bool, contended: bool = False, at: int | None = None
) -> None:
    """Puts `data` in the place of a file in one step: write beside it, sync, rename.
    The directory is not synced. contended: several processes may do so at once. at: as of
    open_private. Raises OSError, with the file as it was."""
    temporary = f"{path}.{os.getpid()}.tmp" if contended else f"{path}.tmp"
    _remove(temporary, at)  # what a killed process left, or what was planted
    try:
        fd = open_private(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, at)
        try:
            pwrite_all(fd, data, 0)
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path, src_dir_fd=at, dst_dir_fd=at)
    except BaseException:
        try:
            _remove(temporary, at)
        except OSError:
            pass  # the failure to report is the first one
        raise


def _remove(path: Path | str, at: int | None) -> None:
    try:
        os.unlink(path, dir_fd=at)
    except FileNotFoundError:
        pass


def try_lock(fd: int) -> bool:
    """Takes the lock (flock, exclusive) of an open file, without waiting; False where another
    holds it. Raises OSError."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def lock_file(path: Path | str) -> int | None:
    """A descriptor that holds the lock of a file, which is made where there is none; None where
    another process holds it. A lock on a file that was removed meanwhile is no lock: the next who
    comes would make a new file and lock that. Raises OSError, Misplaced."""
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
    """Asks every writer to leave bytes of a file as they are, for as long as this opening of it
    lasts, here or in a process that has inherited it. Raises OSError where the system has no such
    locks (Linux has)."""
    setting = getattr(fcntl, "F_OFD_SETLK", None)
    if setting is None or sys.platform != "linux":
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    fcntl.fcntl(fd, setting, struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, first, count, 0))


def held_until(fd: int, first: int, count: int) -> int | None:
    """The byte after some of these bytes that another opening of the file holds; None where there
    are none. Raises OSError where somebody holds all that is to come, which nobody here does."""
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
    """Holds a descriptor, _fd, until it is closed."""

    _fd: int

    def close(self) -> None:
        """Lets it go. May be called again."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def sync_directory(path: Path) -> None:
    """Makes renames in a directory durable. Raises OSError."""
    fd = open_directory(path, follow=True)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_private_directories(path: str | os.PathLike[str]) -> None:
    """Creates the directory and its missing parents, all with mode 0700. Raises OSError."""
    missing = []
    current = os.fspath(path)
    while current and not os.path.isdir(current):
        missing.append(current)
        current = os.path.dirname(current)
    for directory in reversed(missing):
        try:
            os.mkdir(directory, 0o700)
        except FileExistsError:
            if not os.path.isdir(directory):
                raise


def keep_text(path: Path, text: str, what: str) -> None:
    """Puts a file of ASCII text, named `what` in errors, in the place of what was there, and makes
    its directories. Raises CannotCreateError, IOFailure; what was there is then as it was."""
    with reported_as(f"cannot save {what} in {path}", creating=True):
        make_private_directories(path.parent)
        replace_file(path, text.encode("ascii"), sync=True, contended=True)


def not_private(directory: str) -> str | None:
    """Why others could put something of theirs there: it is no real directory, not ours, or its
    mode is not 0700. None where none of that is so. Raises OSError where nothing is there."""
    info = os.lstat(directory)
    if not stat.S_ISDIR(info.st_mode):
        return f"is {_KINDS.get(stat.S_IFMT(info.st_mode), 'no file')}, not a directory"
    if info.st_uid != os.geteuid():
        return "belongs to another user"
    if stat.S_IMODE(info.st_mode) != 0o700:
        return f"has mode {stat.S_IMODE(info.st_mode):04o} instead of 0700"
    return None


class DataFiles:
    """The files of one directory, each of the data files opened at its first use, as is the
    directory. writes: they are opened for writing too, and created."""

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
        """The descriptor of a file. Raises OSError, Misplaced."""
        if name not in self._fds:
            self._fds[name] = open_private(name, self._flags, self.at)
        return self._fds[name]

    def again(self, name: str) -> int:
        """A new opening, to read, of a file that was opened by `fd`; the caller's to close. Raises
        OSError where another has its name by now."""
        fd = open_private(name, os.O_RDONLY, self.at)
        if not os.path.samestat(os.fstat(fd), os.fstat(self.fd(name))):
            os.close(fd)
            raise FileNotFoundError(errno.ENOENT, f"{name} is gone")
        return fd

    def size(self, name: str) -> int:
        """Bytes; 0 for a file that is not there. Raises OSError, Misplaced."""
        try:
            about = os.stat(name, dir_fd=self.at, follow_symlinks=False)
        except FileNotFoundError:
            return 0
        _check(name, about, stat.S_IFREG, self._flags)
        return about.st_size

    def whole(self, name: str, max_bytes: int) -> bytes:
        """All bytes of a file that commits replace, as of read_file."""
        return read_file(name, max_bytes, self.at)

    def replace(self, name: str, data: bytes, sync: bool) -> None:
        """Puts a file in place, as of replace_file."""
        replace_file(name, data, sync, at=self.at)

    def sync_directory(self) -> None:
        """Makes renames in the directory durable. Raises OSError."""
        os.fsync(self.at)

    def read(self, name: str, buffer: memoryview, offset: int) -> bool:
        """Fills the buffer from a byte offset; False if the file ends before. Raises OSError."""
        return not buffer.nbytes or pread_into(self.fd(name), buffer, offset)

    def sync_ahead(self, name: str) -> None:
        """Begins to make durable what was written to a file, unless it is still at it from the last
        time. `sync` has the less to wait for, and says if this failed."""
        if self._ahead is None or not self._ahead.is_alive():
            from threading import Thread

            thread = Thread(target=self._sync_one, args=(self.fd(name),), daemon=True)
            try:
                thread.start()
            except RuntimeError:  # there are no more of this user: `sync` does it all
                return
            self._ahead = thread

    def _sync_one(self, fd: int) -> None:
        try:
            os.fsync(fd)
        except OSError as error:  # which the system tells once
            self._failed = error

    def sync(self) -> None:
        """Makes durable what was written to any of them. Raises OSError."""
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
