"""Daemonise: fork, setsid, fork, before MLX is imported.

Metal's connection to the GPU does not survive a fork. So the fork comes first, and the model is
loaded by the process that uses it; the process that was started waits on a pipe until the daemon
reports that it is ready, or why it is not.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from toastkit.errors import ToastError, UnavailableError, from_os_error, reported_as
from toastkit.private_files import make_private_directories, open_private
from toastkit.text.terminal import shown

FIRST_FREE = 3  # descriptor of the pipe, after all others are closed
_MAX_BYTES = 1 << 16


class Starter:
    """The daemon's end of the pipe to the process that started it."""

    def __init__(self, fd: int):
        self._fd = fd

    def ready(self) -> None:
        """Report that the daemon is ready. Raises UnavailableError if that process is gone:
        interrupting the start means that no daemon is wanted."""
        if not self._tell({"ready": os.getpid()}):
            raise UnavailableError("whoever started the daemon has gone")

    def failed(self, error: ToastError) -> None:
        """Send the error that it is to report and to exit with."""
        self._tell({"code": error.code, "message": error.message, "hint": error.hint})

    def _tell(self, what: dict) -> bool:
        if self._fd < 0:
            return True  # it has been told
        fd, self._fd = self._fd, -1
        try:
            os.write(fd, json.dumps(what).encode())
            return True
        except OSError:
            return False
        finally:
            os.close(fd)


def detach(log: str) -> Starter | int:
    """Daemonise. Return a Starter in the daemon; in the process that was started, the daemon's
    process id, once it is ready.

    log: file that the daemon's standard error is appended to. Raises ToastError, with the daemon's
    message and code, if it could not start.
    """
    if "mlx" in sys.modules or "mlx.core" in sys.modules:
        raise ToastError("cannot fork: MLX is loaded, and Metal does not survive a fork")
    errors = _open_log(log)
    read, write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    doing = "cannot go into the background"
    with reported_as(doing):
        child = os.fork()
    if child:
        os.close(write)
        os.close(errors)
        return _wait(read, child, log)
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        _detach_from_shell(errors, write)
    except BaseException as error:
        told = ToastError(f"{doing}: {error}")
        Starter(write).failed(from_os_error(error, doing) if isinstance(error, OSError) else told)
        os._exit(70)
    return Starter(FIRST_FREE)


def _open_log(log: str) -> int:
    with reported_as(f"cannot write {log}", creating=True):
        make_private_directories(Path(log).parent)
        return open_private(Path(log), os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def _detach_from_shell(errors: int, pipe: int) -> None:
    """Set up the daemon's descriptors and working directory, keeping none of the shell's."""
    with suppress(FileNotFoundError):  # nothing can be imported from a directory that was removed
        start = os.getcwd()
        sys.path[:] = [os.path.join(start, entry) for entry in sys.path]
    os.chdir("/")
    # Move them out of the way of 0 to 3 first, in case the shell had closed one of those.
    errors, pipe = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (errors, pipe))
    null = fcntl.fcntl(os.open(os.devnull, os.O_RDWR), fcntl.F_DUPFD_CLOEXEC, 10)
    for source, target in ((null, 0), (null, 1), (errors, 2)):
        os.dup2(source, target)
    os.dup2(pipe, FIRST_FREE, inheritable=False)
    try:
        opened = [int(name) for name in os.listdir("/dev/fd")]
    except FileNotFoundError:  # no /proc
        opened = list(range(os.sysconf("SC_OPEN_MAX")))
    for fd in opened:
        if fd > FIRST_FREE:
            with suppress(OSError):  # e.g. the one used to list them
                os.close(fd)


def _wait(read: int, child: int, log: str) -> int:
    """The process id of the daemon. Raises the error that it sends."""
    os.waitpid(child, 0)
    data = b""
    while piece := os.read(read, _MAX_BYTES):
        data += piece
    os.close(read)
    if not data:
        raise ToastError("the daemon died while it started", hint=f"see {log}")
    told = json.loads(data)
    if "ready" in told:
        return told["ready"]
    error = ToastError(told["message"], told["hint"])
    error.code = told["code"]
    raise error


def say_with_time(line: str) -> None:
    """Write one line to the log file, with the time."""
    print(
        f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} toasted: {shown(line)}",
        file=sys.stderr,
        flush=True,
    )


def die(code: int) -> NoReturn:
    """End the process at once, whatever its threads are doing."""
    sys.stderr.flush()
    os._exit(code)
