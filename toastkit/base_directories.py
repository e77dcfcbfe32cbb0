"""The user's base directories (XDG), and toastkit's own in them. Nothing is made here. Cheap to
import: a client asks on its way to the first byte."""

from __future__ import annotations

import os

_DEFAULTS = {"CACHE": ".cache", "DATA": ".local/share", "STATE": ".local/state"}


def given_directory(variable: str) -> str | None:
    """The directory that an environment variable names. One that is not absolute is ignored, as
    the XDG base directory specification asks."""
    path = os.environ.get(variable, "")
    return path if os.path.isabs(path) else None


def base_directory(kind: str) -> str:
    """The user's directory of a kind: CACHE (what can be made again), DATA or STATE."""
    return given_directory(f"XDG_{kind}_HOME") or os.path.join(_home(), _DEFAULTS[kind])


def _home() -> str:
    """Of a user whom the system does not know, as in a container, the root directory, in which
    nothing is found and nothing can be made."""
    if home := given_directory("HOME"):
        return home
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return os.sep


def own_directory(kind: str, *names: str) -> str:
    """toastkit's directory in it, or what is called so below that."""
    return os.path.join(base_directory(kind), "toastkit", *names)


def runtime_directory() -> str:
    """toastkit's directory for sockets: in XDG_RUNTIME_DIR, else in the temporary directory, where
    others may have put one of that name."""
    given = given_directory("XDG_RUNTIME_DIR")
    if given is not None:
        return os.path.join(given, "toastkit")
    # POSIX promises that the second is there.
    temporary = given_directory("TMPDIR") or os.path.join(os.sep, "tmp")
    return os.path.join(temporary, f"toastkit-{os.geteuid()}")
