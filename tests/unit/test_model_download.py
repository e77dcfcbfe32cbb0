"""What has been downloaded is held against what the hub says of it; a download that stands still is
noticed."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest

from tests.unit.test_safetensors import GOOD, put
from toastkit.errors import DataError, IOFailure
from toastkit.model.download import _Watch, check_file


def snapshot(path: Path, name: str, tag: str, data: bytes) -> Path:
    """A file of a snapshot as huggingface_hub lays it out: a link to a blob."""
    blob = path / "blobs" / tag
    blob.parent.mkdir()
    blob.write_bytes(data)
    link = path / name
    link.symlink_to(blob.relative_to(path))
    return link


@pytest.mark.parametrize("hash_of", [
    lambda data: hashlib.sha256(data).hexdigest(),
    lambda data: hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(),
    lambda data: hashlib.sha1(data).hexdigest(),
], ids=["large", "git", "mirror"])  # fmt: skip
def test_a_file_has_to_be_what_its_name_promises(tmp_path: Path, hash_of) -> None:
    data = bytes(range(256)) * 9000
    seen: list[int] = []
    file = snapshot(tmp_path, "tokenizer.json", hash_of(data), data)
    check_file(file, "m", seen.append)
    assert sum(seen) == len(data)
    file.resolve().write_bytes(data[:-1] + b"x")
    with pytest.raises(IOFailure, match=r"tokenizer\.json came damaged") as caught:
        check_file(file, "m")
    assert "run it again" in (caught.value.hint or "")
    assert list(tmp_path.iterdir()) == [tmp_path / "blobs"]
    assert list((tmp_path / "blobs").iterdir()) == []


def test_without_a_hash_the_header_counts(tmp_path: Path) -> None:
    whole = put(tmp_path / "whole", GOOD).read_bytes()
    check_file(snapshot(tmp_path, "a.safetensors", "W-1", whole), "m")
    (tmp_path / "b.safetensors").write_bytes(whole[:-1])
    with pytest.raises(DataError, match="truncated"):
        check_file(tmp_path / "b.safetensors", "m")
    assert not (tmp_path / "b.safetensors").exists()


def test_a_download_that_goes_round_in_a_circle_stands_still() -> None:
    gave_up = threading.Event()
    watch = _Watch(0.2, gave_up.set)
    with watch:
        while not gave_up.wait(0.01):
            watch.add(100)
            watch.add(-100)
    patient = threading.Event()
    watch = _Watch(30, patient.set)
    with watch:
        watch.add(1)
    assert not patient.is_set()
