"""The error tree. Every error a user can cause is one of these; anything else is a bug.

    ToastError               exit  70   base class; raised directly only for "cannot happen"
    ├── UsageError                 64   flags or arguments that make no sense together
    ├── DataError                  65   a prompt, a file's content, a template, a checkpoint
    │   └── FrameError             65   a stream of frames; names the byte offset
    ├── NoInputError               66   no such model, session, file
    ├── UnavailableError           69   a daemon, a provider or a helper program is not there
    ├── CannotCreateError          73   an output, a session or a FIFO cannot be made
    ├── IOFailure                  74   disk full, read error, no memory left
    ├── BusyError                  75   the session is locked by another writer
    └── Interrupted               130   Ctrl-C

Exit codes follow sysexits(3). A message is one line in git's voice: lower case, what failed first,
the subject in it, no full stop.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

NO_MEMORY = "std::bad_alloc"  # what MLX makes of it is a RuntimeError with this text
# Of no more threads: Python's text, and what MLX makes of it, RuntimeErrors both.
NO_THREAD = ("can't start new thread", "Resource temporarily unavailable")
UNMAPPED = re.compile("failed to map segment|[Cc]annot allocate memory")  # of a library's import


class ToastError(Exception):
    """Base of all errors shown to a user.

    message: one line. hint: one line on what to do about it, or None.
    """

    code = 70

    def __init__(self, message: str, hint: str | None = None):
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.sent = False  # down the pipe, as an error frame


class UsageError(ToastError):
    code = 64


class DataError(ToastError):
    code = 65


class FrameError(DataError):
    """A broken stream. offset: bytes from the start of the stream to the frame that is broken."""

    def __init__(self, message: str, offset: int):
        super().__init__(message)
        self.offset = offset


class NoInputError(ToastError):
    code = 66


class UnavailableError(ToastError):
    code = 69


class CannotCreateError(ToastError):
    code = 73


class IOFailure(ToastError):
    code = 74


class BusyError(ToastError):
    code = 75


class Interrupted(ToastError):
    """Never raised here: an exit code reported by another process becomes this error."""

    code = 130


class RemoteError(ToastError):
    """An error frame that came down the pipe; its origin has reported it already.

    code: the exit code of the origin. stage: the command in which it happened.
    """

    def __init__(self, code: int, stage: str, message: str, hint: str | None = None):
        super().__init__(message, hint)
        self.code, self.stage = code, stage


class Misplaced(OSError):
    """Something else is where a file of ours should be; it was neither read nor written. strerror
    says what, after the name."""


class SecondName(Misplaced):
    """A file of ours to be written has a second name (a hard link), whose owner would lose its
    content."""


def as_toast_error(error: BaseException) -> ToastError:
    """Return the error to report for a failure: a ToastError itself; IOFailure if the system has no
    more memory, or no more threads for this user, as Python reports it; anything else as a bug."""
    if isinstance(error, ToastError):
        return error
    unmapped = isinstance(error, ImportError) and UNMAPPED.search(str(error))
    if isinstance(error, MemoryError) or str(error) == NO_MEMORY or unmapped:
        return IOFailure("out of memory: there may be a limit of this process (ulimit -v)")
    if isinstance(error, RuntimeError) and str(error) in NO_THREAD:
        return IOFailure(
            "cannot start a thread: there is a limit of processes or memory (ulimit -uv)"
        )
    return ToastError(f"bug: {type(error).__name__}: {error}".replace("\n", " "))


def drop_frames(error: BaseException) -> None:
    """Drop a handled error's traceback and what it came from, to keep it: their frames hold what
    was worked on, in a circle that only Python's collector ends."""
    error.__traceback__ = error.__context__ = error.__cause__ = None


def as_data_error(error: Exception, failed: str) -> ToastError:
    """Return the error to report if MLX or mlx_lm cannot do something with files: that of
    as_toast_error if the system has no more of something, else a DataError, `failed` and why."""
    if isinstance(error, MemoryError) or str(error) in (NO_MEMORY, *NO_THREAD):
        return as_toast_error(error)
    reason = str(error).strip().split("\n")[0][:300]
    return DataError(f"{failed}: {reason}")


def did_you_mean(
    name: str, known: Iterable[str], otherwise: str | None = None, cutoff: float = 0.6
) -> str | None:
    """Return a hint at the known name that was perhaps meant, else `otherwise`.

    cutoff: required similarity, from 0 to 1.
    """
    from difflib import get_close_matches

    near = get_close_matches(name[:100], list(known), 1, cutoff)
    return f"did you mean {near[0]}?" if near else otherwise


def check_choice(what: str, value: str, known: Iterable[str]) -> None:
    """Raise UsageError for an unknown value. what: e.g. "gear scope"."""
    if value not in known:
        raise UsageError(f"no such {what}: {value[:40]} ({', '.join(known)})")


def from_os_error(error: OSError, doing: str, creating: bool = False) -> ToastError:
    """Return the ToastError for an OSError. doing: what failed, e.g. "cannot read x". creating:
    something was to be created or written, so that what is missing or forbidden is an output, not
    an input."""
    import errno

    if isinstance(error, Misplaced):
        text = f"{doing}: {error.strerror}"
        created = creating or isinstance(error, SecondName)
        return CannotCreateError(text) if created else DataError(text)
    reason = (error.strerror or str(error)).lower()
    text = f"{doing}: {reason}"
    if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO):
        return IOFailure(text)
    missing = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENAMETOOLONG)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, *missing):
        return CannotCreateError(text) if creating else NoInputError(text)
    return IOFailure(text)


@contextmanager
def reported_as(doing: str, creating: bool = False) -> Iterator[None]:
    """Convert an OSError from inside as from_os_error does, and raise that."""
    try:
        yield
    except OSError as error:
        raise from_os_error(error, doing, creating) from error
