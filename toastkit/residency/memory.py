"""Available memory: the machine's, the cgroup's, and what this process's limits (ulimit -v, -d)
leave, above which an allocation fails.

In a container, or under systemd with a limit, the machine's free memory says nothing: the cgroup's
limit is reached long before, and then the kernel kills. A limit holds for a group and all its
descendants, so each ancestor of this process's group counts. The page cache counts as available, as
the kernel counts it for the machine, except for mapped files: libraries in use. Its active pages
count too: whatever is read twice is active, and a model that was read from a file is no shortage.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

MAX_READ = 1 << 20  # bytes of a file of /proc or /sys
# Where cgroups are mounted when nothing says so, by version.
USUAL = {1: "/sys/fs/cgroup/memory", 2: "/sys/fs/cgroup"}
# By version, a group's files of limits and of usage, and names in memory.stat. Above memory.high a
# process is not killed, but throttled until it is of no use: that is a limit too. The usage of
# version 1 includes descendants, so the total_ statistics go with it.
FILES = {
    1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_", "total_mapped_file"),
    2: (("memory.max", "memory.high"), "memory.current", "", "file_mapped"),
}


def available_memory() -> int:
    """Bytes that can be allocated now without swapping: the least of what the machine has available
    and what cgroups and this process's limits leave. A snapshot."""
    import psutil

    limits = (left_by_cgroups(), left_by_limits())
    machine = int(psutil.virtual_memory().available)
    return min([machine, *(left for left in limits if left is not None)])


def left_by_limits(root: Path = Path("/")) -> int | None:
    """Bytes that RLIMIT_AS (address space) and RLIMIT_DATA (private memory) leave this process, the
    lesser of both. None if there is no limit, or nothing can be read. root: the directory that
    contains proc/self."""
    import resource

    used = [page * resource.getpagesize() for page in _pages(root)]
    lefts = []
    for kind, place in ((resource.RLIMIT_AS, 0), (resource.RLIMIT_DATA, 5)):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY and len(used) > place:
            lefts.append(max(0, limit - used[place]))
    return min(lefts, default=None)


def left_by_cgroups(root: Path = Path("/")) -> int | None:
    """Bytes that this process's memory cgroups, version 1 or 2, leave it: the least over its group
    and all ancestors. None if there is no limit, or nothing can be read. root: the directory that
    contains proc/self and the mounted cgroups. Missing and malformed files are ignored."""
    lefts = []
    for version, folder in _groups(root):
        limit, used, reclaimable = _read(version, folder)
        if limit is not None and used is not None:
            lefts.append(max(0, limit - used + min(used, reclaimable)))
    return min(lefts, default=None)


def _read(version: int, folder: Path) -> tuple[int | None, int | None, int]:
    """(limit, used, reclaimable) bytes of a group."""
    limits, usage, kind, mapped = FILES[version]
    found = [n for name in limits if (n := _number(folder / name)) is not None]
    stat = _stat(folder)
    cached = stat.get(f"{kind}active_file", 0) + stat.get(f"{kind}inactive_file", 0)
    reclaimable = max(0, cached - stat.get(mapped, 0))
    return min(found, default=None), _number(folder / usage), reclaimable


def _groups(root: Path) -> Iterator[tuple[int, Path]]:
    """(version, folder) of this process's memory cgroups and all their visible ancestors. On a
    machine with both versions, one of them has no memory files."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if not path.startswith("/"):
            continue
        if "memory" in controllers.split(","):
            version = 1
        elif not controllers:
            version = 2
        else:
            continue
        mount, inner = _mounted(root, version, PurePosixPath(path))
        for part in (inner, *inner.parents):
            yield version, root / str(mount).lstrip("/") / part


def _mounted(root: Path, version: int, path: PurePosixPath) -> tuple[str, PurePosixPath]:
    """The mount point of a cgroup's hierarchy, and the group's path below it. In a container the
    mount may begin at the container's own group, or the group may be invisible: then the mount's
    own group is all that can be read."""
    mounts = dict(_mounts(root, version))
    within = [top for top in mounts if path.is_relative_to(top) and ".." not in path.parts]
    if within:
        top = min(within, key=len)  # the highest shows the most ancestors
        return mounts[top], path.relative_to(top)
    if mounts or ".." in path.parts:
        return next(iter(mounts.values()), USUAL[version]), PurePosixPath(".")
    return USUAL[version], path.relative_to("/")


def _mounts(root: Path, version: int) -> Iterator[tuple[str, str]]:
    """(group at the root of a mount, mount point), from proc_pid_mountinfo(5)."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        fields, dash, rest = line.partition(" - ")
        head, tail = fields.split(), rest.split()
        if not dash or len(head) < 5 or len(tail) < 3:
            continue
        memory = tail[0] == "cgroup" and "memory" in tail[2].split(",")
        if (memory and version == 1) or (tail[0] == "cgroup2" and version == 2):
            yield _unescaped(head[3]), _unescaped(head[4])


def _unescaped(field: str) -> str:
    """Decode a field of mountinfo, which has blanks and backslashes in octal."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)


def _number(path: Path) -> int | None:
    """A file's number of bytes; None for "max", and for anything else."""
    text = _text(path).strip()
    return int(text) if re.fullmatch("[0-9]{1,20}", text, re.ASCII) else None


def _stat(folder: Path) -> dict[str, int]:
    """The lines of a group's memory.stat that are a name and a number."""
    found = re.findall(r"^(\w+) ([0-9]{1,20})$", _text(folder / "memory.stat"), re.M | re.ASCII)
    return {name: int(value) for name, value in found}


def _pages(root: Path) -> list[int]:
    """Pages, from proc_pid_statm(5)."""
    text = _text(root / "proc/self/statm").strip()
    return [int(x) for x in text.split()] if re.fullmatch("[0-9 ]+", text, re.ASCII) else []


def _text(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_READ).decode("utf-8", "replace")
    except (OSError, ValueError):  # a path with a zero byte is a ValueError
        return ""
