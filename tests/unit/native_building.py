"""What a test of building needs: a cache, and compilers that are scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from toastkit.native.building import libraries


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one; its folder of libraries."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/toastkit/native"


@pytest.fixture
def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries are not loaded to see whether they can be trusted."""
    monkeypatch.setattr(libraries, "is_trustworthy", lambda path: True)


@pytest.fixture
def cxx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """cxx(script): has the compiler be a script of the shell, which starts ten times as fast as one
    of Python: a build starts it for each source."""

    def install(script: str) -> Path:
        path = tmp_path / "cxx"
        path.write_text(f"#!/bin/sh\n{script}")
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return path

    return install


def install_mlx(place: Path, monkeypatch, *more: str, data: bytes = b"") -> Path:
    """Has a folder be that of the installed MLX, with what is looked at in it, and more files."""
    for name in ("include/mlx/array.h", "lib/libmlx.so", *more):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(data)
    monkeypatch.setattr(libraries, "installed_mlx", lambda: place)
    return place


def fails(*lines: str) -> str:
    """A compiler that writes these lines to stderr and fails."""
    return "".join(f"echo '{line}' >&2\n" for line in lines) + "exit 1\n"


# Writes something to where it is told to, and notes that it ran.
COMPILES = """
printf x >> "$0.log"
while [ "$1" != -o ]; do shift; done
printf compiled > "$2"
"""


def runs(path: Path) -> int:
    log = path.with_name(path.name + ".log")
    return len(log.read_text()) if log.exists() else 0
