"""Every command of the README works as pasted, in order, in one directory."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

from tests.conftest import ROOT
from tests.pipes.pipelines import check_answers, most_tokens
from tests.pipes.test_examples import Shell


def test_it_is_a_front_page_and_names_what_there_is() -> None:
    assert (ROOT / "README.md").read_text().count("\n") < 150
    for page in (ROOT / "README.md", ROOT / "docs/benchmarks.md"):
        text = page.read_text()
        links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
        scripts = re.findall(r"python (benchmarks/\S+\.py)", text)
        missing = [x for x in links if not (page.parent / x).exists()]
        assert not missing + [x for x in scripts if not (ROOT / x).exists()]
        for script, rest in re.findall(r"`python (benchmarks/\S+\.py)([^`]*)`", text):
            source = (ROOT / script).read_text()
            assert all(f'"{flag}"' in source for flag in re.findall(r"--[a-z-]+", rest)), script


def test_commands_work_as_pasted(tmp_path: Path, private_home: Path, measured: None):
    readme = (ROOT / "README.md").read_text()
    scripts = [
        script for block in re.findall(r"```sh\n(.*?)```", readme, re.S) for script in of(block)
    ]
    assert len(scripts) == 29
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    asked, shell = 0, Shell(tmp_path)
    folder = tempfile.mkdtemp(prefix="t")  # short, as a socket's path has to be
    shell.environment["TOAST_SOCKET"] = os.path.join(folder, "s")
    try:
        for script in scripts:
            done = shell("bash", "-c", script, TOAST_MAX_TOKENS=most_tokens(script))
            assert bool(done.stdout.strip()) != script.startswith("toasted --daemon"), script
            check_stderr(script, done.stderr)
            if "--json" not in script:  # there an answer is in pieces
                asked += check_answers(script, done.stdout)
        assert asked >= 4
    finally:
        shell("toasted", "stop", code=69)  # nothing is left to stop, unless a command failed
        shutil.rmtree(folder)


def of(block: str) -> list[str]:
    """The scripts of a block: its lines, or all of them where one sets a variable for the next."""
    return [block] if re.search(r"^\w+=", block, re.M) else block.splitlines()


def check_stderr(script: str, text: str) -> None:
    """Nothing, but where it was asked for."""
    if "--fork" in script:
        cached, total = text.split()[-7].split("/")
        assert int(total) > int(cached) > 200
    elif "--usage" in script:
        cached, total = re.search(r"(\d+)/(\d+) prompt tokens cached", text).groups()
        assert int(total) > int(cached) > 20
    else:
        assert text == "", script
