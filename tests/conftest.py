"""What all tests share: a home of their own, executables."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

# Two test processes on two cores: each keeps to its own with all that it starts, which spares both
# some of their time. Batch: MLX wakes its thread for every operation, and a thread that is woken
# waits until the one before it has no more to do; otherwise they take turns 70,000 times a second.
if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and hasattr(os, "sched_setaffinity"):
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) == int(os.environ["PYTEST_XDIST_WORKER_COUNT"]):
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw"))]})
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import settings

from tests.forked import SCRIPTS, SERVER, executable, run_to_end, start
from tests.native_library import library_at_home
from tests.unit.fake_daemon import signals_put_back
from toastkit.interrupts import Signals

__all__ = ["SCRIPTS", "executable", "library_at_home"]

gc.disable()  # until all tests have been collected: they stay

# What nohup or a shell in the background has turned off would not reach what tests start, and they
# would wait for it.
for number in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(number) is signal.SIG_IGN:
        given = signal.SIG_DFL if number == signal.SIGHUP else signal.default_int_handler
        signal.signal(number, given)

ROOT = Path(__file__).parent.parent

# As many times the examples of Hypothesis as in an ordinary run.
THOROUGH = float(os.environ.get("TOAST_TEST_EXAMPLES", "1"))


def examples(count: int) -> int:
    """How many examples a test takes that needs so many in an ordinary run."""
    return max(1, round(THOROUGH * count))


# No wall-clock assertions, no example database: a run depends on the tree and on nothing else.
settings.register_profile(
    "toastkit", deadline=None, derandomize=True, database=None, max_examples=examples(25)
)
settings.load_profile("toastkit")


class FromTheEnd(pytest.Dir):
    """A directory whose last file is collected first."""

    def collect(self) -> list:
        return list(super().collect())[::-1]


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Every other test process begins at the end: of a fresh tree each then compiles half of the
    files, and finds the other half compiled."""
    if not worker or int(worker.removeprefix("gw")) % 2 == 0:
        return None
    return FromTheEnd.from_parent(parent, path=path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of them have the tests in one order."""
    if worker:
        items.sort(key=lambda item: item.path)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """A test process tells of a test once, where it would six times, unless its set-up fails too or
    is what is timed: that costs both processes half a millisecond each."""
    if not worker or item.config.option.durations is not None:
        return None
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """What is left by a file of tests stays: modules, what is made once. An engine that gives
    memory back, as most do at their end, has all objects looked through for garbage, but these."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def private_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home for the whole run: no test reads or writes the user's, and none sees the user's
    settings."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("TOAST_", "HF_", "XDG_", "HUGGINGFACE_")):
                patch.delenv(name)
        patch.setenv("HOME", str(home))
        for name in ("STATE_HOME", "CACHE_HOME", "CONFIG_HOME", "DATA_HOME", "RUNTIME_DIR"):
            folder = home / name.lower()
            folder.mkdir(mode=0o700)
            patch.setenv(f"XDG_{name}", str(folder))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TOAST_NATIVE", "off")  # nothing is compiled for tests that compute nothing
        patch.setenv("PYTHONFAULTHANDLER", "1")
        patch.setattr(os, "fsync", os.fstat)  # no test has a power failure: none waits for a disk
        SERVER.open()
        gc.freeze()  # seven thousand tests and what they import: no collection looks there again
        gc.enable()
        gc.set_threshold(20_000, 10, 10)
        yield home
        SERVER.close()
        gc.freeze()  # pytest has everything looked through five times before it ends


@pytest.fixture
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sessions of this test alone; the directory that holds them."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "toastkit" / "sessions"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's directory with a feed."""
    os.mkfifo(tmp_path / "feed", 0o600)
    return tmp_path


@pytest.fixture
def signals() -> Iterator[Signals]:
    """Signals of this test alone, whose handlers are undone at its end."""
    with signals_put_back():
        yield Signals()


Toast = Callable[..., subprocess.CompletedProcess]


@pytest.fixture(scope="session")
def toast(private_home: Path) -> Toast:
    """toast(name, *arguments, stdin=b"", env={}): see run_to_end."""
    return run_to_end


class Piped(NamedTuple):
    """What a pipeline left behind: the last stage's output, every stage's exit code and stderr."""

    out: bytes
    codes: list[int]
    errors: list[str]


@pytest.fixture(scope="session")
def pipeline(private_home: Path) -> Callable[..., Piped]:
    """pipeline([name, *arguments], ..., stdin=b"", env={}): commands joined by pipes. stdin is a
    file; None is /dev/null. So is what a prefill at the end writes: in a pipe it would wait for a
    decode. Further settings are those of start."""

    def run(*stages: list[str], stdin: bytes | None = None, **settings) -> Piped:
        errors = [tempfile.TemporaryFile() for _ in stages]
        last = tempfile.TemporaryFile() if stages[-1][0] == "prefill" else None
        with tempfile.TemporaryFile() as first:
            first.write(stdin or b"")
            first.seek(0)
            source = subprocess.DEVNULL if stdin is None else first
            running = []
            for command, err in zip(stages, errors):
                out = last if last and command is stages[-1] else subprocess.PIPE
                running.append(start(*command, stdin=source, stdout=out, stderr=err, **settings))
                if len(running) > 1:
                    running[-2].stdout.close()
                source = running[-1].stdout
        try:
            out, _ = running[-1].communicate(timeout=60)
            if last:
                with last:
                    last.seek(0)
                    out = last.read()
            codes = [process.wait(timeout=10) for process in running]
        finally:
            for process in running:
                process.kill()
                process.wait()
        texts = []
        for file in errors:
            file.seek(0)
            texts.append(file.read().decode())
            file.close()
        return Piped(out, codes, texts)

    return run
