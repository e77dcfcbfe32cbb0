"""Tests of real executables through real pipes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import executable
from tests.unit.fake_daemon import FakeDaemon


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels(private_home: Path) -> None:
    """MLX's first start on this home, so that no test waits for it or sees its notice."""
    subprocess.run(
        [executable("decode"), "-q", "-n", "2", "hello"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True, timeout=300,
    )  # fmt: skip


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Conversations of this test alone; their directory."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "toastkit" / "chats"


@pytest.fixture
def ask(toast, home: Path) -> Callable[..., subprocess.CompletedProcess]:
    """ask(daemon, *arguments, stdin=None, VARIABLE=...): toast, which finds that daemon."""

    def run(daemon: FakeDaemon, *arguments: str, stdin: bytes | None = None, **variables: str):
        env = {"TOAST_SOCKET": daemon.path, **variables}
        return toast("toast", *arguments, stdin=stdin, env=env)

    return run
