"""The writer's lock: flock on SESSION/lock, held by at most one process.

flock belongs to the open file description, not to the process: the lock can be handed to another
process with the descriptor (handover.py), and the kernel drops it when the last duplicate is
closed, also after kill -9. So release it by closing, never by LOCK_UN, which would take it from the
process it was handed to. The file contains the holder's process id, for information only.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from toastkit.errors import BusyError, DataError, reported_as
from toastkit.private_files import Descriptor, lock_file, read_file
from toastkit.session.names import display_name

LOCK_FILE = "lock"


class WriterLock(Descriptor):
    """The right to write one session. path: the session's directory. lent: the process id in the
    file stays that of the lender."""

    def __init__(self, path: Path, fd: int, lent: bool = False):
        super().__init__(path, fd)
        if lent:
            return
        with suppress(OSError):  # a full disk only costs messages the holder's id
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d\n" % os.getpid(), 0)

    @classmethod
    def acquire(cls, path: Path) -> WriterLock:
        """Take the lock, without waiting. Raises BusyError if another process holds it, otherwise
        what from_os_error gives."""
        with reported_as(f"cannot lock session {display_name(path)}", creating=True):
            fd = lock_file(path / LOCK_FILE)
        if fd is None:
            raise _busy(path)
        return cls(path, fd)

    @classmethod
    def from_fd(cls, path: Path, fd: int, lent: bool = False) -> WriterLock:
        """The lock handed over by another process with this descriptor, which this takes ownership
        of.
        Raises DataError, with the descriptor closed, if it is not this session's lock."""
        try:
            same = os.path.samestat(os.fstat(fd), os.lstat(path / LOCK_FILE))
        except OSError:
            same = False
        if not same:
            os.close(fd)
            raise DataError(f"what was handed over is not the lock of session {display_name(path)}")
        os.set_inheritable(fd, False)
        return cls(path, fd, lent)

    @property
    def held(self) -> bool:
        return self._fd >= 0

    def fileno(self) -> int:
        """The descriptor that carries the lock. Raises ValueError once released."""
        if not self.held:
            raise ValueError("the lock has been released")
        return self._fd

    release = Descriptor.close  # this process's duplicate of the lock


def _busy(path: Path) -> BusyError:
    try:
        holder = read_file(path / LOCK_FILE, 64).decode("ascii").strip()
    except (OSError, ValueError):
        holder = ""
    by = f" (process {holder})" if holder.isdecimal() and len(holder) < 12 else ""
    return BusyError(
        f"session {display_name(path)} is in use by another writer{by}",
        hint="wait for it to end, or give another --session",
    )
