"""The pidfile: locked while the daemon lives, so that there is one daemon per socket.

The lock (flock) decides; the number in the file is for people and service managers. After a crash
the lock is free, whatever the number says.
"""

from __future__ import annotations

import os
from contextlib import suppress

from toastkit.daemon.paths import pidfile_path
from toastkit.errors import BusyError, CannotCreateError, reported_as
from toastkit.private_files import Descriptor, lock_file, open_private, read_file, try_lock

_MAX_BYTES = 64


def process_at(socket: str) -> int | None:
    """The process of the daemon that listens at a socket, by the pidfile beside it; None if there
    is none, or nobody holds its lock: the number may be another process's by now. (The kernel names
    the process that made the socket, which may be a service manager.)"""
    try:
        with open(open_private(pidfile_path(socket), os.O_RDONLY), "rb") as file:
            content = file.read(_MAX_BYTES).strip()
            stale = try_lock(file.fileno())
    except OSError:
        return None
    return int(content) if content.isdigit() and not stale else None


class Pidfile(Descriptor):
    """A pidfile locked by this process. Two processes must not share it: take it after the last
    fork."""

    @classmethod
    def take(cls, path: str) -> Pidfile:
        """Create or take over the file. Raises BusyError while another daemon has it,
        CannotCreateError if it cannot be created or is not a pidfile."""
        with reported_as(f"cannot make {path}", creating=True):
            fd = lock_file(path)
        pidfile = cls(path, -1 if fd is None else fd)
        try:
            content = b""
            if fd is not None:
                content = os.pread(fd, _MAX_BYTES, 0).strip()
            else:
                with suppress(OSError):  # its owner has just removed it
                    content = read_file(path, _MAX_BYTES).strip()
            if content and not content.isdigit():
                hint = "--pidfile is written over"
                raise CannotCreateError(f"{path} is not a pidfile", hint=hint)
            if fd is None:
                by = f" (process {content.decode()})" if content else ""
                raise BusyError(f"already running{by}", hint="toasted stop ends it")
            with reported_as(f"cannot write {path}", creating=True):
                os.ftruncate(fd, 0)
                os.pwrite(fd, b"%d\n" % os.getpid(), 0)
            return pidfile
        except BaseException:
            pidfile.close()
            raise

    def remove(self) -> None:
        """Remove the file and release the lock. Idempotent."""
        if self._fd >= 0:
            with suppress(OSError):  # already gone, perhaps with its directory
                if os.path.samestat(os.fstat(self._fd), os.stat(self.path)):
                    os.unlink(self.path)
            self.close()
