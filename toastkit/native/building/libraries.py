"""Find and build the library of native products.

    python -m toastkit.native.building.libraries      build now, and say so (make native)

What a wheel brings (ready.py) saves compiling, as far as it goes. Nobody waits for a compiler:
`find` reports what there is, `build_meanwhile` builds in a process of its own, at the lowest
priority, and the next command finds the result. Libraries are in a private folder. A file's name
has a digest of the sources, MLX and compiler that it was made from, and one of its content; it gets
that name once it has been compiled, loaded in another process, and found right. A file whose
content does not match is ignored."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from toastkit.base_directories import can_be_written, own_directory, remove_old
from toastkit.errors import IOFailure, ToastError, UnavailableError, from_os_error, reported_as
from toastkit.interrupts import Signals
from toastkit.native.building import ready
from toastkit.native.building.compiling import (
    FOLDER,
    SECONDS,
    SOURCES,
    compile_library,
    compiler,
    no_compiler,
    sources,
    unsupported,
)
from toastkit.native.building.ready import digest
from toastkit.private_files import (
    closing_fd,
    make_private_directories,
    not_private,
    open_private,
    read_file,
    replace_file,
    try_lock,
)
from toastkit.threads import start_process

MAX_BYTES = 64 << 20
MAKING = ".making"  # in the names of unfinished files
KEPT = 8  # files of other versions and environments of this user
PROBE_SECONDS = 120.0
LOWEST = 19  # nice value
LOW = 10  # nice value of the session: a tenth of a busy core, so that the build finishes


class Found(NamedTuple):
    """path: of the library, or None, for the reason `why`. pending: it could be built."""

    path: str | None
    why: str = ""
    pending: bool = False


def folder() -> str:
    """The folder of libraries."""
    return own_directory("CACHE", "native")


def find() -> Found:
    """Find the library. Writes nothing."""
    if problem := unsupported():
        return Found(None, problem)
    cxx, mlx = compiler(), installed_mlx()
    if mlx is None:
        return Found(None, "this MLX has no headers to compile for")
    if cxx is None and ready.library(mlx) is None:
        other = ", and nothing that came with toastkit is for this MLX" if ready.kernels() else ""
        return Found(None, no_compiler() + other)
    name, odd = _key(cxx, mlx), ""
    try:
        files = sorted(os.listdir(folder()))
        if problem := _unusable():
            return Found(None, problem)
        for file in files:
            if file.startswith(f"{name}-") and file.endswith(".so"):
                path = os.path.join(folder(), file)
                try:
                    data = read_file(path, MAX_BYTES)
                    if digest(data) == file[len(name) + 1 : -3] and _is_whole(data):
                        return Found(path)
                except OSError as error:  # no regular file of this user's: another may be
                    odd = f"{path}: {error.strerror}"
        if odd:
            return Found(None, odd)
        if f"{name}.failed" in files:
            said = read_file(os.path.join(folder(), f"{name}.failed"), 1 << 12)
            return Found(None, said.decode(errors="replace").strip())
    except FileNotFoundError:
        pass
    except OSError as error:
        return Found(None, f"{folder()}: {error.strerror}")
    if not can_be_written(folder()):
        return Found(None, f"nothing can be kept in {folder()}")
    try:
        state = "being built in the background" if _is_building() else "not built yet"
    except OSError as error:  # no build could take the lock
        return Found(None, f"{os.path.join(folder(), 'lock')}: {error.strerror}")
    return Found(None, f"they are {state}", pending=True)


def _is_whole(library: bytes) -> bool:
    """True if an ELF file of 64 bits has all of its table of sections, which linkers put last: to
    load one that was cut off ends the process (SIGBUS)."""
    start, size, count = (
        int.from_bytes(library[at:end], sys.byteorder) for at, end in ((40, 48), (58, 60), (60, 62))
    )
    return start + size * count <= len(library)


def _is_building() -> bool:
    """True while a process holds the builders' lock. Raises OSError if none can."""
    try:
        with closing_fd(open_private(os.path.join(folder(), "lock"), os.O_RDONLY)) as lock:
            return not try_lock(lock)
    except FileNotFoundError:
        return False


def build_meanwhile() -> bool:
    """Start building what `find` has not found, unless another process does, and return at once.
    The next command may find the result: nobody is told. False if no process can be started."""
    cxx = compiler()  # resolved in this working directory
    env = {"CXX": " ".join(cxx)} if cxx else {}
    return start_process("toastkit.native.building.libraries", "--quiet", env=env)


def _unusable() -> str | None:
    """Why nothing may be loaded from the folder, which exists. Raises OSError."""
    if problem := not_private(folder()):
        return f"{folder()} {problem}"
    if os.statvfs(folder()).f_flag & os.ST_NOEXEC:
        return f"{folder()} is on a file system that runs no programs (noexec)"
    return None


def build(
    wait: bool = False, say: Callable[[str], None] | None = None, useless: str | None = None
) -> str:
    """Build the library unless it exists; return its path. wait: for another process that builds
    it, as long as a compiler may take. say: takes a line about what takes long.
    useless: path of an existing library that cannot be loaded, and is replaced. Raises
    UnavailableError if the machine cannot, or another process builds it; CannotCreateError,
    IOFailure."""
    found = find()
    if found.path not in (None, useless):
        return found.path
    cxx, mlx = compiler(), installed_mlx()
    if unsupported() or mlx is None or not (cxx or ready.library(mlx)):
        raise UnavailableError(f"no native products: {found.why}")
    name = _key(cxx, mlx)
    with reported_as(f"cannot build in {folder()}", creating=True):
        make_private_directories(folder())
        if problem := _unusable():
            raise UnavailableError(f"no native products: {problem}")
        lock = open_private(os.path.join(folder(), "lock"), os.O_RDWR | os.O_CREAT)
    with closing_fd(lock):
        deadline, waiting = time.monotonic() + (SECONDS if wait else 0), False
        while not try_lock(lock):
            if say is not None and not waiting:
                say("native products: another process builds them, waiting for it")
            waiting = True
            if time.monotonic() >= deadline:
                raise UnavailableError("no native products: another process is building them")
            time.sleep(0.1)
        if useless is not None:
            with suppress(FileNotFoundError):
                os.unlink(useless)
        if path := find().path:
            return path
        return _build(name, cxx, mlx, say)


def _build(
    name: str, cxx: Sequence[str] | None, mlx: Path, say: Callable[[str], None] | None
) -> str:
    """Make, probe and install it; a failure is recorded, and not tried again for this name unless
    asked."""
    made = Path(folder(), f"{name}{MAKING}")
    failed = os.path.join(folder(), f"{name}.failed")
    try:
        _remove_unfinished()
        with suppress(FileNotFoundError):
            os.unlink(failed)
        _make(made, cxx, mlx, say)
        path = os.path.join(folder(), f"{name}-{digest(made.read_bytes())}.so")
        os.replace(made, path)
        remove_old(folder(), KEPT, (".so", ".failed"))
        return path
    except ToastError as error:
        with suppress(OSError):
            replace_file(failed, error.message.encode(), sync=False)
        raise UnavailableError(f"no native products: {error.message}") from error
    except OSError as error:
        raise from_os_error(error, f"cannot build in {folder()}", creating=True) from error
    finally:
        with suppress(OSError):
            os.unlink(made)


def _make(
    made: Path, cxx: Sequence[str] | None, mlx: Path, say: Callable[[str], None] | None
) -> None:
    """Use as much of what came with toastkit as possible and trustworthy. Raises ToastError,
    OSError."""
    if ready_library := ready.library(mlx):
        from shutil import copyfile

        copyfile(ready_library, made)
        if is_trustworthy(made):
            return
    if cxx is None:
        raise ToastError("what came with toastkit is not what this MLX needs")
    glue = [*glue_flags(mlx), "-Xlinker", "-rpath", "-Xlinker", str(mlx / "lib")]
    compiled, name = partial(compile_library, made, cxx, glue=glue), " ".join(cxx)
    if kernels := ready.kernels():
        if say is not None:
            say(f"native products: compiling what is MLX's of them with {name}, once")
        with suppress(ToastError):
            compiled(kernels=kernels)
            if is_trustworthy(made):
                return
    if say is not None:
        say(f"native products: compiling {len(SOURCES)} files and more with {name}, once")
    compiled()
    if not is_trustworthy(made):
        raise ToastError("what was compiled is not what this MLX needs")


def glue_flags(mlx: Path) -> list[str]:
    """Flags to compile and link the MLX primitives."""
    return ["-isystem", str(mlx / "include"), f"-L{mlx / 'lib'}", "-lmlx"]


def is_trustworthy(path: Path) -> bool:
    """Probe a library in a child process, which may crash."""
    import subprocess

    command = [sys.executable, "-m", "toastkit.native.building.probe", str(path)]
    try:
        done = subprocess.run(
            command, cwd=FOLDER.parent.parent, capture_output=True, timeout=PROBE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def installed_mlx() -> Path | None:
    """The folder of MLX, if it has headers and library."""
    spec = find_spec("mlx")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if Path(place, "include/mlx/array.h").is_file() and Path(place, "lib/libmlx.so").is_file():
            return Path(place)
    return None


def _key(cxx: Sequence[str] | None, mlx: Path) -> str:
    """Digest of what a library is made from and for, as part of its name. Instruction sets are not
    in it: they are chosen at run time."""
    words = cxx or ()
    programs = [os.path.realpath(word) for word in words if os.path.isfile(word)]
    parts = [sys.implementation.cache_tag or "", *(w for w in words if not os.path.isfile(w))]
    for file in (*programs, str(mlx / "lib/libmlx.so")):
        about = os.stat(file)
        parts.append(f"{file} {about.st_size} {about.st_mtime_ns}")
    return digest(sources() + "\0".join(parts).encode())


def _remove_unfinished() -> None:
    """Remove what killed builds left; nobody else is building."""
    from shutil import rmtree

    for entry in os.scandir(folder()):
        if MAKING in entry.name and entry.is_dir(follow_symlinks=False):
            rmtree(entry.path)
        elif MAKING in entry.name:
            os.unlink(entry.path)


def _lower_priority() -> None:
    """Yield to other processes. Linux weighs sessions against each other before the processes in
    them (autogroup, sched(7)): a session of our own yields as a whole."""
    os.nice(LOWEST)
    if os.getsid(0) == os.getpid():
        with suppress(OSError):  # not supported, or changed too often
            Path("/proc/self/autogroup").write_text(str(LOW))


def _say(line: str) -> None:
    if sys.stderr is not None:
        print(line, file=sys.stderr, flush=True)


def main() -> int:
    """Build it and print its path, or why there is none. A library that cannot be loaded, or a
    recorded failure, is built again, unless in the background."""
    _lower_priority()
    Signals()
    quiet = "--quiet" in sys.argv[1:]
    try:
        useless = None
        if not quiet:
            for name in os.listdir(folder()) if os.path.isdir(folder()) else ():
                if name.endswith(".failed"):
                    with suppress(FileNotFoundError):  # two at once
                        os.unlink(os.path.join(folder(), name))
            there = find().path
            useless = there if there and not is_trustworthy(Path(there)) else None
        path = build(not quiet, None if quiet else _say, useless)
        if not quiet:
            if sys.stdout is None:
                raise IOFailure("cannot write: standard output is closed")
            sys.stdout.buffer.write(os.fsencode(path) + b"\n")
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except (ToastError, OSError) as error:
        told = error if isinstance(error, ToastError) else from_os_error(error, "cannot write")
        if not quiet:
            _say(told.message)
        return told.code
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout = None  # flushed already, or it cannot be
    sys.exit(code)
