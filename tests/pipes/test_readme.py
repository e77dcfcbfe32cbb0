"""Every command block of the README works as pasted, in order, in one directory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from tests.conftest import ROOT, SCRIPTS


def test_commands_work_as_pasted(tmp_path: Path, state_home: Path):
    readme = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", readme, re.S)
    assert len(blocks) == 13
    shutil.copy(ROOT / "README.md", tmp_path)
    for block in blocks:
        done = subprocess.run(
            ["bash", "-c", block], cwd=tmp_path, capture_output=True, timeout=60,
            stdin=subprocess.DEVNULL, env={**os.environ, "PATH": f"{SCRIPTS}:{os.environ['PATH']}"},
        )  # fmt: skip
        assert done.returncode == 0 and done.stdout.strip(), block
        if "--fork" in block:
            cached, total = done.stderr.split()[-7].split(b"/")
            assert int(total) > int(cached) > 200
        else:
            assert done.stderr == b"", block
