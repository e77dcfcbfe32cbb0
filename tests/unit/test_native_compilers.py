"""What becomes of a compiler that fails, hangs, is interrupted or is not there, and how one may be
named. No test here compiles anything."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.native_library import needed
from tests.unit.native_building import COMPILES, cache, cxx, fails, install_mlx, runs, trusting
from toastkit.errors import ToastError, UnavailableError
from toastkit.native.building import compiling, libraries

__all__ = ["cache", "cxx", "trusting"]
pytestmark = needed


def leaves_its_pid(folder: Path) -> str:
    """The lines by which a shell leaves the id of what it started last in a file named pid."""
    return f"echo $! > '{folder}/'$$\nmv '{folder}/'$$ '{folder}/pid'\n"


def await_end(process: int) -> None:
    for _ in range(1000):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.01)
    raise AssertionError("it still runs")


def test_a_compiler_that_fails(cache: Path, cxx) -> None:
    cxx(fails("warning: x", "file.cpp:1: error: no such thing"))
    with pytest.raises(UnavailableError, match="failed: file.cpp:1: error: no such thing"):
        libraries.build()
    assert "no such thing" in libraries.find().why
    cxx("exit 7")
    with pytest.raises(UnavailableError, match="no reason given"):
        libraries.build()


def test_a_compiler_that_does_not_know_all(cache: Path, cxx, trusting) -> None:
    """Nor the newest instructions: their code is left out."""
    path = cxx(f'case " $* " in *" -mamx-tile "*) {fails("error: -mamx-tile")};; esac\n' + COMPILES)
    assert libraries.build() == libraries.find().path
    known = [name for name in compiling.SOURCES if "-mamx-tile" not in compiling.SOURCES[name]]
    assert runs(path) == len(compiling.SOURCES) + 2 and len(known) >= len(compiling.SOURCES) - 1


def test_a_compiler_that_hangs(cache: Path, cxx, tmp_path: Path, monkeypatch) -> None:
    """It is ended, with what it has started."""
    cxx(f"sleep 60 &\n{leaves_its_pid(tmp_path)}sleep 60")
    monkeypatch.setattr(compiling, "SECONDS", 0.6)
    monkeypatch.setattr(compiling, "LINGERS", 0.1)
    with pytest.raises(UnavailableError, match="did not end in 1 s"):
        libraries.build()
    await_end(int((tmp_path / "pid").read_text()))


def test_a_compiler_that_does_nothing(cache: Path, cxx, monkeypatch) -> None:
    """That is seen long before; one that computes is left alone."""
    monkeypatch.setattr(compiling, "LOOK", 0.06)
    cxx("sleep 60")
    with pytest.raises(UnavailableError, match="did nothing for 1 s"):
        libraries.build()
    monkeypatch.setattr(compiling, "SECONDS", 1.6)
    cxx("while :; do :; done & wait")
    with pytest.raises(UnavailableError, match="did not end in 2 s"):
        libraries.build()


def test_a_compiler_that_ends_and_leaves_somebody_behind(
    cache: Path, cxx, tmp_path: Path, monkeypatch
) -> None:
    """Who has its stderr: it is ended, and not waited for."""
    monkeypatch.setattr(compiling, "LINGERS", 0.1)
    cxx(f"sleep 600 &\n{leaves_its_pid(tmp_path)}exit 1")
    with pytest.raises(UnavailableError, match="no reason given"):
        libraries.build()
    await_end(int((tmp_path / "pid").read_text()))


def test_a_compiler_that_says_much(cache: Path, cxx) -> None:
    cxx(f"echo error: too much >&2\nhead -c {4 * compiling.MAX_OUTPUT} /dev/zero >&2\nexit 1")
    with pytest.raises(UnavailableError, match="failed: error: too much"):
        libraries.build()
    reading, writing = os.pipe()
    said = compiling._Reader(open(reading, "rb"))
    with open(writing, "wb") as stream:
        for _ in range(64):
            stream.write(bytes(1 << 16))
    said.join()
    assert len(said.text) == compiling.MAX_OUTPUT


def test_a_compiler_that_writes_without_end(cache: Path, cxx, monkeypatch) -> None:
    monkeypatch.setattr(compiling, "MAX_BYTES", 1 << 20)
    cxx('sleep 0.3\nwhile [ "$1" != -o ]; do shift; done\nexec head -c 1000000000 /dev/zero > "$2"')
    with pytest.raises(UnavailableError, match="failed"):
        libraries.build()
    assert not [entry for entry in cache.iterdir() if entry.name not in ("lock",)
                and not entry.name.endswith(".failed")]  # fmt: skip


def test_a_compiler_that_is_killed(cache: Path, cxx) -> None:
    cxx("kill -9 $$")
    with pytest.raises(UnavailableError, match="failed: ended by SIGKILL"):
        libraries.build()


def test_a_disk_that_is_full(cache: Path, cxx) -> None:
    """That may be another time: it is not remembered."""
    cxx(fails("x.s: error: No space left on device"))
    for _ in range(2):
        with pytest.raises(ToastError, match="no space left") as failed:
            libraries.build()
        assert failed.value.code == 74 and not list(cache.glob("*.failed"))
        assert libraries.find().pending


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_build_that_is_interrupted(cache: Path, cxx, tmp_path: Path, number: int) -> None:
    """It ends at once, with its compilers, and leaves nothing behind."""
    told = tmp_path / "told"
    cxx(f"echo > '{told}'$$\nexec sleep 60")
    build = subprocess.Popen(
        [sys.executable, "-m", "toastkit.native.building.libraries"], stderr=subprocess.PIPE
    )
    while not (compilers := list(tmp_path.glob("told*"))):
        time.sleep(0.01)
    build.send_signal(number)
    _, said = build.communicate(timeout=30)
    assert build.returncode == 128 + number
    (line,) = said.decode().splitlines()
    assert line.startswith("native products: compiling")
    for compiler in compilers:
        await_end(int(compiler.name.removeprefix("told")))
    assert [entry.name for entry in cache.iterdir()] == ["lock"]


def test_an_interrupt_just_before_the_build_waits(cache: Path, cxx, tmp_path: Path) -> None:
    """Python notes it, and it does not end the wait: as one that reaches another thread."""
    cxx(f"echo > '{tmp_path}/told'\nsleep 3\necho > '{tmp_path}/ended'")

    def interrupt() -> None:
        while not (tmp_path / "told").exists():
            time.sleep(0.01)
        time.sleep(0.1)  # now the main thread waits
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        libraries.build()
    assert not (tmp_path / "ended").exists()


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EMFILE])
def test_no_more_processes(cache: Path, cxx, monkeypatch, number: int) -> None:
    """Nor files, nor threads: that may be another time."""

    def refused(*arguments, **settings):
        raise OSError(number, os.strerror(number))

    def unthreaded(thread):
        raise RuntimeError("can't start new thread")

    cxx(COMPILES)
    for where, name, replacement in (
        (subprocess, "Popen", refused), (threading.Thread, "start", unthreaded),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(where, name, replacement)
            with pytest.raises(ToastError) as failed:
                libraries.build()
        assert failed.value.code == 74 and not list(cache.glob("*.failed"))
        assert libraries.find().pending


def test_a_compiler_that_writes_nothing(cache: Path, cxx) -> None:
    cxx("")
    with pytest.raises(UnavailableError, match="has written nothing"):
        libraries.build()
    assert "has written nothing" in libraries.find().why


def test_a_linker_says_why_before_who_started_it(cache: Path, cxx) -> None:
    cxx(fails("ld: cannot find -lmlx: no such file", "collect2: error: ld returned 1"))
    with pytest.raises(UnavailableError, match="failed: ld: cannot find -lmlx"):
        libraries.build()


def test_compilers_have_arguments_and_folders(
    cache: Path, cxx, tmp_path: Path, monkeypatch, trusting
) -> None:
    """CXX is a path, also a relative one or with blanks, or a command with arguments; MLX may lie
    anywhere."""
    path = cxx(f"{{ printf '%s\\0' \"$0\" \"$@\"; echo; }} >> '{tmp_path}/words'\n{COMPILES}")
    monkeypatch.setenv("CXX", f"/bin/sh {path} -m64")
    assert compiling.compiler() == ("/bin/sh", str(path), "-m64")
    mlx = install_mlx(tmp_path / "a,b c", monkeypatch)
    made = libraries.build()
    *_, linked = [line.split("\0") for line in (tmp_path / "words").read_text().splitlines()]
    assert linked[1] == "-m64" and str(mlx / "lib") in linked
    monkeypatch.setenv("CXX", f"/bin/sh {path} -m32")
    assert libraries.find().pending and Path(made).exists()
    monkeypatch.chdir(tmp_path)
    path.rename(tmp_path / "my cxx")
    monkeypatch.setenv("CXX", "./my cxx")
    assert compiling.compiler() == (str(tmp_path / "my cxx"),)


def test_where_it_is_cannot_be_said(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(libraries, "_lower_priority", lambda: None)
    monkeypatch.setattr(libraries, "Signals", lambda: None)
    monkeypatch.setattr(libraries, "build", lambda *rest: "here")
    full = open("/dev/full", "wb", buffering=0)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(full, write_through=True))
    assert libraries.main() == 74
    assert capsys.readouterr().err == "cannot write: no space left on device\n"
    monkeypatch.setattr(sys, "stdout", None)
    assert libraries.main() == 74
    assert capsys.readouterr().err == "cannot write: standard output is closed\n"
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", None)
    libraries._say("an error")
    assert sys.stdout.getvalue() == ""


def test_what_a_compiler_says_is_escaped(cache: Path, cxx, monkeypatch, capsys) -> None:
    from toastkit.commands import model

    cxx(fails("x.h:1: error: \x1b[31mred"))
    with pytest.raises(UnavailableError):
        libraries.build()
    model._lines([("native products", libraries.find().why)])
    said = capsys.readouterr().out
    assert "error: \\x1b[31mred" in said and "\x1b" not in said
