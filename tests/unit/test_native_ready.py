"""What a wheel brings of native products: what is made for one, and what becomes of it where the
wheel was installed. No test here compiles anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native_library import needed
from tests.unit.native_building import COMPILES, cache, cxx, fails, install_mlx, runs, trusting
from toastkit.errors import UnavailableError
from toastkit.native import starting
from toastkit.native.building import compiling, libraries, ready
from toastkit.native.building.wheel import main, make
from toastkit.native.starting import NativeOptions

__all__ = ["cache", "cxx", "trusting"]
pytestmark = needed
ALL = len(compiling.SOURCES) + 2  # sources, with the glue, and a linker


@pytest.fixture
def mlx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of one that is installed."""
    record, data = "../mlx_cpu-1.dist-info/RECORD", b"mlx/lib/libmlx.so,sha256=one,21\n"
    return install_mlx(tmp_path / "site/mlx", monkeypatch, record, data=data)


@pytest.fixture
def wheel(mlx: Path, cache: Path, cxx, trusting, tmp_path: Path, monkeypatch) -> Path:
    """What one brings for that MLX; every library is trusted, and there is no compiler."""
    monkeypatch.setattr(ready, "READY", tmp_path / "ready")
    cxx(COMPILES.replace("compiled", "brought"))
    make()
    monkeypatch.setenv("CXX", "no-such-compiler")
    return tmp_path / "ready"


def trusts(monkeypatch: pytest.MonkeyPatch, *wanted: bytes) -> None:
    """Has only libraries of these bytes be trusted."""
    monkeypatch.setattr(libraries, "is_trustworthy", lambda path: path.read_bytes() in wanted)


def other_mlx(mlx: Path) -> None:
    (mlx.parent / "mlx_cpu-1.dist-info/RECORD").write_text("mlx/lib/libmlx.so,sha256=two,21\n")


def test_no_compiler_is_needed(wheel: Path, mlx: Path) -> None:
    assert sorted(path.suffix for path in wheel.iterdir()) == [".o", ".so"]
    assert libraries.find() == (None, "they are not built yet", True)
    made = libraries.build()
    assert Path(made).read_bytes() == b"brought" and libraries.find().path == made


def test_a_compiler_that_is_there_is_not_asked(wheel: Path, cxx) -> None:
    path = cxx(COMPILES)
    before = runs(path)
    told: list[str] = []
    assert Path(libraries.build(say=told.append)).read_bytes() == b"brought"
    assert runs(path) == before and not told


def test_of_another_mlx_the_kernels_are_of_use(wheel: Path, mlx: Path, cxx, monkeypatch) -> None:
    other_mlx(mlx)
    found = libraries.find()
    assert not found.pending and found.why.endswith(
        "nothing that came with toastkit is for this MLX"
    )
    with pytest.raises(UnavailableError, match="no C\\+\\+ compiler .* for this MLX"):
        libraries.build()
    path, told = cxx(COMPILES), []
    before = runs(path)
    assert Path(libraries.build(say=told.append)).read_bytes() == b"compiled"
    assert runs(path) == before + 2 and len(told) == 1  # the glue, and a linker


def test_of_other_sources_nothing_is(wheel: Path, cxx, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "FLAGS", (*compiling.FLAGS, "-O3"))
    assert libraries.find().why == "there is no C++ compiler (CXX is 'no-such-compiler')"
    path = cxx(COMPILES)
    before = runs(path)
    assert Path(libraries.build()).read_bytes() == b"compiled" and runs(path) == before + ALL


def test_other_bytes_than_there_were(wheel: Path, cxx) -> None:
    for path in wheel.iterdir():
        path.write_bytes(b"broken")
    assert not libraries.find().pending and not starting.start(NativeOptions("auto")).on
    path = cxx(COMPILES)
    before = runs(path)
    assert Path(libraries.build()).read_bytes() == b"compiled" and runs(path) == before + ALL


def test_what_cannot_be_trusted(wheel: Path, cache: Path, cxx, monkeypatch) -> None:
    """Then a compiler does all of it, if there is one; else that is remembered."""
    trusts(monkeypatch)
    with pytest.raises(
        UnavailableError, match="what came with toastkit is not what this MLX needs"
    ):
        libraries.build()
    assert not list(cache.glob("*.so")) and not list(cache.glob("*.making"))
    found = libraries.find()
    assert found.why.startswith("what came with toastkit is not") and not found.pending
    trusts(monkeypatch, b"all compiled")
    path = cxx("""
printf x >> "$0.log"
read -r count < "$0.log"
while [ "$1" != -o ]; do shift; done
[ ${#count} -gt 2 ] && printf "all " > "$2"
printf compiled >> "$2"
""")
    path.with_name("cxx.log").unlink()
    assert Path(libraries.build()).read_bytes() == b"all compiled"
    assert runs(path) == 2 + ALL


def test_kernels_that_cannot_be_linked(wheel: Path, mlx: Path, cxx) -> None:
    other_mlx(mlx)
    refuses = fails("error: no such format")
    cxx(f'for word; do case "$word" in */ready/kernels-*.o) {refuses};; esac; done\n{COMPILES}')
    assert Path(libraries.build()).read_bytes() == b"compiled"


def test_an_mlx_that_says_nothing_of_its_files(wheel: Path, mlx: Path, cxx) -> None:
    (mlx.parent / "mlx_cpu-1.dist-info/RECORD").unlink()
    assert not libraries.find().pending
    cxx(COMPILES)
    assert Path(libraries.build()).read_bytes() == b"compiled"


def test_making_one(
    wheel: Path, cxx, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says for what platforms; or why there is none."""
    assert main() == 1 and "a compiler is needed" in capsys.readouterr().err
    cxx(COMPILES)
    assert main() == 0
    out = capsys.readouterr().out
    assert out.startswith(("manylinux_2_", "linux_")) and out.count("\n") == 1
    trusts(monkeypatch)
    assert main() == 1 and "not what this MLX needs" in capsys.readouterr().err
