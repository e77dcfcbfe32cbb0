"""What a header says of experts that lie one after another: right and used, or refused."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toastkit.errors import DataError
from toastkit.model.files import ModelFiles
from toastkit.model.safetensors import ITEM_BYTES, Header
from toastkit.model.toast_format import ITEM_ALIGNMENT, Part, describe_experts, offsets_of
from toastkit.store.verify import verify
from toastkit.store.writer import Planned, TensorWriter

NAME, EXPERTS = "__experts__.model.layers.0.mlp.switch_mlp", 3
PARTS = (Part("up.weight", "BF16", (5, 3)), Part("up.bias", "F32", (5,)), Part("s", "U8", (1, 64)))
ROW = 64 + 64 + 64
PATH = "model.layers.0.mlp.switch_mlp"


def put(path: Path, experts: object, name: str = NAME, **more: object) -> Path:
    """A file of one tensor of experts and one beside it. experts: its description."""
    text = experts if isinstance(experts, str) else json.dumps(experts)
    fields = {
        name: {"dtype": "U8", "shape": [EXPERTS, ROW], "data_offsets": [0, EXPERTS * ROW]},
        "model.norm.weight": {
            "dtype": "U8", "shape": [4], "data_offsets": [EXPERTS * ROW, EXPERTS * ROW + 4],
        },
        "__metadata__": {"toastkit": "2", "layers": "1", "experts": text},
    }  # fmt: skip
    fields.update(more)
    header = json.dumps(fields).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(EXPERTS * ROW + 4))
    return path


def read(path: Path) -> Header:
    (header,) = ModelFiles(path, "m").headers
    return header


def good() -> dict[str, list]:
    return json.loads(describe_experts({NAME: PARTS}))


def test_parameters_take_the_place_of_what_holds_them(tmp_path: Path) -> None:
    header = read(put(tmp_path / "x.toast", good()))
    names = [f"{PATH}.{part.name}" for part in PARTS]
    assert list(header.entries) == [*names, "model.norm.weight"]
    assert [entry.name for entry in header.stored] == [NAME, "model.norm.weight"]
    weight, bias, _ = (header.entries[name] for name in names)
    assert (weight.dtype, weight.shape) == ("BF16", (3, 5, 3))
    assert (weight.nbytes, weight.stride) == (90, ROW)
    assert bias.start == weight.start + 64 and bias.stop == bias.start + 2 * ROW + 20
    assert header.entries["model.norm.weight"].stride == 0


def without(number: int) -> dict[str, list]:
    found = good()
    del found[NAME][number]
    return found


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ("{", "its description of experts is not usable: it is not JSON"),
        ("[" * 100_000, "its description of experts is not usable"),
        ("[]", "its description of experts is not a map"),
        ({}, "has no usable description"),
        ({**good(), "more": []}, "tensor 'more' is described and not there"),
        ({**good(), "model.norm.weight": [["x", "U8", [4]]]}, "described, and holds no experts"),
        ({NAME: []}, "has no usable description"),
        ({NAME: good()[NAME] + [["y", "U8", [1]]]}, "is not what its description says"),
        *((without(number), "is not what its description says") for number in range(3)),
        *(({NAME: [["up.weight", *rest], *good()[NAME][1:]]}, "has no usable description")
          for rest in (["BF17", [5, 3]], [["BF16"], [5, 3]], ["F64", [5, 1]], ["BF16", [5, 0]],
                       ["BF16", [-5, -3]], ["BF16", [5, True]], ["BF16", [1] * 16], ["BF16"])),
        *(({NAME: [part, *good()[NAME][1:]]}, message) for part, message in (
            (["up.weight", "BF16", [5, 30]], "is not what its description says"),
            (["up.weight", "BF16", [2**62, 2**62]], "is not what its description says"),
            ([7, "BF16", [5, 3]], "has no usable description"),
            (["up.bias", "BF16", [5, 3]], "is there twice"),
            (["x" * 1024, "BF16", [5, 3]], "has 10.. characters"),
        )),
    ],
)  # fmt: skip
def test_broken_descriptions_are_refused(tmp_path: Path, experts: object, message: str) -> None:
    path = put(tmp_path / "x.toast", experts)
    with pytest.raises(DataError, match=rf"m: cannot read x\.toast: .*{message}") as caught:
        read(path)
    assert "\n" not in caught.value.message and len(caught.value.message) < 300
    with pytest.raises(DataError, match=message):
        list(verify(ModelFiles(path, "m")))


def test_what_holds_them_is_bytes_by_expert(tmp_path: Path) -> None:
    for shape, dtype in (([ROW, EXPERTS], "U8"), ([EXPERTS * ROW], "U8"), ([EXPERTS, ROW], "I8")):
        holder = {"dtype": dtype, "shape": shape, "data_offsets": [0, EXPERTS * ROW]}
        with pytest.raises(DataError, match="is not what its description says"):
            read(put(tmp_path / "x.toast", good(), **{NAME: holder}))


def test_no_file_lies_expert_by_expert(tmp_path: Path) -> None:
    """Nor is there any in a file of the first version, or one that somebody else wrote, whatever
    its metadata is called."""
    for name in ("__experts__.__file__", "__experts__.__pad__.1", "__experts__.__experts__.x"):
        with pytest.raises(DataError, match="cannot lie expert by expert"):
            read(put(tmp_path / "x.toast", {name: good()[NAME]}, name))
    for metadata in ({"toastkit": "1", "experts": "8"}, {"experts": "8"}):
        header = read(put(tmp_path / "x.toast", good(), __metadata__=metadata))
        assert NAME in header.entries and header.entries[NAME].inside is None


SIDES = st.one_of(st.integers(-1, 40), st.sampled_from([2**31, 2**63, True, 1.5, None, "4"]))
NAMES = st.sampled_from(["a.weight", "b.weight", "b.bias", "", "x" * 1100])
DTYPES = st.sampled_from([*ITEM_BYTES, "F33", None, 3])
NEAR = st.tuples(NAMES, st.sampled_from(["U8", "BF16", "F32"]), st.lists(st.integers(1, 9)))
FAR = st.one_of(st.tuples(NAMES, DTYPES, st.lists(SIDES, max_size=18)), st.integers(), st.none())


def row_of(parts: list) -> int:
    """Bytes of an expert where that can be told."""
    try:
        return offsets_of(Part(*part) for part in parts)[-1]
    except (TypeError, KeyError, OverflowError):
        return 128


@given(
    parts=st.lists(st.one_of(NEAR, NEAR, NEAR, FAR), max_size=4),
    experts=st.integers(0, 3), more=st.sampled_from([0, 0, 0, 1, -64, 64]),
)  # fmt: skip
def test_any_description_is_right_or_refused(
    tmp_path_factory: pytest.TempPathFactory, parts: list, experts: int, more: int
) -> None:
    row = max(0, min(row_of(parts) + more, 1 << 16))
    path = tmp_path_factory.mktemp("any") / "x.toast"
    fields = {
        NAME: {"dtype": "U8", "shape": [experts, row], "data_offsets": [0, experts * row]},
        "__metadata__": {"toastkit": "2", "experts": json.dumps({NAME: parts})},
    }
    text = json.dumps(fields).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(experts * row))
    try:
        header = read(path)
    except DataError as error:
        assert "\n" not in error.message
        return
    end = 0
    for entry, (name, dtype, shape) in zip(header.entries.values(), parts, strict=True):
        assert (entry.name, entry.dtype) == (f"{PATH}.{name}", dtype)
        assert entry.shape == (experts, *shape) and entry.stride == row and experts
        size = math.prod(shape) * ITEM_BYTES[dtype]
        start = entry.start - header.data_start
        assert start % ITEM_ALIGNMENT == 0 and 0 <= start - end < ITEM_ALIGNMENT
        end = start + size
        assert entry.stop - header.data_start == (experts - 1) * row + end
    assert 0 <= row - end < ITEM_ALIGNMENT


def written(path: Path, experts: bytes) -> Path:
    """A file as baking writes it, with these bytes of experts."""
    plan = [Planned(NAME, "U8", (EXPERTS, ROW), "layer.0", parts=PARTS)]
    metadata = {"toastkit": "2", "layers": "1", "experts": describe_experts({NAME: PARTS})}
    checksums = {"outside": {}, "layer.0": {}}
    with TensorWriter(path, plan, metadata, checksums=checksums) as writer:
        writer.write(NAME, experts)
        writer.finish()
    return path


def test_what_is_not_finite_is_found_in_its_expert(tmp_path: Path, monkeypatch) -> None:
    """Wherever the pieces end in which the file is read. So is a byte that was changed."""
    data = bytearray(EXPERTS * ROW)
    struct.pack_into("<H", data, 2 * ROW + 2 * 7, 0x7FC0)  # NaN: value 7 of 15 of expert 2
    struct.pack_into("<f", data, ROW + 64 + 4 * 4, math.inf)  # the last bias of expert 1
    struct.pack_into("<H", data, 30, 0x7FC0)  # between two parts: nobody's
    path = written(tmp_path / "x.toast", bytes(data))
    for size in (4 << 20, 64, 128, 8):
        monkeypatch.setattr("toastkit.model.safetensors.CHUNK_BYTES", size)
        found = {p.tensor: p.reason for p in verify(ModelFiles(path, "m"), values=True)}
        assert found == {
            f"{PATH}.up.weight": "1 NaN and 0 infinite values, the first at 37",
            f"{PATH}.up.bias": "0 NaN and 1 infinite values, the first at 9",
        }
    assert [*verify(ModelFiles(path, "m"))] == []
    data = bytearray(path.read_bytes())
    data[read(path).stored[0].start + ROW + 3] ^= 1
    path.write_bytes(data)
    (problem,) = verify(ModelFiles(path, "m"))
    assert (problem.tensor, problem.reason) == (NAME, "is not as it was written")
