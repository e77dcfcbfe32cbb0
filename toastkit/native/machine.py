"""What of the machine native products may use, as the system says."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path, PurePath


def processors(root: str = "/") -> int:
    """Threads that this process may run at a time: its processors, as far as the shares of its
    cgroups (version 1 or 2) and of those above them go. root: below which proc and sys are."""
    count = len(os.sched_getaffinity(0))
    lines: list[str] = []
    with suppress(OSError, ValueError):
        lines = Path(root, "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    # 0::FOLDER is of version 2, NUMBER:CONTROLLERS:FOLDER of version 1. In a container FOLDER may
    # be the host's name for what lies at the top.
    of = {controllers: folder for _, controllers, folder in (x.split(":", 2) for x in lines)}
    one = next((f for controllers, f in of.items() if "cpu" in controllers.split(",")), "/")
    for mounted, folder, files in (
        ("", of.get("", "/"), ("cpu.max",)),
        ("cpu", one, ("cpu.cfs_quota_us", "cpu.cfs_period_us")),
    ):
        place = PurePath("/", folder)
        for group in (place, *place.parents):
            with suppress(OSError, ValueError, ArithmeticError):
                beside = Path(root, "sys/fs/cgroup", mounted, group.relative_to("/"))
                told = " ".join((beside / file).read_text(encoding="ascii") for file in files)
                share, period = map(int, told.split())
                if share > 0:  # -1 of version 1 and max of version 2 are no limit
                    count = min(count, max(1, share // period))
    return count


def large_pages(root: str = "/") -> bool:
    """Whether the system gives large pages to whoever asks. root: below which sys is."""
    with suppress(OSError):
        folder = Path(root, "sys/kernel/mm/transparent_hugepage")
        return "[never]" not in (folder / "enabled").read_text(encoding="ascii")
    return False
