"""Session names: where named sessions are stored, and which names are valid.

A session is given as a NAME, stored under `$XDG_STATE_HOME/toastkit/sessions`, or as a directory:
anything with a slash in it, `.`, `..`, or a directory here that holds a session.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from toastkit.base_directories import own_directory
from toastkit.errors import UsageError

HEADER_FILE = "session.msgpack"
EPHEMERAL_PREFIX = ".ephemeral-"  # users cannot choose a name that begins with a dot
MAX_NAME_BYTES = 128


def sessions_root() -> Path:
    """The directory of named sessions."""
    return Path(own_directory("STATE", "sessions"))


def resolve(name_or_dir: str) -> Path:
    """The directory of a session given by name or by path; it need not exist.

    Raises UsageError for a name that is empty, too long, begins with `-` or `.`, or has an
    unprintable character.
    """
    if "\0" in name_or_dir:
        raise UsageError("invalid session name: it holds a NUL character")
    if "/" in name_or_dir or name_or_dir in (".", ".."):
        return Path(name_or_dir).absolute()
    problem = _problem(name_or_dir)
    if problem:
        raise UsageError(
            f"invalid session name {name_or_dir[:40]!r}: {problem}",
            hint="write ./NAME for a directory",
        )
    if os.path.isfile(os.path.join(name_or_dir, HEADER_FILE)):
        return Path(name_or_dir).absolute()
    return sessions_root() / name_or_dir


def _problem(name: str) -> str | None:
    if not name:
        return "it is empty"
    if name[0] in "-.":
        return f"it begins with {name[0]!r}"
    if not name.isprintable():
        return "it holds a character that cannot be printed"
    if len(os.fsencode(name)) > MAX_NAME_BYTES:
        return f"it is longer than {MAX_NAME_BYTES} bytes"
    return None


def display_name(path: Path) -> str:
    """A session as messages name it: by its name if it has one, otherwise by its path."""
    return path.name if path.parent == sessions_root() else str(path)


def is_ephemeral(path: Path) -> bool:
    """True if the directory is deleted with its run: one that `make_ephemeral` has named."""
    return re.fullmatch(re.escape(EPHEMERAL_PREFIX) + "[0-9a-f]{16}", path.name) is not None
