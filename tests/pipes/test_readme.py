"""Every command block of the README works as pasted, in order, in one directory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.conftest import ROOT, SCRIPTS
from tests.forked import SERVER
from tests.pipes.pipelines import check_answers


def test_commands_work_as_pasted(tmp_path: Path, state_home: Path):
    readme = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", readme, re.S)
    assert len(blocks) == 22
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    asked = 0
    folder = tempfile.mkdtemp(prefix="t")  # short, as a socket's path has to be
    environment = {
        **os.environ,
        "PATH": f"{SERVER.stubs()}:{SCRIPTS}:{os.environ['PATH']}",
        "TOAST_SOCKET": os.path.join(folder, "s"),
        "TOAST_MAX_TOKENS": "24",  # long answers show no more
    }
    try:
        for block in blocks:
            done = subprocess.run(
                ["bash", "-c", block], cwd=tmp_path, capture_output=True, timeout=60,
                stdin=subprocess.DEVNULL, env=environment,
            )  # fmt: skip
            assert done.returncode == 0, (block, done.stderr)
            assert bool(done.stdout.strip()) != block.startswith("toasted --daemon"), block
            check_stderr(block, done.stderr)
            if "--json" not in block:  # there an answer is in pieces
                asked += check_answers(block, done.stdout.decode())
        assert asked >= 4
    finally:
        subprocess.run([str(SCRIPTS / "toasted"), "stop"], env=environment, capture_output=True)
        shutil.rmtree(folder)


def check_stderr(block: str, text: bytes) -> None:
    """Nothing, but where it was asked for."""
    if "--fork" in block:
        cached, total = text.split()[-7].split(b"/")
        assert int(total) > int(cached) > 200
    elif "--usage" in block:
        cached, total = re.search(rb"(\d+)/(\d+) prompt tokens cached", text).groups()
        assert int(total) > int(cached) > 30
    else:
        assert text == b"", block
