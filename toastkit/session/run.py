"""SESSION/runs/ID: the directory of one pipeline over a session, see toast-session(5), removed when
the run ends.

`alive` is locked, shared, by the processes of the run; once nobody holds it, the next run removes
the directory. The directory has mode 0700, its files 0600.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from toastkit.errors import CannotCreateError, NoInputError, from_os_error
from toastkit.private_files import (
    Descriptor,
    closing_fd,
    make_private_directories,
    open_directory,
    open_private,
    try_lock,
)
from toastkit.session.upkeep import RUNS_DIRECTORY, older_than, remove_tree

ALIVE_FILE = "alive"
FEED_FILE = "feed"
RING_FILE = "logits"
HANDOVER_FILE = "handover"
UNBORN_SECONDS = 3600


class RunDirectory(Descriptor):
    """A run's directory, kept alive by this process until close, which leaves it to the others, or
    remove."""

    @classmethod
    def create(cls, session_path: Path) -> RunDirectory:
        """Create a run with its FIFO; the ring and the socket are created by their servers. Sweeps
        away dead runs of the session first. Raises CannotCreateError, IOFailure."""
        runs = session_path / RUNS_DIRECTORY
        try:
            make_private_directories(runs)
            sweep(session_path)  # and see that it is no symbolic link
            path = runs / os.urandom(6).hex()
            os.mkdir(path, 0o700)
            try:
                return cls(path, _furnish(path))
            except BaseException:
                remove_tree(path)
                raise
        except FileExistsError as error:
            raise CannotCreateError(
                f"cannot create a run in {runs}: a file is in the way"
            ) from error
        except OSError as error:
            raise from_os_error(error, f"cannot create a run in {runs}", creating=True) from error

    @classmethod
    def join(cls, path: Path | str) -> RunDirectory:
        """Join another process's run, and help keep it alive. Raises NoInputError if it has
        ended."""
        path = Path(path)
        try:
            with closing_fd(open_directory(path)) as at:
                fd = open_private(ALIVE_FILE, os.O_RDWR, at)
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise NoInputError(f"run {path} has ended") from None
        except FileNotFoundError:
            raise NoInputError(f"run {path} has ended") from None
        except OSError as error:
            raise from_os_error(error, f"cannot open run {path}") from error
        return cls(path, fd)

    def remove(self) -> None:
        """Remove the directory: the run has ended. Open rings and FIFOs stay usable."""
        remove_tree(self.path)
        self.close()


def _furnish(path: Path) -> int:
    """Create the files of a run. Return the open file that keeps it alive."""
    os.mkfifo(path / FEED_FILE, 0o600)
    # Locked before it has its name, so that a sweep never sees it unlocked.
    unborn = path / f"{ALIVE_FILE}.new"
    fd = open_private(unborn, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        os.rename(unborn, path / ALIVE_FILE)
    except BaseException:
        os.close(fd)
        raise
    return fd


def feed_of(run: Path | str) -> Path:
    """The FIFO of a run."""
    return Path(run) / FEED_FILE


def ring_of(run: Path | str) -> Path:
    """The logits ring of a run."""
    return Path(run) / RING_FILE


def is_over(run: Path | str) -> bool:
    """True if no process keeps a run alive: there is no prefill from which a decode could take it
    over. False for a directory that is no run."""
    try:
        fd = open_private(Path(run) / ALIVE_FILE, os.O_RDWR)
    except OSError:
        return False
    with closing_fd(fd):
        return try_lock(fd)


def sweep(session_path: Path) -> None:
    """Remove the runs of a session that no process keeps alive. Raises OSError if they cannot be
    listed."""
    try:
        os.close(open_directory(session_path / RUNS_DIRECTORY))
        entries = list(os.scandir(session_path / RUNS_DIRECTORY))
    except FileNotFoundError:
        return
    for entry in entries:
        if _is_dead(entry):
            remove_tree(Path(entry.path))


def _is_dead(entry: os.DirEntry) -> bool:
    if not entry.is_dir(follow_symlinks=False):
        return False
    if not os.path.lexists(Path(entry.path) / ALIVE_FILE):
        return older_than(entry, time.time() - UNBORN_SECONDS)  # just created, or abandoned
    return is_over(entry.path)
