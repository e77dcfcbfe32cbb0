"""The user's base directories, and what of them is private."""

from __future__ import annotations

import errno
import os
import pwd
import stat
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from toastkit.base_directories import base_directory, own_directory
from toastkit.daemon.spill import conversations_root
from toastkit.errors import CannotCreateError
from toastkit.gears import thresholds
from toastkit.model.hub import hub_cache
from toastkit.model.locate import models_home
from toastkit.private_files import make_private_directories, not_private
from toastkit.session.names import sessions_root
from toastkit.session.upkeep import prepare


def test_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system says of the user; a user whom it does not know has nothing, anywhere."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    home = pwd.getpwuid(os.getuid()).pw_dir
    for given in ("", "here"):
        monkeypatch.setenv("HOME", given)
        assert base_directory("CACHE") == os.path.join(home, ".cache")
    monkeypatch.delenv("HOME")
    assert base_directory("CACHE") == os.path.join(home, ".cache")

    def unknown(user: int):
        raise KeyError(user)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert base_directory("CACHE") == "/.cache"


def test_one_rule_for_every_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that is absolute is followed, any other ignored, whoever asks."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for value, base in (("relative/x", tmp_path), ("", tmp_path), ("~/x", tmp_path)):
        for kind in ("CACHE", "DATA", "STATE"):
            monkeypatch.setenv(f"XDG_{kind}_HOME", value)
        assert hub_cache() == base / ".cache/huggingface/hub"
        assert thresholds.path("f").parent == base / ".cache/toastkit/thresholds"
        assert conversations_root() == base / ".cache/toastkit/conversations"
        assert models_home() == base / ".local/share/toastkit/models"
        assert sessions_root() == base / ".local/state/toastkit/sessions"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "d"))
    assert base_directory("DATA") == str(tmp_path / "d")
    assert own_directory("DATA", "models", "x") == str(tmp_path / "d/toastkit/models/x")


def test_parents_are_private_whatever_the_umask(tmp_path: Path) -> None:
    """And what others can write to is told."""
    old = os.umask(0)
    try:
        for _ in range(2):
            make_private_directories(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(old)
    for name in ("a", "a/b", "a/b/c"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o700
    assert not_private(str(tmp_path / "a")) is None
    (tmp_path / "a").chmod(0o777)
    assert not_private(str(tmp_path / "a")) == "has mode 0777 instead of 0700"
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert not_private(str(tmp_path / "link")) == "is a symbolic link, not a directory"
    with pytest.raises(FileNotFoundError):
        not_private(str(tmp_path / "nothing"))
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        make_private_directories(tmp_path / "file" / "below")


def test_directories_that_the_umask_bars_go_again(tmp_path: Path, monkeypatch) -> None:
    """Nothing can be made in the first, or read in the session's. Root may do either."""

    def refused(*_: object) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied")

    real = os.mkdir
    once = iter((real, refused))
    monkeypatch.setattr(os, "mkdir", lambda *rest: next(once)(*rest))
    with pytest.raises(PermissionError):
        make_private_directories(tmp_path / "a" / "b" / "c")
    monkeypatch.setattr(os, "mkdir", real)
    with monkeypatch.context() as patch, pytest.raises(CannotCreateError):
        patch.setattr(os, "listdir", refused)
        prepare(tmp_path / "s", create=True)
    assert list(tmp_path.iterdir()) == []


def test_cuda_kernels_are_kept_where_nobody_else_writes(tmp_path: Path, monkeypatch) -> None:
    from toastkit.engine.device import keep_cuda_kernels

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", "the user's own")
    keep_cuda_kernels()
    assert os.environ["MLX_PTX_CACHE_DIR"] == "the user's own"
    own = "toastkit/ptx"
    for path, wanted in ((own, own), (own, None), ("toastkit", None)):
        monkeypatch.delenv("MLX_PTX_CACHE_DIR")
        keep_cuda_kernels()
        assert os.environ["MLX_PTX_CACHE_DIR"] == (str(tmp_path / wanted) if wanted else "")
        for name in ("toastkit", "toastkit/ptx"):
            (tmp_path / name).chmod(0o700)
        (tmp_path / path).chmod(0o777)


def test_the_cpu_compiles_nothing(tmp_path: Path) -> None:
    """MLX would run g++, and load what lies in a predictable folder under TMPDIR."""
    pytest.importorskip("mlx.core")
    program = (
        "from toastkit.engine import device; device.start('cpu'); import mlx.core as mx\n"
        "mx.eval(mx.compile(lambda x: mx.exp(x) * x + 1)(mx.ones(2)))"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "c")}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)
    assert not list(tmp_path.iterdir())
