"""What native products may use of the machine."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path, PurePath


def processors(root: str = "/") -> int:
    """Threads that this process can run at a time: its processors, limited by the CPU quotas of its
    cgroups (version 1 or 2) and their parents. root: of proc and sys."""
    count = len(os.sched_getaffinity(0))
    lines: list[str] = []
    with suppress(OSError, ValueError):
        lines = Path(root, "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    # 0::FOLDER is version 2, NUMBER:CONTROLLERS:FOLDER version 1. In a container FOLDER may be the
    # host's path of what is mounted at the top.
    folders = {controllers: folder for _, controllers, folder in (x.split(":", 2) for x in lines)}
    cpu = next((f for controllers, f in folders.items() if "cpu" in controllers.split(",")), "/")
    for mounted, folder, files in (
        ("", folders.get("", "/"), ("cpu.max",)),
        ("cpu", cpu, ("cpu.cfs_quota_us", "cpu.cfs_period_us")),
    ):
        place = PurePath("/", folder)
        for group in (place, *place.parents):
            with suppress(OSError, ValueError, ArithmeticError):
                at = Path(root, "sys/fs/cgroup", mounted, group.relative_to("/"))
                limits = " ".join((at / file).read_text(encoding="ascii") for file in files)
                share, period = map(int, limits.split())
                if share > 0:  # no limit: -1 in version 1, max in version 2
                    count = min(count, max(1, share // period))
    return count


def large_pages(root: str = "/") -> bool:
    """True if the system gives huge pages on request. root: of sys."""
    with suppress(OSError):
        folder = Path(root, "sys/kernel/mm/transparent_hugepage")
        return "[never]" not in (folder / "enabled").read_text(encoding="ascii")
    return False
