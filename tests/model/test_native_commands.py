"""Commands whose products are native: --native, --threads, and what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model.published import write_published
from tests.model.worker_driver import Running
from tests.native_library import built, cache, library, needed
from tests.unit.daemon_front import eventually
from tests.unit.test_loaded_modules import GREEDY, STEP_FREE, loaded_by
from toastkit.daemon import local_service, worker
from toastkit.daemon.service_settings import ServiceSettings
from toastkit.engine.opening import open_engine
from toastkit.model.locate import locate
from toastkit.native import starting
from toastkit.native.building import libraries
from toastkit.native.building.libraries import Found
from toastkit.native.library import Library
from toastkit.native.starting import NativeOptions

__all__ = ["built", "cache", "library"]
pytestmark = needed


def test_commands(toast, cache: Path) -> None:
    env = {"XDG_CACHE_HOME": str(cache)}
    words = ("--raw", "-n", "4", "--temp", "0")
    plain = toast("decode", "--native", "off", *words, stdin=b"Once upon a time", env=env)
    for setting in ("auto", "require"):
        done = toast(
            "decode", "-v", "--native", setting, *words, stdin=b"Once upon a time", env=env
        )
        assert (done.returncode, done.stdout) == (0, plain.stdout) and plain.stdout
        assert b"native products: on (" in done.stderr
    told = toast("model", "info", "--device", env=env).stdout.decode()
    assert f"native products    on ({starting.status().why})" in told
    assert "TOAST_" not in told
    for name, value in (("TOAST_NATIVE", "off"), ("TOAST_THREADS", "1")):
        told = toast("model", "info", "--device", env={**env, name: value}).stdout.decode()
        assert f"variables          {name}={value}\n" in told
        assert ("off: TOAST_NATIVE is off" in told) is (value == "off")


def test_a_greedy_answer_loads_little(tmp_path: Path, cache: Path, monkeypatch) -> None:
    """With native products too: see tests/unit/test_loaded_modules.py."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    words = ("--raw", "--native", "require", "Hello")
    modules, out = loaded_by(tmp_path, "decode", *GREEDY, *words)
    assert out and sorted(modules & STEP_FREE) == [] and "toastkit.native.regions" in modules


def test_threads(toast, cache: Path, library: Library) -> None:
    """As many as are asked for, of the process; None leaves them."""
    before = library.threads
    try:
        open_engine(locate("crumb"), native="require", threads=3)
        assert library.threads == 3
        assert "threads: 3" in open_engine(locate("crumb"), native="require").native.why
    finally:
        library.set_threads(before)
    env = {"XDG_CACHE_HOME": str(cache), "TOAST_NATIVE": "require"}
    words = ("--raw", "-n", "2", "--temp", "0", "-v")
    done = toast("decode", "--threads", "5", *words, stdin=b"Once upon a time", env=env)
    assert done.returncode == 0 and b"threads: 5)" in done.stderr
    done = toast("decode", *words, stdin=b"Once", env={**env, "TOAST_THREADS": "256"})
    assert done.returncode == 0 and b"threads: 256)" in done.stderr
    done = toast("decode", "--native-exact", *words, stdin=b"Once", env=env)
    assert done.returncode == 0 and b", exact)" in done.stderr


@pytest.mark.parametrize("count", ["0", "-1", "two", "257", ""])
def test_no_number_of_threads(toast, count: str) -> None:
    words = ("--raw", "-n", "2")
    for how, env in ((("--threads", count), {}), ((), {"TOAST_THREADS": count})):
        done = toast("decode", *words, *how, stdin=b"Once upon a time", env=env)
        if not how and not count:  # an empty variable is none
            assert done.returncode == 0
            continue
        assert done.returncode == 64 and not done.stdout
        lines = done.stderr.decode().splitlines()
        named = "--threads" if how else "TOAST_THREADS"
        assert named in lines[0] and len(lines) == 2 and "hint" in lines[1]


def test_how_products_are_computed_that_are_not(toast) -> None:
    for flag in (("--threads", "2"), ("--native-exact",)):
        words = ("decode", "--raw", "-n", "2")
        done = toast(*words, "--native", "off", *flag, stdin=b"Once upon a time")
        assert done.returncode == 64 and b"--native off has none" in done.stderr
        done = toast(*words, *flag, stdin=b"Once upon a time", env={"TOAST_NATIVE": "off"})
        assert done.returncode == 0  # a variable is a wish, the flag may be of a script


def test_commands_without_a_compiler(toast, tmp_path: Path) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path), "CXX": "no-such-compiler"}
    words = ("--raw", "-n", "2", "--temp", "0")
    done = toast("decode", "--native", "auto", *words, stdin=b"Once upon a time", env=env)
    assert (done.returncode, done.stderr) == (0, b"") and done.stdout
    done = toast("decode", "--native", "require", *words, stdin=b"Once upon a time", env=env)
    assert done.returncode == 69 and not done.stdout
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("toast-decode: no native products: there is no C++ compiler")
    done = toast("model", "info", "--device", env=env)
    assert b"off: there is no C++ compiler" in done.stdout


def test_a_daemon_takes_them_when_they_have_been_built(tmp_path: Path, monkeypatch) -> None:
    """It was started while they were: what it remembers, it still does."""
    found = libraries.find()
    there = [Found(None, "", pending=True)]
    for module in (libraries, worker):
        monkeypatch.setattr(module, "find", lambda: there[-1])
    monkeypatch.setattr(libraries, "build_meanwhile", lambda: True)
    monkeypatch.setattr(worker, "NATIVE_SECONDS", 0.05)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    native = NativeOptions("auto")
    running = Running(write_published(tmp_path / "llama", "llama"), native=native)
    running.worker.start()
    try:
        before = running.answer()
        assert "being built" in running.worker.status()["native"]
        held = running.hold(80)
        there.append(found)
        eventually(lambda: held.is_done)
        eventually(lambda: running.worker.status()["loaded"] and running.said)
        assert running.worker.status()["native"].startswith("on (")
        channel = running.ask()
        eventually(lambda: channel.is_done)
        assert channel.one("stats")["cached"] == channel.one("stats")["prompt"] - 1
        assert running.answer() == before
    finally:
        running.worker.close()


def test_a_chat_without_a_daemon_takes_them_too(tmp_path: Path, monkeypatch) -> None:
    """From its next turn on."""
    there = [Found(None, "", pending=True)]
    found = libraries.find()
    for module in (libraries, local_service):
        monkeypatch.setattr(module, "find", lambda: there[-1])
    monkeypatch.setattr(libraries, "build_meanwhile", lambda: True)
    path = write_published(tmp_path / "llama", "llama")
    settings = ServiceSettings(model=str(path), dtype="float32", native=NativeOptions("auto"))
    service = local_service.LocalService(settings)
    turn = {"prompt": "Who are you?", "options": {"max_tokens": 8}}

    def asked() -> tuple[bool, str]:
        replies = list(service.ask(turn))
        loads = any("loading" in reply.get("progress", {}) for reply in replies)
        return loads, replies[-1]["end"]["text"]

    loads, text = asked()
    assert loads and asked() == (False, text)
    there.append(found)
    assert asked() == (True, text) and asked() == (False, text)
    service.close()


def test_a_daemon_looks_no_longer_where_they_cannot_be(tmp_path: Path, monkeypatch) -> None:
    looks = [Found(None, "", pending=True)]

    def find() -> Found:
        looks.append(Found(None, "c++ failed"))
        return looks[0] if len(looks) < 4 else looks[-1]

    monkeypatch.setattr(libraries, "find", lambda: looks[0])
    monkeypatch.setattr(worker, "find", find)
    monkeypatch.setattr(libraries, "build_meanwhile", lambda: True)
    monkeypatch.setattr(worker, "NATIVE_SECONDS", 0.01)
    running = Running(
        write_published(tmp_path / "llama", "llama"), native=NativeOptions("auto"), spill_bytes=0
    )
    running.worker.start()
    try:
        eventually(lambda: len(looks) == 4)
        running.answer()
        assert len(looks) == 4 and running.said == []
    finally:
        running.worker.close()
