"""Paths of the daemon's socket and pidfile. Cheap to import: a client needs it before the first
byte."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from toastkit.base_directories import given_directory, runtime_directory
from toastkit.errors import CannotCreateError, UsageError, reported_as
from toastkit.private_files import not_private

SOCKET_NAME = "toasted.sock"
# sun_path has 108 bytes on Linux and 104 elsewhere, including the terminating NUL.
MAX_SOCKET_BYTES = 107 if sys.platform == "linux" else 103


def socket_path(explicit: str | None = None) -> str:
    """The absolute path of the daemon's socket: `explicit`, else TOAST_SOCKET, else
    toastkit/toasted.sock in XDG_RUNTIME_DIR, else in a private directory under TMPDIR.

    Creates nothing. Raises UsageError for a path that no socket can have, CannotCreateError if the
    private directory under TMPDIR belongs to somebody else: a listener there is not ours.
    """
    if explicit is None:
        explicit = os.environ.get("TOAST_SOCKET") or None
    if explicit is not None:
        if not explicit or "\0" in explicit:
            raise UsageError(f"invalid socket: {explicit!r} is not a path")
        path = os.path.abspath(explicit)
        check_length(path)
        return path
    directory = runtime_directory()
    if given_directory("XDG_RUNTIME_DIR") is None:
        check_private(directory)
    return os.path.join(directory, SOCKET_NAME)


def check_length(path: str) -> None:
    """Raise UsageError if a path does not fit into a socket address."""
    size = len(os.fsencode(path))
    if size > MAX_SOCKET_BYTES:
        raise UsageError(
            f"the socket's path has {size} bytes, at most {MAX_SOCKET_BYTES} are possible: {path}",
            hint="give a shorter --socket",
        )


def make_private(directory: str) -> None:
    """Create the directory, mode 0700, unless it exists. Raises CannotCreateError, IOFailure."""
    with reported_as(f"cannot make {directory}", creating=True), suppress(FileExistsError):
        os.mkdir(directory, 0o700)
    check_private(directory)


def check_private(directory: str) -> None:
    """Raise CannotCreateError unless the path is free or a real directory, ours, with mode 0700:
    whoever can write to it could replace our socket."""
    try:
        problem = not_private(directory)
    except OSError:
        return  # creating or opening something there reports why it fails
    if problem is not None:
        wrong_mode = problem.startswith("has mode")
        hint = f"chmod 700 {directory}" if wrong_mode else "set XDG_RUNTIME_DIR, or give --socket"
        raise CannotCreateError(f"no place for a socket: {directory} {problem}", hint=hint)


def pidfile_path(socket: str) -> str:
    """The pidfile beside a socket: toasted.sock has toasted.pid."""
    return socket.removesuffix(".sock") + ".pid"
