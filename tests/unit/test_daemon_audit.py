"""The audit log: whole lines, private files, rotation, and a disk that is full."""

from __future__ import annotations

import json
import os
import resource
import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path

import pytest

from toastkit.daemon import audit as module
from toastkit.daemon.audit import MAX_FILES, Audit
from toastkit.errors import CannotCreateError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "audit.jsonl"


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def nothing(line: str) -> None:
    raise AssertionError(line)


def test_a_record(path: Path) -> None:
    audit = Audit(str(path), False, nothing)
    audit.write({"op": "generate", "model": "ümlaut", "odd": Path("x")}, {"text": "secret"})
    audit.close()
    audit.close()
    (record,) = records(path)
    when = datetime.fromisoformat(record.pop("time").replace("Z", "+00:00"))
    assert abs((datetime.now(timezone.utc) - when).total_seconds()) < 60
    assert record == {"op": "generate", "model": "ümlaut", "odd": "x"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.chmod(0o644)
    audit = Audit(str(path), True, nothing)  # texts are kept
    audit.write({"prompt": 3}, {"messages": [{"role": "user", "content": "hi"}], "text": "ho"})
    audit.close()
    assert records(path)[1]["text"] == "ho" and records(path)[1]["prompt"] == 3
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_rotation(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 1000)
    audit = Audit(str(path), False, nothing)
    for n in range(100):
        audit.write({"n": n, "fill": "x" * 150})
    audit.close()
    names = [path, *(path.with_name(f"{path.name}.{n}") for n in range(1, MAX_FILES))]
    assert sorted(path.parent.iterdir()) == sorted(names)
    assert all(0 < file.stat().st_size <= 1000 for file in names)
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in names)
    kept = [record["n"] for file in reversed(names) for record in records(file)]
    assert kept == list(range(100 - len(kept), 100)) and len(kept) > 15
    monkeypatch.setattr(module, "MAX_BYTES", 100)
    audit = Audit(str(path), False, nothing)
    for n in range(3):  # a record over the limit has a file of its own
        audit.write({"n": n, "fill": "x" * 200})
    audit.close()
    assert [records(file)[0]["n"] for file in names[:3]] == [2, 1, 0]


def test_lines_of_several_threads_stay_whole(path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 200_000)
    audit = Audit(str(path), False, nothing)

    def write(who: int) -> None:
        for n in range(100):
            audit.write({"who": who, "n": n, "fill": "x" * (n * 7 % 300)})

    with ThreadPoolExecutor(6) as writers:
        list(writers.map(write, range(6)))
    audit.close()
    found = [(r["who"], r["n"]) for file in path.parent.iterdir() for r in records(file)]
    assert sorted(found) == [(who, n) for who in range(6) for n in range(100)]


def test_a_full_disk_is_told_once_and_leaves_whole_lines(path: Path) -> None:
    said: list[str] = []
    audit = Audit(str(path), False, said.append)
    audit.write({"n": 0})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 60, hard))
    try:
        for n in range(1, 4):
            audit.write({"n": n, "fill": "x" * 100})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    audit.write({"n": 4})
    audit.close()
    assert [r["n"] for r in records(path)] == [0, 4]
    assert len(said) == 1 and said[0].startswith(f"cannot write the audit log {path}: ")


def test_a_file_that_was_moved_away_is_not_written_to(path: Path) -> None:
    """And a directory that vanishes fails no request."""
    said: list[str] = []
    audit = Audit(str(path), False, said.append)
    audit.write({"n": 1})
    path.rename(path.with_name("old"))
    audit.write({"n": 2})
    assert [r["n"] for r in records(path.with_name("old"))] == [1]
    path.with_name("old").unlink()
    path.unlink()
    path.parent.rmdir()
    assert said == []
    audit.write({"n": 3})
    audit.write({"n": 4})
    assert len(said) == 1
    audit.reopen()
    audit.write({"n": 4})
    assert len(said) == 2  # as nobody has seen to it
    path.parent.mkdir()
    audit.reopen()
    assert path.exists()
    audit.write({"n": 5})
    audit.close()
    assert [r["n"] for r in records(path)] == [5]


def test_what_cannot_be_a_log(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "fifo", Path(os.devnull), tmp_path / "file" / "audit"):
        with pytest.raises(CannotCreateError, match="cannot write"):
            Audit(str(path), False, nothing)
