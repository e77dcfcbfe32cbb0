"""What a wheel for one platform brings of native products: then less is compiled, or nothing.

    python -m toastkit.native.building.ready    makes it, for this machine and MLX (make wheel)

It is an object file with the kernels, which know no MLX, and a library for that MLX which was
there when the wheel was made. Their names say what they were made from, for which MLX, and what
their bytes add up to. They are not loaded where they lie: libraries.py takes them in place of a
compiler's work, and asks in a process of its own whether what comes of it is to be trusted.
"""

from __future__ import annotations

import hashlib
import os
import sys
from contextlib import suppress
from pathlib import Path

from toastkit.errors import ToastError
from toastkit.native.building.compiling import FOLDER, sources

READY = FOLDER / "ready"


def digest(data: bytes) -> str:
    """Of what lies in a file, or of what it is made from; for names of files."""
    return hashlib.sha256(data).hexdigest()[:24]


def kernels() -> Path | None:
    """The object file of these sources."""
    return _brought(_of_kernels(), ".o")


def library(mlx: Path) -> Path | None:
    """The library of these sources for an MLX, of which this is the folder."""
    name = _of_library(mlx)
    return _brought(name, ".so") if name else None


def _brought(name: str, end: str) -> Path | None:
    """The file NAME-DIGESTEND, if it has the bytes that it had."""
    with suppress(OSError):  # it may not be read: then it is not there
        for path in READY.glob(f"{name}-*{end}"):
            if path.name == f"{name}-{digest(path.read_bytes())}{end}":
                return path
    return None


def _of_kernels() -> str:
    return f"kernels-{digest(sources())}"


def _of_library(mlx: Path) -> str | None:
    """What is installed says of each of its files what its bytes add up to: that of libmlx.so, of
    21 MB, need not be read for it. None where nothing does."""
    for record in mlx.parent.glob("mlx*.dist-info/RECORD"):
        for line in record.read_text("utf-8", errors="replace").splitlines():
            if line.startswith("mlx/lib/libmlx.so,"):
                return f"mlx-{digest(sources() + line.encode())}"
    return None


def make() -> list[Path]:
    """Makes both where they are sought. Raises ToastError, OSError."""
    from toastkit.native.building.compiling import compile_library, compiler, unsupported
    from toastkit.native.building.libraries import glue_flags, installed_mlx, is_trustworthy

    cxx, mlx = compiler(), installed_mlx()
    name = _of_library(mlx) if mlx else None
    if unsupported() or cxx is None or mlx is None or name is None:
        raise ToastError("a compiler is needed, Linux, and an installed MLX")
    READY.mkdir(exist_ok=True)
    made = [READY / "making.o", READY / "making.so"]
    compile_library(made[0], cxx)
    compile_library(made[1], cxx, glue=glue_flags(mlx), kernels=made[0])
    if not is_trustworthy(made[1]):
        raise ToastError("what was compiled is not what this MLX needs")
    return [
        path.replace(READY / f"{name}-{digest(path.read_bytes())}{path.suffix}")
        for path, name in zip(made, (_of_kernels(), name))
    ]


def main() -> int:
    """Makes it, and prints for what platforms: a wheel's tag."""
    try:
        make()
    except (ToastError, OSError) as error:
        print(f"no library for a wheel: {error}", file=sys.stderr)
        return 1
    # Nobody has a symbol of the C library that this machine has not.
    libc = (os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc ").replace(".", "_")
    print(f"manylinux_{libc}_{os.uname().machine}" if libc else f"linux_{os.uname().machine}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
