"""Executables without their start: one process has imported what they need, and forks.

    process = start("decode", "--greedy", stdin=subprocess.PIPE, stdout=subprocess.PIPE)

Most tests of commands ask what a process reads, writes and ends with, and not how it was begun.
Here it is a process like any other, with its own pipes, environment, directory and exit status,
that has spared itself half a second of imports. What begins with the file of an executable, and
what it imports, is tested elsewhere with real ones.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toastkit.commands import COMMANDS, program_name

SCRIPTS = Path(sysconfig.get_path("scripts"))
# A model's memory does not come 4 KiB at a time, where the system has larger pages.
LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
# Python and C libraries have looked at these before the fork.
READ_AT_START = ("PYTHON", "LC_", "LANG", "MLX_", "OMP_", "OPENBLAS_", "TOKENIZERS_", "TQDM_")


def executable(name: str) -> str:
    """The path of an installed command, by its name in the table."""
    return str(SCRIPTS / program_name(name))


def start(
    name: str,
    *arguments: object,
    env: Mapping[str, str] | None = None,
    forked: bool = True,
    **streams: Any,
) -> subprocess.Popen | Process:
    """Begins a command's process. env: variables besides those of this process. forked: False for
    one with a start of its own. streams: stdin, stdout and stderr, as subprocess takes them.

    Where a forked process is not as good as one of its own, it gets one: with variables that are
    read at the start, in the background, outside tests, and on macOS, whose frameworks have
    threads.
    """
    words, env = [str(word) for word in arguments], env or {}
    variables = {**os.environ, **env}
    new = [name for name, value in env.items() if os.environ.get(name) != value]
    forked &= SERVER.running and "--daemon" not in words
    if not forked or any(name.startswith(READ_AT_START) for name in new):
        return subprocess.Popen([executable(name), *words], env=variables, **streams)
    return Process(name, words, variables, **streams)


def run_to_end(
    name: str,
    *arguments: object,
    stdin: bytes | None = None,
    timeout: float = 60.0,
    **settings: Any,
) -> subprocess.CompletedProcess:
    """Runs a command; its CompletedProcess with bytes. stdin=None is /dev/null: no prompt is piped
    in. What prefill writes is a file: in a pipe it would wait for a decode. settings: others, of
    start."""
    source = subprocess.DEVNULL if stdin is None else subprocess.PIPE
    with contextlib.ExitStack() as opened:
        file = opened.enter_context(tempfile.TemporaryFile()) if name == "prefill" else None
        process = start(
            name, *arguments, stdin=source, stdout=file or subprocess.PIPE,
            stderr=subprocess.PIPE, **settings,
        )  # fmt: skip
        try:
            out, err = process.communicate(stdin, timeout=timeout)
        finally:
            process.kill()
        if file is not None:
            file.seek(0)
            out = file.read()
        return subprocess.CompletedProcess(process.args, process.wait(), out, err)


class Process:
    """As subprocess.Popen, as far as tests need it, for a process that the server has forked."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        env: Mapping[str, str],
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
    ):
        self.args = [name, *arguments]
        self.returncode: int | None = None
        with contextlib.ExitStack() as theirs:
            self.stdin, source = _stream(stdin, 0, theirs)
            self.stdout, out = _stream(stdout, 1, theirs)
            self.stderr, error = _stream(stderr, 2, theirs)
            self._status = socket.socket(socket.AF_UNIX)
            self._status.connect(SERVER.place())
            parts = [name, os.getcwd(), str(len(arguments)), *arguments]
            parts += [f"{name}={value}" for name, value in env.items()]
            data = b"\0".join(map(os.fsencode, parts))
            socket.send_fds(self._status, [len(data).to_bytes(4, "big")], [source, out, error])
            self._status.sendall(data)
        self._lines = self._status.makefile("r")
        self.pid = int(self._lines.readline())

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, -N for signal N. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(self._lines.readline())
            self._lines.close()
            self._status.close()
        return self.returncode

    def poll(self) -> int | None:
        """The exit status, None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def communicate(
        self, input: bytes | None = None, timeout: float | None = None
    ) -> tuple[bytes | None, bytes | None]:
        """Writes, reads and waits; what stood on stdout and stderr. Raises TimeoutExpired."""
        found: list[bytes | None] = [None, None]

        def read(number: int, pipe: Any) -> None:
            with pipe:
                found[number] = pipe.read()

        pipes = [(n, p) for n, p in enumerate((self.stdout, self.stderr)) if p is not None]
        threads = [threading.Thread(target=read, args=pipe, daemon=True) for pipe in pipes]
        if self.stdin is not None:
            threads.append(threading.Thread(target=_write, args=(self.stdin, input), daemon=True))
        for thread in threads:
            thread.start()
        self.wait(timeout)
        for thread in threads:
            thread.join(timeout)
        return found[0], found[1]

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()
        self.wait()


def _stream(given: Any, number: int, theirs: contextlib.ExitStack) -> tuple[Any, int]:
    """Our end of a standard stream, where it is a pipe, and the descriptor of the other end."""
    if given == subprocess.PIPE:
        read, write = os.pipe()
        mine, other = (write, read) if number == 0 else (read, write)
        theirs.callback(os.close, other)
        return open(mine, "rb" if number else "wb", -1 if number else 0), other
    if given == subprocess.DEVNULL:
        other = os.open(os.devnull, os.O_RDWR)
        theirs.callback(os.close, other)
        return None, other
    return None, number if given is None else given if isinstance(given, int) else given.fileno()


def _write(pipe: Any, data: bytes | None) -> None:
    """Writes, as far as anybody reads, and closes."""
    with contextlib.suppress(BrokenPipeError), open(os.dup(pipe.fileno()), "wb") as whole:
        pipe.close()
        whole.write(data or b"")


class Server:
    """The process that forks: begun by the first request, if at all. running: from `open` on."""

    def __init__(self) -> None:
        self.running = False
        self._folder = ""
        self._process: subprocess.Popen | None = None

    def open(self) -> None:
        """Has processes forked from now on, where that can be done."""
        self.running = sys.platform == "linux"

    def place(self) -> str:
        """The path of its socket."""
        path = os.path.join(self._folder, "s")
        if self._process is None:
            self._folder = tempfile.mkdtemp(prefix="t")  # short: a socket's path has to be
            path = os.path.join(self._folder, "s")
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fork_server", path], cwd=Path(__file__).parents[1],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **LARGE_PAGES},
            )  # fmt: skip
            assert self._process.stdout is not None
            self._process.stdout.readline()  # it listens
        return path

    def stubs(self) -> str:
        """A directory for PATH in which all commands are such that hand over to this server; that
        of the executables themselves, where nothing is forked."""
        if not self.running:
            return str(SCRIPTS)
        place = self.place()
        for name in [command.name for command in COMMANDS]:
            stub = Path(self._folder, program_name(name))
            if not stub.exists():
                stub.write_text(
                    f"#!{sys.executable} -IS\nNAME, PLACE = {name!r}, {place!r}\n{STUB}"
                )
                stub.chmod(0o700)
        return self._folder

    def close(self) -> None:
        """Ends it."""
        self.running = False
        if self._process is not None:
            self._process.communicate()
            shutil.rmtree(self._folder)


# It imports next to nothing, and ends as the process ends to which it has given all it has.
STUB = """
import _signal, _socket, posix, sys
if "--daemon" in sys.argv:
    path = sys.executable.rpartition("/")[0] + "/" + sys.argv[0].rpartition("/")[2]
    posix.execv(path, sys.argv)
connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
connection.connect(PLACE)
parts = [NAME, posix.getcwd(), str(len(sys.argv) - 1), *sys.argv[1:]]
data = b"\\0".join([part.encode("utf-8", "surrogateescape") for part in parts]
                   + [name + b"=" + value for name, value in posix.environ.items()])
fds = b"".join([fd.to_bytes(4, sys.byteorder) for fd in (0, 1, 2)])
connection.sendmsg([len(data).to_bytes(4, "big")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, fds)])
connection.sendall(data)
nothing = posix.open("/dev/null", posix.O_RDWR)
for fd in (0, 1):  # a pipe's other end sees the end of the process, and not of this one
    posix.dup2(nothing, fd)
told = b""
while b"\\n" not in told:
    told += connection.recv(64)
pid = int(told.split(b"\\n")[0])
for number in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP):
    _signal.signal(number, lambda number, _: posix.kill(pid, number))
while told.count(b"\\n") < 2:
    told += connection.recv(64)
status = int(told.split(b"\\n")[1])
if status < 0:
    _signal.signal(-status, _signal.SIG_DFL)
    posix.kill(posix.getpid(), -status)
posix._exit(status)
"""
SERVER = Server()
