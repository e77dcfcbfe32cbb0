"""Where the library of native products lies, who may have put it there, and that nobody waits for
it. No test here compiles anything."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.native_library import needed
from tests.unit.native_building import COMPILES, cache, cxx, install_mlx, runs, trusting
from toastkit.errors import ToastError, UnavailableError
from toastkit.native import machine, starting
from toastkit.native.building import compiling, libraries
from toastkit.native.starting import NativeOptions, Status
from toastkit.private_files import open_private, try_lock

__all__ = ["cache", "cxx", "trusting"]
pytestmark = needed
AUTO = NativeOptions("auto")


def test_what_is_built_is_found(cache: Path, cxx, trusting) -> None:
    path = cxx(COMPILES)
    assert libraries.find() == (None, "they are not built yet", True)
    assert not cache.exists()  # looking writes nothing
    made = libraries.build()
    assert libraries.find() == (made, "", False)
    assert Path(made).read_bytes() == b"compiled"
    assert stat.S_IMODE(os.stat(cache).st_mode) == 0o700
    assert sorted(entry.name for entry in cache.iterdir()) == sorted(["lock", Path(made).name])
    count = runs(path)
    assert libraries.build() == made and runs(path) == count


def test_a_library_is_of_its_sources_and_its_compiler(
    cache: Path, cxx, monkeypatch: pytest.MonkeyPatch, trusting
) -> None:
    path = cxx(COMPILES)
    made = libraries.build()
    with monkeypatch.context() as patch:
        patch.setattr(compiling, "FLAGS", (*compiling.FLAGS, "-O3"))
        assert libraries.find().pending
    assert not libraries.find().pending
    os.utime(path, (1, 1))  # another compiler
    assert libraries.find().pending and Path(made).exists()


def test_files_that_nobody_built(cache: Path, cxx, trusting) -> None:
    """A planted or a damaged library has other bytes than its name says."""
    cxx(COMPILES)
    made = Path(libraries.build())
    made.write_bytes(b"compiled?")
    assert libraries.find() == (None, "they are not built yet", True)
    assert Path(libraries.build()).read_bytes() == b"compiled"
    made.unlink()
    elsewhere = cache / "elsewhere"
    elsewhere.write_bytes(b"compiled")
    made.symlink_to(elsewhere)
    found = libraries.find()
    assert found.path is None and not found.pending and found.why.startswith(str(made))
    made.unlink()
    whole = Path(libraries.build())
    (cache / f"{whole.name[:-6]}000.so").symlink_to(elsewhere)  # before it, or after it
    (cache / f"{whole.name[:-6]}fff.so").mkdir()
    assert libraries.find().path == str(whole)


def test_a_folder_that_others_can_write_to(cache: Path, cxx, trusting) -> None:
    cxx(COMPILES)
    libraries.build()
    cache.chmod(0o777)
    assert "has mode 0777" in libraries.find().why
    with pytest.raises(UnavailableError, match="has mode 0777"):
        libraries.build()


def test_a_library_that_is_not_trusted(cache: Path, cxx) -> None:
    """The child that loads what the compiler wrote finds that it is none."""
    path = cxx(COMPILES)
    with pytest.raises(UnavailableError, match="is not what this MLX needs"):
        libraries.build()
    assert not list(cache.glob("*.so")) and not list(cache.glob("*.making"))
    found = libraries.find()
    assert found == (None, "what was compiled is not what this MLX needs", False)
    count = runs(path)
    assert not starting.start(AUTO).on
    assert runs(path) == count  # nor is it tried again


def test_a_cache_that_cannot_be(tmp_path: Path, cxx, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quiet where native products are wanted where they can be had; else a line."""
    cxx(COMPILES)
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert not starting.start(AUTO).on
    with pytest.raises(ToastError) as failed:
        starting.start(AUTO._replace(native="require"))
    assert failed.value.code == 73 and "\n" not in failed.value.message


def test_a_cache_that_runs_no_programs(cache: Path, cxx, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cxx(COMPILES)
    cache.mkdir(parents=True, mode=0o700)
    os.chmod(cache.parent, 0o700)
    told = os.statvfs(cache)
    noexec = os.statvfs_result((*told[:8], told.f_flag | os.ST_NOEXEC, told.f_namemax))
    monkeypatch.setattr(libraries.os, "statvfs", lambda path: noexec)
    found = libraries.find()
    assert "noexec" in found.why and not found.pending
    with pytest.raises(UnavailableError, match="noexec"):
        libraries.build()
    assert runs(path) == 0


def test_a_library_is_of_its_mlx(cache: Path, cxx, tmp_path: Path, monkeypatch, trusting) -> None:
    cxx(COMPILES)
    mlx = install_mlx(tmp_path / "mlx", monkeypatch)
    made = libraries.build()
    assert libraries.find().path == made
    (mlx / "lib/libmlx.so").write_bytes(b"another version")
    assert libraries.find() == (None, "they are not built yet", True)
    assert libraries.build() != made and Path(made).exists()


def test_who_waits_is_told(cache: Path, cxx, trusting) -> None:
    path = cxx(COMPILES)
    told: list[str] = []
    libraries.build(say=told.append)
    (line,) = told
    assert str(path) in line and "compiling" in line
    libraries.build(say=told.append)
    assert told == [line]


def test_no_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no C++ compiler" in libraries.find().why
    assert starting.start(AUTO) == Status(False, libraries.find().why)
    with pytest.raises(UnavailableError, match=r"no native products: there is no C\+\+ compiler"):
        starting.start(AUTO._replace(native="require"))
    assert not cache.exists()


def test_another_machine(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.platform, "machine", lambda: "riscv64")
    monkeypatch.setattr(libraries, "unsupported", compiling.unsupported)
    assert "x86-64" in libraries.find().why and not starting.start(AUTO).on


def test_one_builds_at_a_time(cache: Path, cxx, trusting) -> None:
    path = cxx(COMPILES)
    cache.mkdir(parents=True, mode=0o700)
    os.chmod(cache.parent, 0o700)
    lock = open_private(cache / "lock", os.O_RDWR | os.O_CREAT)
    assert try_lock(lock)
    assert libraries.find() == (None, "they are being built in the background", True)
    with pytest.raises(UnavailableError, match="another process is building"):
        libraries.build()
    threading.Timer(0.2, os.close, [lock]).start()
    assert libraries.build(wait=True) == libraries.find().path  # the other has not built it
    assert runs(path) > 0


def test_nothing_is_begun_where_nothing_can_be_locked(cache: Path, cxx, monkeypatch) -> None:
    """Else every command would begin a build that fails, and say that it is done meanwhile."""
    cxx(COMPILES)
    monkeypatch.setattr(subprocess, "Popen", None)
    cache.mkdir(parents=True, mode=0o700)
    os.mkfifo(cache / "lock", 0o600)
    why = f"{cache / 'lock'}: lock is a FIFO"
    assert libraries.find() == (None, why, False) and starting.start(AUTO) == Status(False, why)
    (cache / "lock").unlink()
    (cache / "lock").touch(0o600)
    monkeypatch.setattr(libraries, "try_lock", Mock(side_effect=OSError(37, "No locks available")))
    assert libraries.find() == (None, f"{cache / 'lock'}: No locks available", False)


def test_nothing_is_begun_where_nothing_can_be_kept(cache: Path, cxx, monkeypatch) -> None:
    cxx(COMPILES)
    monkeypatch.setattr(libraries.os, "access", lambda path, mode: mode != os.W_OK)
    monkeypatch.setattr(subprocess, "Popen", None)
    why = f"nothing can be kept in {cache}"
    assert libraries.find() == (None, why, False) and starting.start(AUTO) == Status(False, why)


def test_what_is_required_and_cannot_be_loaded(cache: Path, cxx, trusting) -> None:
    """It is built again, once; then that is an error. Who has not asked for it goes on without."""
    path = cxx(COMPILES)
    require = AUTO._replace(native="require")
    for times in (1, 2):
        with pytest.raises(UnavailableError, match="no native products: .*(too short|invalid ELF)"):
            starting.start(require)
        assert runs(path) == times * (len(compiling.SOURCES) + 2)
    assert not starting.start(AUTO).on and runs(path) == 2 * (len(compiling.SOURCES) + 2)


def test_what_killed_builds_have_left_goes(cache: Path, cxx, trusting) -> None:
    cxx(COMPILES)
    (cache / "x.making.abc").mkdir(parents=True, mode=0o700)
    (cache / "x.making.abc/rows.o").write_bytes(b"half")
    (cache / "x.making").write_bytes(b"half")
    cache.chmod(0o700)
    made = libraries.build()
    assert sorted(entry.name for entry in cache.iterdir()) == sorted(["lock", Path(made).name])


def test_old_libraries_go(cache: Path, cxx, trusting) -> None:
    cxx(COMPILES)
    cache.mkdir(parents=True, mode=0o700)
    for n in range(12):
        (cache / f"{n}-old.so").write_bytes(b"")
        os.utime(cache / f"{n}-old.so", (n, n))
    made = libraries.build()
    left = [entry.name for entry in cache.glob("*.so")]
    assert len(left) == libraries.KEPT and Path(made).name in left and "0-old.so" not in left


def await_failure(cache: Path) -> None:
    """Of a build in the background, which has little of a busy machine."""
    for _ in range(6000):
        if list(cache.glob("*.failed")):
            return
        time.sleep(0.01)
    raise AssertionError("it is still being built")


def test_nobody_waits(cache: Path, cxx, tmp_path: Path) -> None:
    """The first command begins a build, and goes on."""
    gate = tmp_path / "gate"
    path = cxx(f"while [ ! -e '{gate}' ]; do sleep 0.01; done\n" + COMPILES)
    why = "they are being built in the background, for later"
    assert starting.start(AUTO) == Status(False, why, awaited=True)
    assert runs(path) == 0
    gate.touch()
    await_failure(cache)
    assert "is not what this MLX needs" in libraries.find().why


@pytest.mark.skipif(sys.version_info < (3, 11), reason="compilers have sessions of their own")
def test_who_builds_gives_way(cache: Path, cxx, tmp_path: Path) -> None:
    """To everybody: priorities alone count among the processes of one session."""
    told, group = tmp_path / "told", Path("/proc/self/autogroup")
    cxx(f"""
told=$(nice)
[ -e {group} ] && read -r name word weight < {group} && told="$told $weight"
printf %s "$told" > '{told}'$$
mv '{told}'$$ '{told}'
exit 1
""")
    starting.start(AUTO)
    await_failure(cache)
    assert told.read_text() == ("19 10" if group.exists() else "19")


def test_threads_are_those_that_may_run(tmp_path: Path) -> None:
    every = len(os.sched_getaffinity(0))
    assert machine.processors() >= 1 and machine.processors(str(tmp_path)) == every
    group = tmp_path / "sys/fs/cgroup/a/b"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n")
    (group / "cpu.max").write_text("max 100000\n")
    assert machine.processors(str(tmp_path)) == every
    (group.parent / "cpu.max").write_text("50000 100000\n")
    assert machine.processors(str(tmp_path)) == 1


@pytest.mark.parametrize("folder", ["a/b", ""])
def test_threads_in_control_groups_of_version_1(tmp_path: Path, folder: str) -> None:
    """Also in a container, where the group is named as the host knows it, and lies at the top."""
    (tmp_path / "proc/self").mkdir(parents=True)
    told = "12:cpuset:/x\n4:cpu,cpuacct:/a/b\n1:name=systemd:/y\n0::/z\n"
    (tmp_path / "proc/self/cgroup").write_text(told)
    group = tmp_path / "sys/fs/cgroup/cpu" / folder
    group.mkdir(parents=True)
    every = len(os.sched_getaffinity(0))
    for quota, period, threads in (
        ("-1", "100000", every), ("100000", "100000", 1), ("1000", "100000", 1),
        ("900000000", "100000", every), ("100000", "0", every), ("", "x", every),
    ):  # fmt: skip
        (group / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (group / "cpu.cfs_period_us").write_text(f"{period}\n")
        assert machine.processors(str(tmp_path)) == threads


@pytest.mark.parametrize(
    "said, there",
    [
        ("[always] madvise never", True),
        ("always [madvise] never", True),
        ("always madvise [never]", False),
        (None, False),
    ],
)
def test_large_pages(tmp_path: Path, said: str | None, there: bool) -> None:
    folder = tmp_path / "sys/kernel/mm/transparent_hugepage"
    folder.mkdir(parents=True)
    if said is not None:
        (folder / "enabled").write_text(said + "\n")
    assert machine.large_pages(str(tmp_path)) is there
