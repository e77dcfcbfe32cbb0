"""The header of a safetensors file: what is right is read, what is wrong is refused and named."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toastkit.errors import DataError, NoInputError
from toastkit.model import safetensors
from toastkit.model.files import ModelFiles
from toastkit.model.safetensors import ITEM_BYTES, Header, read_header

GOOD = {
    "b": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [4, 16]},
    "a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
    "empty": {"dtype": "U8", "shape": [0, 7], "data_offsets": [16, 16]},
    "__metadata__": {"format": "pt", "odd": 3},
}


def put(path: Path, header: object, data: bytes = bytes(16), length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def read(path: Path) -> Header:
    return read_header(path, "m")


def test_a_whole_file(tmp_path: Path) -> None:
    path = put(tmp_path / "x.safetensors", GOOD)
    header = read(path)
    assert list(header.entries) == ["a", "b", "empty"]  # in the order of the file
    b = header.entries["b"]
    assert (b.shape, b.nbytes, b.start) == ((2, 3), 12, header.data_start + 4)
    assert header.metadata == {"format": "pt"} and header.size == path.stat().st_size


def changed(name: str, **fields) -> dict:
    return {**GOOD, name: {**GOOD[name], **fields}}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (changed("b", data_offsets=[4, 15]), "'b' has offsets that do not fit"),
        (changed("b", data_offsets=[8, 20]), "truncated: tensor 'b' ends at byte"),
        (changed("b", data_offsets=[2, 14]), "'a' and 'b' overlap"),
        (changed("b", data_offsets=[-4, 8]), "no usable shape and offsets"),
        (changed("b", data_offsets=[2**62, 2**62 + 12]), "truncated"),
        (changed("b", shape=[2**40, 2**40]), "do not fit"),
        (changed("b", shape=[2.0, 3]), "no usable shape"),
        (changed("b", shape=[True, 6]), "no usable shape"),
        (changed("b", shape=[1] * 15 + [2, 3]), "no usable shape"),
        (changed("b", shape=[2**62] * 300_000), "no usable shape"),  # the product has 18 M bits
        (changed("b", shape=[[]] * (1 << 21)), "it has more than 3145728 values"),
        ({"x" * 1025: GOOD["b"]}, "has 1025 characters"),
        (changed("b", dtype="Q4"), "dtype 'Q4'"),
        (changed("b", dtype=["F32"]), "dtype"),
        ({**GOOD, "b": 7}, "not described by a map"),
        ({**GOOD, "__metadata__": []}, None),
        ([], "not a map"),
        (b"{", "not JSON"),
        (b"\xff\xff", "not UTF-8"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b"[" * 100_000, None),
    ],
)
def test_a_broken_header(tmp_path: Path, header: object, message: str | None) -> None:
    path = put(tmp_path / "x.safetensors", header)
    if header == {**GOOD, "__metadata__": []}:
        assert read(path).metadata == {}
        return
    with pytest.raises(DataError) as caught:
        read(path)
    assert "x.safetensors" in caught.value.message and "\n" not in caught.value.message
    assert message is None or message in caught.value.message


def test_as_many_dimensions_as_there_may_be(tmp_path: Path) -> None:
    header = read(put(tmp_path / "x", changed("b", shape=[1] * 14 + [2, 3])))
    assert math.prod(header.entries["b"].shape) == 6


def test_too_many_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one file, and in all of a checkpoint together."""
    path = put(tmp_path / "model-1.safetensors", GOOD)
    monkeypatch.setattr(safetensors, "MAX_TENSORS", 3)
    assert len(ModelFiles(tmp_path, "m").headers) == 1
    put(tmp_path / "model-2.safetensors", {"c": GOOD["a"]})
    with pytest.raises(DataError, match="^m: 4 tensors are more than 3"):
        _ = ModelFiles(tmp_path, "m").headers
    monkeypatch.setattr(safetensors, "MAX_TENSORS", 2)
    with pytest.raises(DataError, match=r"model-1\.safetensors: 3 tensors are more than 2"):
        read(path)
    monkeypatch.setattr(safetensors, "MAX_TENSORS", 4)
    monkeypatch.setattr(safetensors, "MAX_HEADER_BYTES", path.stat().st_size)
    with pytest.raises(DataError, match="bytes of headers are more than"):
        _ = ModelFiles(tmp_path, "m").headers


@pytest.mark.parametrize("length", [2**60, 2**64 - 1, 99_000_000, 1000])
def test_a_header_that_claims_too_much(tmp_path: Path, length: int) -> None:
    with pytest.raises(DataError, match="claims"):
        read(put(tmp_path / "x.safetensors", GOOD, length=length))


@pytest.mark.parametrize("size", [0, 3, 8, 100])
def test_a_truncated_file(tmp_path: Path, size: int) -> None:
    path = put(tmp_path / "x.safetensors", GOOD)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DataError):
        read(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(NoInputError, match=r"no such file: x\.safetensors"):
        read(tmp_path / "x.safetensors")


@given(st.data())
def test_any_damage_is_told_or_harmless(tmp_path_factory: pytest.TempPathFactory, data) -> None:
    """A flipped byte anywhere: a clear error, or a header whose tensors lie within the file."""
    path = put(tmp_path_factory.mktemp("damage") / "x.safetensors", GOOD)
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        header = read(path)
    except DataError as error:
        assert "\n" not in error.message
        return
    for entry in header.entries.values():
        assert header.data_start <= entry.start <= entry.stop <= header.size
        assert entry.nbytes == math.prod(entry.shape) * ITEM_BYTES[entry.dtype]


# ------------------------------------------------------------------------- which files there are


def shards(path: Path, places: object, *names: str) -> ModelFiles:
    path.mkdir()
    for name in names:
        put(path / name, {name: {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]}})
    if places is not None:
        index = json.dumps({"weight_map": places})
        (path / "model.safetensors.index.json").write_text(index)
    return ModelFiles(path, "m")


def test_an_index_says_which_files_count(tmp_path: Path) -> None:
    files = shards(
        tmp_path / "m", {"a": "one.safetensors", "b": "two.safetensors"},
        "one.safetensors", "two.safetensors", "model.safetensors",
    )  # fmt: skip
    assert [p.name for p in files.weight_files()] == ["one.safetensors", "two.safetensors"]
    assert [h.path.name for h in files.headers] == ["one.safetensors", "two.safetensors"]


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "", "..", "a/b", "a\0b"])
def test_an_index_that_points_outside(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="points outside"):
        shards(tmp_path / "m", {"a": name}).weight_files()


@pytest.mark.parametrize("places", [{}, [], 3, "x"])
def test_an_index_without_places(tmp_path: Path, places: object) -> None:
    with pytest.raises(DataError, match="no weight_map"):
        shards(tmp_path / "m", places, "model.safetensors").weight_files()


def test_a_missing_shard(tmp_path: Path) -> None:
    files = shards(
        tmp_path / "m", {"a": "one.safetensors", "b": "two.safetensors"}, "one.safetensors"
    )
    with pytest.raises(NoInputError, match=r"two\.safetensors is missing"):
        files.weight_files()


def test_pickles_are_not_weights(tmp_path: Path) -> None:
    files = shards(tmp_path / "m", None)
    (tmp_path / "m" / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(NoInputError, match="pickles, which are never opened"):
        files.weight_files()


def test_a_split_checkpoint_needs_every_layer(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.mkdir()
    about = {"__metadata__": {"toastkit": "1", "layers": "3"}}
    for name in ("non_layer", "layer_0000", "layer_0002"):
        put(path / f"{name}.safetensors", about, b"")
    with pytest.raises(NoInputError, match=r"layer_0001\.safetensors is missing"):
        _ = ModelFiles(path, "m").headers
    put(path / "layer_0001.safetensors", about, b"")
    files = ModelFiles(path, "m")
    assert len(files.headers) == 4 and files.is_baked


def test_a_format_of_the_future(tmp_path: Path) -> None:
    path = put(tmp_path / "x.toast", {"__metadata__": {"toastkit": "3"}}, b"")
    with pytest.raises(DataError, match="format '3'"):
        _ = ModelFiles(path, "m").headers
