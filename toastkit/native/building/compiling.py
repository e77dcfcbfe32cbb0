"""Compile the C++ of the folder above with the machine's own compiler."""

from __future__ import annotations

import errno
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from toastkit.errors import ToastError

if TYPE_CHECKING:
    import subprocess

FOLDER = Path(__file__).parents[1]
KERNELS = FOLDER / "kernels"
AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
AVX512 = (
    "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni",
    "-mprefer-vector-width=512",
)  # fmt: skip
DOTPROD = "-march=armv8.2-a+dotprod"
# Extra flags of each source; which of them runs is chosen at run time.
FOR_ALL: dict[str, tuple[str, ...]] = {
    "pool.cpp": (), "kernels.cpp": (), "rows.cpp": (), "routes.cpp": (),
    "recurrent.cpp": (), "attention.cpp": (),
}  # fmt: skip
BY_MACHINE: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "portable.cpp": (), "avx2.cpp": AVX2, "avxvnni.cpp": (*AVX2, "-mavxvnni"),
        "avx512vnni.cpp": (*AVX2, *AVX512),
        "avx512vbmi.cpp": (*AVX2, *AVX512, "-mavx512vbmi"),
        "amx_int8.cpp": (
            *AVX2, *AVX512, "-mavx512vbmi", "-mamx-tile", "-mamx-int8", "-mtune=sapphirerapids",
        ),
    },
    "aarch64": {
        "neon.cpp": (), "neon_dotprod.cpp": (DOTPROD,), "neon_i8mm.cpp": (f"{DOTPROD}+i8mm",),
    },
}  # fmt: skip
# Sources that old compilers (GCC 10) lack flags for; without the flags they contain no code.
RECENT = ("amx_int8.cpp", "avxvnni.cpp")
SOURCES = {**FOR_ALL, **BY_MACHINE.get(platform.machine(), {})}
GLUE = FOLDER / "glue"  # the MLX primitives over them
# GCC's own headers cause the warnings about uninitialized values. contract: a * b + c is one
# instruction wherever there is one, so that all tiles of a product round alike.
FLAGS = (
    "-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-pthread",
    "-Wall", "-Wextra", "-Wno-psabi", "-Wno-uninitialized", "-Wno-maybe-uninitialized",
)  # fmt: skip
# A process group for each compiler, to kill all of it, but in the session of the build, which
# yields as a whole.
GROUP: dict[str, Any] = (
    {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
)
# For one source, of 30 s of processor time: at the lowest priority that may take long, and a build
# that was given up is not tried again.
SECONDS = 1800.0
LOOK = 10.0  # seconds between two looks at what a compiler does
MAX_IDLE = 12  # looks at one that neither computes nor waits to: it hangs
SIGNALS_CHECK = 0.1  # seconds
LINGERS = 1.0  # seconds to wait for the end of its output after it has exited
MAX_OUTPUT = 1 << 18  # bytes of a compiler's output
MAX_BYTES = 256 << 20  # of a compiled file
# Shortages that may pass: not a failure of the compiler.
SCARCE = (errno.ENOSPC, errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


def unsupported() -> str | None:
    """Why native products cannot run on this machine; None if they can."""
    if sys.platform == "linux" and platform.machine() in BY_MACHINE:
        return None
    return "there are native products for Linux on x86-64 and 64-bit ARM only"


def compiler() -> tuple[str, ...] | None:
    """The C++ compiler as the words of a command, programs by absolute path: of the variable CXX
    ("ccache g++ -m64"), or the system's; None if there is none."""
    given = os.environ.get("CXX", "")
    for words in ((given,), given.split()) if given.strip() else (("c++",), ("g++",), ("clang++",)):
        if _which(words[0]):
            return tuple(_which(word) or word for word in words)
    return None


def no_compiler() -> str:
    """The message if there is none."""
    given = os.environ.get("CXX", "")
    tried = f"CXX is {given!r}" if given.strip() else "c++, g++, clang++ or CXX"
    return f"there is no C++ compiler ({tried})"


def _which(name: str) -> str | None:
    """As shutil.which, whose import would take longer than all else at start."""
    folders = [""] if os.path.dirname(name) else os.get_exec_path()
    paths = (os.path.join(folder, name) for folder in folders)
    found = next((p for p in paths if os.path.isfile(p) and os.access(p, os.X_OK)), None)
    return os.path.abspath(found) if found else None


def sources() -> bytes:
    """All that a library is made from: flags and files. Read at every start."""
    files = [entry.path for place in (KERNELS, GLUE) for entry in os.scandir(place)]
    parts = [repr((FLAGS, SOURCES)).encode()]
    for path in sorted(path for path in files if path.endswith((".cpp", ".h"))):
        with open(path, "rb", buffering=0) as file:
            parts.append(file.readall())
    return b"\0".join(parts)


def compile_library(
    target: Path,
    cxx: Sequence[str],
    extra: Sequence[str] = (),
    glue: Sequence[str] | None = None,
    kernels: Path | None = None,
) -> None:
    """Compile the kernels to a library, or to an object file if the target's name says so. cxx: see
    `compiler`. extra: more flags. glue: flags to compile and link the MLX primitives; None leaves
    them out. kernels: such an object file, instead of compiling them. Raises ToastError with the
    compiler's first error, OSError for shortages that may pass, such as a full disk. Compilers
    still running then, or on an interrupt, are killed."""
    import tempfile
    from concurrent.futures import ThreadPoolExecutor, wait

    flags_of = {}  # the slowest first
    if glue is not None:  # as one source: MLX's headers take most of the time
        *others, last = sorted(GLUE.glob("*.cpp"))
        flags_of[last] = (*glue, *(word for path in others for word in ("-include", str(path))))
    if kernels is None:
        flags_of |= {KERNELS / name: flags for name, flags in reversed(SOURCES.items())}
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.", dir=target.parent) as temporary:
        compilers = _Compilers(temporary)

        def compile_source(source: Path) -> str:
            made = os.path.join(temporary, f"{source.parent.name}-{source.stem}.o")
            command = (*cxx, *FLAGS, *extra, "-c", str(source))
            try:
                compilers.run([*command, *flags_of[source]], made)
            except ToastError:
                if source.name not in RECENT:
                    raise
                compilers.run([*command], made)
            return made

        made = os.path.join(temporary, f"made{target.suffix}")
        link = ["-shared", "-pthread", *extra, *(glue or ()), *(() if extra else ("-Wl,-z,defs",))]
        if target.suffix == ".o":
            link = ["-r", "-nostdlib"]
        threads = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
        try:
            tasks = [threads.submit(compile_source, source) for source in flags_of]
            objects = []
            for task in tasks:
                # A signal that arrives just before an unlimited wait would not end it.
                while wait([task], SIGNALS_CHECK).not_done:
                    pass
                objects.append(task.result())
            objects += [str(kernels)] if kernels else []
            compilers.run([*cxx, *objects, *link], made)
        except RuntimeError as error:  # no more threads for this user
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from error
        finally:
            compilers.end()
            threads.shutdown(cancel_futures=True)
        os.replace(made, target)


class _Compilers:
    """Concurrent compilers that can be killed together. temporary: a folder for them alone."""

    def __init__(self, temporary: str):
        self._running: set[subprocess.Popen[bytes]] = set()
        self._ended = False
        self._lock = threading.Lock()
        self._environment = {**os.environ, "TMPDIR": temporary, "LC_ALL": "C"}
        self._environment.pop("LD_PRELOAD", None)  # e.g. a sanitizer

    def end(self) -> None:
        """Kill those that run, and start no more."""
        with self._lock:
            self._ended = True
            for process in self._running:
                if process.returncode is None:
                    _kill(process.pid)

    def run(self, command: list[str], made: str) -> None:
        """Run a compiler that writes one file. Raises ToastError; OSError for shortages that may
        pass."""
        import subprocess

        with self._lock:
            if self._ended:
                raise ToastError("the compiler was interrupted")
            try:
                process = subprocess.Popen(
                    [*command, "-o", made], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE, env=self._environment, **GROUP,
                )  # fmt: skip
            except OSError as error:
                if error.errno in SCARCE:
                    raise
                raise ToastError(f"{command[0]}: {error.strerror}") from error
            self._running.add(process)
        try:
            _raise_failure(process, _wait(process, command[0]), command[0])
        finally:
            with self._lock:
                self._running.discard(process)
        if not os.path.exists(made):
            raise ToastError(f"{command[0]} has written nothing")


def _kill(process: int) -> None:
    """With all its children."""
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)


def _wait(process: subprocess.Popen[bytes], name: str) -> bytes:
    """Wait for a compiler, and return its output. Raises ToastError if it does not end; its
    children are killed with it."""
    import resource

    assert process.stderr is not None
    reader = None
    try:
        reader = _Reader(process.stderr)
        with suppress(ProcessLookupError, ValueError, PermissionError):  # a lower limit stays
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (MAX_BYTES, MAX_BYTES))
        _await_end(process, name)
    except BaseException:
        _kill(process.pid)
        process.wait()
        raise
    finally:
        if reader is not None:
            reader.join(LINGERS)
            if reader.is_alive():  # a child still has its stderr
                _kill(process.pid)
                reader.join()
    return reader.text


def _await_end(process: subprocess.Popen[bytes], name: str) -> None:
    """Raises ToastError if it hangs. Counts looks, as all may have been frozen between two."""
    import subprocess

    deadline, idle, before = time.monotonic() + SECONDS, 0, None
    while time.monotonic() < deadline:
        with suppress(subprocess.TimeoutExpired):
            process.wait(min(LOOK, deadline - time.monotonic()))
            return
        seen = _doings(process.pid)
        idle, before = idle + 1 if seen == before else 0, seen
        if idle == MAX_IDLE:
            raise ToastError(f"{name} did nothing for {MAX_IDLE * LOOK:.0f} s")
    raise ToastError(f"{name} did not end in {SECONDS:.0f} s")


def _doings(group: int) -> set[object]:
    """What changes while a process of a group computes, or waits for a processor or a disk."""
    found: set[object] = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            state, _, of, *rest = path.read_text("ascii", "replace").rpartition(")")[2].split()
            if int(of) == group:
                found.add((path, *rest[8:12]) if state not in "RD" else object())
    return found or {object()}


def _raise_failure(process: subprocess.Popen[bytes], output: bytes, name: str) -> None:
    """Raise the error of a compiler that has failed, see `_Compilers.run`."""
    if not process.returncode:
        return
    lines = output.decode(errors="replace").splitlines()
    shortages = {os.strerror(number): number for number in SCARCE}
    # Signals at a shutdown; GCC reports those of its children so.
    shortages |= dict.fromkeys(("Terminated signal", "Hangup signal"), errno.EINTR)
    if process.returncode in (-signal.SIGTERM, -signal.SIGHUP):
        lines.append("Terminated signal")
    for message, number in shortages.items():
        if any(message in line for line in lines):
            raise OSError(number, os.strerror(number))
    why = "no reason given"
    if process.returncode < 0:
        why = f"ended by {signal.Signals(-process.returncode).name}"
    # A linker's own lines precede those of the compiler that ran it.
    errors = [line for line in lines if "error" in line or "cannot find" in line]
    raise ToastError(f"{name} failed: {next(iter(errors), why).strip()[:200]}")


class _Reader(threading.Thread):
    """Reads a stream to its end. text: the first bytes, at most MAX_OUTPUT."""

    def __init__(self, stream: IO[bytes]):
        super().__init__(daemon=True)
        self.text = b""
        self._stream = stream
        self.start()

    def run(self) -> None:
        with self._stream:
            while part := self._stream.read(1 << 16):
                self.text += part[: MAX_OUTPUT - len(self.text)]
