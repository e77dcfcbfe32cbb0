"""A memory cgroup, where the machine lets a test make one."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """A cgroup with a limit, without swap; skips the test where none can be made: at the top of the
    hierarchy, for below the own group version 2 has none while processes are in that."""
    folder = Path("/sys/fs/cgroup")
    version_1 = (folder / "memory/memory.limit_in_bytes").exists()
    group = folder / ("memory" if version_1 else ".") / f"toastkit-{uuid.uuid4().hex[:12]}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error.strerror}")
    try:
        limit = group / ("memory.limit_in_bytes" if version_1 else "memory.max")
        try:
            if not limit.exists():
                pytest.skip("cgroups here have no memory controller")
            limit.write_text(str(limit_bytes))
        except OSError as error:
            pytest.skip(f"no limit can be set: {error.strerror}")
        yield group
    finally:
        group.rmdir()
