"""Which libraries of native products are trusted, and what one of them does on a lesser processor
than the one that it was built on."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native_library import cache, library, native_path, needed
from toastkit.errors import UnavailableError
from toastkit.native import starting
from toastkit.native.building import libraries, probe, ready
from toastkit.native.library import Library

__all__ = ["cache", "library"]
pytestmark = needed


@pytest.fixture(scope="module")
def path(cache: Path) -> str:
    """Of the library."""
    return str(native_path(cache))


def test_the_probe(library: Library, path: str, tmp_path: Path) -> None:
    assert probe.trustworthy(library)
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"\x7fELF" + bytes(4000))
    assert not libraries.is_trustworthy(broken)
    # Arrays that are sought in the wrong place: the child may die of it.
    code = (
        "import sys, mlx.core as mx\nfrom toastkit.native.building import probe\n"
        "from toastkit.native.library import Library\nlibrary = Library(sys.argv[1])\n"
        "import ctypes\nctypes.PyDLL(sys.argv[1]).toast_set_head(ctypes.c_int64(24))\n"
        "sys.exit(0 if probe.trustworthy(library) else 1)"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True)
    assert done.returncode != 0


def test_libraries_that_lie(path: str) -> None:
    """They load, and are not trusted; optimised Python trusts no more than any."""

    class Wrong(Library):
        def multiply(self, *arrays, **rest):
            return super().multiply(*arrays, **rest) * 1.01

    class WrongAlone(Library):
        def multiply(self, x, *arrays, **rest):
            return super().multiply(x, *arrays, **rest) * (1 + (x.size == x.shape[-1]))

    class Elsewhere(Library):
        def describe(self, array):
            return ((*array.shape, 1), array.itemsize, array.size)

    for one in (Wrong, WrongAlone, Elsewhere):
        assert not probe.trustworthy(one(path))
    for file, code in ((path, 0), (str(Path(probe.__file__)), 1)):
        command = [sys.executable, "-O", "-m", "toastkit.native.building.probe", file]
        assert bool(subprocess.run(command, capture_output=True).returncode) == bool(code)


def test_a_library_of_a_wheel(path: str, tmp_path: Path, monkeypatch) -> None:
    """Without a compiler it is probed and used; one that is broken is not."""
    mlx = libraries.installed_mlx()
    assert mlx is not None
    monkeypatch.setattr(ready, "READY", tmp_path / "ready")
    ready.READY.mkdir()
    monkeypatch.setenv("CXX", "no-such-compiler")
    for data, on in ((Path(path).read_bytes()[:500_000], False), (Path(path).read_bytes(), True)):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(on)))
        name = f"{ready.name_of_library(mlx)}-{ready.digest(data)}.so"
        (ready.READY / name).write_bytes(data)
        assert libraries.find().pending
        if on:
            assert Library(libraries.build()).instructions
        else:
            with pytest.raises(UnavailableError, match="not what this MLX needs"):
                libraries.build()
        assert starting.status().on == on
        (ready.READY / name).unlink()


def test_a_library_that_ends_early(path: str, tmp_path: Path) -> None:
    """Loading it would end the process, though its name has the digest of what is there."""
    folder = tmp_path / "toastkit/native"
    folder.mkdir(0o700, parents=True)
    data = Path(path).read_bytes()
    for size in (500_000, len(data) - 1, len(data)):
        name = f"{Path(path).name.partition('-')[0]}-{ready.digest(data[:size])}.so"
        (folder / name).write_bytes(data[:size])
        code = "from toastkit.native import starting; print(starting.status().on)"
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
        assert done.stdout == f"{size == len(data)}\n".encode(), done
        (folder / name).unlink()


EMULATOR = shutil.which("qemu-x86_64-static") or shutil.which("qemu-x86_64")


@pytest.mark.skipif(EMULATOR is None or platform.machine() != "x86_64", reason="no emulator")
@pytest.mark.parametrize("processor, named", [("Nehalem", "portable"), ("Haswell", "avx2")])
def test_a_processor_with_fewer_instructions(path: str, processor: str, named: str) -> None:
    """A home on two machines: the library is the same, its code is not."""
    code = (
        "import ctypes, sys; library = ctypes.CDLL(sys.argv[1])\n"
        "library.toast_instructions.restype = ctypes.c_char_p\n"
        "print(library.toast_instructions().decode())"
    )
    command = [str(EMULATOR), "-cpu", processor, os.path.realpath(sys.executable), "-S", "-c", code]
    environment = {**os.environ, "PYTHONHOME": sys.base_prefix}
    done = subprocess.run([*command, path], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == named, done.stderr
