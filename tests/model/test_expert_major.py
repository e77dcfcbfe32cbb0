"""Experts that lie one after another: the same model to the bit, an expert read in one go."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from tests.model.checkpoints import baked, open_store
from tests.model.moe_checkpoints import write_moe
from tests.model.test_expert_slots import Lazily, answer, opened
from tests.model.test_streaming import alike
from toastkit.gears.gear_options import GearOptions
from toastkit.holdings import slot_memory
from toastkit.holdings.policy import Wish
from toastkit.model.locate import locate
from toastkit.residency.residency_options import ResidencyOptions
from toastkit.store import raw as raw_module
from toastkit.store import reader as reader_module
from toastkit.store.bake import split
from toastkit.store.direct import PAGE
from toastkit.store.dtypes import bytes_of
from toastkit.store.quantising import QuantizationOptions
from toastkit.store.raw import RawTensors, Span
from toastkit.store.store import Store
from toastkit.store.verify import verify
from toastkit.store.waiting import AHEAD, NOW

# Packed; with biases, computed of blocks; shared ones, in shards, and gears; packed as it is baked.
OPTIONS: dict[str, dict[str, Any]] = {
    "qwen3_moe_quantised": {}, "gpt_oss": {"dtype": "float32"},
    "qwen2_moe": {"gears": ("low", "mid")},
    "olmoe": {"quantization": QuantizationOptions(4, 32), "dtype": "float16"},
}  # fmt: skip


class Files:
    """One model in three forms. options: it was baked with."""

    def __init__(self, folder: Path, name: str):
        self.options = OPTIONS[name]
        self.source = write_moe(folder / name, name, 2)
        self.tensors = baked(self.source, folder / f"{name}.1.toast", **self.options)
        self.experts = baked(
            self.source, folder / f"{name}.2.toast", expert_major=True, **self.options
        )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Files]:
    """Files by the name of the model, made when they are asked for."""
    folder = tmp_path_factory.mktemp("major")
    return Lazily(lambda name: Files(folder, name))


def gear_names(store: Store) -> list[str]:
    return [n for h in store.files.headers for n in h.entries if n.startswith("__gear__.")]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(first byte, bytes) of every system call that reads weights from now on."""
    found: list[tuple[int, int]] = []
    real = RawTensors._pread

    def counted(raw: RawTensors, fd: int, views: list[memoryview], start: int) -> int:
        count = real(raw, fd, views, start)
        found.append((start, count))
        return count

    monkeypatch.setattr(RawTensors, "_pread", counted)
    return found


# ---------------------------------------------------------------------------------- the same model


@pytest.mark.parametrize("name", OPTIONS)
def test_every_way_to_read_gives_the_same(models, name: str) -> None:
    one, two = open_store(models[name].tensors), open_store(models[name].experts)
    assert not one.files.is_expert_major and two.files.is_expert_major
    assert (two.names, gear_names(two)) == (one.names, gear_names(one))  # in the same order
    lazy, whole, gears = two.load(), one.load(), two.read(gear_names(two))
    for tensor, expected in whole.items():
        assert (two.shape(tensor), two.dtype(tensor)) == (expected.shape, expected.dtype)
        assert bytes_of(two.tensor(tensor)) == bytes_of(lazy[tensor]) == bytes_of(expected)
    assert all(bytes_of(gears[n]) == bytes_of(one.tensor(n)) for n in gears)
    for index in range(one.layer_count):
        layer = two.layer(index)
        assert {*layer} == {n for n in whole if one.layer_of(n) == index}
        assert all(bytes_of(layer[n]) == bytes_of(lazy[n]) for n in layer)
        for tensor in two.expert_names(index):
            assert bytes_of(two.rows(tensor, 2, 5)) == bytes_of(lazy[tensor][2:5])
            jobs, make = two.row_reading.rows(tensor, [(6, 7), (0, 1)])
            found = mx.concatenate(two.reader.request(jobs, make, NOW).result())
            assert bytes_of(found) == bytes_of(lazy[tensor][mx.array([6, 0])])
        assert set(two.expert_names(index)) == set(one.expert_names(index))


@pytest.mark.parametrize("name", OPTIONS)
def test_either_comes_of_either(models, tmp_path: Path, name: str) -> None:
    """With its gears, its checksums and its files."""
    files = models[name]
    again = baked(files.tensors, tmp_path / "1.toast", expert_major=True)
    assert again.read_bytes() == files.experts.read_bytes()
    assert baked(again, tmp_path / "2.toast").read_bytes() == files.tensors.read_bytes()
    copy = baked(again, tmp_path / "3.toast", expert_major=True)
    assert copy.read_bytes() == files.experts.read_bytes()
    split(open_store(files.experts), tmp_path / "split")
    for path in (files.experts, tmp_path / "split"):
        assert [*verify(locate(str(path)), values=True)] == []
    assert (
        baked(tmp_path / "split", tmp_path / "4.toast").read_bytes() == files.tensors.read_bytes()
    )


def test_blocks_make_no_difference(models, tmp_path: Path, monkeypatch) -> None:
    files = models["qwen2_moe"]
    monkeypatch.setattr("toastkit.store.pieces.READ_BYTES", 30_000)
    monkeypatch.setattr("toastkit.store.pieces.BLOCK_BYTES", 5000)
    again = baked(files.source, tmp_path / "x.toast", expert_major=True, **files.options)
    assert again.read_bytes() == files.experts.read_bytes()


def test_where_it_lies(models) -> None:
    """Experts after what every token needs, before the gears, each in one place of the file."""
    (header,) = locate(str(models["qwen2_moe"].experts)).headers
    names = [entry.name for entry in header.stored if "layers.1." in entry.name]
    switch = "model.layers.1.mlp.switch_mlp"
    holders = [f"__experts__.{gear}{switch}" for gear in ("", "__gear__.low.", "__gear__.mid.")]
    assert [name for name in names if name.startswith("__experts__.")] == holders
    kinds = [name.split("model.layers")[0] for name in names]
    low, mid = "__gear__.low.", "__gear__.mid."
    order = ["", "__experts__.", low, f"__experts__.{low}", mid, f"__experts__.{mid}"]
    assert list(dict.fromkeys(kinds)) == order and kinds == sorted(kinds, key=order.index)
    for part in ("gate_proj", "up_proj", "down_proj"):
        entry = header.entries[f"{switch}.{part}.weight"]
        assert entry.inside.name == holders[0] and entry.start % 64 == entry.stride % 64 == 0


def test_another_reader_opens_it(models) -> None:
    safetensors = pytest.importorskip("safetensors")
    path = models["qwen3_moe_quantised"].experts
    store = open_store(path)
    (header,) = store.files.headers
    with safetensors.safe_open(path, framework="numpy") as file:
        assert set(file.keys()) == {entry.name for entry in header.stored}
        for name in store.expert_names(1):
            entry = header.entries[name]
            first, size = entry.start - entry.inside.start, entry.nbytes // entry.shape[0]
            rows = file.get_tensor(entry.inside.name)[:, first : first + size]
            assert rows.tobytes() == bytes_of(store.tensor(name))


# --------------------------------------------------------------------------------------- in one go


def experts_of(store: Store, calls: list[tuple[int, int]]) -> list[str]:
    """The tensors of which calls have read one expert each, all of it and no more."""
    (header,) = store.files.headers
    holders = {entry.inside for entry in header.entries.values() if entry.inside}
    found = []
    for at, size in calls:
        for holder in (h for h in holders if h.start <= at < h.stop):
            row = holder.shape[1]
            assert (at - holder.start) % row == 0 and row - 64 < size <= row
            found.append(holder.name)
    return found


@pytest.mark.parametrize("name", OPTIONS)
def test_an_expert_is_one_range(models, calls: list, name: str, monkeypatch) -> None:
    """However large it is."""
    monkeypatch.setattr(slot_memory, "TOGETHER_BYTES", 1)
    engine = opened(models[name].experts, 5)
    expected = answer(opened(models[name].tensors))
    calls.clear()
    assert alike(answer(engine), expected)
    counted = engine.run_report()["slots"]
    found = experts_of(engine.holdings.store, calls)
    assert len(found) == counted["wanted"] - counted["hit"] > 0


@pytest.mark.parametrize("gear", ["low", "mid"])
def test_a_gear_of_an_expert_is_one_range(models, calls: list, gear: str) -> None:
    options, files = GearOptions(gear, "all"), models["qwen2_moe"]
    whole, engine = (
        opened(path, count, gear_options=options)
        for path, count in ((files.tensors, None), (files.experts, 5))
    )
    calls.clear()
    made = answer(engine, wish=Wish(gear))
    found = experts_of(engine.holdings.store, calls)
    assert alike(made, answer(whole, wish=Wish(gear)))
    assert any(name.startswith(f"__experts__.__gear__.{gear}.") for name in found)


def test_through_memory_of_the_host(models, calls: list, monkeypatch) -> None:
    for module in (slot_memory, reader_module):
        monkeypatch.setattr(module, "host_writes", lambda: False)
    files = models["qwen3_moe_quantised"]
    expected = answer(opened(files.tensors))
    engine = opened(files.experts, 3)
    calls.clear()
    assert alike(answer(engine), expected)
    counted = engine.run_report()["slots"]
    assert len(calls) == counted["wanted"] - counted["hit"] > 0


def test_a_layer_is_read_in_few_calls(models, calls: list) -> None:
    """Its experts in one, scattered to where each parameter is wanted; streamed layers as well."""
    files = models["qwen3_moe_quantised"]
    store = open_store(files.experts)
    names = store.expert_names(1)
    calls.clear()
    layer = store.read(names)
    assert len(calls) == 1 and len(names) == 9
    assert all(bytes_of(layer[n]) == bytes_of(open_store(files.tensors).tensor(n)) for n in names)
    widened = store.request(names, widen=names).result()
    for name in names:
        floats = mx.issubdtype(layer[name].dtype, mx.floating)
        assert mx.array_equal(widened[name], layer[name])
        assert (widened[name].dtype == mx.float32) == floats
    engine = opened(files.experts, residency=ResidencyOptions("layers", 0))
    assert alike(answer(engine), answer(opened(files.tensors)))


def test_a_layer_that_has_no_room_ahead_is_read_all_the_same(models) -> None:
    """Parameter by parameter, as far as there is room."""
    store = open_store(models["qwen2_moe"].experts)
    names = store.expert_names(1)
    store.reader.ahead_bytes = store.nbytes(names[0]) * 3 // 2
    request = store.request(names, AHEAD)
    lazy = store.load()
    assert all(bytes_of(array) == bytes_of(lazy[name]) for name, array in request.result().items())


# ----------------------------------------------------------------------------------- system calls


@settings(max_examples=examples(50), deadline=None)
@given(data=st.data())
def test_what_lies_side_by_side_is_read_at_once(tmp_path_factory, data) -> None:
    """Any spans, of any order, into memory of their own, whatever a call may take, and however
    short calls are to be; until it is to be left off."""
    folder = tmp_path_factory.mktemp("spans")
    content = np.random.default_rng(0).bytes(30_000)
    mx.save_safetensors(str(folder / "model.safetensors"), {"a": mx.zeros(1)})
    (folder / "config.json").write_text("{}")
    with (folder / "model.safetensors").open("ab") as file:
        file.write(content)
    raw = RawTensors(locate(str(folder)))
    (path,) = (header.path for header in locate(str(folder)).headers)
    whole = path.read_bytes()
    draw = data.draw
    most = draw(st.sampled_from([len(whole), 300]))  # all over the file, or a few bytes each
    cuts = sorted(draw(st.lists(st.integers(0, most), min_size=2, max_size=30)))
    spans = [Span(path, a, b) for a, b in zip(cuts, cuts[1:]) if draw(st.integers(0, 3))]
    if draw(st.booleans()):
        spans = draw(st.permutations(spans))
    views = [memoryview(bytearray(span.stop - span.start)) for span in spans]
    short = draw(st.sampled_from([1 << 20, 7]))  # a system call may give less than was asked
    counts: list[int] = []
    calls = draw(st.one_of(st.just(1 << 20), st.integers(0, 5)))

    def pread(fd: int, views: list[memoryview], start: int, flags: int = 0) -> int:
        counts.append(sum(map(len, views)))
        some = memoryview(bytearray(min(short, counts[-1])))
        count = os.preadv(fd, [some], start)
        for view in views:
            view[: min(len(view), count)] = some[: min(len(view), count)]
            some, count = some[len(view) :], max(0, count - len(view))
        return min(short, counts[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(raw, "_pread", pread)
        patch.setattr(raw_module, "CHUNK_BYTES", most := draw(st.sampled_from([16 << 20, 100])))
        patch.setattr(raw_module, "CALL_BUFFERS", draw(st.sampled_from([1024, 3])))
        patch.setattr(raw_module, "CALL_SECONDS", 0)
        patch.setattr(raw_module, "MIN_CALL_BYTES", PAGE)
        read = raw.fill(zip(spans, views), lambda: len(counts) >= calls, draw(st.booleans()))
    assert read == sum(min(short, count) for count in counts) and len(counts) <= calls
    for span, view in zip(spans, views) if calls == 1 << 20 else ():
        assert bytes(view) == whole[span.start : span.stop]
    assert all(count <= most for count in counts)
