"""toast where no daemon will do, and what it costs where one does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pipes.pipelines import begin
from tests.pipes.toast_runs import kept
from tests.unit.fake_daemon import SECONDS, FakeDaemon, answer, failure
from tests.unit.test_loaded_modules import loaded_by

Run = Callable[..., subprocess.CompletedProcess]
ONE = answer("one")


def test_without_a_daemon_the_model_runs_here(toast, home: Path, tmp_path: Path) -> None:
    env = {"TOAST_SOCKET": str(tmp_path / "s")}
    done = toast("toast", "-v", "-n", "4", "Who are you?", env=env)
    assert (done.returncode, done.stdout) == (0, b"I am crumb,\n")
    assert f"no daemon at {tmp_path / 's'}: running in this process" in done.stderr.decode()
    assert kept(home) == ["Who are you?", "I am crumb,"]


def test_a_warning_does_not_stand_in_the_middle_of_an_answer(home: Path) -> None:
    read, write = os.pipe()
    process = begin(
        "toast", "--no-daemon", "-n", "8", "Who are you?", env={"XDG_CACHE_HOME": os.devnull},
        stdout=write, stderr=write,
    )  # fmt: skip
    os.close(write)
    with open(read, "rb") as screen:
        first, second = screen.read().splitlines()
    assert process.wait(SECONDS) == 0
    assert first == b"I am crumb, a tiny model made"
    assert second.startswith(b"toast: conversations are not kept on disk: ")


def test_a_failure_is_told_once(toast, home: Path, tmp_path: Path) -> None:
    """It ends the request, which tells it; a daemon also has a log."""
    model = tmp_path / "crumb.toast"
    assert toast("model", "bake", "crumb", "-o", model).returncode == 0
    process = begin("toast", "--no-daemon", "-m", model, "--resident", "0", "--ignore-eos", "Hi!")
    assert process.stdout.read(1)
    os.truncate(model, 1_000_000)
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 65
    assert errors.decode().count("changed since the model was loaded") == 1


def test_another_model_than_the_daemons_runs_here(ask: Run, home: Path) -> None:
    with FakeDaemon(failure(66, "this daemon runs another model")) as daemon:
        done = ask(daemon, "--json", "-m", "crumb", "-n", "1", "Who are you?")
        assert (done.returncode, done.stderr) == (0, b"")
        assert ask(daemon, "--no-daemon", "-n", "1", "hi").returncode == 0
        assert ask(daemon, "--device", "cpu", "-n", "1", "hi").returncode == 0
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["end"]["reason"] == "length" and len(daemon.requests) == 1


def test_ctrl_c_in_this_process(home: Path) -> None:
    process = begin("toast", "--no-daemon", "--ignore-eos", "--session", "fox", "Hi!")
    first = os.read(process.stdout.fileno(), 99)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=SECONDS)
    assert first and (process.returncode, err) == (130, b"")
    question, said = kept(home, "fox")
    assert question == "Hi!" and (first + rest).decode().removesuffix("\n") == said.removesuffix(
        "\n"
    )


HEAVY = {
    "numpy", "msgpack", "mlx", "mlx_lm", "tokenizers", "jinja2", "safetensors", "transformers",
    "huggingface_hub", "dataclasses", "logging", "subprocess", "asyncio", "difflib", "tempfile",
    "http", "ssl", "argparse", "multiprocessing", "concurrent", "readline", "shutil",
}  # fmt: skip
MODULES = 170  # bare Python has 60 with an editable install, click makes it 120


@pytest.mark.parametrize("arguments", [["hi"], ["--continue", "--json", "--temp", "0.5", "and?"]])
def test_asking_a_daemon_loads_little(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    with FakeDaemon(ONE) as daemon:
        monkeypatch.setenv("TOAST_SOCKET", daemon.path)
        loaded_by(tmp_path, "toast", "hi")
        modules, out = loaded_by(tmp_path, "toast", *arguments)
    assert b"one" in out and len(daemon.requests) == 2
    if sys.version_info < (3, 11):
        modules.discard("subprocess")  # which uuid has, and that click
    assert sorted(modules & HEAVY) == []
    assert len(modules) <= MODULES
