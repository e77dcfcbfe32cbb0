"""Compiles the C++ of the folder above with the machine's own compiler."""

from __future__ import annotations

import errno
import os
import platform
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from toastkit.errors import ToastError

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


def unsupported() -> str | None:
    """Why nothing of this can run here; None where it can."""
    if sys.platform == "linux" and platform.machine() in BY_MACHINE:
        return None
    return "there are native products for Linux on x86-64 and 64-bit ARM only"


def compiler() -> str | None:
    """The C++ compiler: of the variable CXX, or the system's; None where there is none."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next(filter(None, map(_which, names)), None)


def _which(name: str) -> str | None:
    """As shutil.which, whose import would take a start longer than all of this."""
    folders = [""] if os.path.dirname(name) else os.get_exec_path()
    paths = (os.path.join(folder, name) for folder in folders)
    return next((p for p in paths if os.path.isfile(p) and os.access(p, os.X_OK)), None)


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
    cxx: str,
    extra: Sequence[str] = (),
    glue: Sequence[str] | None = None,
    kernels: Path | None = None,
) -> None:
    """Makes the kernels a library, or an object file where that is the target's name. extra: more
    flags. glue: those that the MLX primitives are compiled and linked with; None leaves these out.
    kernels: such an object file, in place of compiling them. Raises ToastError with what the
    compiler said first, OSError for a disk that is full."""
    import tempfile
    from concurrent.futures import ThreadPoolExecutor

    flags_of = {}  # what takes longest first
    if glue is not None:  # as one source: MLX's headers are what takes time
        *others, last = sorted(GLUE.glob("*.cpp"))
        flags_of[last] = (*glue, *(word for path in others for word in ("-include", str(path))))
    if kernels is None:
        flags_of |= {KERNELS / name: flags for name, flags in reversed(SOURCES.items())}
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:

        def made_of(source: Path) -> str:
            made = os.path.join(temporary, f"{source.parent.name}-{source.stem}.o")
            command = (cxx, *FLAGS, *extra, "-c", str(source), "-o", made)
            try:
                _run([*command, *flags_of[source]], temporary)
            except ToastError:
                if source.name not in RECENT:
                    raise
                _run([*command], temporary)
            return made

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as compilers:
            objects = list(compilers.map(made_of, flags_of))
        made = os.path.join(temporary, f"made{target.suffix}")
        link = ["-shared", "-pthread", *extra, *(glue or ()), *(() if extra else ("-Wl,-z,defs",))]
        if target.suffix == ".o":
            link = ["-r", "-nostdlib"]
        _run([cxx, *objects, *([str(kernels)] if kernels else ()), *link, "-o", made], temporary)
        os.replace(made, target)


def _run(command: list[str], temporary: str) -> None:
    """Runs the compiler. Raises ToastError; OSError where it found the disk full, which may be
    another time."""
    import resource
    import signal
    import subprocess

    environment = {**os.environ, "TMPDIR": temporary, "LC_ALL": "C"}
    environment.pop("LD_PRELOAD", None)  # a sanitizer, say: not for the compiler
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            env=environment, **GROUP,
        )  # fmt: skip
    except OSError as error:
        raise ToastError(f"{command[0]}: {error.strerror}") from error
    assert process.stderr is not None
    said = _Said(process.stderr)
    try:
        with suppress(ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (MOST_BYTES, MOST_BYTES))
        process.wait(timeout=SECONDS)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            raise ToastError(f"{command[0]} did not end in {SECONDS:.0f} s") from error
        raise
    finally:
        said.join(LINGERS)
        if said.is_alive():  # what it has left behind has its stderr
            os.killpg(process.pid, signal.SIGKILL)
            said.join()
    if process.returncode:
        lines = said.text.decode(errors="replace").splitlines()
        if any(os.strerror(errno.ENOSPC) in line for line in lines):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        why = "no reason given"
        if process.returncode < 0:
            why = f"ended by {signal.Signals(-process.returncode).name}"
        why = next((line for line in lines if "error" in line), why)
        raise ToastError(f"{command[0]} failed: {why.strip()[:200]}")


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
