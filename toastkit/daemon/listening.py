"""The daemon's own socket: made so that nobody else may connect, never in the place of anything but
a socket that a daemon left behind."""

from __future__ import annotations

import errno
import os
import socket
import stat
from contextlib import suppress

from toastkit.daemon.paths import check_length
from toastkit.errors import BusyError, CannotCreateError, from_os_error

BACKLOG = 128  # who connects while the model is loaded waits here


class SocketFile:
    """A listening socket and the file it is reached by. socket: the listener."""

    def __init__(self, path: str, listener: socket.socket):
        self.path = path
        self.socket = listener
        self._identity: tuple | None = _identity(path)

    @classmethod
    def make(cls, path: str) -> SocketFile:
        """Listens at the path, mode 0600.

        Raises BusyError where a daemon answers there, CannotCreateError where something else is in
        the way or nothing can be made, UsageError for too long a path.
        """
        check_length(path)
        _clear(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Between bind and chmod it would be open to all; the process has no other threads yet.
        mask = os.umask(0o177)
        try:
            listener.bind(path)
            os.chmod(path, 0o600)
            listener.listen(BACKLOG)
            return cls(path, listener)
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE:
                raise _busy(path) from error
            raise from_os_error(error, f"cannot make the socket {path}", creating=True) from error
        finally:
            os.umask(mask)

    @property
    def gone(self) -> bool:
        """Whether nobody can reach it any more: somebody has removed the file, or replaced it."""
        try:
            return self._identity != _identity(self.path)
        except OSError:
            return True

    def remove(self) -> None:
        """Removes the file, if it is still this one. May be called again."""
        with suppress(OSError):  # gone already
            if self._identity == _identity(self.path):
                os.unlink(self.path)
        self._identity = None


def _identity(path: str) -> tuple:
    """What tells a socket from one that was made later; inode numbers are used again."""
    info = os.lstat(path)
    return (info.st_dev, info.st_ino, info.st_mtime_ns)


def _clear(path: str) -> None:
    """Removes a socket at which nobody listens any more."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise from_os_error(error, f"cannot make the socket {path}", creating=True) from error
    if not stat.S_ISSOCK(mode):
        raise CannotCreateError(f"cannot make the socket {path}: something else is in the way")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:
            pass  # there is a listener, with a long queue
        except FileNotFoundError:
            return
        except OSError as error:
            raise from_os_error(error, f"cannot make the socket {path}", creating=True) from error
    raise _busy(path)


def _busy(path: str) -> BusyError:
    return BusyError(f"a daemon answers at {path} already", hint="toasted stop ends it")
