"""What a wheel for one platform brings of native products: then less is compiled, or nothing.

It is an object file with the kernels, which know no MLX, and a library for that MLX which was
there when the wheel was made. Their names say what they were made from, for which MLX, and what
their bytes add up to. They are not loaded where they lie: libraries.py takes them in place of a
compiler's work, and asks in a process of its own whether what comes of it is to be trusted.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from toastkit.native.building.compiling import FOLDER, sources

READY = FOLDER / "ready"


def digest(data: bytes) -> str:
    """Of what lies in a file, or of what it is made from; for names of files."""
    return hashlib.sha256(data).hexdigest()[:24]


def kernels() -> Path | None:
    """The object file of these sources."""
    return _brought(name_of_kernels(), ".o")


def library(mlx: Path) -> Path | None:
    """The library of these sources for an MLX, of which this is the folder."""
    name = name_of_library(mlx)
    return _brought(name, ".so") if name else None


def _brought(name: str, end: str) -> Path | None:
    """The file NAME-DIGESTEND, if it has the bytes that it had."""
    with suppress(OSError):  # it may not be read: then it is not there
        for path in READY.glob(f"{name}-*{end}"):
            if path.name == f"{name}-{digest(path.read_bytes())}{end}":
                return path
    return None


def name_of_kernels() -> str:
    """How the name of that object file begins."""
    return f"kernels-{digest(sources())}"


def name_of_library(mlx: Path) -> str | None:
    """Likewise of that library. What is installed says of each of its files what its bytes add up
    to: that of libmlx.so, of 21 MB, need not be read for it. None where nothing does."""
    for record in mlx.parent.glob("mlx*.dist-info/RECORD"):
        for line in record.read_text("utf-8", errors="replace").splitlines():
            if line.startswith("mlx/lib/libmlx.so,"):
                return f"mlx-{digest(sources() + line.encode())}"
    return None
