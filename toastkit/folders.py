"""The user's base directories (XDG), and toastkit's own folders in them. Cheap to import."""

from __future__ import annotations

import os
import stat

_DEFAULTS = {"CACHE": ".cache", "DATA": ".local/share", "STATE": ".local/state"}


def given_folder(variable: str) -> str | None:
    """The directory that an environment variable names. One that is not absolute is ignored, as
    the XDG base directory specification asks."""
    path = os.environ.get(variable, "")
    return path if os.path.isabs(path) else None


def base_folder(kind: str) -> str:
    """The user's directory of a kind: CACHE (what can be made again), DATA or STATE."""
    return given_folder(f"XDG_{kind}_HOME") or os.path.join(
        os.path.expanduser("~"), _DEFAULTS[kind]
    )


def own_folder(kind: str, *names: str) -> str:
    """toastkit's folder in it, or what is called so below that. Nothing is made."""
    return os.path.join(base_folder(kind), "toastkit", *names)


def make_private_folders(path: str | os.PathLike[str]) -> None:
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


def not_private(directory: str) -> str | None:
    """Why others could put something of theirs there: it is no real directory, not ours, or its
    mode is not 0700. None where none of that is so. Raises OSError where nothing is there."""
    info = os.lstat(directory)
    if not stat.S_ISDIR(info.st_mode):
        return "is not a directory"
    if info.st_uid != os.geteuid():
        return "belongs to another user"
    if stat.S_IMODE(info.st_mode) != 0o700:
        return f"has mode {stat.S_IMODE(info.st_mode):04o} instead of 0700"
    return None
