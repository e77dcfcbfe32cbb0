"""How much memory there is, and how much of it can be had: the machine's, the cgroup's, and what
the limits of this process leave (ulimit -v, -d), above which an allocation fails.

In a container, or under systemd with a limit, the machine's free memory says nothing: what a cgroup
allows is spent long before, and then the kernel kills. Limits hold for a group with all below it,
so that each ancestor of the own one counts. Cached files are counted as available, as the kernel
does for the machine, except those that are mapped: libraries in use. Active ones too: whatever is
read twice is active, and a model that has been read from a file is not a shortage of memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

MOST_READ = 1 << 20  # bytes of a file of /proc or /sys
# Where cgroups are mounted when nothing says so, by version.
USUAL = {1: "/sys/fs/cgroup/memory", 2: "/sys/fs/cgroup"}
# By version, a group's files of limits and of usage, and names in memory.stat. Above memory.high a
# process is not killed, but slowed down until it is of no use: that is a limit too. The usage of
# version 1 is of all below it: so are the statistics in total.
FILES = {
    1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_", "total_mapped_file"),
    2: (("memory.max", "memory.high"), "memory.current", "", "file_mapped"),
}


def available_memory() -> int:
    """Bytes that can be allocated now without swapping: what the machine has available, or what the
    cgroups or this process's limits leave, whichever is less. A snapshot."""
    import psutil

    lefts = (left_by_cgroups(), left_by_limits())
    machine = int(psutil.virtual_memory().available)
    return min([machine, *(left for left in lefts if left is not None)])


def left_by_limits(root: Path = Path("/")) -> int | None:
    """Bytes that RLIMIT_AS and RLIMIT_DATA leave this process, whichever is less: of addresses, and
    of what is not shared. None where neither limits, or nothing can be read. root: below which
    proc/self is."""
    import resource

    used = [page * resource.getpagesize() for page in _pages(root)]
    lefts = []
    for kind, place in ((resource.RLIMIT_AS, 0), (resource.RLIMIT_DATA, 5)):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY and len(used) > place:
            lefts.append(max(0, limit - used[place]))
    return min(lefts, default=None)


def left_by_cgroups(root: Path = Path("/")) -> int | None:
    """Bytes that the memory cgroups of this process leave it, version 1 or 2: the least of the own
    one and its ancestors. None where nothing limits, or nothing can be read. root: below which
    proc/self and the mounted cgroups are. A file that is missing or malformed is one that says
    nothing."""
    lefts = []
    for version, folder in _groups(root):
        limit, used, reclaimable = _read(version, folder)
        if limit is not None and used is not None:
            lefts.append(max(0, limit - used + min(used, reclaimable)))
    return min(lefts, default=None)


def _read(version: int, folder: Path) -> tuple[int | None, int | None, int]:
    """(limit, used, reclaimable) bytes of a group."""
    limits, usage, kind, mapped = FILES[version]
    said = [n for name in limits if (n := _number(folder / name)) is not None]
    stat = _stat(folder)
    cached = stat.get(f"{kind}active_file", 0) + stat.get(f"{kind}inactive_file", 0)
    reclaimable = max(0, cached - stat.get(mapped, 0))
    return min(said, default=None), _number(folder / usage), reclaimable


def _groups(root: Path) -> Iterator[tuple[int, Path]]:
    """(version, folder) of the own memory cgroups and all their ancestors that can be seen. On a
    machine with both versions one of them has no files about memory."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if not colon or not path.startswith("/"):
            continue
        if "memory" in controllers.split(","):
            version = 1
        elif number == "0" and not controllers:
            version = 2
        else:
            continue
        mount, inner = _mounted(root, version, PurePosixPath(path))
        for part in (inner, *inner.parents):
            yield version, root / str(mount).lstrip("/") / part


def _mounted(root: Path, version: int, path: PurePosixPath) -> tuple[str, PurePosixPath]:
    """Where a cgroup's hierarchy is mounted, and the group's path below that. In a container the
    mount may begin at the container's own group, or the group be out of sight: then what is mounted
    is all that there is to read."""
    mounts = dict(_mounts(root, version))
    within = [top for top in mounts if path.is_relative_to(top) and ".." not in path.parts]
    if within:
        top = min(within, key=len)  # from the highest, the most ancestors are seen
        return mounts[top], path.relative_to(top)
    if mounts or ".." in path.parts:
        return next(iter(mounts.values()), USUAL[version]), PurePosixPath(".")
    return USUAL[version], path.relative_to("/")


def _mounts(root: Path, version: int) -> Iterator[tuple[str, str]]:
    """(the group that a mount begins at, mount point) of proc_pid_mountinfo(5)."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        fields, dash, rest = line.partition(" - ")
        head, tail = fields.split(), rest.split()
        if not dash or len(head) < 5 or len(tail) < 3:
            continue
        memory = tail[0] == "cgroup" and "memory" in tail[2].split(",")
        if (memory and version == 1) or (tail[0] == "cgroup2" and version == 2):
            yield _unescaped(head[3]), _unescaped(head[4])


def _unescaped(field: str) -> str:
    """Blanks and backslashes are octal there."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)


def _number(path: Path) -> int | None:
    """Bytes; None for "max", and for what is no number."""
    text = _text(path).strip()
    return int(text) if re.fullmatch("[0-9]{1,20}", text, re.ASCII) else None


def _stat(folder: Path) -> dict[str, int]:
    """A group's memory.stat, the lines of it that are a name and a number."""
    found = re.findall(r"^(\w+) ([0-9]{1,20})$", _text(folder / "memory.stat"), re.M | re.ASCII)
    return {name: int(value) for name, value in found}


def _pages(root: Path) -> list[int]:
    """Of proc_pid_statm(5)."""
    text = _text(root / "proc/self/statm").strip()
    return [int(x) for x in text.split()] if re.fullmatch("[0-9 ]+", text, re.ASCII) else []


def _text(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(MOST_READ).decode("utf-8", "replace")
    except (OSError, ValueError):  # a path with a zero byte is a ValueError
        return ""
