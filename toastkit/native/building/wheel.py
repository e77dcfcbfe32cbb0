"""Makes what a wheel for one platform brings of native products: see ready.py.

    python -m toastkit.native.building.wheel      for this machine and its MLX (make wheel)

Nothing of toastkit imports it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from toastkit.errors import ToastError
from toastkit.native.building import libraries, ready
from toastkit.native.building.compiling import compile_library, compiler, unsupported


def make() -> list[Path]:
    """Makes both where they are sought. Raises ToastError, OSError."""
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
