"""The store and the ledger: what is asked for is read, what is dropped goes, and bytes add up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.model.checkpoints import open_model, open_store, quantised_qwen3, same, tied_llama
from tests.model.published import write_published
from toastkit.errors import DataError, NoInputError
from toastkit.store.ledger import Ledger, layer_owner
from toastkit.store.store import Store


@pytest.fixture(scope="module")
def crumb_store(mlx_started) -> Store:
    return open_store("crumb")


@pytest.fixture(scope="module", params=["one file", "published"])
def store(request, crumb_store: Store, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Two models of one architecture: as toastkit bakes it, and as it is published."""
    if request.param == "one file":
        return crumb_store
    return open_store(write_published(tmp_path_factory.mktemp("models") / "m", "qwen3_next"))


def test_every_tensor_is_in_one_place(crumb_store: Store) -> None:
    store = crumb_store
    layers = [name for i in range(store.layer_count) for name in store.layer_names(i)]
    outside = store.layer_names(None)
    assert sorted([*layers, *outside]) == sorted(store.names)
    assert (store.layers_path, store.layer_count) == ("model.layers", 8)
    assert outside and all(store.layer_of(name) is None for name in outside)
    assert store.layer_of("model.layers.12.mlp.gate.weight") == 12
    assert store.layer_of("model.layers_extra.1.x") is None
    for name, array in store.layer(3).items():
        assert (tuple(array.shape), array.dtype, array.nbytes) == (
            store.shape(name), store.dtype(name), store.nbytes(name),
        )  # fmt: skip


def test_names_that_there_are_not(crumb_store: Store) -> None:
    for ask in (crumb_store.tensor, crumb_store.shape, crumb_store.source):
        with pytest.raises(KeyError):
            ask("model.layers.0.nonsense")
    for rows in ((-1, 2), (3, 3), (10, 17)):
        with pytest.raises(IndexError):
            crumb_store.rows(crumb_store.expert_names(0)[0], *rows)


def test_an_expert_is_read_without_its_neighbours(store: Store) -> None:
    """In a baked file and in a published directory: of neighbours, not a byte is read."""
    name = store.expert_names(store.layer_count - 1)[0]
    before = store.reader.bytes_read
    rows = store.rows(name, 2, 4)
    assert store.reader.bytes_read - before == rows.nbytes
    assert rows.nbytes == 2 * store.nbytes(name) // store.shape(name)[0]


def test_sources_are_not_what_sanitize_changed(store: Store) -> None:
    changed = {name for name in store.names if store.source(name) is None}
    if store.files.is_baked:
        assert not changed
    else:
        assert "model.norm.weight" in changed  # shifted by one
        assert "model.embed_tokens.weight" not in changed
        assert set(store.expert_names(0)) <= changed


def sparse_llama(path: Path, layers: int) -> int:
    """A checkpoint with holes for weights. Returns its bytes."""
    path.mkdir()
    small = write_published(path / "small", "llama_tied")
    config = json.loads((small / "config.json").read_bytes())
    width, inner = 2048, 5632
    config |= {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    config |= {"num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 64}
    shapes = {f"self_attn.{n}_proj": [width, width] for n in "qkvo"}
    shapes |= {"mlp.gate_proj": [inner, width], "mlp.up_proj": [inner, width]}
    shapes |= {"mlp.down_proj": [width, inner], "input_layernorm": [width]}
    shapes["post_attention_layernorm"] = [width]
    tensors = {f"model.layers.{n}.{k}": s for n in range(layers) for k, s in shapes.items()}
    tensors |= {"model.embed_tokens": [config["vocab_size"], width], "model.norm": [width]}
    header, end = {}, 0
    for name, shape in tensors.items():
        start, end = end, end + 2 * int(np.prod(shape))
        offsets = [start, end]
        header[f"{name}.weight"] = {"dtype": "F16", "shape": shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    with open(path / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (path / "config.json").write_text(json.dumps(config))
    return end


def test_opening_reads_no_weights(tmp_path: Path, mlx_started) -> None:
    """Of 4 GB, and takes no memory for them; a layer takes its own size."""
    size = sparse_llama(tmp_path / "m", 38)
    before = mx.get_active_memory()
    with open_store(tmp_path / "m") as store:
        assert sum(map(store.nbytes, store.names)) == size > 3.9e9
        assert store.reader.bytes_read == 0 and mx.get_active_memory() - before < 1 << 20
        names = [name for name in store.names if name.startswith("model.layers.7.self_attn.")]
        found = store.read(names)
        assert store.reader.bytes_read == sum(map(store.nbytes, names)) == 4 * 2 * 2048 * 2048
        assert mx.get_active_memory() - before < 1.01 * store.reader.bytes_read
        assert len(found) == 4


def test_weights_that_do_not_fit(tmp_path: Path, mlx_started) -> None:
    path = tied_llama(tmp_path / "m")
    config = json.loads((path / "config.json").read_bytes())

    def refused(**fields) -> str:
        (path / "config.json").write_text(json.dumps({**config, **fields}))
        with pytest.raises(DataError) as caught:
            open_store(path)
        assert "\n" not in caught.value.message
        return caught.value.message

    assert "it has no parameter model.layers.1." in refused(num_hidden_layers=1)
    assert "missing" in refused(num_hidden_layers=3)
    assert "has shape" in refused(intermediate_size=256)
    assert "quantised with awq" in refused(quantization_config={"quant_method": "awq"})
    assert "quantised with ['x']" in refused(quantization_config={"quant_method": ["x"]})
    assert "no usable quantization" in refused(quantization={"bits": 4})
    assert "no usable quantization_config" in refused(quantization_config={"bits": 4})
    assert "never done" in refused(model_file="model.py")
    (path / "config.json").write_text(json.dumps(config))
    file = path / "model-00002-of-00002.safetensors"
    whole = file.read_bytes()
    for dtype in ("I16", "U16"):
        file.write_bytes(whole.replace(b'"F16"', f'"{dtype}"'.encode()))
        with pytest.raises(DataError, match=f"is stored as {dtype}, which are no weights"):
            open_store(path)
    packed = next(quantised_qwen3(tmp_path / "q").glob("*.safetensors"))
    packed.write_bytes(packed.read_bytes().replace(b'"U32"', b'"I32"'))
    with pytest.raises(DataError, match="is stored as I32, which are no weights"):
        open_store(packed.parent)
    file.unlink()
    with pytest.raises(NoInputError, match="is missing"):
        open_store(path)


@pytest.mark.parametrize(
    ("name", "field", "size"),
    [
        ("llama_tied", "hidden_size", 10**9), ("llama_tied", "vocab_size", 10**9),
        ("qwen3_moe_quantised", "hidden_size", 10**9), ("gpt_oss", "intermediate_size", 10**9),
        ("qwen3_moe", "num_experts", 10**9), ("llama_tied", "head_dim", 10**400),
    ],
)  # fmt: skip
def test_sizes_that_no_tensor_has(
    name: str, field: str, size: int, tmp_path: Path, mlx_started, monkeypatch
) -> None:
    """They are refused before anything of that size is made."""
    path = write_published(tmp_path / "m", name)
    config = json.loads((path / "config.json").read_bytes())
    (path / "config.json").write_text(json.dumps({**config, field: size}))
    monkeypatch.delattr("toastkit.store.skeleton.import_architecture")
    with pytest.raises(DataError, match=f"{field} .*, which no tensor has"):
        open_store(path)


@pytest.mark.parametrize("said", [{"tie_word_embeddings": True}, {}], ids=["tied", "left out"])
def test_an_output_matrix_that_is_stored_is_used(said, tmp_path: Path, mlx_started) -> None:
    """As in transformers: unless it is the embedding once more, whatever the config says."""
    path = tied_llama(tmp_path / "m")
    tied = open_store(path)
    config = json.loads((path / "config.json").read_bytes())
    del config["tie_word_embeddings"]
    (path / "config.json").write_text(json.dumps({**config, **said}))
    index = json.loads((path / "model.safetensors.index.json").read_bytes())
    index["weight_map"]["lm_head.weight"] = "head.safetensors"
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    embedding = tied.tensor("model.embed_tokens.weight")
    last = mx.concatenate([embedding[:-1], embedding[-1:] + 1])
    for head in (mx.contiguous(embedding[::-1]), last):
        mx.save_safetensors(str(path / "head.safetensors"), {"lm_head.weight": head})
        assert same(open_store(path).tensor("lm_head.weight"), head)
    mx.save_safetensors(str(path / "head.safetensors"), {"lm_head.weight": embedding})
    assert "lm_head.weight" not in open_store(path).names


def test_of_a_tensor_in_two_files_the_index_has_the_say(tmp_path: Path, mlx_started) -> None:
    path = tied_llama(tmp_path / "m")
    index = json.loads((path / "model.safetensors.index.json").read_bytes())
    name, place = next(iter(index["weight_map"].items()))
    before = open_store(path).tensor(name)
    second = {name: before + 1}
    mx.save_safetensors(str(path / "model-00003.safetensors"), second)
    index["weight_map"]["other"] = "model-00003.safetensors"
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert same(open_store(path).tensor(name), before)
    index["weight_map"][name] = "model-00003.safetensors"
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert same(open_store(path).tensor(name), second[name])
    (path / "model.safetensors.index.json").unlink()
    with pytest.raises(DataError, match=f"tensor {name} is in {place} and in model-00003"):
        open_store(path)


# ------------------------------------------------------------------------------------------ ledger


def test_an_account_is_what_was_put_in() -> None:
    ledger = Ledger()
    ledger.add(layer_owner(3), 18)
    ledger.add("experts", 100)
    ledger.add("experts", -40)
    cache = [7]
    ledger.measure("cache", lambda: sum(cache))
    cache[0] = 5
    assert ledger.by_owner() == {"layer.3": 18, "experts": 60, "cache": 5}
    assert (ledger.total(), ledger.of("experts"), ledger.of("gears")) == (83, 60, 0)
    with pytest.raises(ValueError, match="gives back more"):
        ledger.add("experts", -61)
    ledger.add("layer.3", -18)
    assert "layer.3" not in ledger.by_owner()


MEASURE = """
import gc, sys
import mlx.core as mx
from toastkit.engine.opening import open_engine
from toastkit.model.locate import locate
for model, dtype in zip(sys.argv[1::2], sys.argv[2::2]):
    engine = cache = None
    gc.collect()
    mx.clear_cache()
    base = mx.get_active_memory()
    engine = open_engine(locate(model), dtype=dtype)
    before = mx.get_active_memory() - base
    weights = engine.ledger.total()
    cache = engine.new_cache()
    engine.prefill([1 + i % 4000 for i in range(100)], cache)
    mx.clear_cache()
    print(weights, before, engine.ledger.total(), mx.get_active_memory() - base)
"""


def test_the_ledger_agrees_with_mlx(tmp_path: Path, mlx_started) -> None:
    """Of a fresh process: weights, then weights and caches, within two per cent."""
    held = mx.ones(1 << 16)
    mx.eval(held)
    if not mx.get_active_memory():
        pytest.skip("this back end does not count its memory")
    models = ["crumb", "float32", str(tied_llama(tmp_path / "m")), "bfloat16"]
    command = [sys.executable, "-c", MEASURE, *models]
    out = subprocess.run(command, capture_output=True, check=True, timeout=120).stdout
    found = [list(map(int, line.split())) for line in out.splitlines()]
    for weights, before, total, after in found:
        assert weights == pytest.approx(before, rel=0.02)
        assert total == pytest.approx(after, rel=0.02)
    assert len(found) == 2 and found[0][0] == pytest.approx(4 * 7_719_280, rel=0.01)


def test_loading_gives_exactly_the_stores_tensors(crumb_store: Store) -> None:

    engine = open_model(crumb_store.files)
    loaded = dict(tree_flatten(engine.model.parameters()))
    assert sorted(loaded) == sorted(crumb_store.names)
    for index in range(crumb_store.layer_count):
        layer = crumb_store.layer(index)
        for name, array in layer.items():
            floating = mx.issubdtype(array.dtype, mx.floating)
            assert same(loaded[name], array.astype(mx.float32) if floating else array)
        owned = sum(loaded[name].nbytes for name in layer)
        assert engine.ledger.of(layer_owner(index)) == owned
