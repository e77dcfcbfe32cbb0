"""The pidfile: locked for as long as the daemon lives, so that there is one daemon a socket.

The lock (flock) is the truth, the number in the file is for people and for service managers: after
a crash the lock is free, whatever the number says.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress

from toastkit.errors import BusyError, CannotCreateError, from_os_error
from toastkit.private_files import Descriptor, open_private

_MAX_BYTES = 64


class Pidfile(Descriptor):
    """A pidfile that is locked by this process. Two processes must not share it: take it after the
    last fork."""

    def __init__(self, path: str, fd: int):
        self.path = path
        self._fd = fd

    @classmethod
    def take(cls, path: str) -> Pidfile:
        """Makes or takes over the file. Raises BusyError while another daemon has it,
        CannotCreateError where it cannot be made or is no pidfile."""
        while True:
            try:
                fd = open_private(path, os.O_RDWR | os.O_CREAT)
            except OSError as error:
                raise from_os_error(error, f"cannot make {path}", creating=True) from error
            try:
                found = cls._locked(path, fd)
            except BaseException:
                os.close(fd)
                raise
            if found is not None:
                return found
            os.close(fd)  # it was removed between open and lock

    @classmethod
    def _locked(cls, path: str, fd: int) -> Pidfile | None:
        content = os.pread(fd, _MAX_BYTES, 0).strip()
        if content and not content.isdigit():
            raise CannotCreateError(f"{path} is not a pidfile", hint="--pidfile is written over")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            by = f" (process {content.decode()})" if content else ""
            raise BusyError(f"already running{by}", hint="toasted stop ends it") from None
        except OSError as error:
            raise from_os_error(error, f"cannot lock {path}", creating=True) from error
        try:
            if not os.path.samestat(os.fstat(fd), os.stat(path)):
                return None
        except FileNotFoundError:
            return None
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        except OSError as error:
            raise from_os_error(error, f"cannot write {path}", creating=True) from error
        return cls(path, fd)

    def remove(self) -> None:
        """Removes the file and lets go of the lock. May be called again."""
        if self._fd >= 0:
            with suppress(OSError):  # gone already, or in a directory that is
                if os.path.samestat(os.fstat(self._fd), os.stat(self.path)):
                    os.unlink(self.path)
            self.close()
