"""The examples of the manual run as they stand: every `$ ` command, and the Python of section 5."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.daemons import Daemon
from tests.pipes.pipelines import check_answers, most_tokens
from tests.pipes.test_examples import Shell
from tests.unit.mdoc import MAN, Page, literal_blocks, pages
from toastkit.model.locate import CRUMB


def shell_blocks(page: Page) -> list[str]:
    """The examples of a page: scripts of one command or several, without the prompts."""
    blocks = literal_blocks(page.part("EXAMPLES"))
    return [re.sub(r"^\$ ", "", block, flags=re.MULTILINE) for block in blocks]


EXAMPLES = [
    pytest.param(script, id=f"{page.name}-{number}")
    for page in pages(1)
    for number, script in enumerate(shell_blocks(page), 1)
]


# What starts a daemon or is refused by one without options; and toast, whose turns in its own
# process are tried here.
OWN = re.compile(r"toasted|--resident|--expert-slots|\btoast ")


def python_example(page: str) -> str:
    """The one Python program of a page of section 5."""
    (program,) = literal_blocks(Page(MAN / "man5" / page).part("EXAMPLES"))
    return program


@pytest.fixture
def shell(tmp_path: Path, daemon: Daemon, measured: None):
    """shell(script): runs it with bash, where any command of a pipeline may fail it. Commands that
    ask for crumb as it is use the weights of a daemon, with which they write the same and start
    sooner (test_attached.py); the examples of the README load their own."""
    shell = Shell(tmp_path)

    def run(script: str) -> subprocess.CompletedProcess[str]:
        near = {} if OWN.search(script) else {"TOAST_SOCKET": str(daemon.socket)}
        bash = ("bash", "-e", "-o", "pipefail", "-c", script)
        return shell(*bash, TOAST_MAX_TOKENS=most_tokens(script), **near)

    yield run
    assert not list(shell.state.rglob(".ephemeral-*")), "a session outlived its run"


def test_every_page_has_examples() -> None:
    for page in pages(1):
        blocks = literal_blocks(page.part("EXAMPLES"))
        assert blocks and all(block.startswith("$ ") for block in blocks), page.name
        assert any(f"{page.name} " in block for block in blocks), page.name


@pytest.mark.parametrize("script", EXAMPLES)
def test_example(script: str, shell) -> None:
    result = shell(script)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout or "cmp" in script.splitlines()[-1], "it shows nothing"
    check_answers(script, result.stdout)


def test_stage_in_python(shell) -> None:
    """The stage of toast-frames(5), in a running pipeline: "I" is token 43, and never comes."""
    begin = 'toast-tokenize "Who are you?" | toast-prefill | toast-decode --inline'
    end = "toast-sample -n 4 | toast-frames --json --kinds token"
    program = python_example("toast-frames.5")
    script = f"cat > stage.py <<'END'\n{program}END\n{begin} | python stage.py | {end}"
    result = shell(script)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.count('"k": "token"') == 4
    assert '"id": 43,' not in result.stdout
    assert '"id": 43,' in shell('toast-decode --json -n 1 "Who are you?"').stdout


def test_header_in_python(shell) -> None:
    """The reader of toast-session(5), on a session of twelve tokens."""
    program = python_example("toast-session.5")
    script = f"""cat > look.py <<'END'\n{program}END
toast-tokenize "Who are you?" | toast-prefill --session ./who > head.frames
cd who && python ../look.py"""
    result = shell(script)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("12 tokens, ['ArraysCache'")


def test_the_reader_of_a_file() -> None:
    """The reader of toast-file(5), on the embedded model."""
    program = python_example("toast-file.5")
    done = subprocess.run(
        [sys.executable, "-c", program, str(CRUMB)], capture_output=True, timeout=60, check=True
    )
    lines = done.stdout.decode().splitlines()
    assert lines[:2] == ["8 layers", "__file__.config.json U8 [1126] 1126"]
    assert "model.embed_tokens.weight BF16 [4096, 192] 1572864" in lines
    assert len(lines) == 1 + 4 + 136
