"""The library of native products, built once for all runs of the tests of one tree."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest

from toastkit.base_directories import own_directory
from toastkit.native.building import libraries
from toastkit.native.building.compiling import compiler, unsupported

CAN_BE = not unsupported() and compiler() is not None
NATIVE = "require" if CAN_BE else "off"
needed = pytest.mark.skipif(not CAN_BE, reason="no compiler, or no kernels for this machine")

KEPT = Path(__file__).parents[1] / ".pytest_cache/native"  # a cache in which only that lies


def native_cache(factory: pytest.TempPathFactory) -> Path:
    """A cache (XDG_CACHE_HOME) with the library in it; the processes of a run have one in common.
    Who comes second waits, and its core compiles too. What an earlier run has built from the same
    files is taken, and found right by its digest."""
    base = factory.getbasetemp()
    cache = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "native_cache"
    cache.mkdir(mode=0o700, exist_ok=True)
    with open(cache / "building", "w") as lock, pytest.MonkeyPatch.context() as patch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder := cache / "toastkit/native").exists():
            patch.setenv("XDG_CACHE_HOME", str(KEPT))
            KEPT.mkdir(mode=0o700, parents=True, exist_ok=True)
            with everywhere():
                library = libraries.build(wait=True)
            folder.mkdir(mode=0o700, parents=True)
            shutil.copy2(library, folder)
    return cache


@pytest.fixture(scope="session")
def library_at_home(private_home: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """It lies where commands look for it, where there can be one."""
    if CAN_BE:
        lies = native_cache(tmp_path_factory) / "toastkit/native"
        shutil.copytree(lies, Path(os.environ["XDG_CACHE_HOME"], "toastkit/native"))


@pytest.fixture(scope="package", autouse=True)
def native_commands(library_at_home: None) -> Iterator[None]:
    """Commands compute as they do for users, for the tests of a folder whose conftest has this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TOAST_NATIVE", raising=False)
        yield


def own_cache(folder: Path) -> Path:
    """Makes a directory for XDG_CACHE_HOME in which there is only the library that this process
    has in its own, if it has one."""
    name = "toastkit/native"
    there = Path(own_directory("CACHE", "native"))
    folder.mkdir(mode=0o700, exist_ok=True)
    if there.is_dir():
        shutil.copytree(there, folder / name)
    return folder


@contextmanager
def everywhere() -> Iterator[None]:
    """What is started meanwhile may use every core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def native_path(cache: Path) -> Path:
    """The library in a cache."""
    (path,) = (cache / "toastkit/native").glob("*.so")
    return path


def operations_of(*arrays: Any) -> list[str]:
    """Names of the operations that arrays of MLX have left to do."""
    import mlx.core as mx

    with NamedTemporaryFile("r", suffix=".dot") as file:
        mx.export_to_dot(file.name, *arrays)
        return re.findall(r'label ="(\w+)", shape=rectangle', file.read())


def watched(module: Any) -> list[tuple]:
    """What a module is called with from now on: its class is another, which no operation knows."""
    seen: list[tuple] = []

    class Watched(type(module)):  # type: ignore[misc]
        def __call__(self, *args: Any, **rest: Any) -> Any:
            seen.append(args)
            return super().__call__(*args, **rest)

    module.__class__ = Watched
    return seen


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return native_cache(tmp_path_factory)


@pytest.fixture(scope="module")
def library(cache: Path) -> Any:
    from toastkit.native.library import load  # not where kernels alone are tested, without MLX

    return load(str(native_path(cache)))


@pytest.fixture(autouse=True)
def built(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines and commands that want native products find the library."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
