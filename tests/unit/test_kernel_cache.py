"""The private folder for MLX's kernels: whose it is, what is shared, what happens without g++."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from tests.conftest import executable
from toastkit.engine import kernel_cache
from toastkit.engine.kernel_cache import KernelCache
from toastkit.errors import CannotCreateError

ANSWER = b"I am crumb, a tiny model made for trying toastkit.\n"


@pytest.fixture
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "toastkit" / "kernels"


def decode(path: str | None = None) -> subprocess.CompletedProcess:
    env = {**os.environ, "TMPDIR": os.environ.get("TMPDIR", "/tmp")}
    if path is not None:
        env["PATH"] = path
    return subprocess.run(
        [executable("decode"), "Who are you?"],
        stdin=subprocess.DEVNULL, capture_output=True, timeout=120, env=env,
    )  # fmt: skip


def without_compilers(folder: Path) -> str:
    """A PATH with all programs of this one but compilers."""
    folder.mkdir()
    for directory in os.environ["PATH"].split(os.pathsep):
        for program in Path(directory).glob("*") if Path(directory).is_dir() else ():
            compiler = any(word in program.name for word in ("g++", "gcc", "clang", "c++"))
            if not compiler and not (folder / program.name).is_symlink():
                (folder / program.name).symlink_to(program)
    return str(folder)


def test_without_a_compiler(cache_home: Path, tmp_path: Path):
    done = decode(without_compilers(tmp_path / "bin"))
    assert (done.returncode, done.stdout, done.stderr) == (0, ANSWER, b"")
    assert not list(cache_home.rglob("*.so"))


def test_with_a_broken_compiler(cache_home: Path, tmp_path: Path):
    path = without_compilers(tmp_path / "bin")
    broken = Path(path) / "g++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    done = decode(path)
    assert (done.returncode, done.stdout) == (0, ANSWER)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_first_start_says_so_once(cache_home: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    first, second = decode(), decode()
    assert first.stdout == second.stdout == ANSWER
    assert first.stderr.count(b"\n") == 1 and b"first start on the CPU" in first.stderr
    assert second.stderr == b""
    kernels = list(cache_home.glob("shared/*/*.so"))
    assert kernels and not list(cache_home.glob("run-*"))
    assert stat.S_IMODE(cache_home.stat().st_mode) == 0o700
    assert not list((tmp_path / "tmp").rglob("*.so")), "nothing in the predictable place"


def test_kernels_are_shared_whole(tmp_path: Path):
    one, two = KernelCache(tmp_path), KernelCache(tmp_path)
    one.attach("1.0")
    two.attach("1.0")
    assert one.is_empty() and [one.first_to_announce(), two.first_to_announce()] == [True, False]
    (one.path / "mlx" / "1.0" / "cpu" / "lib.so").write_bytes(b"kernel")
    one.publish()
    three = KernelCache(tmp_path)
    three.attach("1.0")
    assert (three.path / "mlx" / "1.0" / "cpu" / "lib.so").read_bytes() == b"kernel"
    assert not three.is_empty()
    other = KernelCache(tmp_path)
    other.attach("2.0")
    assert other.is_empty()
    for cache in (one, two, three, other):
        cache.close()
    assert [p.name for p in tmp_path.iterdir()] == ["shared"]


def test_a_folder_of_somebody_else_is_refused(cache_home: Path, tmp_path: Path):
    cache_home.parent.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    cache_home.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CannotCreateError, match="refusing"):
        kernel_cache._private_root()


def test_open_folders_are_closed_to_others(cache_home: Path):
    cache_home.mkdir(parents=True)
    cache_home.chmod(0o777)
    assert kernel_cache._private_root() == cache_home
    assert stat.S_IMODE(cache_home.stat().st_mode) == 0o700


def test_what_killed_processes_left_is_swept(tmp_path: Path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    (tmp_path / f"run-{dead.pid}-x").mkdir()
    (tmp_path / f"run-{os.getpid()}-y").mkdir()
    kernel_cache._sweep(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [f"run-{os.getpid()}-y"]
