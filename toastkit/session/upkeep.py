"""Session directories as directories: prepared for locking, removed, swept."""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress
from pathlib import Path

from toastkit.errors import CannotCreateError, Misplaced, NoInputError, ToastError, from_os_error
from toastkit.private_files import check_private, make_private_directories
from toastkit.session.gear_state import GEAR_FILE
from toastkit.session.lock import LOCK_FILE, WriterLock
from toastkit.session.names import (
    EPHEMERAL_PREFIX,
    HEADER_FILE,
    display_name,
    is_ephemeral,
    sessions_root,
)

TOKENS_FILE = "tokens.u32"
CACHE_FILE = "cache.bin"
LOGITS_FILE = "logits.f32"
RUNS_DIRECTORY = "runs"
OWN_NAMES = {HEADER_FILE, f"{HEADER_FILE}.tmp", TOKENS_FILE, CACHE_FILE, LOGITS_FILE, LOCK_FILE,
             RUNS_DIRECTORY, GEAR_FILE}  # fmt: skip
STALE_SECONDS = 3600


def gone(path: Path) -> NoInputError:
    """The error for a session that does not exist: an ephemeral one has no name to report."""
    if is_ephemeral(path):
        kept = "toast-prefill --session NAME keeps one"
        return NoInputError("the session was for that pipeline only and is gone", hint=kept)
    return NoInputError(f"no such session: {display_name(path)}")


def prepare(path: Path, create: bool) -> bool:
    """Make sure that there is a directory to lock, and that it is a session's or an empty one.
    Return whether there was none.

    Raises NoInputError if there is no session and none may be created, CannotCreateError.
    """
    name = display_name(path)
    missing = False
    try:
        is_session = os.path.lexists(path / HEADER_FILE)
        if not create and not is_session:
            raise gone(path)
        missing = not path.exists()
        if not missing and not path.is_dir():
            raise CannotCreateError(f"cannot create session {name}: not a directory")
        make_private_directories(path)
        if not is_session and not set(os.listdir(path)) <= OWN_NAMES:
            raise CannotCreateError(
                f"cannot create session {name}: the directory holds other files",
                hint="give an empty or a new directory",
            )
    except FileExistsError as error:
        raise CannotCreateError(f"cannot create session {name}: a file is in the way") from error
    except OSError as error:
        if missing:  # and now ours, but the umask bars us from it
            with suppress(OSError):
                path.rmdir()
        raise from_os_error(error, f"cannot create session {name}", creating=True) from error
    return missing


def lock_prepared(path: Path, create: bool) -> tuple[WriterLock, bool]:
    """Prepare a directory and take its lock. Return with it whether the directory is to go if
    nothing is committed: there was none, or it is a named session's, which another process may have
    made and failed to lock, or to remove since this one has. Raises as prepare and
    WriterLock.acquire do."""
    while True:
        made = prepare(path, create)
        try:
            return WriterLock.acquire(path), made or path.parent == sessions_root()
        except ToastError as error:
            if isinstance(error, CannotCreateError) and not os.path.lexists(path):
                continue  # another process made it, committed nothing, and has just removed it
            if made:
                with suppress(OSError):  # another process has locked it
                    path.rmdir()
            raise


def make_ephemeral() -> tuple[Path, WriterLock]:
    """Create and lock a directory under the sessions' root with a name that users cannot choose.
    Sweeps away what is left of earlier ones. Raises CannotCreateError, IOFailure."""
    root = sessions_root()
    try:
        make_private_directories(root)
        sweep_ephemeral(root)
        path = root / (EPHEMERAL_PREFIX + os.urandom(8).hex())
        os.mkdir(path, 0o700)
    except FileExistsError as error:
        raise CannotCreateError(f"cannot create {root}: a file is in the way") from error
    except OSError as error:
        told = from_os_error(error, f"cannot create a session in {root}", creating=True)
        if isinstance(error, PermissionError):
            told.hint = "XDG_STATE_HOME says where sessions go"
        raise told from error
    try:
        return path, WriterLock.acquire(path)
    except ToastError:
        path.rmdir()
        raise


def sweep_ephemeral(root: Path) -> None:
    """Remove ephemeral sessions of killed processes: an hour old and not locked. Raises OSError if
    the root cannot be read."""
    limit = time.time() - STALE_SECONDS
    with os.scandir(root) as entries:
        for entry in entries:
            ours = is_ephemeral(Path(entry.path)) and entry.is_dir(follow_symlinks=False)
            if ours and older_than(entry, limit):
                try:
                    lock = WriterLock.acquire(Path(entry.path))
                except ToastError:
                    continue  # still running after all that time, or another user's
                remove_tree(Path(entry.path))
                lock.release()


def older_than(entry: os.DirEntry, limit: float) -> bool:
    """True if nothing was added to a directory since `limit` (seconds since 1970)."""
    try:
        return entry.stat(follow_symlinks=False).st_mtime < limit
    except OSError:
        return False


def remove_unborn(path: Path, made: bool) -> None:
    """Remove what was created for a session without a commit, and nothing that stood in its place.
    made: the directory too, if that is all there is in it."""
    if os.path.lexists(path / HEADER_FILE):
        return
    with suppress(OSError):  # it has other contents
        for name in (*OWN_NAMES - {RUNS_DIRECTORY, LOCK_FILE}, LOCK_FILE):
            with suppress(FileNotFoundError, Misplaced):
                check_private(path / name, (path / name).lstat(), stat.S_IFREG, os.O_RDWR)
                (path / name).unlink()
        for folder in (path / RUNS_DIRECTORY, *([path] if made else ())):
            if folder.is_dir():
                folder.rmdir()


def remove_tree(path: Path) -> None:
    """Remove a directory; what cannot be removed is left for the next sweep."""
    import shutil

    shutil.rmtree(path, ignore_errors=True)
