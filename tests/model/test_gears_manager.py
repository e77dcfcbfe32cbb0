"""The precision manager: modules replaced, originals released and read again, the cache bounded."""

from __future__ import annotations

import gc
import os
import threading
from dataclasses import asdict
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.model.checkpoints import (
    SIZES,
    baked,
    model_of,
    open_model,
    open_store,
    random_weights,
    write_checkpoint,
    write_random,
)
from tests.model.published import write_published
from toastkit.engine.engine import Engine
from toastkit.errors import DataError, UsageError
from toastkit.gears.gear_options import GearOptions
from toastkit.gears.gear_policy import GearPolicy
from toastkit.holdings import weights as weights_module
from toastkit.holdings.policy import Wish
from toastkit.store.ledger import GEARS
from toastkit.store.precision import LARGEST
from toastkit.store.reader import IDLE_SECONDS
from toastkit.store.store import Store

IDS = [5 + 7 * n % 4000 for n in range(12)]
PLENTY = 1 << 40


def engine_of(path: Path | str, options: GearOptions | None = None, **rest) -> Engine:
    return open_model(path, gear_options=options, **rest)


def geared(path: Path | str, scope: str = "all", /, **options) -> tuple[Engine, GearPolicy]:
    engine = engine_of(path, GearOptions("auto", scope, **options))
    assert engine.gears is not None
    return engine, engine.gears


def logits(engine: Engine) -> np.ndarray:
    """(12, vocab), and of a step after them: many rows at once, and a single one."""
    cache = engine.new_cache()
    rows = np.array(engine.score(IDS, cache))
    return np.concatenate([rows, np.array(engine.step(9, cache))[None]])


def weights_by_hand(engine: Engine, paths: list[str], bits: int) -> None:
    """Puts into a plain model what section 5 makes of its bfloat16 matrices, with numpy alone."""
    changed = []
    for name, array in tree_flatten(engine.model.parameters()):
        if name.rpartition(".")[0] in paths and name.endswith(".weight"):
            w = np.array(array)
            peak = np.abs(w).max(axis=-1, keepdims=True)
            s = np.maximum(peak / LARGEST[bits], 1e-8).astype(np.float32)
            s = np.array(mx.array(s).astype(mx.bfloat16).astype(mx.float32))  # as it is stored
            q = np.clip(np.round(w / s), -LARGEST[bits], LARGEST[bits])
            changed.append((name, mx.array((q * s).astype(np.float32))))
    assert len(changed) == len(paths)
    engine.model.load_weights(changed, strict=False)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("gears")
    names = ("qwen3", "qwen3_moe", "qwen3_moe_quantised", "qwen3_next", "gemma3_text")
    return {name: write_published(folder / name, name) for name in names}


@pytest.mark.parametrize(
    ("name", "scope"),
    [("qwen3_next", "attention"), ("qwen3_next", "all"), ("qwen3", "attention"),
     ("qwen3_moe", "all"), ("gemma3_text", "all")],
)  # fmt: skip
def test_high_gear_is_no_gear(sources: dict, name: str, scope: str) -> None:
    plain = logits(engine_of(sources[name]))
    engine, gears = geared(sources[name], scope, cache_bytes=0)
    assert (logits(engine) == plain).all()
    for gear in ("low", "high", "mid", "high"):
        assert engine.shift(gear)
        assert not engine.shift(gear)
        assert (logits(engine) == plain).all() == (gear == "high")


@pytest.mark.parametrize(
    ("scope", "bits", "path"),
    [("all", (4, 8), "fused"), ("all", (2, 6), "dequant"), ("attention", (4, 8), "dequant"),
     ("attention", (2, 6), "fused")],
)  # fmt: skip
def test_gears_compute_what_the_numbers_stand_for(
    sources: dict, scope: str, bits: tuple[int, int], path: str
) -> None:
    plain = engine_of(sources["qwen3_moe"])
    originals = logits(plain)
    engine, gears = geared(sources["qwen3_moe"], scope, bits=bits, path=path)
    stored = dict(tree_flatten(plain.model.parameters()))
    for gear, width in zip(("low", "mid"), bits):
        engine.shift(gear)
        found = logits(engine)
        plain.model.load_weights(list(stored.items()))
        weights_by_hand(plain, gears.paths, width)
        wanted = logits(plain)
        assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()
        assert np.abs(found - originals).max() > 0
    assert (gears.counts.fused > 0) == (path == "fused")
    assert (gears.counts.miss > 0) == (gears.counts.hit > 0) == (path == "dequant")


def test_dense_copies_last_as_long_as_the_gear(sources: dict) -> None:
    engine, gears = geared(sources["qwen3"], "attention", path="dequant")
    engine.shift("mid")
    count = len(gears.paths)
    packed = gears.device_bytes
    logits(engine)
    assert asdict(gears.counts) == {"fused": 0, "hit": count, "miss": count}
    assert engine.ledger.of(GEARS) == gears.device_bytes == packed + gears.originals_bytes
    engine.shift("high")
    engine.shift("mid")
    assert engine.ledger.of(GEARS) == gears.device_bytes == packed
    logits(engine)
    assert asdict(gears.counts) == {"fused": 0, "hit": 2 * count, "miss": 2 * count}


def test_rows_that_mlx_has_no_groups_for(tmp_path: Path) -> None:
    sizes = {**SIZES, "hidden_size": 72, "head_dim": 18, "intermediate_size": 100}
    config = {"model_type": "llama", "tie_word_embeddings": True, **sizes}
    path = write_random(tmp_path / "odd", config)
    plain = logits(engine_of(path))
    engine, gears = geared(path)
    engine.shift("mid")
    found = logits(engine)
    assert 0 < np.abs(found - plain).max() < 0.05 * np.abs(plain).max()
    assert gears.counts.fused == 0 and gears.counts.hit > 0
    engine.shift("high")
    assert (logits(engine) == plain).all()


def test_device_memory_falls_and_returns() -> None:
    for thread in threading.enumerate():
        if thread.name == "reader":  # of an engine of another test, which lives as long
            thread.join(2 * IDLE_SECONDS)
    engine, gears = geared("crumb", cache_bytes=0)
    mx.eval(engine.model.parameters())
    gc.collect()
    mx.clear_cache()
    memory, ledger = mx.get_active_memory(), engine.ledger.total()
    assert gears.device_bytes == gears.originals_bytes > 25 << 20
    for gear in ("low", "mid", "high", "low", "high"):
        engine.shift(gear)
        gc.collect()
        fall = memory - mx.get_active_memory()
        assert ledger - engine.ledger.total() == gears.originals_bytes - gears.device_bytes
        assert abs(fall - (gears.originals_bytes - gears.device_bytes)) < 0.02 * ledger
        share = {"low": 0.16, "mid": 0.3, "high": 1}[gear]
        assert share * 0.8 < gears.device_bytes / gears.originals_bytes <= share
        assert (engine.ledger.of(GEARS) == 0) == (gear == "high")


def test_nothing_is_quantised_before_it_is_wanted(
    sources: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    real = weights_module.quantise_rows

    def counted(weight, bits, pad):
        made.append(bits)
        return real(weight, bits, pad)

    monkeypatch.setattr(weights_module, "quantise_rows", counted)
    engine, gears = geared(sources["qwen3"], "attention")
    logits(engine)
    assert made == []
    engine.shift("mid")
    assert made == [8] * len(gears.paths)
    engine.shift("high")
    engine.shift("mid")
    assert len(made) == len(gears.paths)
    times = gears.times["mid"]
    assert (len(times.first), len(times.again)) == (1, 1)


@pytest.mark.parametrize("scope", ["attention", "all"])
def test_baked_gears_are_read(
    sources: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scope: str
) -> None:
    baked(sources["qwen3_moe"], tmp_path / "x.toast", gears=("low", "mid"))
    made, gears = geared(sources["qwen3_moe"], scope, cache_bytes=0)
    read, stored = geared(tmp_path / "x.toast", scope, cache_bytes=0)
    wanted = []
    for gear in ("low", "mid", "high"):
        made.shift(gear)
        wanted.append(logits(made))
    monkeypatch.setattr(weights_module, "quantise_rows", lambda *a, **k: pytest.fail("quantised"))
    for gear, expected in zip(("low", "mid", "high"), wanted):
        read.shift(gear)
        assert (logits(read) == expected).all()


def test_baked_gears_of_other_bits_are_not(sources: dict, tmp_path: Path) -> None:
    baked(sources["qwen3"], tmp_path / "x.toast", gears=("low",))
    six, gears = geared(tmp_path / "x.toast", bits=(6, 8))
    six.shift("low")
    plain, own = geared(sources["qwen3"], bits=(6, 8))
    plain.shift("low")
    assert (logits(six) == logits(plain)).all()


def packed_bytes(engine: Engine, bits: int) -> int:
    """Bytes of the managed matrices, packed."""
    return sum(engine.holdings.loaded.packed_bytes(path, bits) for path in engine.gears.paths)


def kept(engine: Engine) -> list[int]:
    """Bits of the gears that are kept, 0 of high; all matrices have the same."""
    forms = {path: engine.holdings.kept(path) for path in engine.gears.paths}
    [bits] = {tuple(form.bits for form in some) for some in forms.values()}
    return list(bits)


def test_the_cache_is_bounded(sources: dict) -> None:
    engine, gears = geared(sources["qwen3"], "attention")
    for gear, bits in (("low", 4), ("mid", 8)):
        engine.shift(gear)
        held = sum(engine.holdings.modules[path].matrix_bytes for path in gears.paths)
        assert packed_bytes(engine, bits) == held
    engine.shift("high")
    assert kept(engine) == [4, 8]
    packed = packed_bytes(engine, 4) + packed_bytes(engine, 8)
    assert gears.device_bytes == gears.originals_bytes + packed

    low = packed_bytes(engine, 4) * 5 // 4  # no room for the mid one
    engine, gears = geared(sources["qwen3"], "attention", cache_bytes=low)
    for gear in ("low", "mid", "high", "low", "high"):
        engine.shift(gear)
        assert kept(engine) == ([4] if gear != "low" else [])

    engine, gears = geared(sources["qwen3"], "attention", cache_bytes=0)
    for gear in ("low", "mid", "high"):
        engine.shift(gear)
        assert kept(engine) == []


def test_a_cache_with_room_keeps_the_originals(
    sources: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, gears = geared(sources["qwen3"], "attention", cache_bytes=PLENTY)
    before = dict(tree_flatten(engine.model.parameters()))
    monkeypatch.setattr(Store, "read", lambda *a: pytest.fail("read again"))
    for gear in ("low", "mid", "high"):
        engine.shift(gear)
    after = dict(tree_flatten(engine.model.parameters()))
    assert all(after[name] is array for name, array in before.items())


def test_a_gear_that_is_coming_is_made_in_parts(sources: dict) -> None:
    path = sources["qwen3"]
    engine, gears = geared(path, "attention")
    full = engine.ledger.total()
    engine.prepare(Wish(expected="high"))  # it is there
    assert engine.ledger.total() == full
    engine.prepare(Wish(expected="mid"))
    first = engine.ledger.of(GEARS)
    engine.prepare(Wish(expected="mid"))
    whole = engine.ledger.of(GEARS)
    assert 0 < first < whole and gears.device_bytes == gears.originals_bytes + whole
    engine.prepare(Wish(expected="mid"))
    assert engine.ledger.of(GEARS) == whole
    engine.prepare(Wish(expected="low"))  # the other one is not coming after all
    assert 0 < engine.ledger.of(GEARS) < first
    engine.shift("mid")
    assert engine.ledger.of(GEARS) == gears.device_bytes == whole
    engine.prepare(Wish(expected="high"))  # reads ahead; nothing on the device
    assert gears.device_bytes == whole

    prepared, late = geared(path, "attention")
    prepared.prepare(Wish(expected="low"))
    prepared.shift("low")  # half of it was ready
    plain, gears = geared(path, "attention")
    plain.shift("low")
    assert (logits(prepared) == logits(plain)).all()

    engine, gears = geared(path, "attention", cache_bytes=1000)
    engine.prepare(Wish(expected="mid"))
    assert gears.device_bytes == gears.originals_bytes


def test_changed_files_are_noticed(tmp_path: Path) -> None:
    path = write_published(tmp_path / "llama", "llama")
    engine, gears = geared(path)
    engine.shift("low")
    expected = logits(engine)
    file = sorted(path.glob("*.safetensors"))[0]
    data = file.read_bytes()
    file.unlink()
    with pytest.raises(Exception, match="cannot read|no such"):
        engine.shift("high")
    file.write_bytes(data)
    os.utime(file, ns=(1, 1))
    with pytest.raises(DataError, match="have changed since"):
        engine.shift("high")
    assert gears.gear == "low" and (logits(engine) == expected).all()


def test_weights_that_cannot_be_quantised(tmp_path: Path) -> None:
    path = write_published(tmp_path / "llama_tied", "llama_tied")
    file = path / "model.safetensors"
    tensors = mx.load(str(file))
    assert isinstance(tensors, dict)
    name = "model.layers.1.self_attn.o_proj.weight"
    tensors[name] = mx.full(tensors[name].shape, float("nan"), tensors[name].dtype)
    mx.save_safetensors(str(file), tensors, metadata={"format": "pt"})
    engine, gears = geared(path)
    before = dict(tree_flatten(engine.model.parameters()))
    with pytest.raises(DataError, match=r"layers\.1\.self_attn\.o_proj\.weight: NaN"):
        engine.shift("low")
    assert gears.gear == "high" and gears.device_bytes == gears.originals_bytes
    assert dict(tree_flatten(engine.model.parameters())).keys() == before.keys()


def test_a_quantised_checkpoint_only_shows_its_gears(sources: dict) -> None:
    told: list[str] = []
    options = GearOptions("auto")
    engine = engine_of(sources["qwen3_moe_quantised"], options, notify=told.append)
    assert engine.gears is None and "shown and not shifted" in told[-1]
    with pytest.raises(UsageError, match="--gear low: .* is quantised already"):
        engine_of(sources["qwen3_moe_quantised"], GearOptions("low"))
    assert engine_of(sources["qwen3_moe_quantised"], GearOptions("high")).gears is None


def test_weights_that_were_quantised_before(tmp_path: Path) -> None:
    config = {"model_type": "llama", "tie_word_embeddings": True, **SIZES}
    weights = random_weights(model_of(config))
    for name, array in weights.items():
        if array.ndim == 2:
            packed = mx.quantize(array, 64, 4)
            weights[name] = mx.dequantize(*packed, 64, 4).astype(mx.float16)
    path = write_checkpoint(tmp_path / "twice", config, weights)
    told: list[str] = []
    engine = engine_of(path, GearOptions("auto", "all"), notify=told.append)
    assert engine.gears is not None
    engine.shift("low")
    engine.shift("mid")
    assert len([line for line in told if "quantised before" in line]) == 1


def test_a_module_in_two_places_is_one(sources: dict) -> None:
    store = open_store(sources["qwen3"])
    layers = store.model.model.layers
    layers[1].self_attn.q_proj = layers[0].self_attn.q_proj
    gears = GearPolicy(GearOptions("auto", "attention"))
    engine = Engine(store, (gears,), dtype="float32")
    paths = [f"model.layers.{n}.self_attn.q_proj" for n in (0, 1)]
    assert paths[0] in gears.paths and paths[1] not in gears.paths
    engine.shift("low")
    assert layers[1].self_attn.q_proj is layers[0].self_attn.q_proj
    assert hasattr(layers[0].self_attn.q_proj, "packed_bits")


def test_sixteen_bits_on_the_cpu_are_not_fused(sources: dict) -> None:
    """MLX would add up in 16 bits there."""
    if mx.default_device() != mx.Device(mx.cpu):
        pytest.skip("a GPU adds up in float32")
    options = GearOptions("auto", "all")
    engine = open_model(sources["qwen3"], dtype="bfloat16", gear_options=options)
    assert engine.gears is not None
    plain = logits(engine)
    engine.shift("mid")
    found = logits(engine)
    assert engine.gears.counts.fused == 0 and engine.gears.counts.miss > 0
    assert np.abs(found - plain).mean() < 0.1 * plain.std()


def test_a_model_without_matrices_to_manage(tmp_path: Path) -> None:
    path = write_published(tmp_path / "mamba2", "mamba2")
    with pytest.raises(UsageError, match="no matrix for gears in scope attention") as caught:
        geared(path, "attention")
    assert "--gear-scope all" in str(caught.value.hint)
    engine, gears = geared(path, "all")
    plain = logits(engine)
    engine.shift("low")
    assert not (logits(engine) == plain).all()
