"""Other processes, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def start(code: str, *arguments: Path) -> subprocess.Popen:
    """Another Python process."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
