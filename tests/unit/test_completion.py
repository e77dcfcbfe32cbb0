"""Completion, as shells do it at a terminal after a press of Tab, and what they ask for it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked import SCRIPTS, SERVER
from tests.terminals import Terminal
from tests.unit.test_cli import here
from toastkit.commands import program_name

NAMES = ("toast-decode", "toast-prefill", "toast", "toast-model")
# Of each shell how it is begun, what it is told first, how it takes a script, and a function in the
# place of a command, which prints its arguments and what it reads where that is no terminal.
PRINT = "printf '<%s>' \"$@\"; [[ -t 0 ]] || printf '<%s>' \"$(cat)\"; printf '!!%s\\n' end"
SHELLS = {
    "bash": (
        ["--norc", "--noprofile", "-i"], "", 'eval "$({} --completion bash)"',
        f"{{}}() {{{{ {PRINT}; }}}}",
    ),
    "zsh": (
        ["-f", "-i"], "autoload -Uz compinit; compinit -u -D", 'eval "$({} --completion zsh)"',
        f"{{}}() {{{{ {PRINT}; }}}}",
    ),
    "fish": (
        ["--private", "-N", "-i"], "function fish_prompt; end", "{} --completion fish | source",
        "function {}; printf '<%s>' $argv; isatty stdin; or begin; read -lz text;"
        " printf '<%s>' $text; end; printf '!!%s\\n' end; end",
    ),
}  # fmt: skip


class Shell(Terminal):
    """A shell, with the completion of some commands; the commands themselves are functions that
    print their arguments."""

    def __init__(self, name: str, folder: Path):
        path = os.pathsep.join([SERVER.stubs(), str(SCRIPTS), os.environ["PATH"]])
        arguments, begin, evaluate, function = SHELLS[name]
        environment = {"PATH": path, "PS1": "", "LC_ALL": "C.UTF-8"}
        super().__init__(name, *arguments, cwd=folder, env=environment)
        self.type(f"{begin}\n")
        for command in NAMES:
            self.type(f"{evaluate.format(command)}\n")
            self.type(f"{function.format(command)}\n")
        self.type("printf '!!%s\\n' ready\n")
        self.expect("!!ready")

    def complete(self, line: str) -> str:
        """The arguments that a command gets after the line, Tab and Enter, each in <>."""
        self.type(f"{line}\t\n")
        return re.findall(r"(?:<[^<>]*>)+", self.expect("!!end"))[-1]


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
    for name in ("garden", "my chat", "7,5"):
        (folder / "state" / "toastkit" / "chats" / f"{name}.jsonl").touch()
    (folder / "hub" / "models--some--llama").mkdir(parents=True)
    return folder


@pytest.fixture(scope="module")
def home(folder: Path, private_home: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        patch.setenv("HF_HUB_CACHE", str(folder / "hub"))
        yield


@pytest.fixture(scope="module", params=SHELLS)
def shell(request, folder: Path, home: None) -> Iterator[Shell]:
    if shutil.which(request.param) is None:
        pytest.skip(f"there is no {request.param}")
    made = Shell(request.param, folder)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("line", "arguments"),
    [("toast-decode --max-t", "<--max-tokens>"), ("toast-decode not", "<notes.txt>"),
     ("toast-decode my", "<my story.txt>"), ("toast-decode 'my st", "<my story.txt>"),
     ("toast-decode x", "<x*y.txt>"), ("toast-decode --messages no", "<--messages><notes.txt>"),
     ("toast-decode hi <ru", "<hi><logits>"), ("toast-prefill -q < ru", "<-q><logits>"),
     ("toast-decode --model=some/", "<--model=some/llama>"),
     ("toast-decode --messages=my", "<--messages=my story.txt>"),
     ("toast-decode -m models/sm", "<-m><models/small.toast>"),
     ("toast-prefill --session nov", "<--session><novel>"),
     ("toast-prefill --session sta", "<--session><state/>"),
     ("toast --session my", "<--session><my chat>"), ("toast --session=7", "<--session=7,5>"),
     ("toast --session not", "<--session><not>"), ("toast-model rm not", "<rm><not>"),
     ("toast-model rm some/llama <ru", "<rm><some/llama><logits>"),
     ("toast-model inf", "<info>"), ("toast-model info mod", "<info><models/>")],
)  # fmt: skip
def test_shell(shell: Shell, line: str, arguments: str) -> None:
    # zsh takes the slash that it has put after a directory away again.
    assert shell.complete(line) in (arguments, arguments.replace("/>", ">"))


@pytest.mark.parametrize(
    ("line", "names"),
    [("decode -m cru", "crumb"), ("decode -m some/", "some/llama"), ("decode --fork nov", "novel"),
     ("toast --session gar", "garden"), ("decode --device g", "gpu"), ("sample --hy", ""),
     ("prefill --resident au", "auto"), ("toast --placement in", "interleaved"),
     ("entropy-gear --hy", "--hysteresis"), ("model nosuch x", None), ("model info 'a", None),
     ("model rm some/", "some/llama"), ("model rm cru", ""), ("model v", "verify"),
     ("model verify --va", "--values"), ("model verify cru", "crumb"),
     ("model", None)],
)  # fmt: skip
def test_names(home: None, monkeypatch: pytest.MonkeyPatch, line: str, names: str | None) -> None:
    """What a command tells a shell. None: it fails, and says nothing, which would stand in the
    middle of what is typed."""
    name, *words = line.split()
    variable = f"_TOAST_{name.upper().replace('-', '_')}_COMPLETE".replace("TOAST_TOAST", "TOAST")
    monkeypatch.setenv(variable, "bash_complete")
    if words:
        monkeypatch.setenv("COMP_WORDS", f"{program_name(name)} {' '.join(words)}")
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
    done = here(name)
    found = [row for row in done.stdout.decode().splitlines() if row.startswith("plain,")]
    assert not done.stderr and (found == [f"plain,{names}"] if names else not found)


@pytest.mark.parametrize("shell", SHELLS)
def test_script(shell: str) -> None:
    done = here("entropy-gear", "--completion", shell)
    assert done.returncode == 0 and b"toast-entropy-gear" in done.stdout
    assert b"_TOAST_ENTROPY_GEAR_COMPLETE" in done.stdout
    if shell != "fish" and shutil.which(shell):
        subprocess.run([shell, "-n"], input=done.stdout, check=True)
