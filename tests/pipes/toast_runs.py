"""What the tests of toast as a client look at: what was asked, and what is kept."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.unit.fake_daemon import FakeDaemon


def kept(home: Path, name: str = ".unnamed") -> list[str]:
    """What the messages of a conversation say, none where there is none."""
    path = home / f"{name}.jsonl"
    if not path.exists():
        return []
    return [json.loads(line)["content"] for line in path.read_text("utf-8").splitlines()]


def asked(daemon: FakeDaemon) -> list[list[str]]:
    """What the messages of each request said."""
    return [[message["content"] for message in r["messages"]] for r in daemon.requests]


def without_out(done: subprocess.CompletedProcess) -> subprocess.CompletedProcess:
    """lines_of takes what is on stdout for frames."""
    return subprocess.CompletedProcess(done.args, done.returncode, b"", done.stderr)
