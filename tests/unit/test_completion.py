"""Completion, as bash does it at a terminal after a press of Tab, and what other shells ask."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked import SCRIPTS, SERVER
from toastkit.commands import program_name

SECONDS = 20  # until a bash that says nothing is given up
# Its arguments, and what it reads where that is no terminal.
PRINT = "printf '<%s>' \"$@\"; [[ -t 0 ]] || printf '<%s>' \"$(cat)\"; printf '!!%s\\n' end"
NAMES = ("toast-decode", "toast-prefill", "toast", "toast-model")


class Bash:
    """A bash at a terminal, with the completion of some commands; the commands themselves are
    functions that print their arguments."""

    def __init__(self, folder: Path):
        self._main, tty = pty.openpty()
        path = os.pathsep.join([SERVER.stubs(), str(SCRIPTS), os.environ["PATH"]])
        environment = {**os.environ, "PATH": path, "TERM": "dumb", "PS1": "", "INPUTRC": os.devnull}
        self._process = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "-i"], stdin=tty, stdout=tty, stderr=tty, cwd=folder,
            env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(tty)
        self._data = ""
        for name in NAMES:
            self._send(f'eval "$({name} --completion bash)"\n')
            self._send(f"{name}() {{ {PRINT}; }}\n")
        self._send("printf '!!%s\\n' ready\n")
        self._wait("!!ready")

    def _send(self, text: str) -> None:
        os.write(self._main, text.encode())

    def _wait(self, mark: str) -> str:
        """What was written up to the mark."""
        deadline = time.monotonic() + SECONDS
        while mark not in self._data:
            left = deadline - time.monotonic()
            assert left > 0 and select.select([self._main], [], [], left)[0], self._data
            self._data += os.read(self._main, 4096).decode()
        before, _, self._data = self._data.partition(mark)
        return before

    def complete(self, line: str) -> str:
        """The arguments that a command gets after the line, Tab and Enter, each in <>."""
        self._send(f"{line}\t\n")
        return re.findall(r"(?:<[^<>]*>)+", self._wait("!!end"))[-1]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._main)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with files; the user has sessions, conversations and a model."""
    folder = tmp_path_factory.mktemp("completion")
    for name in ("notes.txt", "my story.txt", "x*y.txt"):
        (folder / name).touch()
    (folder / "run.frames").write_text("logits")
    (folder / "models").mkdir()
    (folder / "models" / "small.toast").touch()
    (folder / "state" / "toastkit" / "sessions" / "novel").mkdir(parents=True)
    (folder / "state" / "toastkit" / "sessions" / ".ephemeral-x").mkdir()
    (folder / "state" / "toastkit" / "chats").mkdir(parents=True)
    (folder / "state" / "toastkit" / "chats" / "garden.jsonl").touch()
    (folder / "hub" / "models--some--llama").mkdir(parents=True)
    return folder


@pytest.fixture(scope="module")
def bash(folder: Path, private_home: Path) -> Iterator[Bash]:
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        patch.setenv("HF_HUB_CACHE", str(folder / "hub"))
        made = Bash(folder)
        yield made
        made.close()


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("toast-decode --max-t", "<--max-tokens>"),
        ("toast-decode not", "<notes.txt>"),
        ("toast-decode my", "<my story.txt>"),
        ("toast-decode 'my st", "<my story.txt>"),
        ("toast-decode x", "<x*y.txt>"),
        ("toast-decode --messages no", "<--messages><notes.txt>"),
        ("toast-decode hi <ru", "<hi><logits>"),
        ("toast-prefill -q < ru", "<-q><logits>"),
        ("toast-decode -m cru", "<-m><crumb>"),
        ("toast-decode --model=cru", "<--model=crumb>"),
        ("toast-decode -m some/", "<-m><some/llama>"),
        ("toast-decode -m models/sm", "<-m><models/small.toast>"),
        ("toast-prefill --session nov", "<--session><novel>"),
        ("toast-prefill --session sta", "<--session><state/>"),
        ("toast-decode --fork nov", "<--fork><novel>"),
        ("toast --session gar", "<--session><garden>"),
        ("toast-model inf", "<info>"),
        ("toast-model info mod", "<info><models/>"),
        ("toast-decode --device g", "<--device><gpu>"),
        ("toast-prefill --resident au", "<--resident><auto>"),
        ("toast --placement in", "<--placement><interleaved>"),
    ],
)
def test_bash(bash: Bash, line: str, arguments: str) -> None:
    assert bash.complete(line) == arguments


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize("name", ["sample", "entropy-gear"])
def test_completion(toast, name: str, shell: str) -> None:
    done = toast(name, "--completion", shell)
    assert done.returncode == 0 and program_name(name).encode() in done.stdout
    if shell != "fish" and shutil.which(shell):
        subprocess.run([shell, "-n"], input=done.stdout, check=True)
    variable = re.search(rb"_TOAST_\w+_COMPLETE", done.stdout)[0].decode()
    # fish passes the word itself where the others pass its number.
    place = "--hy" if shell == "fish" else "1"
    env = {
        variable: f"{shell}_complete",
        "COMP_WORDS": f"{program_name(name)} --hy",
        "COMP_CWORD": place,
    }
    found = toast(name, env=env).stdout
    assert (b"--hysteresis" in found) == (name == "entropy-gear")
