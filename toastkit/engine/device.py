"""Starts MLX: private kernel cache first, then the device, then whether graphs are compiled.

The only way into `mlx.core` for code that may be the first to import it.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable

from toastkit.engine import kernel_cache
from toastkit.errors import UsageError

DEVICES = ("auto", "cpu", "gpu")
_started: str | None = None


def start(device: str = "auto", notify: Callable[[str], None] | None = None) -> str:
    """Imports MLX and chooses the device; returns "cpu" or "gpu". Later calls return the first
    choice.

    notify: is told, once per machine and MLX version, that the first start compiles kernels.
    Raises UsageError where the wanted device is not there.
    """
    global _started
    if _started is not None:
        return _started
    cache = kernel_cache.prepare()
    import mlx.core as mx

    if device == "gpu" and not mx.is_available(mx.gpu):
        raise UsageError("--device gpu: this MLX has no GPU to run on")
    if device != "auto":
        mx.set_default_device(mx.cpu if device == "cpu" else mx.gpu)
    _started = "cpu" if mx.default_device() == mx.Device(mx.cpu) else "gpu"
    if _started == "cpu":
        _prepare_compiler(mx, cache, notify)
    return _started


def _prepare_compiler(mx, cache, notify) -> None:
    """Switches MLX's graph compilation off where no working g++ is found."""
    if os.environ.get("MLX_DISABLE_COMPILE") is not None:
        return
    if shutil.which("g++") is None:
        mx.disable_compile()
        return
    cache.attach(mx.__version__)
    if cache.is_empty() and notify is not None and cache.first_to_announce():
        notify("first start on the CPU: MLX compiles its kernels with g++, once, some seconds")
    if not _compiler_works(mx):
        mx.disable_compile()


def _compiler_works(mx) -> bool:
    """Compiles something small. MLX looks for g++ with system(3) now, during which a Ctrl-C would
    be lost: it is held back until that is over, and no run has begun yet."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGQUIT})
    try:
        mx.eval(mx.compile(lambda x: mx.exp(x) * x + 1)(mx.ones(2)))
    except RuntimeError:
        return False
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
    return True


def publish_kernels() -> None:
    """Makes the kernels compiled so far available to other processes."""
    if _started == "cpu":
        kernel_cache.prepare().publish()
