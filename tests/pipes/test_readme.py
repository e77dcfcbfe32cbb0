"""Every command of the README works as pasted, in order, in one directory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.conftest import ROOT, SCRIPTS
from tests.forked import SERVER
from tests.pipes.pipelines import check_answers, most_tokens


def test_it_is_a_front_page_and_names_what_there_is() -> None:
    assert (ROOT / "README.md").read_text().count("\n") < 150
    for page in (ROOT / "README.md", ROOT / "docs/benchmarks.md"):
        text = page.read_text()
        links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
        scripts = re.findall(r"python (benchmarks/\S+\.py)", text)
        missing = [x for x in links if not (page.parent / x).exists()]
        assert not missing + [x for x in scripts if not (ROOT / x).exists()]


def test_commands_work_as_pasted(tmp_path: Path, state_home: Path, measured: None):
    readme = (ROOT / "README.md").read_text()
    scripts = [
        script for block in re.findall(r"```sh\n(.*?)```", readme, re.S) for script in of(block)
    ]
    assert len(scripts) == 29
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    asked = 0
    folder = tempfile.mkdtemp(prefix="t")  # short, as a socket's path has to be
    environment = {
        **os.environ,
        "PATH": f"{SERVER.stubs()}:{SCRIPTS}:{os.environ['PATH']}",
        "TOAST_SOCKET": os.path.join(folder, "s"),
    }
    try:
        for script in scripts:
            done = subprocess.run(
                ["bash", "-c", script], cwd=tmp_path, capture_output=True, timeout=60,
                stdin=subprocess.DEVNULL,
                env={**environment, "TOAST_MAX_TOKENS": most_tokens(script)},
            )  # fmt: skip
            assert done.returncode == 0, (script, done.stderr)
            assert bool(done.stdout.strip()) != script.startswith("toasted --daemon"), script
            check_stderr(script, done.stderr)
            if "--json" not in script:  # there an answer is in pieces
                asked += check_answers(script, done.stdout.decode())
        assert asked >= 4
    finally:
        subprocess.run([str(SCRIPTS / "toasted"), "stop"], env=environment, capture_output=True)
        shutil.rmtree(folder)


def of(block: str) -> list[str]:
    """The scripts of a block: its lines, or all of them where one sets a variable for the next."""
    return [block] if re.search(r"^\w+=", block, re.M) else block.splitlines()


def check_stderr(script: str, text: bytes) -> None:
    """Nothing, but where it was asked for."""
    if "--fork" in script:
        cached, total = text.split()[-7].split(b"/")
        assert int(total) > int(cached) > 200
    elif "--usage" in script:
        cached, total = re.search(rb"(\d+)/(\d+) prompt tokens cached", text).groups()
        assert int(total) > int(cached) > 20
    else:
        assert text == b"", script
