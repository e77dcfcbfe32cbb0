"""Writing safetensors files as a stream: what is in them, and that there is no half of one."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toastkit.errors import BusyError, CannotCreateError, DataError, NoInputError
from toastkit.model.safetensors import ITEM_BYTES, read_header
from toastkit.model.toast_format import CHECKSUMS_KEY, PAD_PREFIX, PAGE, new_digest
from toastkit.private_files import pwrite_all
from toastkit.store import writer as writer_module
from toastkit.store.partial import Partial
from toastkit.store.writer import Planned, TensorWriter

DTYPES = sorted(ITEM_BYTES)
PLAN = [
    Planned("a", "U8", (3, 5), "outside"),
    Planned("b", "F32", (7,), "layer.0"),
    Planned("empty", "F16", (0, 4), "layer.0"),
    Planned("c", "BF16", (), "layer.0"),
    Planned("none", "F32", (0,), "layer.1"),
    Planned("d", "U32", (2, 2), "layer.1"),
]
METADATA = {"format": "mlx", "toastkit": "1", "layers": "2"}


def content(item: Planned) -> bytes:
    """Bytes that tell tensors and places in them apart."""
    first = sum(item.name.encode())
    return bytes((first + i) % 251 for i in range(item.nbytes))


def write(path: Path, plan: list[Planned], piece: int = 1 << 20) -> None:
    with TensorWriter(path, plan, METADATA) as writer:
        for item in plan:
            data = content(item)
            for start in range(0, len(data), piece):
                writer.write(item.name, data[start : start + piece])
        writer.finish()


def check(path: Path, plan: list[Planned]) -> None:
    """The file has what was planned, in order, without a hole, layers aligned, with right
    checksums."""
    header = read_header(path, "test")
    data = path.read_bytes()
    assert header.data_start % PAGE == 0
    own = [e for e in header.entries.values() if not e.name.startswith(PAD_PREFIX)]
    assert {e.name: (e.dtype, e.shape) for e in own} == {i.name: (i.dtype, i.shape) for i in plan}
    assert [e.name for e in own if e.nbytes] == [i.name for i in plan if i.nbytes]
    end = header.data_start
    for entry in header.entries.values():
        assert entry.start == end
        end = entry.stop
        if entry.name.startswith(PAD_PREFIX):
            assert not any(data[entry.start : entry.stop])
    assert end == header.size == len(data)
    checksums = json.loads(header.metadata[CHECKSUMS_KEY])
    first = {item.group: item.name for item in reversed(plan) if item.nbytes}
    for item in plan:
        entry = header.entries[item.name]
        assert data[entry.start : entry.stop] == content(item)
        if first.get(item.group) == item.name and item.group != "outside":
            assert entry.start % PAGE == 0
        assert entry.start % ITEM_BYTES[item.dtype] == 0 or not item.nbytes
        digest = new_digest()
        digest.update(content(item))
        assert checksums[item.group][item.name] == digest.hexdigest()


def test_what_is_planned_is_in_the_file(tmp_path: Path) -> None:
    write(tmp_path / "x.toast", PLAN)
    check(tmp_path / "x.toast", PLAN)
    assert os.listdir(tmp_path) == ["x.toast"]
    metadata = read_header(tmp_path / "x.toast", "test").metadata
    assert METADATA.items() <= metadata.items()


@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 40), max_size=3), st.booleans()),
        max_size=12,
    ),
    piece=st.integers(1, 5000),
    block=st.integers(1, 8192),
)
def test_any_plan_in_whole_blocks(
    tmp_path_factory: pytest.TempPathFactory, shapes: list, piece: int, block: int
) -> None:
    layers = accumulate(begins for *_, begins in shapes)
    plan = [
        Planned(f"t{i}.ä\n{i % 3}", dtype, tuple(shape), f"layer.{layer}")
        for i, ((dtype, shape, _), layer) in enumerate(zip(shapes, layers))
        if len(shape) < 3
    ]
    path = tmp_path_factory.mktemp("any") / "x.safetensors"
    spans: list[tuple[int, int]] = []

    def noted(fd: int, data: memoryview, offset: int) -> None:
        spans.append((offset, offset + len(data)))
        pwrite_all(fd, data, offset)

    with (
        mock.patch.object(writer_module, "BLOCK_BYTES", block),
        mock.patch.object(writer_module, "pwrite_all", noted),
    ):
        write(path, plan, piece)
    check(path, plan)
    *blocks, (first, _) = spans
    assert first == 0  # of the header, which comes last
    assert [start for start, _ in blocks] == [0, *(stop for _, stop in blocks)][: len(blocks)]
    assert not any(start % block for start, _ in blocks)


def test_other_readers_open_it(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    numpy = pytest.importorskip("numpy")
    plan = [item for item in PLAN if item.dtype != "BF16"]  # numpy has no such dtype
    write(tmp_path / "x.toast", plan)
    with safetensors.safe_open(tmp_path / "x.toast", framework="numpy") as file:
        assert METADATA.items() <= file.metadata().items()
        for item in plan:
            array = file.get_tensor(item.name)
            assert array.shape == item.shape
            assert numpy.ascontiguousarray(array).tobytes() == content(item)


def test_progress_counts_bytes(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    total = sum(item.nbytes for item in PLAN)
    with TensorWriter(tmp_path / "x", PLAN, {}, progress=lambda *v: seen.append(v)) as writer:
        for item in PLAN:
            if item.nbytes:
                writer.write(item.name, content(item))
        writer.finish()
    assert seen == sorted(seen) and seen[-1] == (total, total)


# ------------------------------------------------------------------------------------- wrong calls


def test_a_bug_in_the_caller_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "x.toast"
    with (
        pytest.raises(ValueError, match="b is written out of turn"),
        TensorWriter(path, PLAN, {}) as writer,
    ):
        writer.write("b", b"")
    with (
        pytest.raises(ValueError, match="more than its 15"),
        TensorWriter(path, PLAN, {}) as writer,
    ):
        writer.write("a", bytes(16))
    with (
        pytest.raises(ValueError, match="tensor a is missing"),
        TensorWriter(path, PLAN, {}) as writer,
    ):
        writer.write("a", bytes(14))
        writer.finish()
    with pytest.raises(ValueError, match="planned twice"):
        TensorWriter(path, [PLAN[0], PLAN[0]], {})
    with TensorWriter(path, PLAN[:1], {}) as writer:
        writer.write("a", bytes(15))
        with pytest.raises(ValueError, match="out of turn"):
            writer.write("a", b"x")
    assert os.listdir(tmp_path) == []


# ----------------------------------------------------------------------------------- whole or not


def test_it_is_private_and_nameless_until_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.toast"
    old = os.umask(0o027)
    try:
        with TensorWriter(path, PLAN[:1], {}) as writer:
            (name,) = os.listdir(tmp_path)
            assert not name.endswith((".toast", ".safetensors"))
            assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
            writer.write("a", bytes(15))
            assert not path.exists()
            writer.finish()
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_exception_leaves_what_was_there(tmp_path: Path, error: type) -> None:
    path = tmp_path / "x.toast"
    path.write_bytes(b"before")
    with pytest.raises(error), TensorWriter(path, PLAN, {}) as writer:
        writer.write("a", bytes(10))
        raise error
    assert os.listdir(tmp_path) == ["x.toast"] and path.read_bytes() == b"before"


def test_two_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x.toast"
    with TensorWriter(path, PLAN[:1], {}) as writer:
        with pytest.raises(BusyError, match="being written"):
            TensorWriter(path, PLAN, {})
        writer.write("a", content(PLAN[0]))
        writer.finish()
    check(path, PLAN[:1])
    assert os.listdir(tmp_path) == ["x.toast"]


def test_what_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    """A file that was not there when the writing began, or a link to nowhere."""
    path = tmp_path / "x.toast"
    for put in (lambda: path.write_bytes(b"mine"), lambda: path.symlink_to("elsewhere")):
        with TensorWriter(path, PLAN[:1], {}, overwrite=False) as writer:
            writer.write("a", content(PLAN[0]))
            put()
            with pytest.raises(CannotCreateError, match="x.toast exists"):
                writer.finish()
        assert os.listdir(tmp_path) == ["x.toast"]
        assert path.is_symlink() or path.read_bytes() == b"mine"
        with pytest.raises(CannotCreateError, match="x.toast exists"):
            TensorWriter(path, PLAN[:1], {}, overwrite=False)
        path.unlink()


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "folder", tmp_path / "no" / "x", tmp_path / "file" / "x"):
        with pytest.raises(CannotCreateError, match="cannot write"):
            TensorWriter(path, PLAN, {})
    beside = tmp_path / "x.partial"
    for put in (beside.mkdir, lambda: os.mkfifo(beside), lambda: beside.symlink_to("elsewhere")):
        put()
        with pytest.raises(CannotCreateError, match="x.partial is no regular file"):
            TensorWriter(tmp_path / "x", PLAN, {})
        with suppress(OSError):
            beside.rmdir()
        beside.unlink(missing_ok=True)
    beside.touch()
    with pytest.raises(CannotCreateError, match="x.partial is no directory"):
        Partial(tmp_path / "x", directory=True)
    assert not (tmp_path / "elsewhere").exists() and beside.is_file()


def test_what_nobody_of_ours_left_is_not_emptied(tmp_path: Path) -> None:
    """A file that begins with a header, as a source may be; a directory of other files."""
    beside = tmp_path / "x.partial"
    write(beside, PLAN)
    whole = beside.read_bytes()
    with pytest.raises(CannotCreateError, match="x.partial is there, and not what an interrupted"):
        TensorWriter(tmp_path / "x", PLAN, {})
    assert beside.read_bytes() == whole
    beside.unlink()
    for name in ("notes", "model.safetensors", "layer_1"):
        (beside / name).mkdir(parents=True)
        with pytest.raises(CannotCreateError, match="x.partial is there, and not what"):
            Partial(tmp_path / "x", directory=True)
        (beside / name).rmdir()
    for name in ("non_layer.safetensors", "layer_0000.safetensors.partial"):
        (beside / name).touch()
    with Partial(tmp_path / "x", directory=True):
        assert list(beside.iterdir()) == []


def test_more_tensors_than_a_header_holds(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(writer_module, "MAX_HEADER_BYTES", 4 * PAGE)
    plan = [Planned(f"{i}" + "n" * (5 << 10), "U8", (1,), "outside") for i in range(6)]
    with TensorWriter(tmp_path / "x", plan, {}):
        pass
    plan.append(Planned("n" * (5 << 10), "U8", (1,), "outside"))
    with pytest.raises(DataError, match="too many tensors"):
        TensorWriter(tmp_path / "x", plan, {})
    assert os.listdir(tmp_path) == []


# -------------------------------------------------------------------------------------------- copy


def test_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toastkit.model.safetensors.CHUNK_BYTES", 100)
    source = tmp_path / "source"
    item = Planned("a", "U8", (1001,), "outside")
    source.write_bytes(b"before" + content(item) + b"after")
    with TensorWriter(tmp_path / "x", [item], {}) as writer:
        writer.copy("a", source, 6, 1007)
        writer.finish()
    check(tmp_path / "x", [item])


def test_copying_from_what_is_no_longer_there(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(bytes(10))
    with TensorWriter(tmp_path / "x", PLAN[:1], {}) as writer:
        with pytest.raises(DataError, match="truncated"):
            writer.copy("a", tmp_path / "source", 0, 15)
        with pytest.raises(NoInputError, match="cannot read"):
            writer.copy("a", tmp_path / "gone", 0, 15)
    assert os.listdir(tmp_path) == ["source"]
