"""Where a checkpoint is found, its configuration, and attacks by way of it."""

from __future__ import annotations

import json
import os
import struct
import sys
from pathlib import Path

import pytest

from toastkit.errors import DataError, NoInputError, UnavailableError
from toastkit.model.config import fingerprint, load_config, sampling_defaults
from toastkit.model.files import MAX_TEMPLATES, TEMPLATES_FOLDER, ModelFiles
from toastkit.model.hub import hub_cache
from toastkit.model.locate import CRUMB, find, for_stream, locate

CONFIG = {"model_type": "llama", "vocab_size": 16, "max_position_embeddings": 32}


def safetensors(size: int, seed: int = 0) -> bytes:
    """A weight file with one tensor of so many bytes."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    body = bytes((seed + 7 * n) % 251 for n in range(size))
    return struct.pack("<Q", len(header)) + header + body


def checkpoint(path: Path, **files: bytes | dict) -> Path:
    """A directory that looks like a model."""
    path.mkdir(parents=True, exist_ok=True)
    contents = {
        "config.json": CONFIG,
        "tokenizer.json": {"model": {}},
        "model.safetensors": safetensors(20_000),
    }
    for name, content in {**contents, **files}.items():
        data = json.dumps(content).encode() if isinstance(content, dict) else content
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(data)
    return path


def files_with(path: Path, **files) -> ModelFiles:
    return ModelFiles(checkpoint(path, **files), "m")


# ----------------------------------------------------------------------------------------- locate


def test_the_embedded_model_is_there() -> None:
    files = locate("crumb")
    assert (files.path, files.name) == (CRUMB, "crumb")
    assert load_config(files).vocab == 4096 and len(fingerprint(files)) == 32
    assert find("crumb").path == CRUMB


def test_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint(tmp_path / "org" / "model")
    assert locate(str(path)).path == path
    monkeypatch.chdir(tmp_path)
    for name in ("org/model", "./org/model", "org/../org/model"):
        assert locate(name).path == find(name).path == path
        assert locate(name).name == str(path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate("~/org/model").path == path


def test_what_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_bytes(b"x")
    for name in ("empty", "missing"):
        with pytest.raises(NoInputError) as caught:
            locate(str(tmp_path / name))
        assert name in caught.value.message and "\n" not in caught.value.message
    with pytest.raises(DataError, match="not a safetensors file"):
        locate(str(tmp_path / "file"))
    for name in ("x" * 5000, "crum", "", "a/b/c", "../x/y/z", "org/..", "-x/y", "a\0b", "a\nb"):
        with pytest.raises(NoInputError):
            locate(name)


# -------------------------------------------------------------------------------------------- hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, a network that must not be asked."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    (tmp_path / "hf" / "hub").mkdir(parents=True)
    return tmp_path / "hf" / "hub"


def cached(hub: Path, revision: str = "abc123", **files) -> Path:
    """A snapshot of org/name as huggingface_hub lays it out."""
    repository = hub / "models--org--name"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(revision)
    return checkpoint(repository / "snapshots" / revision, **files)


def test_a_cached_hub_id_needs_no_network(hub: Path) -> None:
    """A sharded snapshot has to be whole."""
    snapshot = cached(hub)
    assert locate("org/name").path == find("org/name").path == snapshot
    assert locate("org/name").name == "org/name"
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    snapshot = cached(hub, **{"model.safetensors.index.json": index})
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model-1.safetensors").write_bytes(safetensors(8))
    with pytest.raises(NoInputError, match="no such model here: org/name"):
        find("org/name")
    (snapshot / "model-2.safetensors").write_bytes(safetensors(8))
    assert find("org/name").path == snapshot


def test_a_broken_index_and_an_odd_revision_are_no_snapshot(hub: Path) -> None:
    cached(hub)
    checkpoint(hub.parent / "x")
    for revision in ("../../../x", "", "a b", "x" * 5000, ".."):
        (hub / "models--org--name" / "refs" / "main").write_text(revision)
        with pytest.raises(NoInputError):
            find("org/name")
    broken = (b"{", b"[]", b'{"weight_map": 1}', b'{"weight_map": {"a": 5}}', b"[" * 100_000)
    for index in broken:
        cached(hub, **{"model.safetensors.index.json": index})
        with pytest.raises(NoInputError):
            find("org/name")


def test_the_network_is_asked_last(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnavailableError, match="huggingface_hub is not installed"):
        locate("org/name")
    with pytest.raises(NoInputError, match="no such model here"):
        find("org/name")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(NoInputError, match="not in the cache, and HF_HUB_OFFLINE"):
        locate("org/name")


# ------------------------------------------------------------------------------ named by a stream


def test_a_stream_may_name_what_is_here(hub: Path, tmp_path: Path, monkeypatch) -> None:
    """It fetches nothing."""
    with pytest.raises(NoInputError, match="no such model here: org/name") as caught:
        for_stream(None, "org/name", "ab" * 16)
    assert caught.value.hint == "toast-model pull org/name"
    with pytest.raises(UnavailableError):  # the fixture's network is asked for what -m names
        for_stream("org/name", "crumb", "ab" * 16)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    mine = checkpoint(tmp_path / "data" / "toastkit" / "models" / "mine")
    made = fingerprint(ModelFiles(mine, "mine"))
    for name, path in (("org/name", cached(hub)), ("mine", mine), (str(mine), mine)):
        assert for_stream(None, name, made).path == path
    assert for_stream(None, "crumb", fingerprint(locate("crumb"))).path == CRUMB
    # Another checkpoint under the same name, or another than the one that -m names.
    for chosen, name in ((None, "crumb"), (str(mine), "crumb")):
        with pytest.raises(DataError, match=r"is not the model that this stream .* \(crumb\)"):
            for_stream(chosen, name, "ab" * 16)


def test_a_stream_names_no_path_from_here(hub: Path, tmp_path: Path, monkeypatch) -> None:
    made = fingerprint(ModelFiles(checkpoint(tmp_path / "org" / "name"), "m"))
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path / "org")
    names = ("../org/name", "name", "~/org/name", "./name", str(tmp_path / "fifo"), "/dev/zero")
    for name in names:
        with pytest.raises(NoInputError):
            for_stream(None, name, made)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NoInputError, match="no such model here"):  # org/name is one of the hub
        for_stream(None, "org/name", made)
    assert for_stream("org/name", "x", made).path == tmp_path / "org" / "name"


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value, place in (
        ("HOME", str(tmp_path), ".cache/huggingface/hub"),
        ("XDG_CACHE_HOME", str(tmp_path / "c"), "c/huggingface/hub"), ("HF_HOME", "~/h", "h/hub"),
        ("HF_HUB_CACHE", str(tmp_path / "direct"), "direct"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)  # each goes before those above it
        assert hub_cache() == tmp_path / place


# ------------------------------------------------------------------------------------------ config


def test_a_config(tmp_path: Path) -> None:
    config = load_config(files_with(tmp_path))
    assert (config.model_type, config.vocab, config.context) == ("llama", 16, 32)
    nested = {"model_type": "gemma3", "text_config": {"vocab_size": 9}}
    files = files_with(tmp_path, **{"config.json": nested})
    config = load_config(files)
    assert (config.vocab, config.context) == (9, None)
    (tmp_path / "config.json").unlink()
    with pytest.raises(DataError, match="no config.json"):
        load_config(files)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(DataError, match="config.json is not a regular file"):
        load_config(files)


def test_floats_that_json_lacks(tmp_path: Path) -> None:
    tagged = {**CONFIG, "limits": [{"__float__": "Infinity"}, {"__float__": "x"}]}
    raw = load_config(files_with(tmp_path, **{"config.json": tagged})).raw
    assert raw["limits"] == [float("inf"), {"__float__": "x"}]
    tagged["rope_theta"] = {"__float__": "Infinity"}
    with pytest.raises(DataError, match="^m: config.json: rope_theta is inf, no finite number$"):
        load_config(files_with(tmp_path, **{"config.json": tagged}))


@pytest.mark.parametrize(
    ("fields", "said"),
    [('"rope_theta": NaN', "rope_theta is nan"), ('"rope_theta": 1e999', "rope_theta is inf"),
     ('"text_config": {"rope_parameters": {"a": [0.5, -Infinity]}}',
      "text_config.rope_parameters.a is -inf"),
     ('"time_step_limit": [0.0, NaN]', "time_step_limit is nan")],
)  # fmt: skip
def test_numbers_that_are_not_finite(tmp_path: Path, fields: str, said: str) -> None:
    content = f'{{"model_type": "llama", "vocab_size": 9, {fields}}}'.encode()
    with pytest.raises(DataError, match=f"^m: config.json: {said}, no finite number$"):
        load_config(files_with(tmp_path, **{"config.json": content}))


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b"null", b"\0" * 100,
        b'{"a":[' + b"[]," * (1 << 21) + b"0]}", b'{"a":"' + b"x" * (16 << 20) + b'"}',
        {"vocab_size": 16}, {**CONFIG, "model_type": 5}, {**CONFIG, "vocab_size": 0},
        {**CONFIG, "vocab_size": True}, {**CONFIG, "vocab_size": "16"}, {"model_type": "llama"},
        {**CONFIG, "vocab_size": None}, {**CONFIG, "max_position_embeddings": 0},
        {**CONFIG, "max_position_embeddings": 1.5}, {"model_type": "x", "text_config": 5},
    ],
)  # fmt: skip
def test_a_broken_config(tmp_path: Path, content: bytes | dict) -> None:
    with pytest.raises(DataError) as caught:
        load_config(files_with(tmp_path, **{"config.json": content}))
    assert caught.value.message.startswith("m: ") and "\n" not in caught.value.message


def test_weights_may_be_missing(tmp_path: Path) -> None:
    files = files_with(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(NoInputError, match="no model"):
        files.weight_files()
    for name in ("model-00002.safetensors", "model-00001.safetensors", "other.safetensors"):
        (tmp_path / name).write_bytes(b"")
    assert [p.name for p in files.weight_files()] == [
        "model-00001.safetensors", "model-00002.safetensors",
    ]  # fmt: skip


def test_additional_templates(tmp_path: Path) -> None:
    files = files_with(tmp_path)
    assert files.additional_templates() == []
    folder = tmp_path / TEMPLATES_FOLDER
    folder.write_text("no folder")
    assert files.additional_templates() == []
    folder.unlink()
    (folder / "deeper").mkdir(parents=True)
    for name in ("rag.jinja", "tool_use.jinja", "._rag.jinja", ".jinja", "notes.md", "a\nb.jinja"):
        (folder / name).touch()
    names = [f"{TEMPLATES_FOLDER}/{name}.jinja" for name in ("rag", "tool_use")]
    assert files.additional_templates() == names == files.small_files()[-2:]
    for number in range(MAX_TEMPLATES):
        (folder / f"{number}.jinja").touch()
    with pytest.raises(DataError, match="m: 66 files in additional_chat_templates, more than 64"):
        files.additional_templates()


def test_templates_that_lead_out_of_their_folder(tmp_path: Path) -> None:
    """A .toast file's names become paths where it is split."""
    names = ("../x.jinja", "a/../../x.jinja", "/x.jinja", "..jinja", "x.jinja")
    entry = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"__file__.{TEMPLATES_FOLDER}/{name}": entry for name in names}).encode()
    path = tmp_path / "x.toast"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    assert ModelFiles(path, "m").additional_templates() == [f"{TEMPLATES_FOLDER}/x.jinja"]


@pytest.mark.parametrize(
    ("names", "missing"),
    [("model-00001-of-00003 model-00003-of-00003", "model-00002-of-00003"),
     ("model-00002-of-00002 model", "model-00001-of-00002"),
     ("model-1-of-10 model-2-of-10", "model-3-of-10"),
     ("model-1-of-999999999", "model-2-of-999999999"),
     ("model-1-of-1 model.b-1-of-2", "model.b-2-of-2"),
     ("model-00001-of-00002 model-00002-of-00002", None), ("model-1-of-1 model-of-2", None)],
)  # fmt: skip
def test_shards_that_number_themselves(tmp_path: Path, names: str, missing: str | None) -> None:
    (tmp_path / "config.json").touch()
    for name in names.split():
        (tmp_path / f"{name}.safetensors").touch()
    files = ModelFiles(tmp_path, "m")
    if missing is None:
        assert len(files.weight_files()) == len(names.split())
        return
    with pytest.raises(NoInputError, match=f"^m: {missing}.safetensors is missing$"):
        files.weight_files()


@pytest.mark.parametrize(
    ("content", "expected"),
    [(None, {}), ({"temperature": 0.6}, {}), ({"do_sample": False, "temperature": 0.6}, {}),
     ({"do_sample": "yes", "temperature": 0.6}, {}), ({"do_sample": True}, {"temperature": 1.0}),
     ({"do_sample": True, "temperature": 0.6, "top_k": 20.0, "top_p": 1, "min_p": None,
       "typical_p": True, "repetition_penalty": "1.1", "max_length": 3},
      {"temperature": 0.6, "top_k": 20, "top_p": 1.0}),
     ({"do_sample": True, "top_k": -1}, {"temperature": 1.0, "top_k": 0})],
)  # fmt: skip
def test_sampling_defaults(tmp_path: Path, content: dict | None, expected: dict) -> None:
    files = {} if content is None else {"generation_config.json": content}
    found = sampling_defaults(files_with(tmp_path, **files))
    assert found == expected and type(found.get("top_k", 0)) is int


def test_sampling_defaults_out_of_their_range(tmp_path: Path) -> None:
    """The checkpoint is broken, not the command line."""
    for name, value, said in (
        ("top_p", 1.5, "top-p: 1.5 is not in [0, 1]"),
        ("temperature", -1, "temperature: -1.0 is not in [0, 1e+06]"),
        ("repetition_penalty", 0, "repetition-penalty: 0.0 is not in [1e-06, 1e+06]"),
    ):
        files = files_with(tmp_path, **{"generation_config.json": {"do_sample": True, name: value}})
        with pytest.raises(DataError) as error:
            sampling_defaults(files)
        assert error.value.message == f"{files.name}: generation_config.json: invalid {said}"
    for number in ("NaN", "Infinity", "1e999", "9" * 400, "9" * 5000):
        content = f'{{"do_sample": true, "top_k": {number}}}'.encode()
        with pytest.raises(DataError):
            sampling_defaults(files_with(tmp_path, **{"generation_config.json": content}))
