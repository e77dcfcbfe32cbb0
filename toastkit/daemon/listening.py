"""The daemon's listening socket: private to its user, and never replacing anything but a stale
socket."""

from __future__ import annotations

import errno
import os
import socket
import stat
from contextlib import suppress

from toastkit.daemon.paths import check_length
from toastkit.errors import BusyError, CannotCreateError, from_os_error

BACKLOG = 128  # for clients that connect while the model loads


def address_of(listener: socket.socket) -> str:
    """The path that a socket listens at; its name after an @, as systemd writes it, if it has none
    in the file system."""
    name = listener.getsockname()
    return name if isinstance(name, str) else "@" + bytes(name[1:]).decode("utf-8", "replace")


class SocketFile:
    """A listening socket and its file. socket: the listener."""

    def __init__(self, path: str, listener: socket.socket):
        self.path = path
        self.socket = listener
        self._identity: tuple | None = _identity(path)

    @classmethod
    def make(cls, path: str) -> SocketFile:
        """Listen at the path, mode 0600.

        Raises BusyError if a daemon answers there, CannotCreateError if something else is in the
        way or it cannot be created, UsageError if the path is too long.
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
        """True if it is unreachable: the file has been removed or replaced."""
        try:
            return self._identity != _identity(self.path)
        except OSError:
            return True

    def remove(self) -> None:
        """Remove the file, if it is still this one. Idempotent."""
        with suppress(OSError):  # gone already
            if self._identity == _identity(self.path):
                os.unlink(self.path)
        self._identity = None


def _identity(path: str) -> tuple:
    """Identify a socket file; inode numbers are reused."""
    info = os.lstat(path)
    return (info.st_dev, info.st_ino, info.st_mtime_ns)


def _clear(path: str) -> None:
    """Remove a stale socket."""
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
            pass  # there is a listener, with a full backlog
        except FileNotFoundError:
            return
        except OSError as error:
            raise from_os_error(error, f"cannot make the socket {path}", creating=True) from error
    raise _busy(path)


def _busy(path: str) -> BusyError:
    return BusyError(f"a daemon answers at {path} already", hint="toasted stop ends it")
