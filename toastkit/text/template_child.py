"""The parent's side of the process that renders untrusted chat templates.

It is started for the first such template, answers any number of jobs, one at a time, and is killed
when one exceeds a limit; the next job starts another. It gets no environment and no descriptor
except its end of a socket, see toastkit.text.sandbox.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from toastkit.errors import UnavailableError

SECONDS = 5.0  # of processor, for one job
WAIT_SECONDS = 60.0  # on the clock, of which a busy machine may take more
START_SECONDS = 30.0
LOOKS = sys.platform == "darwin"  # which does not enforce RLIMIT_AS
LOOK_SECONDS = 0.1  # between two checks of a child's memory
MEMORY_BYTES = 768 << 20  # of a child's address space, interpreter included
BASE_CHARACTERS = 16 << 20  # that it may write, whatever the job
MAX_BYTES = 256 << 20  # of a reply, as JSON
HEADER_BYTES = 8  # of a message: its length, big-endian
_BOOT = f"""import sys
sys.path += sys.argv[1:]
from toastkit.text.sandbox import serve
serve({MEMORY_BYTES}, {BASE_CHARACTERS}, {HEADER_BYTES})"""
_FAILED = "cannot start the process that renders templates"
_KEPT_VARIABLES = ("TZ", "LD_LIBRARY_PATH")  # strftime_now's time zone; Python's own libraries


class Stopped(Exception):
    """The child was killed; says why in a line."""


class _Child:
    """A running child. Raises UnavailableError if it cannot be started, which `ask` may find."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._is_ready = False
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-I", "-S", "-c", _BOOT, *package_roots()]
        variables = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL, cwd="/", env=variables, start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            self._socket.close()
            raise UnavailableError(_FAILED) from error

    def alive(self) -> bool:
        """True if it is running, and this process is not a fork of the one that started it."""
        return self._owner == os.getpid() and self._process.poll() is None

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to a job. Raises Stopped."""
        if not self._is_ready:
            try:
                self._receive(time.monotonic() + START_SECONDS)
            except (OSError, Stopped) as error:
                raise UnavailableError(_FAILED) from error
            self._is_ready = True
        deadline = time.monotonic() + WAIT_SECONDS
        data = json.dumps({**job, "seconds": SECONDS, "wait": WAIT_SECONDS}).encode()
        try:
            self._socket.settimeout(WAIT_SECONDS)
            self._socket.sendall(len(data).to_bytes(HEADER_BYTES, "big") + data)
            return self._receive(deadline)
        except TimeoutError as error:
            raise _too_long() from error
        except OSError as error:
            raise Stopped("it takes too much memory") from error

    def _ended(self) -> Stopped:
        """Why it has closed its end."""
        by_timer = self._process.wait() == -signal.SIGPROF
        return _too_long() if by_timer else Stopped("it takes too much memory")

    def end(self) -> None:
        """Kill it."""
        self._socket.close()
        if self._owner == os.getpid():
            self._process.kill()
            self._process.wait()

    def _receive(self, deadline: float) -> dict[str, Any]:
        size = int.from_bytes(self._read(HEADER_BYTES, deadline), "big")
        if size > MAX_BYTES:
            raise Stopped("it writes too much")
        return json.loads(self._read(size, deadline))

    def _read(self, size: int, deadline: float) -> bytearray:
        data = bytearray(size)
        rest = memoryview(data)
        while rest:
            left = max(deadline - time.monotonic(), 0.001)
            try:
                self._socket.settimeout(min(left, LOOK_SECONDS))
                count = self._socket.recv_into(rest)
            except TimeoutError:
                if time.monotonic() >= deadline:  # what arrived while we were suspended is in time
                    raise
                if LOOKS and _resident(self._process.pid) > MEMORY_BYTES:
                    raise Stopped("it takes too much memory") from None
                continue
            if not count:
                raise self._ended()
            rest = rest[count:]
        return data


def _too_long() -> Stopped:
    return Stopped(f"it runs for over {SECONDS:g} seconds")


def _resident(pid: int) -> int:
    """Return the resident memory of a process in bytes, 0 if unknown."""
    command = ["ps", "-o", "rss=", "-p", str(pid)]
    try:
        return int(subprocess.run(command, capture_output=True, check=True).stdout) * 1024
    except (OSError, ValueError, subprocess.CalledProcessError):
        return 0


def package_roots() -> list[str]:
    """Return the directories of what the child imports besides the standard library."""
    from importlib.util import find_spec

    specs = [find_spec(name) for name in ("toastkit", "jinja2", "markupsafe")]
    roots = [os.path.dirname(os.path.dirname(s.origin)) for s in specs if s and s.origin]
    return list(dict.fromkeys(map(os.path.abspath, roots)))


_lock = threading.Lock()
_child: _Child | None = None


def ask(job: dict[str, Any]) -> dict[str, Any]:
    """Return the child's reply to a job of toastkit.text.sandbox.answer. Any thread; one at a time.

    Raises Stopped if it took SECONDS, WAIT_SECONDS or too much memory, or wrote too much,
    UnavailableError if no child can be started.
    """
    with _lock:
        try:
            reply = _started().ask(job)
        except BaseException:  # an interrupt as well: the next job would get its reply
            _end()
            raise
        if reply.get("stopped"):
            _end()
        return reply


def start() -> None:
    """Start the child, if there is none, without waiting for it. A failure is found by `ask`."""
    with _lock, suppress(UnavailableError):
        _started()


def _started() -> _Child:
    global _child
    if _child is None:
        atexit.register(end)
    elif not _child.alive():
        _child.end()
        _child = None
    _child = _child or _Child()
    return _child


def end() -> None:
    """End the child, if there is one."""
    with _lock:
        _end()


def _end() -> None:
    global _child
    if _child is not None:
        _child.end()
        _child = None
