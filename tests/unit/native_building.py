"""What a test of building needs: a cache, and compilers that are scripts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one; its folder of libraries."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/toastkit/native"


@pytest.fixture
def cxx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """cxx(script): has the compiler be a script."""

    def install(script: str) -> Path:
        path = tmp_path / "cxx"
        path.write_text(f"#!{sys.executable} -IS\nimport os, sys, time\n{script}")
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return path

    return install


# Writes something to where it is told to, and notes that it ran.
COMPILES = """
open(sys.argv[0] + ".log", "a").write("x")
open(sys.argv[sys.argv.index("-o") + 1], "wb").write(b"compiled")
"""


def runs(path: Path) -> int:
    log = path.with_name(path.name + ".log")
    return len(log.read_text()) if log.exists() else 0
