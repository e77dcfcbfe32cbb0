"""The user's base directories (XDG), and toastkit's own in them, with what lies there. Creates
nothing. Cheap to import: a client needs it before its first byte."""

from __future__ import annotations

import os

_DEFAULTS = {"CACHE": ".cache", "DATA": ".local/share", "STATE": ".local/state"}


def given_directory(variable: str) -> str | None:
    """Return the directory in an environment variable. A relative one is ignored, as the XDG base
    directory specification asks."""
    path = os.environ.get(variable, "")
    return path if os.path.isabs(path) else None


def base_directory(kind: str) -> str:
    """Return the user's directory of a kind: CACHE (what can be recreated), DATA or STATE."""
    return given_directory(f"XDG_{kind}_HOME") or os.path.join(_home(), _DEFAULTS[kind])


def _home() -> str:
    """Return the home directory; for a user unknown to the system, as in a container, the root
    directory, where nothing is found and nothing can be created."""
    if home := given_directory("HOME"):
        return home
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return os.sep


def own_directory(kind: str, *names: str) -> str:
    """Return toastkit's directory in the base directory of a kind, or a path below it."""
    return os.path.join(base_directory(kind), "toastkit", *names)


def runtime_directory() -> str:
    """Return toastkit's directory for sockets: in XDG_RUNTIME_DIR, else in the temporary directory,
    where other users may have created one of that name."""
    given = given_directory("XDG_RUNTIME_DIR")
    if given is not None:
        return os.path.join(given, "toastkit")
    # POSIX guarantees that /tmp exists.
    temporary = given_directory("TMPDIR") or os.path.join(os.sep, "tmp")
    return os.path.join(temporary, f"toastkit-{os.geteuid()}")


def listed(folder: os.PathLike[str]) -> list[str]:
    """The valid names in a folder, sorted; none where it cannot be read."""
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError:
        return []


def can_be_written(directory: str) -> bool:
    """True if files can be created in a directory, or it can be created itself."""
    while not os.path.exists(directory):
        directory = os.path.dirname(directory)
    return os.access(directory, os.W_OK)


def remove_old(directory: str, keep: int, endings: tuple[str, ...]) -> None:
    """Remove all but the newest `keep` of the files whose names end so. Raises OSError."""
    files = [entry for entry in os.scandir(directory) if entry.name.endswith(endings)]
    files.sort(key=lambda entry: entry.stat(follow_symlinks=False).st_mtime_ns)
    for entry in files[:-keep]:
        os.unlink(entry.path)
