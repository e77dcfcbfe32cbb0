"""What is said of files that are not what they were, and of disks that fail."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from tests.model.checkpoints import open_store, same
from tests.model.published import write_published
from toastkit.errors import DataError, IOFailure, NoInputError


def files_of(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def test_files_that_are_cut_short(tmp_path: Path, mlx_started) -> None:
    """What is stored, what is stacked of parts, and what is computed."""
    for name in ("llama", "qwen3_moe", "qwen3_next"):
        path = write_published(tmp_path / name, name)
        with open_store(path) as store:
            for file in files_of(path):
                os.truncate(file, 64)
            with pytest.raises(DataError, match="is shorter than it was"):
                store.layer(1)
            with pytest.raises(DataError, match="have changed since"):
                store.check_files()


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("replaced", [False, True])
def test_files_that_go_or_are_replaced(model: Path, opened: bool, replaced: bool) -> None:
    """What is open stays readable; nothing is ever read from the new ones."""
    with open_store(model) as store:
        store.check_files()
        if opened:
            before = store.layer(1)
        for file in files_of(model):
            size = file.stat().st_size
            file.rename(file.with_suffix(".gone"))
            if replaced:
                file.write_bytes(bytes(size))
        error = (DataError, "have changed since the model was loaded")
        kind, words = error if replaced else (NoInputError, "no such file")
        with pytest.raises(kind, match=words):
            store.check_files()
        if opened:
            assert all(same(array, before[name]) for name, array in store.layer(1).items())
        else:
            with pytest.raises(kind, match=words):
                store.layer(1)


def test_a_disk_that_fails(model: Path, monkeypatch) -> None:
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with open_store(model) as store:
        plain = os.preadv
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(IOFailure, match="cannot read .*: input/output error"):
            store.layer(1)
        while store.reader.held_bytes:  # others have begun, and fail too
            time.sleep(0.001)
        monkeypatch.setattr(os, "preadv", plain)
        assert store.layer(1) and store.reader.held_bytes == 0  # it is tried again
        halves = []

        def half(fd, buffers, offset):
            halves.append(len(buffers[0]))
            return plain(fd, [buffers[0][: -(-len(buffers[0]) // 2)]], offset)

        expected = store.layer(0)
        monkeypatch.setattr(os, "preadv", half)  # as a system call may
        assert all(same(array, expected[name]) for name, array in store.layer(0).items())
        assert len(halves) > 2 * len(expected)
