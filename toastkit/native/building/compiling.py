"""Compiles the C++ of the folder above with the machine's own compiler."""

from __future__ import annotations

import errno
import os
import platform
import signal
import sys
import threading
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
# What each source is compiled for besides the usual; which of them runs is chosen where it runs.
FOR_ALL: dict[str, tuple[str, ...]] = {
    "pool.cpp": (), "kernels.cpp": (), "rows.cpp": (), "recurrent.cpp": (), "attention.cpp": (),
}  # fmt: skip
BY_MACHINE: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "portable.cpp": (), "avx2.cpp": AVX2, "avx512vnni.cpp": (*AVX2, *AVX512),
        "avx512vbmi.cpp": (*AVX2, *AVX512, "-mavx512vbmi"),
        "amx_int8.cpp": (
            *AVX2, *AVX512, "-mavx512vbmi", "-mamx-tile", "-mamx-int8", "-mtune=sapphirerapids",
        ),
    },
    "aarch64": {
        "neon.cpp": (), "neon_dotprod.cpp": (DOTPROD,), "neon_i8mm.cpp": (f"{DOTPROD}+i8mm",),
    },
}  # fmt: skip
# What compilers of some years ago (GCC 10) have not: without its flags such a source has no code.
RECENT = ("amx_int8.cpp",)
SOURCES = {**FOR_ALL, **BY_MACHINE.get(platform.machine(), {"portable.cpp": ()})}
GLUE = FOLDER / "glue"  # the MLX primitives over them
# GCC's own headers leave undefined what is undefined, and are warned of. contract: a * b + c is
# one instruction wherever there is one, so that all tiles of a product round alike.
FLAGS = (
    "-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-pthread",
    "-Wall", "-Wextra", "-Wno-psabi", "-Wno-uninitialized", "-Wno-maybe-uninitialized",
)  # fmt: skip
# A group of its own, so that all of a compiler can be ended, in the session of who builds, which
# gives way as a whole.
GROUP: dict[str, Any] = (
    {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
)
SECONDS = 300.0  # that one source may take
LINGERS = 1.0  # seconds that what it has said is waited for once it has ended
MOST_OUTPUT = 1 << 18  # bytes that are read of what a compiler says
MOST_BYTES = 256 << 20  # of a file that it writes
# What is wanting now, and may be there another time: it is no fault of a compiler's.
SCARCE = (errno.ENOSPC, errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


def unsupported() -> str | None:
    """Why nothing of this can run here; None where it can."""
    if sys.platform == "linux" and platform.machine() in BY_MACHINE:
        return None
    return "there are native products for Linux on x86-64 and 64-bit ARM only"


def compiler() -> tuple[str, ...] | None:
    """The C++ compiler, as the words of a command, programs among them by their whole paths: of the
    variable CXX ("ccache g++ -m64"), or the system's; None where there is none."""
    given = os.environ.get("CXX", "")
    for words in ((given,), given.split()) if given.strip() else (("c++",), ("g++",), ("clang++",)):
        if _which(words[0]):
            return tuple(_which(word) or word for word in words)
    return None


def no_compiler() -> str:
    """What is said where there is none."""
    given = os.environ.get("CXX", "")
    tried = f"CXX is {given!r}" if given.strip() else "c++, g++, clang++ or CXX"
    return f"there is no C++ compiler ({tried})"


def _which(name: str) -> str | None:
    """As shutil.which, whose import would take a start longer than all of this."""
    folders = [""] if os.path.dirname(name) else os.get_exec_path()
    paths = (os.path.join(folder, name) for folder in folders)
    found = next((p for p in paths if os.path.isfile(p) and os.access(p, os.X_OK)), None)
    return os.path.abspath(found) if found else None


def sources() -> bytes:
    """All that a library is made from: flags and files. Each start asks for it."""
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
    """Makes the kernels a library, or an object file where that is the target's name. cxx: the
    compiler, see `compiler`. extra: more flags. glue: those that the MLX primitives are compiled
    and linked with; None leaves these out. kernels: such an object file, in place of compiling
    them. Raises ToastError with what the compiler said first, OSError for what may be there another
    time, such as a disk that has room. What is compiled then, or is interrupted, is ended."""
    import tempfile
    from concurrent.futures import ThreadPoolExecutor

    flags_of = {}  # what takes longest first
    if glue is not None:  # as one source: MLX's headers are what takes time
        *others, last = sorted(GLUE.glob("*.cpp"))
        flags_of[last] = (*glue, *(word for path in others for word in ("-include", str(path))))
    if kernels is None:
        flags_of |= {KERNELS / name: flags for name, flags in reversed(SOURCES.items())}
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.", dir=target.parent) as temporary:
        compilers = _Compilers(temporary)

        def made_of(source: Path) -> str:
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
            objects = [*threads.map(made_of, flags_of), *([str(kernels)] if kernels else ())]
            compilers.run([*cxx, *objects, *link], made)
        except RuntimeError as error:  # no more threads for this user
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from error
        finally:
            compilers.end()
            threads.shutdown(cancel_futures=True)
        os.replace(made, target)


class _Compilers:
    """Compilers that run at once, and can be ended at once. temporary: a folder for them alone."""

    def __init__(self, temporary: str):
        self._running: set[subprocess.Popen[bytes]] = set()
        self._ended = False
        self._lock = threading.Lock()
        self._environment = {**os.environ, "TMPDIR": temporary, "LC_ALL": "C"}
        self._environment.pop("LD_PRELOAD", None)  # a sanitizer, say: not for the compiler

    def end(self) -> None:
        """Ends those that run, and lets no other begin."""
        with self._lock:
            self._ended = True
            for process in self._running:
                if process.returncode is None:
                    _kill(process.pid)

    def run(self, command: list[str], made: str) -> None:
        """Has one make a file. Raises ToastError; OSError for what may be another time."""
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
            _complain(process, _awaited(process, command[0]), command[0])
        finally:
            with self._lock:
                self._running.discard(process)
        if not os.path.exists(made):
            raise ToastError(f"{command[0]} has written nothing")


def _kill(process: int) -> None:
    """With all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)


def _awaited(process: subprocess.Popen[bytes], name: str) -> bytes:
    """What a compiler has said when it has ended. Raises ToastError where it does not; what it has
    started ends with it."""
    import resource
    import subprocess

    assert process.stderr is not None
    said = None
    try:
        said = _Said(process.stderr)
        with suppress(ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (MOST_BYTES, MOST_BYTES))
        process.wait(timeout=SECONDS)
    except BaseException as error:
        _kill(process.pid)
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            raise ToastError(f"{name} did not end in {SECONDS:.0f} s") from error
        raise
    finally:
        if said is not None:
            said.join(LINGERS)
            if said.is_alive():  # what it has left behind has its stderr
                _kill(process.pid)
                said.join()
    return said.text


def _complain(process: subprocess.Popen[bytes], said: bytes, name: str) -> None:
    """Raises what there is to be said of a compiler that has failed, see `_Compilers.run`."""
    if not process.returncode:
        return
    lines = said.decode(errors="replace").splitlines()
    passing = {os.strerror(number): number for number in SCARCE}
    # As all else is ended at a shutdown; so GCC says it of what it has started.
    passing |= dict.fromkeys(("Terminated signal", "Hangup signal"), errno.EINTR)
    if process.returncode in (-signal.SIGTERM, -signal.SIGHUP):
        lines.append("Terminated signal")
    for said_so, number in passing.items():
        if any(said_so in line for line in lines):
            raise OSError(number, os.strerror(number))
    why = "no reason given"
    if process.returncode < 0:
        why = f"ended by {signal.Signals(-process.returncode).name}"
    # A linker's own lines come before that of who started it.
    telling = [line for line in lines if "error" in line or "cannot find" in line]
    raise ToastError(f"{name} failed: {next(iter(telling), why).strip()[:200]}")


class _Said(threading.Thread):
    """Reads a stream to its end. text: what came first, MOST_OUTPUT bytes at most."""

    def __init__(self, stream: IO[bytes]):
        super().__init__(daemon=True)
        self.text = b""
        self._stream = stream
        self.start()

    def run(self) -> None:
        with self._stream:
            while part := self._stream.read(1 << 16):
                self.text += part[: MOST_OUTPUT - len(self.text)]
