"""Tests of real executables through real pipes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.daemons import Daemon
from tests.native_library import native_commands
from tests.unit.fake_daemon import FakeDaemon
from toastkit.residency.predict import Calibration, Slowdown, Source

__all__ = ["native_commands"]

Model = Callable[..., subprocess.CompletedProcess]
LAYERS = (0.25,) * 8
SLOWER = Slowdown(0.5, 0.5)
# As if of crumb here.
MEASURED = Calibration(
    LAYERS, LAYERS, LAYERS, 0.5, 0.5, 0.9, Source(1e9, SLOWER, SLOWER), Source(1e8, SLOWER, SLOWER)
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Conversations of this test alone; their directory."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "toastkit" / "chats"


@pytest.fixture
def refuses(toast) -> Callable[[str, Sequence[tuple[list[str], str]]], None]:
    """refuses(name, [(flags, message), ...]): in one line and a hint at most; nothing is read and
    nothing loaded before. All commands have an option from one place: the last two show it."""

    def check(name: str, refused: Sequence[tuple[list[str], str]]) -> None:
        for flags, message in refused if name == "decode" else refused[-2:]:
            done = toast(name, *flags, stdin=b"")
            assert done.returncode == 64 and message in done.stderr.decode(), done.stderr
            assert len(done.stderr.splitlines()) <= 2

    return check


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


@pytest.fixture(scope="package")
def daemon(native_commands: None) -> Iterator[Daemon]:
    """toasted on crumb with no options that change results, shared by the tests that neither end
    nor change it."""
    with Daemon("crumb", "--no-audit", "--spill", "0") as running:
        yield running


@pytest.fixture(scope="session")
def measured(private_home: Path) -> None:
    """What this device takes for crumb is stored, so that toast-model plan does not measure it."""
    from toastkit.commands.model import model
    from toastkit.engine import calibrating

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrating, "measure", lambda opened, tell: MEASURED)
        model.main(["plan", "-q"], standalone_mode=False)
