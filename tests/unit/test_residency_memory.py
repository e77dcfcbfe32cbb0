"""What memory can be had: cgroups read from a tree made here, and from the machine's own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cgroups import memory_group
from toastkit.commands import cli
from toastkit.errors import as_data_error, as_toast_error
from toastkit.residency import memory
from toastkit.residency.memory import available_memory, left_by_cgroups, left_by_limits

MB = 1 << 20
V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"
UNLIMITED_1 = 0x7FFFFFFFFFFFF000


def write(path: Path, text: str | int | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else f"{text}\n".encode())


def member(root: Path, *lines: str) -> Path:
    """A process is in these groups."""
    write(root / "proc/self/cgroup", "\n".join(lines))
    return root


def mounted(root: Path, *lines: str) -> None:
    write(root / "proc/self/mountinfo", "\n".join(lines))


def group_1(folder: Path, limit: object, used: object = 0, stat: str = "") -> None:
    write(folder / "memory.limit_in_bytes", str(limit))
    write(folder / "memory.usage_in_bytes", str(used))
    write(folder / "memory.stat", stat)


def group_2(
    folder: Path, most: object, used: object = 0, stat: str = "", high: object = "max"
) -> None:
    write(folder / "memory.max", str(most))
    write(folder / "memory.high", str(high))
    write(folder / "memory.current", str(used))
    write(folder / "memory.stat", stat)


# --------------------------------------------------------------------------------------- version 2


def test_a_limit_of_version_2(tmp_path: Path) -> None:
    member(tmp_path, "0::/app")
    group_2(tmp_path / V2 / "app", 1000, 700, "anon 500\nfile 200\ninactive_file 150\nslab 9")
    assert left_by_cgroups(tmp_path) == 450


def test_cached_files_can_be_had_unless_they_are_mapped(tmp_path: Path) -> None:
    member(tmp_path, "0::/app", "4:memory:/old")
    app, old = tmp_path / V2 / "app", tmp_path / V1 / "old"
    group_2(app, 1000, 900, "active_file 400\ninactive_file 150\nfile_mapped 50")
    assert left_by_cgroups(tmp_path) == 600
    group_2(app, 1000, 900, "inactive_file 20\nfile_mapped 50")  # it counts shared memory as well
    assert left_by_cgroups(tmp_path) == 100
    stat = "total_active_file 400\ntotal_inactive_file 150\nactive_file 7\ntotal_mapped_file 530"
    group_1(old, 1000, 990, stat)
    assert left_by_cgroups(tmp_path) == 30


def test_high_is_a_limit_too(tmp_path: Path) -> None:
    member(tmp_path, "0::/app")
    group_2(tmp_path / V2 / "app", "max", 700, high=900)
    assert left_by_cgroups(tmp_path) == 200
    group_2(tmp_path / V2 / "app", 800, 700, high=900)
    assert left_by_cgroups(tmp_path) == 100
    group_2(tmp_path / V2 / "app", 800, 700, high=600)  # over it: nothing, not less
    assert left_by_cgroups(tmp_path) == 0


def test_no_limit(tmp_path: Path) -> None:
    member(tmp_path, "0::/app", "0::app", "4:memory", "nothing")
    group_2(tmp_path / V2 / "app", "max", 700)
    assert left_by_cgroups(tmp_path) is None
    assert left_by_cgroups(tmp_path / "nowhere") is None


def test_every_ancestor_counts(tmp_path: Path) -> None:
    """The least that is left, which need not be of the least limit."""
    member(tmp_path, "0::/user.slice/app.scope/own")
    group_2(tmp_path / V2 / "user.slice", 5000, 4950)
    group_2(tmp_path / V2 / "user.slice/app.scope", 1000, 600)
    group_2(tmp_path / V2 / "user.slice/app.scope/own", "max", 600)
    group_2(tmp_path / V2 / "user.slice/app.scope/sibling", 10, 10)
    assert left_by_cgroups(tmp_path) == 50
    group_2(tmp_path / V2, 300, 260)  # a container's mount begins at a group with limits
    assert left_by_cgroups(tmp_path) == 40


# --------------------------------------------------------------------------------------- version 1


def test_a_limit_of_version_1(tmp_path: Path) -> None:
    """Its usage is of all groups below, so what can be reclaimed is to be, too."""
    member(tmp_path, "5:cpu,cpuacct:/elsewhere", "4:memory,hugetlb:/app/own", "0::/")
    group_1(tmp_path / V1, UNLIMITED_1, 9000)
    group_1(tmp_path / V1 / "app", 2000, 1900, "inactive_file 5\ntotal_inactive_file 300")
    group_1(tmp_path / V1 / "app/own", UNLIMITED_1, 800)
    assert left_by_cgroups(tmp_path) == 400
    group_1(tmp_path / V1 / "app/own", 1000, 800, "total_inactive_file 50")
    assert left_by_cgroups(tmp_path) == 250


def test_both_versions_at_once(tmp_path: Path) -> None:
    """As systemd's hybrid does: version 2 is there, for other things than memory."""
    member(tmp_path, "4:memory:/app", "0::/app")
    mounted(
        tmp_path,
        "30 20 0:25 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
        "35 20 0:31 / /sys/fs/cgroup/memory rw,nosuid shared:9 - cgroup cgroup rw,memory",
        "36 20 0:32 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu",
    )
    write(tmp_path / V2 / "unified/app/cgroup.procs", "1")
    group_1(tmp_path / V1 / "app", 2000, 1500)
    assert left_by_cgroups(tmp_path) == 500


# ------------------------------------------------------------------------------------------ mounts


def test_in_a_container_the_mount_begins_at_its_group(tmp_path: Path) -> None:
    member(tmp_path, "4:memory:/docker/abc/own")
    mounted(tmp_path, "35 20 0:31 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory")
    group_1(tmp_path / V1, 1000, 400)
    group_1(tmp_path / V1 / "own", 500, 400)
    assert left_by_cgroups(tmp_path) == 100


@pytest.mark.parametrize("path", ["/../other", "/somewhere/else", "/docker/abc/../other"])
def test_a_group_out_of_sight(tmp_path: Path, path: str) -> None:
    """What is mounted is then all there is to read; no path leads out of it."""
    member(tmp_path, f"0::{path}")
    for usual in V2, "mnt/own":
        group_2(tmp_path / usual, 1000, 400)
        group_2(tmp_path / usual / "../other", 5, 5)
        assert left_by_cgroups(tmp_path) == 600
        group_2(tmp_path / usual, 5, 5)
        mounted(tmp_path, "35 20 0:31 /docker/abc /mnt/own ro - cgroup2 cgroup rw")


def test_an_unusual_mount(tmp_path: Path) -> None:
    """With a blank in its name; of two, the one from which more can be seen."""
    member(tmp_path, "0::/a/b")
    mounted(
        tmp_path,
        "34 20 0:31 /a/b /mnt/part rw - cgroup2 none rw",
        "35 20 0:31 / /mnt/all\\040groups rw - cgroup2 none rw",
    )
    group_2(tmp_path / "mnt/all groups/a", 1000, 400)
    group_2(tmp_path / "mnt/all groups/a/b", "max", 400)
    assert left_by_cgroups(tmp_path) == 600


# --------------------------------------------------------------------------------------- malformed


@pytest.mark.parametrize(
    "text", ["", "many", "-5", "1e9", "1_000", "0x10", "1 2", "٣", "9" * 30, b"\xff\xfe\x00"]
)
def test_a_malformed_number_is_no_limit(tmp_path: Path, text: str | bytes) -> None:
    member(tmp_path, "0::/outer/own")
    group_2(tmp_path / V2 / "outer", 1000, 400)
    group_2(tmp_path / V2 / "outer/own", 500, 400)
    write(tmp_path / V2 / "outer/own/memory.max", text)
    assert left_by_cgroups(tmp_path) == 600
    group_2(tmp_path / V2 / "outer/own", 500, 400)
    write(tmp_path / V2 / "outer/own/memory.current", text)
    assert left_by_cgroups(tmp_path) == 600  # the limit is known, the rest not
    group_2(tmp_path / V2 / "outer/own", 500, 400)
    write(tmp_path / V2 / "outer/own/memory.stat", b"inactive_file " + str(text).encode())
    assert left_by_cgroups(tmp_path) == 100


def test_more_to_reclaim_than_is_used_counts_once(tmp_path: Path) -> None:
    member(tmp_path, "0::/own")
    group_2(tmp_path / V2 / "own", 500, 400, "inactive_file 900")
    assert left_by_cgroups(tmp_path) == 500


@given(st.binary(max_size=80), st.binary(max_size=120))
def test_any_bytes_at_all(
    tmp_path_factory: pytest.TempPathFactory, groups: bytes, mounts: bytes
) -> None:
    root = tmp_path_factory.mktemp("root")
    write(root / "proc/self/cgroup", b"0::/" + groups + b"\n4:memory:/" + groups)
    write(root / "proc/self/mountinfo", b"1 1 0:1 / /" + mounts + b" rw - cgroup2 a rw\n" + mounts)
    assert left_by_cgroups(root) is None


# ------------------------------------------------------------------------------------- the machine


def test_the_least_of_machine_and_cgroup(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = psutil.virtual_memory()
    for left in None, 1 << 62:
        monkeypatch.setattr(memory, "left_by_cgroups", lambda left=left: left)
        assert 0 < available_memory() <= machine.total
    monkeypatch.setattr(memory, "left_by_cgroups", lambda: 7)
    assert available_memory() == 7


# A child that may have 300 MB more addresses, or memory of its own, than it has. It says what it
# can have before and after it has taken 100 MB, and fails if 250 MB more can be had.
LIMITED = """
import resource, sys
from toastkit.residency.memory import available_memory
available_memory()
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0 if sys.argv[1] == "RLIMIT_AS" else 5]) * 4096
resource.setrlimit(getattr(resource, sys.argv[1]), (used + (300 << 20), -1))
lefts = [available_memory()]
held = bytearray(100 << 20)
lefts.append(available_memory())
try:
    bytearray(250 << 20)
except MemoryError:
    print(*lefts)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="what is used is in /proc")
@pytest.mark.parametrize("kind", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_a_limit_of_the_process(kind: str) -> None:
    child = [sys.executable, "-c", LIMITED, kind]
    said = subprocess.run(child, capture_output=True, text=True, check=True).stdout
    first, second = map(int, said.split())
    assert 280 * MB < first <= 300 * MB and abs(first - second - 100 * MB) < 16 * MB


def test_what_cannot_be_read_limits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda kind: (1 << 30, 1 << 30))
    for text in ("", "x 1 2", "-1 5 6 7 8 9 0"):
        write(tmp_path / "proc/self/statm", text)
        assert left_by_limits(tmp_path) is None
    write(tmp_path / "proc/self/statm", f"{1 << 20} 5 6 7 8 9 0")
    assert left_by_limits(tmp_path) == 0
    assert left_by_limits(tmp_path / "nowhere") is None


def test_what_the_system_lacks_is_no_bug() -> None:
    """Neither in a command nor where the daemon answers."""
    unmapped = "libx.so: failed to map segment from shared object"
    lacks = {
        "out of memory": (MemoryError(), RuntimeError("std::bad_alloc"), ImportError(unmapped)),
        "cannot start a thread": (
            RuntimeError("can't start new thread"),
            RuntimeError("Resource temporarily unavailable"),  # as MLX says it
        ),
    }
    for tell in (lambda error: cli._told(error, "toast"), as_toast_error):
        for said, error in ((said, e) for said, errors in lacks.items() for e in errors):
            told = tell(error)
            assert told.code == 74 and told.message.startswith(said) and told.hint is None
        assert tell(RuntimeError("a\nb")).message == "bug: RuntimeError: a b"
    for error in (*lacks["out of memory"][:2], *lacks["cannot start a thread"]):
        assert as_data_error(error, "x").message == as_toast_error(error).message
    told = as_data_error(RuntimeError("a\nb"), "m: cannot run")
    assert (told.code, told.message) == (65, "m: cannot run: a")


def test_psutil_is_imported_when_it_is_needed() -> None:
    code = "import sys, toastkit.residency.memory; sys.exit('psutil' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# A child that enters a group, says what it can have, takes memory when told to, gives it back at 0,
# reads a file at its name twice, and says each time what it can have then.
CHILD = """
import os, sys
from toastkit.residency.memory import available_memory
open(sys.argv[1], "w").write(str(os.getpid()))
held = []
print(available_memory(), flush=True)
for line in map(str.strip, sys.stdin):
    if line == "0":
        held.clear()
    elif line.isdigit():
        held.append(bytearray(b"x") * int(line))
    else:
        for _ in range(2):
            with open(line, "rb", buffering=0) as file:
                while file.read(1 << 20):
                    pass
    print(available_memory(), flush=True)
"""


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """A memory cgroup of 256 MB."""
    with memory_group(256 * MB) as group:
        yield group


def in_group(group: Path, *told: str) -> list[int]:
    """What a child in a group says that it can have, at first and after each thing that it is
    told."""
    pipe = subprocess.PIPE
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(group / "cgroup.procs")],
        stdin=pipe, stdout=pipe, stderr=pipe, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    try:
        out, err = child.communicate("".join(f"{line}\n" for line in told), timeout=60)
    finally:
        child.kill()
        child.communicate()
    if child.returncode and "PermissionError" in err:
        pytest.skip("no process can be moved into the cgroup")
    assert child.returncode == 0, err
    return [*map(int, out.splitlines())]


def test_a_hog_in_a_real_cgroup(limited_group: Path) -> None:
    """The reading falls by what is taken, and rises when it is given back."""
    steps = 64 * MB, 40 * MB, 0
    lefts = in_group(limited_group, *map(str, steps))
    assert 200 * MB < lefts[0] <= 256 * MB
    for before, after, taken in zip(lefts, lefts[1:], (64 * MB, 40 * MB, -104 * MB)):
        assert abs(before - after - taken) < 16 * MB


def test_files_that_are_read_in_a_real_cgroup(limited_group: Path, tmp_path: Path) -> None:
    """They lie in the page cache, and are in nobody's way."""
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    nearest = next((mounts[path] for path in tmp_path.parents if path in mounts), "")
    if nearest in ("tmpfs", "ramfs"):
        pytest.skip("files lie in memory here")
    path = tmp_path / "weights"
    with open(path, "wb") as file:
        file.write(bytes(64 * MB))
        os.fdatasync(file.fileno())
        # Out of the cache: what is there belongs to the group that wrote it.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    lefts = in_group(limited_group, str(path), str(40 * MB))
    assert abs(lefts[0] - lefts[1]) < 16 * MB and abs(lefts[1] - lefts[2] - 40 * MB) < 16 * MB
