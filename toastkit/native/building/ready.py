"""Prebuilt native products in a platform wheel: then less is compiled, or nothing.

They are an object file of the kernels, which do not depend on MLX, and a library for the MLX that
was installed when the wheel was made. Their names have digests of sources, MLX and content. They
are not loaded from here: libraries.py takes them in place of a compiler's output, and probes the
result in a child process."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from toastkit.native.building.compiling import FOLDER, sources

READY = FOLDER / "ready"


def digest(data: bytes) -> str:
    """Digest of a file's content or sources, for names of files."""
    return hashlib.sha256(data).hexdigest()[:24]


def kernels() -> Path | None:
    """The object file of these sources, if present."""
    return _intact(name_of_kernels(), ".o")


def library(mlx: Path) -> Path | None:
    """The library of these sources for the MLX in a folder, if present."""
    name = name_of_library(mlx)
    return _intact(name, ".so") if name else None


def _intact(name: str, end: str) -> Path | None:
    """The file NAME-DIGESTEND, if its content matches."""
    with suppress(OSError):  # unreadable counts as missing
        for path in READY.glob(f"{name}-*{end}"):
            if path.name == f"{name}-{digest(path.read_bytes())}{end}":
                return path
    return None


def name_of_kernels() -> str:
    """First part of the object file's name."""
    return f"kernels-{digest(sources())}"


def name_of_library(mlx: Path) -> str | None:
    """First part of the library's name. It has the digest of libmlx.so (21 MB) from MLX's
    installation record, so that the file need not be read; None without a record."""
    for record in mlx.parent.glob("mlx*.dist-info/RECORD"):
        for line in record.read_text("utf-8", errors="replace").splitlines():
            if line.startswith("mlx/lib/libmlx.so,"):
                return f"mlx-{digest(sources() + line.encode())}"
    return None
