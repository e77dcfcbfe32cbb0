"""Make the prebuilt native products of a platform wheel, see ready.py.

    python -m toastkit.native.building.wheel      for this machine and its MLX (make wheel)

Nothing in toastkit imports it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from toastkit.errors import ToastError
from toastkit.native.building import libraries, ready
from toastkit.native.building.compiling import compile_library, compiler, unsupported


def make() -> list[Path]:
    """Make both files in the folder `ready`. Raises ToastError, OSError."""
    cxx, mlx = compiler(), libraries.installed_mlx()
    name = ready.name_of_library(mlx) if mlx else None
    if unsupported() or cxx is None or mlx is None or name is None:
        raise ToastError("a compiler is needed, Linux, and an installed MLX")
    ready.READY.mkdir(exist_ok=True)
    made = [ready.READY / "making.o", ready.READY / "making.so"]
    compile_library(made[0], cxx)
    compile_library(made[1], cxx, glue=libraries.glue_flags(mlx), kernels=made[0])
    if not libraries.is_trustworthy(made[1]):
        raise ToastError("what was compiled is not what this MLX needs")
    return [
        path.replace(ready.READY / f"{name}-{ready.digest(path.read_bytes())}{path.suffix}")
        for path, name in zip(made, (ready.name_of_kernels(), name))
    ]


def main() -> int:
    """Make them, and print the wheel's platform tag."""
    try:
        make()
    except (ToastError, OSError) as error:
        print(f"no library for a wheel: {error}", file=sys.stderr)
        return 1
    # Only symbols of this machine's C library are used: its version is the lowest that works.
    libc = (os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc ").replace(".", "_")
    print(f"manylinux_{libc}_{os.uname().machine}" if libc else f"linux_{os.uname().machine}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
