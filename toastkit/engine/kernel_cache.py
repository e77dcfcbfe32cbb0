"""A private place for the kernels that MLX compiles on the CPU.

MLX writes them to a predictable folder under TMPDIR and loads them from there: another user's file
planted there would run as ours, and two processes that compile at once read each other's
half-written files. So each process gets a folder of its own (0700) as MLX's TMPDIR, which starts
with hard links to the kernels that earlier processes finished, and gives what it compiled back by
atomic links:

    $XDG_CACHE_HOME/toastkit/kernels/run-PID-RANDOM/   TMPDIR as MLX sees it, removed at exit
    $XDG_CACHE_HOME/toastkit/kernels/shared/MLX-VERSION-MACHINE/   finished kernels, only ever whole

Imports no MLX: `prepare` has to run before it.
"""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import tempfile
from pathlib import Path

from toastkit.errors import CannotCreateError, from_os_error

_active: KernelCache | None = None


class KernelCache:
    """One process's kernels. shared: the folder of finished ones, known once MLX is imported."""

    def __init__(self, root: Path):
        self._root = root
        self._scratch = Path(tempfile.mkdtemp(prefix=f"run-{os.getpid()}-", dir=root))
        self._kernels: Path | None = None
        self.shared: Path | None = None

    def attach(self, mlx_version: str) -> None:
        """Links the finished kernels of this MLX version into the process's own folder."""
        self.shared = self._root / "shared" / f"{mlx_version}-{os.uname().machine}"
        self._kernels = self._scratch / "mlx" / mlx_version / "cpu"
        self.shared.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._kernels.mkdir(parents=True, mode=0o700)
        _link_missing(self.shared, self._kernels)

    def is_empty(self) -> bool:
        """Whether nothing has ever been compiled for this MLX version."""
        return self.shared is None or not any(self.shared.glob("*.so"))

    def first_to_announce(self) -> bool:
        """True in exactly one process per MLX version: the one that tells the user."""
        if self.shared is None:
            return False
        try:
            os.close(os.open(self.shared / "announced", os.O_CREAT | os.O_EXCL, 0o600))
        except OSError:
            return False
        return True

    def publish(self) -> None:
        """Gives finished kernels back. Call it only while MLX compiles nothing."""
        if self._kernels is not None and self.shared is not None:
            _link_missing(self._kernels, self.shared)

    def close(self) -> None:
        """Publishes and removes the process's own folder."""
        self.publish()
        shutil.rmtree(self._scratch, ignore_errors=True)

    @property
    def path(self) -> Path:
        """The folder that MLX is to take for TMPDIR."""
        return self._scratch


def prepare() -> KernelCache:
    """Sets MLX's TMPDIR for this process, once. Raises CannotCreateError for a cache folder that
    belongs to somebody else."""
    global _active
    if _active is None:
        root = _private_root()
        _sweep(root)
        _active = KernelCache(root)
        atexit.register(close)
        # putenv reaches MLX's getenv and g++, and leaves os.environ (so Python's tempfile) alone.
        os.putenv("TMPDIR", str(_active.path))
        if "MLX_PTX_CACHE_DIR" not in os.environ:
            ptx = root / "ptx"
            ptx.mkdir(mode=0o700, exist_ok=True)
            os.putenv("MLX_PTX_CACHE_DIR", str(ptx))
    return _active


def close() -> None:
    """Publishes this process's kernels and removes its folder. May be called again."""
    if _active is not None:
        _active.close()


def _private_root() -> Path:
    """The kernels folder, ours alone; a throw-away one where no cache can be written."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    root = Path(base).expanduser() / "toastkit" / "kernels"
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        info = root.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
            raise CannotCreateError(f"{root} is not a directory of yours: refusing to load from it")
        if stat.S_IMODE(info.st_mode) != 0o700:
            root.chmod(0o700)
        if not os.access(root, os.W_OK):
            raise PermissionError
        return root
    except OSError:
        pass
    try:
        fallback = Path(tempfile.mkdtemp(prefix="toastkit-kernels-"))
    except OSError as error:
        raise from_os_error(
            error, "cannot make a folder for compiled kernels", creating=True
        ) from error
    atexit.register(shutil.rmtree, fallback, ignore_errors=True)
    return fallback


def _sweep(root: Path) -> None:
    """Removes the folders of processes that were killed."""
    for folder in root.glob("run-*-*"):
        pid = folder.name.split("-")[1]
        if pid.isdigit() and not _alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _link_missing(source: Path, target: Path) -> None:
    for kernel in source.glob("*.so"):
        try:
            os.link(kernel, target / kernel.name)
        except OSError:
            continue  # there already, or no hard links here: MLX compiles it again
