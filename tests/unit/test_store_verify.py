"""Verification: a changed byte is found and named, whatever it belongs to."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest

from toastkit.errors import DataError, NoInputError, ToastError
from toastkit.model.files import ModelFiles
from toastkit.model.safetensors import read_header
from toastkit.model.toast_format import FILE_PREFIX
from toastkit.store.verify import Problem, has_checksums, verify
from toastkit.store.writer import Planned, TensorWriter

PLAN = [
    Planned("__file__.config.json", "U8", (2,), "files"),
    Planned("embed.weight", "F32", (3, 5), "outside"),
    Planned("layers.0.weight", "BF16", (9,), "layer.0"),
    Planned("layers.1.weight", "U32", (2, 2), "layer.1"),
]
METADATA = {"format": "mlx", "toastkit": "1", "layers": "2"}


def write(path: Path, plan: list[Planned], checksums: dict | None = None) -> Path:
    with TensorWriter(path, plan, METADATA, checksums=checksums) as writer:
        for item in plan:
            writer.write(item.name, b"{}" if "config" in item.name else bytes(item.nbytes))
        writer.finish()
    return path


@pytest.fixture
def toast_file(tmp_path: Path) -> Path:
    return write(tmp_path / "x.toast", PLAN)


def problems(path: Path, **options: bool) -> list[Problem]:
    return list(verify(ModelFiles(path, "test"), **options))


def flip(path: Path, offset: int, mask: int = 1) -> None:
    with open(path, "r+b", buffering=0) as file:
        (byte,) = os.pread(file.fileno(), 1, offset)
        os.pwrite(file.fileno(), bytes([byte ^ mask]), offset)


def test_what_is_whole(toast_file: Path) -> None:
    assert problems(toast_file) == [] == problems(toast_file, values=True)
    assert has_checksums(ModelFiles(toast_file, "test"))
    seen: list = []
    list(verify(ModelFiles(toast_file, "test"), progress=lambda *v: seen.append(v)))
    assert seen[-1][0] == seen[-1][1] > 0


def test_every_tensor_and_the_padding(toast_file: Path) -> None:
    header = read_header(toast_file, "test")
    for entry in header.entries.values():
        for offset in {entry.start, (entry.start + entry.stop) // 2, entry.stop - 1}:
            flip(toast_file, offset, 0x40)
            (problem,) = problems(toast_file)
            assert (problem.tensor, problem.file) == (entry.name, "x.toast")
            assert str(problem) == f"x.toast: {entry.name}: is not as it was written"
            flip(toast_file, offset, 0x40)
    assert problems(toast_file) == []


def test_every_byte_of_the_header(toast_file: Path) -> None:
    text = toast_file.read_bytes()[8:].split(b"  ")[0]
    for offset in range(8 + len(text)):
        flip(toast_file, offset, 1 << (offset % 7))
        try:
            found = problems(toast_file)
        except ToastError:
            found = ["refused"]
        assert found, f"byte {offset}"
        flip(toast_file, offset, 1 << (offset % 7))
    assert problems(toast_file) == []


def test_a_file_that_was_cut_off(toast_file: Path) -> None:
    data = toast_file.read_bytes()
    toast_file.write_bytes(data[:-3])
    (problem,) = problems(toast_file)
    assert "truncated" in problem.reason and problem.tensor is None
    assert str(problem).startswith("x.toast: truncated")


def test_a_file_that_goes_on(toast_file: Path) -> None:
    """No other reader of safetensors opens it."""
    with open(toast_file, "ab") as stream:
        stream.write(b"hello")
    (problem,) = problems(toast_file)
    assert problem.reason == "goes on after the last tensor" and problem.tensor is None


def split(tmp_path: Path) -> Path:
    """The same tensors as a split checkpoint."""
    folder = tmp_path / "split"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    inside = json.loads(read_header(write(tmp_path / "y", PLAN), "test").metadata["checksums"])[
        "files"
    ]
    write(folder / "non_layer.safetensors", PLAN[1:2], {"files": inside})
    write(folder / "layer_0000.safetensors", PLAN[2:3])
    write(folder / "layer_0001.safetensors", PLAN[3:])
    return folder


def test_a_split_checkpoint(tmp_path: Path) -> None:
    folder = split(tmp_path)
    assert problems(folder) == []
    (folder / "config.json").write_text("[]")
    assert [str(p) for p in problems(folder)] == ["config.json: is not as it was written"]
    (folder / "config.json").unlink()
    assert [str(p) for p in problems(folder)] == ["config.json: is missing"]
    (folder / "config.json").mkdir()
    (problem,) = problems(folder)
    assert "config.json is not a regular file" in str(problem)
    (folder / "config.json").rmdir()
    (folder / "config.json").write_text("{}")
    shared = folder / "non_layer.safetensors"
    whole = shared.read_bytes()
    for name in ("a\0b", "../x", "a/../../x", "/x"):
        shared.unlink()
        write(shared, PLAN[1:2], {"files": {FILE_PREFIX + name: "0" * 16}})
        assert "is not the name of a file" in str(problems(folder)[0])
    shared.write_bytes(whole)
    layer = folder / "layer_0001.safetensors"
    flip(layer, layer.stat().st_size - 1)
    assert [(p.file, p.tensor) for p in problems(folder)] == [(layer.name, "layers.1.weight")]
    layer.write_bytes((folder / "layer_0000.safetensors").read_bytes())
    with pytest.raises(DataError, match="layers.0.weight is in layer_0000.* and in layer_0001"):
        problems(folder)
    layer.unlink()
    with pytest.raises(NoInputError, match="layer_0001.safetensors is missing"):
        problems(folder)


def plain(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> Path:
    """A directory with one safetensors file as others write it."""
    path.mkdir()
    fields, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        offsets = [len(data), len(data) + len(content)]
        fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += content
    text = json.dumps(fields).encode()
    file = struct.pack("<Q", len(text)) + text + data
    (path / "model.safetensors").write_bytes(file)
    (path / "config.json").write_text("{}")
    return path


def test_a_checkpoint_without_checksums(tmp_path: Path) -> None:
    folder = plain(tmp_path / "x", {"a": ("F32", [2], struct.pack("<2f", 1, 2))})
    assert not has_checksums(ModelFiles(folder, "test"))
    assert problems(folder) == []
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    (problem,) = problems(folder)
    assert "truncated" in problem.reason


def test_tensors_that_are_not_where_the_index_says(tmp_path: Path) -> None:
    folder = plain(tmp_path / "x", {"a": ("F32", [2], struct.pack("<2f", 1, 2))})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    assert problems(folder) == []
    index.write_text(json.dumps({"weight_map": dict.fromkeys("ab", "model.safetensors")}))
    (problem,) = problems(folder)
    assert str(problem) == f"model.safetensors: b: is not there, though {index.name} says so"


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("dtype", "good", "infinite", "nan"),
    [
        ("F16", b"\xff\x7b", b"\x00\xfc", b"\x01\x7c"),
        ("BF16", b"\x7f\x7f", b"\x80\xff", b"\x81\x7f"),
        ("F32", struct.pack("<f", 3e38), struct.pack("<f", -INF), struct.pack("<f", NAN)),
        ("F64", struct.pack("<d", 1e308), struct.pack("<d", INF), struct.pack("<d", NAN)),
        ("F8_E5M2", b"\x7b", b"\xfc", b"\x7d"),
        ("F8_E4M3", b"\x7e", None, b"\xff"),
        ("F8_E8M0", b"\xfe", None, b"\xff"),
    ],
)
def test_values_that_are_not_finite(
    tmp_path: Path, dtype: str, good: bytes, infinite: bytes | None, nan: bytes
) -> None:
    count = (9 << 20) // len(good)  # more than is read at a time
    values = good * (count - 3) + (infinite or good) + nan + good
    tensors = {"good": (dtype, [3], good * 3), "bad": (dtype, [count], values)}
    folder = plain(tmp_path / "x", tensors)
    assert problems(folder) == []
    (problem,) = problems(folder, values=True)
    first, infinities = (count - 3, 1) if infinite else (count - 2, 0)
    assert problem.tensor == "bad"
    assert problem.reason == f"1 NaN and {infinities} infinite values, the first at {first}"
