"""What sanitize makes of a layer alone is what it makes of all, however it looks around."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest

from tests.model.checkpoints import open_store
from tests.model.published import write_published
from toastkit.model.safetensors import Entry
from toastkit.store.sanitizing import Made, Sanitizing, Stacked, Stored

LAYERS = 12
PER_LAYER = ("norm.weight", "conv.weight", "experts.0.up", "experts.1.up", "a.w", "b.w")


class Files:
    """Tensors in the place of files."""

    def __init__(self, *further: str):
        names = [f"m.layers.{n}.{leaf}" for n in range(LAYERS) for leaf in PER_LAYER]
        key = mx.random.key(3)
        self.arrays = {}
        for number, name in enumerate([*names, "m.embed", *further]):
            shape = (4, 1, 6) if "conv" in name else (2, 3)  # two experts of two rows each
            self.arrays[name] = mx.random.normal(shape, key=mx.random.split(key, 99)[number])
        mx.eval(self.arrays)

    def place(self, name: str):
        array = self.arrays[name]
        return Path("x"), Entry(name, "F32", tuple(array.shape), 0, array.nbytes)


def layer_in(name: str) -> int:
    return int(name.split(".")[2])


def plain(weights):
    """Looks whether there are any names of a kind, and at shapes."""
    shifted = any("conv" in k and v.shape[-1] != 1 for k, v in weights.items())
    weights = {k: v for k, v in weights.items() if not k.startswith("mtp.")}
    for name in [k for k in weights if k.endswith("experts.0.up")]:
        parts = [weights.pop(name), weights.pop(name.replace(".0.up", ".1.up"))]
        weights[name.replace("experts.0.up", "switch.up")] = mx.stack(parts)
    for name, array in weights.items():
        if "conv" in name and array.shape[-1] != 1:
            weights[name] = mx.contiguous(array.moveaxis(2, 1))
        if name.endswith("norm.weight") and shifted:
            weights[name] = array + 1.0
    return weights


def further(weights):
    """As if a further layer at the end changed the others."""
    scale = 2.0 if any(k.startswith("mtp.") for k in weights) else 3.0
    return {k: v * scale if k.endswith("a.w") else v for k, v in plain(weights).items()}


def in_place(weights):
    for name, array in weights.items():
        if name.endswith("a.w"):
            array *= 1 + layer_in(name)
    return weights


def across(weights):
    """A layer that is made of the one before."""
    made = dict(weights)
    for name, array in weights.items():
        before = f"m.layers.{layer_in(name) - 1}.a.w" if name.endswith("a.w") else ""
        if before in weights:
            made[name] = array - weights[before]
    return made


def sideways(weights):
    """Stacks along the second axis: the rows are not the parts."""
    for n in range(LAYERS):
        base = f"m.layers.{n}.experts"
        if f"{base}.0.up" in weights:
            parts = [weights.pop(f"{base}.{e}.up") for e in range(2)]
            weights[f"{base}.up"] = mx.stack(parts, axis=1)
    return weights


def all_layers(weights):
    """Misses every layer that is not there."""
    return {f"m.layers.{n}.a.w": weights[f"m.layers.{n}.a.w"].T for n in range(LAYERS)}


def counting(weights):
    """As many layers as there are, in a value."""
    count = sum(name.endswith("a.w") for name in weights)
    return {k: v * count if k.endswith("a.w") else v for k, v in weights.items()}


FUNCTIONS = [plain, further, in_place, across, sideways, all_layers, counting]
NEEDS_ALL = (all_layers, counting)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_a_layer_alone_is_that_of_all(function, mlx_started) -> None:
    files = Files("mtp.layers.0.a.w")
    seen: list[int] = []

    def sanitize(weights):
        seen.append(len(weights))
        return function(weights)

    expected = function({k: v[...] for k, v in files.arrays.items()})
    mx.eval(expected)
    sanitizing = Sanitizing(files, sanitize, files.arrays)
    made = 0
    for name, wanted in expected.items():
        origin = sanitizing.origin(name)
        if isinstance(origin, Stored):
            found = files.arrays[origin.name]
        elif isinstance(origin, Stacked):
            found = mx.stack([files.arrays[part] for part in origin.parts])
        else:
            assert isinstance(origin, Made)
            sanitizing.make([name], {part: files.arrays[part] for part in origin.parts})
            found = sanitizing.make([name], {p: files.arrays[p] for p in origin.parts})[name]
            made += 1
            assert (seen[-1] == len(files.arrays)) == (function in NEEDS_ALL)
        assert found.dtype == wanted.dtype and mx.array_equal(found, wanted).item(), name
    assert made
    assert all(mx.array_equal(a, b) for a, b in zip(files.arrays.values(), Files(
        "mtp.layers.0.a.w").arrays.values()))  # fmt: skip


def test_what_tensors_are_made_of(mlx_started) -> None:
    sanitizing = Sanitizing(Files(), plain, Files().arrays)
    assert sanitizing.origin("m.embed") == Stored("m.embed")
    experts = "m.layers.7.experts"
    assert sanitizing.origin("m.layers.7.switch.up") == Stacked(
        (f"{experts}.0.up", f"{experts}.1.up")
    )
    assert sanitizing.origin("m.layers.7.norm.weight") == Made(("m.layers.7.norm.weight",))
    aside = Sanitizing(Files(), sideways, Files().arrays).origin("m.layers.7.experts.up")
    assert isinstance(aside, Made)
    plain_function = mx.contiguous
    sanitizing.origin("m.layers.7.conv.weight")
    assert mx.contiguous is plain_function


def test_a_sanitize_that_looks_at_values_is_not_recorded(mlx_started) -> None:
    def looks(weights):
        return {k: v for k, v in weights.items() if mx.any(v != 0).item()}

    assert Sanitizing(Files(), looks, Files().arrays).origin("m.embed") is None


def test_complex_numbers_that_sanitize_drops(tmp_path: Path, mlx_started) -> None:
    """As frequencies of rotary embeddings may be stored."""
    path = write_published(tmp_path / "llama", "llama")
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    mx.save_safetensors(str(path / "other.safetensors"), {name: mx.zeros((8,), mx.complex64)})
    index = json.loads((path / "model.safetensors.index.json").read_bytes())
    index["weight_map"][name] = "other.safetensors"
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with open_store(path) as store:
        assert name not in store.names and store.layer(1)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_reading_without_a_record(name: str, tmp_path: Path, mlx_started, monkeypatch) -> None:
    """The whole set is built, and the same comes out."""
    monkeypatch.setattr(Sanitizing, "origin", lambda self, name: None)
    with open_store(write_published(tmp_path / name, name)) as store:
        whole = store.load()
        found = store.layer(1)
        assert found and all(mx.array_equal(array, whole[k]) for k, array in found.items())
        tensor = next(iter(found))
        assert store.source(tensor) is None
        assert mx.array_equal(store.rows(tensor, 1, 3), whole[tensor][1:3])
