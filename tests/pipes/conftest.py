"""Tests of real executables through real pipes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.fake_daemon import FakeDaemon

Model = Callable[..., subprocess.CompletedProcess]


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


@pytest.fixture
def model(toast, tmp_path: Path) -> Model:
    """model(*arguments, env={}): toast-model with folders of its own; its output is text."""

    def run(*arguments: object, env: dict | None = None) -> subprocess.CompletedProcess:
        own = {"XDG_DATA_HOME": str(tmp_path / "data"), "HF_HOME": str(tmp_path / "hf")}
        done = toast("model", *arguments, env={**own, **(env or {})})
        done.stdout, done.stderr = done.stdout.decode(), done.stderr.decode()
        return done

    return run
