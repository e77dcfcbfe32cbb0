"""Starts MLX: chooses the device, and what MLX may compile there.

The only way into `mlx.core` for code that may be the first to import it.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from toastkit.base_directories import own_directory
from toastkit.errors import UsageError
from toastkit.heap import trim_heap
from toastkit.interrupts import held
from toastkit.native import starting
from toastkit.native.starting import NativeOptions, Status
from toastkit.private_files import make_private_directories, not_private

DEVICES = ("auto", "cpu", "gpu")
MAPPED = "mapped where they can be used as they are stored, else read"
END_SECONDS = 1.0  # for the system thread to end after Python's
_started: str | None = None


def start(device: str = "auto") -> str:
    """Import MLX and choose the device; return "cpu" or "gpu". Later calls return the first choice.
    Raises UsageError if the wanted device is absent."""
    global _started
    if _started is not None:
        return _started
    with held():
        import mlx.core as mx

    if device == "gpu" and not mx.is_available(mx.gpu):
        raise UsageError("--device gpu: this MLX has no GPU to run on")
    if device != "auto":
        mx.set_default_device(mx.cpu if device == "cpu" else mx.gpu)
    _started = "cpu" if mx.default_device() == mx.Device(mx.cpu) else "gpu"
    if _started == "cpu":
        # It would run g++ for seconds and load libraries from a predictable directory, for 3% of
        # speed: docs/decisions.md.
        mx.disable_compile()
    elif sys.platform == "linux":
        keep_cuda_kernels()
    return _started


def native_products(
    options: NativeOptions, device: str, say: Callable[[str], None] | None = None
) -> Status:
    """Start native matrix products for a model on that device, and return their status: on the CPU,
    where possible. See starting.start. Raises UsageError if a GPU is required to have them, and as
    starting.start does."""
    if device == "cpu":
        return starting.start(options, say)
    if options.native == "require":
        raise UsageError("--native require: products are native on the CPU only")
    return Status(False, "on the GPU MLX's own are used")


def give_memory_back(collect: bool = True) -> None:
    """Return memory that nothing uses to the system: what Python, MLX and the C library keep.
    collect: find Python's first, which takes a tenth of a second."""
    import mlx.core as mx

    if collect:
        gc.collect()
    mx.clear_cache()
    trim_heap()


def wait_for_end(thread: threading.Thread) -> None:
    """Wait until the system thread of an ended Python thread that used MLX is gone too: MLX takes
    the GIL once more as the thread exits, and the process aborts if the interpreter has ended by
    then."""
    task = f"/proc/self/task/{thread.native_id}"
    deadline = time.monotonic() + END_SECONDS
    while os.path.exists(task) and time.monotonic() < deadline:
        time.sleep(0.001)


def facts() -> dict[str, Any]:
    """Describe what computes here: the device, MLX's version, whether products are native, their
    number of threads, and how weights reach the device."""
    on = start()
    from importlib.metadata import version

    from toastkit.native.machine import large_pages, processors

    found = starting.status() if on == "cpu" else native_products(NativeOptions("auto"), on)
    named = {"device": on, "mlx": version("mlx"), "native products": str(found)}
    if not found.on:
        return named
    pages = "asked for" if large_pages() else "the system has none"
    return {**named, "threads": processors(), "large pages": pages, "weights": MAPPED}


def keep_cuda_kernels() -> None:
    """Set a private cache directory for MLX's compiled CUDA kernels, before any is compiled: the
    default is a predictable one under TMPDIR, from which MLX loads whatever it finds. Without a
    private directory nothing is cached."""
    if "MLX_PTX_CACHE_DIR" in os.environ:
        return
    folder = own_directory("CACHE", "ptx")
    try:
        make_private_directories(folder)
        if not_private(folder) is not None or not_private(os.path.dirname(folder)) is not None:
            folder = ""
    except OSError:
        folder = ""
    os.environ["MLX_PTX_CACHE_DIR"] = folder


def check_dtype(dtype: str | None, device: str, model: Any) -> None:
    """Raise UsageError for a dtype that MLX cannot compute a model in."""
    if device != "cpu" or dtype in (None, "float32"):
        return
    if any(type(module).__name__ == "SwitchLinear" for module in model.modules()):
        raise UsageError(f"--dtype {dtype}: on the CPU, MLX computes experts in float32 only")
