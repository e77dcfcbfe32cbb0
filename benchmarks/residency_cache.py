"""What reading a model leaves of the system's cache of files: by toastkit, and by each way to read.

As a program, it is one of those ways in a process of its own: python residency_cache.py JSON.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from residency_files import PIECE, cached, drop, join_group, limited, size, warm, weights

if TYPE_CHECKING:
    from residency_report import Settings

DONTCACHE = 0x80  # RWF_DONTCACHE: Linux 6.14
THREADS = 4  # as toastkit has them
PASSES = 3
TIMES = (1, 2)  # that the other files were read
WAYS = ("plain", "RWF_DONTCACHE", "posix_fadvise", "O_DIRECT")
BARE = 64 << 20  # bytes of a process that only reads


def cache(settings: Settings) -> None:
    """The section."""
    from gears_report import percent, say, table
    from residency_files import model
    from residency_report import gb, section

    name = settings.names[0]
    files = weights(model(settings.models, name))
    others = [_other(settings, times) for times in TIMES]
    room = size(others) + size(files) // 2
    rows = []
    with limited(room + BARE) as group:
        grouped = group is not None
        for way in WAYS:
            say(f"cache: {way}")
            rows.append([way, *_alone(way, files, others, group)])
    say("cache: toastkit")
    rows.append(_by_toastkit(settings, name, files, others, room))
    how = (
        f"A cgroup's limit leaves room for those and half of the model ({gb(size(files))} GB)."
        if grouped
        else "No cgroup could be made: nothing limits the cache but the machine's memory."
    )
    section(
        f"The system's cache of files: {name}",
        f"Two other files of {settings.bystander >> 20} MiB are in the cache, one having been read "
        f"once, one twice. Then all of the model is read {PASSES} times by {THREADS} threads, 16 "
        f"MiB at a time, or by toastkit at 0% resident, {max(PASSES, settings.tokens)} tokens, "
        f"without being told how. {how}",
    )
    head = ("way", "GB a second", "of the model in the cache in the end", "of the other, read once",
            "read twice")  # fmt: skip
    sizes = [size(files), *map(size, ([other] for other in others))]
    table(head, [[way, rate, *(percent(left / whole) for left, whole in zip(lefts, sizes))]
                 for way, rate, *lefts in rows])  # fmt: skip


def _other(settings: Settings, number: int) -> Path:
    """A file of somebody else."""
    path = settings.models / f"other-{settings.bystander >> 20}M-{number}"
    if not path.exists():
        with open(path, "wb") as file:
            for _ in range(settings.bystander >> 20):
                file.write(os.urandom(1 << 20))
            os.fsync(file.fileno())
    return path


def _alone(
    way: str, files: Sequence[Path], others: Sequence[Path], group: Path | None
) -> list[Any]:
    """GB a second in words, bytes of the model and of the other files in the cache."""
    drop([*files, *others])
    order = {"way": way, "files": [*map(str, files)], "others": [*map(str, others)],
             "group": group and str(group)}  # fmt: skip
    command = [sys.executable, __file__, json.dumps(order)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().split("\n")[-1][:60]
        return [reason or f"status {done.returncode}", *[0] * (1 + len(others))]
    found = json.loads(done.stdout)
    return [f"{found['bytes'] / found['seconds'] / 1e9:.2f}", found["model"], *found["others"]]


def _by_toastkit(
    settings: Settings, name: str, files: Sequence[Path], others: Sequence[Path], room: int
) -> list[Any]:
    """The same, of tokens at 0% resident: bytes that were read over the time of a token."""
    from residency_case import Case
    from residency_memory import PROCESS

    with Case(settings.spec(name, "0")) as case:
        needs = PROCESS + BARE + case.opened["minimum"]
    drop([*files, *others])
    with limited(room + needs) as group:
        with Case(settings.spec(name, "0", group=group and str(group))) as case:
            for other, times in zip(others, TIMES):
                for _ in range(times):
                    case.do("warm", path=str(other))
            keeps = case.do("keeps")["cached"]
            found = case.do("tokens", count=max(PASSES, settings.tokens))
        rate = f"{found['read'] / found['seconds'] / 1e9:.2f} (a token)"
        way = f"toastkit ({'keeps' if keeps else 'does not keep'} files cached)"
        return [way, rate, cached(files), *(cached([other]) for other in others)]


# ---------------------------------------------------------------------------- in the process itself


def read(way: str, files: Sequence[str], passes: int) -> int:
    """Reads files; how many bytes."""
    opened = {path: os.open(path, os.O_RDONLY | _flag(way)) for path in files}
    buffers = [mmap.mmap(-1, PIECE) for _ in range(THREADS)]
    one = _reader(way)
    total = 0
    with ThreadPoolExecutor(THREADS) as threads:

        def piece(fd: int, start: int) -> int:
            buffer = buffers.pop()  # as many as threads
            try:
                return one(fd, buffer, start)
            finally:
                buffers.append(buffer)

        for _ in range(passes):
            waiting = [
                threads.submit(piece, fd, start)
                for fd in opened.values()
                for start in range(0, os.fstat(fd).st_size, PIECE)
            ]
            total += sum(future.result() for future in waiting)
    for fd in opened.values():
        os.close(fd)
    return total


def _flag(way: str) -> int:
    return getattr(os, "O_DIRECT", 0) if way == "O_DIRECT" else 0


def _reader(way: str) -> Callable[[int, mmap.mmap, int], int]:
    def plain(fd: int, buffer: mmap.mmap, start: int) -> int:
        return os.preadv(fd, [buffer], start)

    def dropping(fd: int, buffer: mmap.mmap, start: int) -> int:
        try:
            return os.preadv(fd, [buffer], start, DONTCACHE)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
                raise SystemExit("this system has no RWF_DONTCACHE") from error
            raise

    def advised(fd: int, buffer: mmap.mmap, start: int) -> int:
        count = os.preadv(fd, [buffer], start)
        os.posix_fadvise(fd, start, count, os.POSIX_FADV_DONTNEED)
        return count

    return {"RWF_DONTCACHE": dropping, "posix_fadvise": advised}.get(way, plain)


def main() -> None:
    order = json.loads(sys.argv[1])
    join_group(order["group"])
    files, others = [*map(Path, order["files"])], [*map(Path, order["others"])]
    for other, times in zip(others, TIMES):
        warm([other] * times)
    start = time.perf_counter()
    count = read(order["way"], order["files"], PASSES)
    seconds = time.perf_counter() - start
    left = {"model": cached(files), "others": [cached([other]) for other in others]}
    print(json.dumps({"bytes": count, "seconds": seconds, **left}))


if __name__ == "__main__":
    main()
