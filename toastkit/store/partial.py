"""Atomic outputs: written beside their place, as NAME.partial, then renamed.

The writer holds flock on it: two processes never make the same output at once, and what a killed
process left behind is taken over by the next instead of filling the disk.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from toastkit.errors import BusyError, CannotCreateError, IOFailure, reported_as
from toastkit.model.info import human
from toastkit.private_files import sync_directory, try_lock

SUFFIX = ".partial"
# What a killed `split` leaves; the small files come last.
_WEIGHTS = re.compile(r"(non_layer|layer_\d{4,})\.safetensors(\.partial)?")
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)  # network shares


class Partial:
    """A file, or a directory of files, on its way to `path`. A context manager: removed on exit
    unless `publish` was called.

    beside: where it is written, private until then. fd: open on it. mask: the umask. overwrite: a
    file replaces what is at `path`; a directory replaces an empty one and nothing else.
    Raises BusyError while another process writes it, CannotCreateError or IOFailure if it cannot be
    created.
    """

    def __init__(self, path: Path, directory: bool = False, overwrite: bool = True):
        self.path = path
        self.beside = path.with_name(path.name + SUFFIX)
        self._directory, self._overwrite = directory, overwrite
        self._doing = "make" if directory else "write"
        self._published = False
        # The only way to read it; a file that another thread creates meanwhile is merely private.
        self.mask = os.umask(0o077)
        os.umask(self.mask)
        with self.reported():
            if not directory and path.is_dir():
                raise CannotCreateError(f"cannot write {path}: is a directory")
            if directory and path.is_symlink():
                raise CannotCreateError(f"cannot make {path}: is a symbolic link")
            if directory and path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise CannotCreateError(f"cannot make {path}: exists and is not empty")
            self.check_free()
            self.fd = self._claim()

    def _claim(self) -> int:
        """Return a locked descriptor of the empty output."""
        while True:
            self._look()
            if self._directory:
                if not self.beside.is_dir():
                    os.mkdir(self.beside, 0o700)
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                fd = os.open(self.beside, flags)
            else:
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                fd = os.open(self.beside, flags, 0o600)
            try:
                self._lock(fd)
                if os.path.samestat(os.fstat(fd), os.stat(self.beside)):
                    self._check_left(fd)
                    os.fchmod(fd, 0o700 if self._directory else 0o600)
                    self._empty(fd)
                    return fd
            except FileNotFoundError:
                pass  # its writer has just finished with it
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def _look(self) -> None:
        """Raises CannotCreateError for what no process of ours has left in its place."""
        with suppress(FileNotFoundError):
            mode = os.lstat(self.beside).st_mode
            if not (stat.S_ISDIR(mode) if self._directory else stat.S_ISREG(mode)):
                raise self._taken(f"is no {'directory' if self._directory else 'regular file'}")

    def _check_left(self, fd: int) -> None:
        """Raises CannotCreateError for content that no killed writer has left: a file that does not
        begin with zeros, as its header is written last; a directory with more than weights."""
        if self._directory:
            odd = not all(map(_WEIGHTS.fullmatch, os.listdir(fd)))
        else:
            odd = any(os.pread(fd, 8, 0))
        if odd:
            raise self._taken("is there, and not what an interrupted command has left")

    def _taken(self, reason: str) -> CannotCreateError:
        return CannotCreateError(
            f"cannot {self._doing} {self.path}: {self.beside.name} {reason}",
            hint="it is made under that name first",
        )

    def _lock(self, fd: int) -> None:
        try:
            if not try_lock(fd):
                raise BusyError(f"{self.path} is being written by another process")
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise

    def _empty(self, fd: int) -> None:
        """Remove what a killed process left in it."""
        if not self._directory:
            os.ftruncate(fd, 0)
            return
        for path in self.beside.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def check_room(self, size: int) -> None:
        """Raise IOFailure at once, not after an hour, if `size` bytes cannot fit."""
        try:
            system = os.statvfs(self.beside)
        except OSError:
            return
        free = system.f_bavail * system.f_frsize
        if system.f_blocks and size > free:
            raise IOFailure(
                f"cannot {self._doing} {self.path}: no space left on device: {human(size)} needed, "
                f"{human(free)} free"
            )

    def check_free(self) -> None:
        """Raise CannotCreateError for what must not be overwritten."""
        if not self._overwrite and os.path.lexists(self.path):
            raise CannotCreateError(f"{self.path} exists", hint="--force overwrites it")

    def publish(self) -> None:
        """Make it durable and give it its name. Raises CannotCreateError, IOFailure."""
        with self.reported():
            os.fchmod(self.fd, (0o777 if self._directory else 0o666) & ~self.mask)
            os.fsync(self.fd)
            self.check_free()  # again: a large model takes long to write
            os.replace(self.beside, self.path)
            self._published = True
            sync_directory(self.path.absolute().parent)

    def reported(self) -> AbstractContextManager[None]:
        """Guard writes to it: turn an OSError into its CannotCreateError or IOFailure."""
        return reported_as(f"cannot {self._doing} {self.path}", creating=True)

    def discard(self) -> None:
        """Remove it, unless published. Idempotent."""
        if self.fd < 0:
            return
        with suppress(OSError):  # the failure to report is the one that led here
            if not self._published:
                if self._directory:
                    self._empty(self.fd)
                    os.rmdir(self.beside)
                else:
                    os.unlink(self.beside)
        fd, self.fd = self.fd, -1
        os.close(fd)  # last: the lock keeps others out until here

    def __enter__(self) -> Partial:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()
