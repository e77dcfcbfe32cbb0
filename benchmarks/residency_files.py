"""Files of benchmarks/residency.py: checkpoints, the system's cache of files, dd, cgroups."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

PIECE = 16 << 20  # bytes of a read, as toastkit has it
CACHESTAT = 451  # the system call, on all architectures; Linux 6.5
# A model for --quick: a few layers of the 0.8B, and not much around them.
QUICK = {"num_hidden_layers": 4, "vocab_size": 16384}


# ------------------------------------------------------------------------------------- checkpoints


def model(folder: Path, name: str) -> Path:
    """The checkpoint of a name such as 0.8B-4, 4B-bf16 or quick-4 in a folder; made if it is not
    there."""
    path = folder / name
    if path.exists():
        return path
    from qwen35 import SHAPES, make

    size, _, kind = name.partition("-")
    if size not in (*SHAPES, "quick") or not re.fullmatch("bf16|[2-8]", kind):
        raise SystemExit(f"no such model: {name} (such as {', '.join(SHAPES)}, -bf16 or -4)")
    shape = {**SHAPES["0.8B"], **QUICK} if size == "quick" else SHAPES[size]
    part = folder / f"{name}.part"
    shutil.rmtree(part, ignore_errors=True)
    make(part, shape, None if kind == "bf16" else int(kind))
    os.sync()  # what is not on the disk yet cannot be dropped from the cache
    return part.rename(path)


def baked(folder: Path, name: str) -> Path:
    """A .toast of that checkpoint with its low gear beside the originals."""
    path = folder / f"{name}-low.toast"
    if not path.exists():
        from toastkit.model.locate import locate
        from toastkit.store.bake import bake
        from toastkit.store.store import Store

        with Store(locate(str(model(folder, name)))) as store:
            bake(store, path, gears=("low",))
        os.sync()
    return path


def weights(path: Path) -> list[Path]:
    """The files that hold the weights, those of the layers in the order of the layers."""
    if path.is_file():
        return [path]
    number = lambda file: int("".join(filter(str.isdecimal, file.stem)) or -1)  # noqa: E731
    return sorted(path.glob("*.safetensors"), key=number)


def layer_files(path: Path) -> list[Path]:
    """Those of the layers alone, where they have files of their own."""
    return [file for file in weights(path) if "outside" not in file.name]


def size(paths: Iterable[Path]) -> int:
    """Bytes of files."""
    return sum(file.stat().st_size for file in paths)


# ----------------------------------------------------------------------- the system's cache of them


def drop(paths: Iterable[Path]) -> None:
    """Puts files out of the system's cache: what of them is on the disk, and mapped by nobody."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def warm(paths: Iterable[Path]) -> None:
    """Reads files, so that they are in the system's cache if there is room."""
    memory = memoryview(mmap.mmap(-1, PIECE))
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(memory):
                pass


def cached(paths: Iterable[Path]) -> int:
    """Bytes of files that are in the system's cache."""
    return sum(map(_cached, paths))


def _cached(path: Path) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "rb") as file:
        whole, counts = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
        if libc.syscall(CACHESTAT, file.fileno(), whole, counts, 0) == 0:
            return counts[0] * mmap.PAGESIZE
        length = os.fstat(file.fileno()).st_size
        pages = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
        with mmap.mmap(file.fileno(), length, mmap.MAP_PRIVATE) as mapped:
            start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
            if libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(length), pages):
                raise OSError(ctypes.get_errno(), "mincore")
        return sum(page & 1 for page in pages) * mmap.PAGESIZE


def dd(paths: Sequence[Path], direct: bool) -> float:
    """Bytes a second that dd reads from files that are not in the cache; direct: past it. The
    seconds are dd's own."""
    drop(paths)
    seconds = 0.0
    for path in paths:
        flags = ["iflag=direct"] if direct else []
        command = ["dd", f"if={path}", "of=/dev/null", "bs=16M", *flags]
        environment = {**os.environ, "LC_ALL": "C"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        found = re.search(r"copied, ([0-9.e-]+) s", done.stderr)
        if found is None:
            raise RuntimeError(f"dd: {done.stderr.strip()}")
        seconds += float(found[1])
    drop(paths)
    return size(paths) / seconds


# --------------------------------------------------------------------------------------- cgroups

GROUPS = Path("/sys/fs/cgroup/memory")  # of version 1
GROUPS_2 = Path("/sys/fs/cgroup")


@contextmanager
def limited(limit: int) -> Iterator[Path | None]:
    """A memory cgroup with a limit in bytes, None where none can be made. It is gone at the end,
    when nobody is in it."""
    old = (GROUPS / "memory.limit_in_bytes").exists()
    path = (GROUPS if old else GROUPS_2) / f"toastkit-benchmark-{os.getpid()}"
    try:
        path.mkdir()
        (path / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(limit))
    except OSError:
        if path.exists():
            path.rmdir()
        yield None
        return
    try:
        yield path
    finally:
        path.rmdir()


def join_group(path: str | None) -> None:
    """Puts this process into a cgroup."""
    if path is not None:
        Path(path, "cgroup.procs").write_text(str(os.getpid()))


def most_used(group: Path) -> int | None:
    """Bytes that a cgroup has used at most, files in the cache included."""
    for name in ("memory.max_usage_in_bytes", "memory.peak"):
        with suppress(OSError):
            return int((group / name).read_text())
    return None
