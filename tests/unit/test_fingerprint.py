"""The fingerprint of a checkpoint: every byte that matters counts."""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_model_files import checkpoint, files_with, safetensors

from toastkit.model.config import SAMPLE_BYTES, SAMPLES_PER_FILE, fingerprint
from toastkit.model.files import TEMPLATES_FOLDER, ModelFiles


def test_a_copy_has_the_same_fingerprint(tmp_path: Path) -> None:
    first = files_with(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    os.utime(tmp_path / "b" / "config.json", (0, 0))
    (tmp_path / "b" / "README.md").write_text("a copy")
    assert fingerprint(first) == fingerprint(ModelFiles(tmp_path / "b", "another name"))
    assert fingerprint(first) == fingerprint(first)


NAMES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
         f"{TEMPLATES_FOLDER}/rag.jinja", "model.safetensors")  # fmt: skip


@given(st.sampled_from(NAMES), st.integers(0, 1 << 20), st.integers(1, 255))
def test_any_changed_byte_changes_it(
    tmp_path_factory: pytest.TempPathFactory, name: str, at: int, difference: int
) -> None:
    extra = {"tokenizer_config.json": {"a": 1}, "chat_template.jinja": b"{{ x }}"}
    extra[f"{TEMPLATES_FOLDER}/rag.jinja"] = b"{{ y }}"
    files = files_with(tmp_path_factory.getbasetemp() / "fingerprint", **extra)
    before = fingerprint(files)
    path = files.path / name
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= difference
    path.write_bytes(data)
    assert fingerprint(files) != before
    path.write_bytes(data[:-1])
    assert fingerprint(files) != before
    path.unlink()
    assert name == "model.safetensors" or fingerprint(files) != before


def test_large_weights_are_sampled_all_over(tmp_path: Path) -> None:
    size = 4 * SAMPLES_PER_FILE * SAMPLE_BYTES
    files = files_with(tmp_path, **{"model.safetensors": bytes(8) + bytes(size)})
    before = fingerprint(files)
    seen = set()
    with open(tmp_path / "model.safetensors", "r+b") as file:
        for part in range(64):
            first = 8 + part * size // 64
            file.seek(first)
            file.write(b"\1" * (size // 64))
            file.flush()
            seen.add(fingerprint(files))
    assert len(seen) == 64 and before not in seen


def test_shards_count_by_content_and_order(tmp_path: Path) -> None:
    def of(*contents: bytes) -> str:
        path = checkpoint(tmp_path / str(len(list(tmp_path.iterdir()))))
        (path / "model.safetensors").unlink()
        for n, content in enumerate(contents):
            (path / f"model-{n}.safetensors").write_bytes(content)
        return fingerprint(ModelFiles(path, "m"))

    a, b = safetensors(100), safetensors(100, 3)
    assert len({of(a), of(b), of(a, b), of(b, a), of(a + b)}) == 5
    assert of(a, b) == of(a, b)
    for data in (b"", b"\xff" * 8, b"\xff" * 7, struct.pack("<Q", 2**63) + b"abc"):
        assert len(of(data)) == 32  # of any bytes
