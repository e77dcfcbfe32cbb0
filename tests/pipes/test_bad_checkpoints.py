"""Checkpoints that are broken, or mean harm: one clear line, the right exit code, no traceback,
whichever command meets them first."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Toast, executable
from tests.hostile import run_hostile, run_without_privileges
from tests.pipes.test_bad_input import refused
from toastkit.model.locate import locate

CONFIG = {
    "model_type": "llama", "tie_word_embeddings": True, "vocab_size": 4096, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512, "rope_theta": 10000.0,
}  # fmt: skip
LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (4096, 32), "model.norm.weight": (32,),
    LAYER + "input_layernorm.weight": (32,), LAYER + "post_attention_layernorm.weight": (32,),
    LAYER + "self_attn.q_proj.weight": (32, 32), LAYER + "self_attn.k_proj.weight": (16, 32),
    LAYER + "self_attn.v_proj.weight": (16, 32), LAYER + "self_attn.o_proj.weight": (32, 32),
    LAYER + "mlp.gate_proj.weight": (64, 32), LAYER + "mlp.up_proj.weight": (64, 32),
    LAYER + "mlp.down_proj.weight": (32, 64),
}  # fmt: skip
NORM, UP = "model.norm.weight", LAYER + "mlp.up_proj.weight"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

Tensors = dict[str, np.ndarray]
Make = Callable[..., Path]


def safetensors(tensors: Tensors, change: Callable[[dict], None] | None = None) -> bytes:
    """A file of F16 tensors. change: edits its header."""
    header: dict[str, Any] = {}
    body = b""
    for name, value in tensors.items():
        data = value.astype(np.float16).tobytes()
        places = [len(body), len(body) + len(data)]
        header[name] = {"dtype": "F16", "shape": value.shape, "data_offsets": places}
        body += data
    if change is not None:
        change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def random_tensors() -> Tensors:
    generator = np.random.default_rng(1)
    return {name: 0.2 * generator.standard_normal(shape) for name, shape in SHAPES.items()}


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """make(config={}, tensors={}, change=None, **files): a small llama with crumb's tokenizer. None
    as a value leaves a field, a tensor or a file out."""

    def build(config=None, tensors=None, change=None, **files: bytes | None) -> Path:
        path = tmp_path / "bad"
        path.mkdir()
        fields = {**CONFIG, **(config or {})}
        arrays = {**random_tensors(), **(tensors or {})}
        contents = {name: locate("crumb").read(name) for name in TOKENIZER}
        contents["config.json"] = json.dumps(_given(fields)).encode()
        contents[WEIGHTS] = safetensors(_given(arrays), change)
        for name, data in _given({**contents, **files}).items():
            (path / name).write_bytes(data)
        return path

    return build


def _given(items: dict) -> dict:
    return {name: value for name, value in items.items() if value is not None}


TURNS = cycle((False, True))


def refused_by_all(toast: Toast, path: Path, code: int, *said: str, whole: bool = False) -> None:
    """decode and info refuse it, info with nothing on stdout but, unless whole, what it knew before
    it came to that; counting tokens needs no weights. What both notice in the same place, before
    MLX is started, is put to them in turn."""
    turn = next(TURNS)
    if not (whole and turn):
        refused(toast("decode", "-m", path, "-n", "2", "hi"), code, "toast-decode: ", *said)
    if whole and not turn:
        return
    done = toast("model", "info", path)
    if not whole:
        assert b"model type" in done.stdout
        done.stdout = b""
    refused(done, code, "toast-model: ", *said)


def counts(toast: Toast, path: Path) -> None:
    done = toast("tokenize", "--count", "-m", path, "hi")
    assert (done.returncode, done.stdout.strip().isdigit(), done.stderr) == (0, True, b"")


def test_the_good_one(toast: Toast, make: Make) -> None:
    path = make()
    done = toast("decode", "-m", path, "-n", "2", "hi")
    assert done.returncode == 0 and done.stdout and not done.stderr
    assert toast("model", "info", path).returncode == 0
    counts(toast, path)


# ------------------------------------------------------------------------------- weight files


def test_a_missing_shard(toast: Toast, make: Make) -> None:
    places = {name: f"model-0000{1 + (name == NORM)}-of-00002.safetensors" for name in SHAPES}
    first = {name: value for name, value in random_tensors().items() if name != NORM}
    shard = {"model-00001-of-00002.safetensors": safetensors(first)}
    path = make(**{WEIGHTS: None, INDEX: json.dumps({"weight_map": places}).encode(), **shard})
    said = f"{path}: model-00002-of-00002.safetensors is missing"
    refused_by_all(toast, path, 66, f"{said}, and {INDEX} needs it", whole=True)
    counts(toast, path)
    (path / INDEX).unlink()
    refused_by_all(toast, path, 66, said, whole=True)
    refused(toast("model", "verify", path), 66, said)


# What else a header may claim and an index may point to: tests/unit/test_safetensors.py.


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        (lambda data: data[:-1000], "truncated: tensor"),
        (lambda data: b"", "not a safetensors file: too short"),
        (lambda data: b"\x80\x02cos\n" + data[6:], "its header claims"),
    ],
    ids=["data", "empty", "pickle"],
)
def test_a_damaged_file(toast: Toast, make: Make, cut: Callable, said: str) -> None:
    path = make(**{WEIGHTS: cut(safetensors(random_tensors()))})
    refused_by_all(toast, path, 65, f"{path}: cannot read {WEIGHTS}: ", said, whole=True)


@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        ([64, 0], "do not fit its shape and dtype"),
        ([0], "no usable shape and offsets"),
        ("ab", "no usable shape and offsets"),
    ],
)
def test_a_header_that_lies(toast: Toast, make: Make, offsets: object, said: str) -> None:
    path = make(change=lambda header: header[NORM].update({"data_offsets": offsets}))
    refused_by_all(toast, path, 65, f"{path}: cannot read {WEIGHTS}: ", said, whole=True)


@pytest.mark.parametrize(
    "shape",
    ["9223372036854775807," * 300_000 + "0", "[]," * (1 << 21) + "0"],
    ids=["dims", "lists"],
)
def test_a_header_that_would_keep_us_busy(make: Make, shape: str) -> None:
    header = f'{{"w":{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,0]}}}}'.encode()
    path = make(**{WEIGHTS: struct.pack("<Q", len(header)) + header})
    taken = run_hostile([executable("model"), "info", path])
    assert taken.code == 65 and f"{path}: cannot read {WEIGHTS}: " in taken.error
    assert taken.error.count("\n") == 1


def test_an_index_that_points_outside(toast: Toast, make: Make) -> None:
    path = make(**{INDEX: json.dumps({"weight_map": {NORM: "../other.safetensors"}}).encode()})
    refused_by_all(toast, path, 65, f"{path}: {INDEX} points outside", whole=True)


@pytest.mark.parametrize("index", ["{", "[]", "{}"])
def test_an_index_that_is_none(toast: Toast, make: Make, index: str) -> None:
    refused_by_all(toast, make(**{INDEX: index.encode()}), 65, INDEX, whole=True)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({NORM: None}, f"{NORM} is missing"),
        ({NORM: None, UP: None}, "are missing"),
        ({"model.nrom.weight": np.ones(32)}, f"model.nrom.weight (did you mean {NORM}?)"),
        ({NORM: np.ones(3)}, f"{NORM} has shape [3], not [32]"),
    ],
    ids=["missing", "two", "unknown", "shape"],
)
def test_tensors_that_do_not_fit(toast: Toast, make: Make, tensors: dict, said: str) -> None:
    path = make(tensors=tensors)
    refused_by_all(toast, path, 65, f"{path}: the weights do not fit the model: ", said)


def test_weights_that_are_no_numbers(toast: Toast, make: Make) -> None:
    path = make(tensors={UP: np.full(SHAPES[UP], np.nan)})
    done = toast("decode", "-m", path, "-n", "3", "hi")
    assert done.returncode == 0
    assert done.stderr.decode().count("NaN") == done.stderr.decode().count("\n") == 1
    assert b"toast-model verify --values" in done.stderr
    assert toast("decode", "-q", "-m", path, "-n", "3", "hi").stderr == b""
    found = toast("model", "verify", "--values", path)
    assert found.returncode == 65
    assert found.stdout.decode().startswith(f"{WEIGHTS}: {UP}: 2048 NaN and 0 infinite values")
    assert toast("model", "verify", path).returncode == 0


def test_pickles_are_never_opened(toast: Toast, make: Make, tmp_path: Path) -> None:
    bomb = f"cos\nsystem\n(S'touch {tmp_path}/opened'\ntR.".encode()
    path = make(**{WEIGHTS: None, "pytorch_model.bin": bomb})
    said = "has its weights only as Python pickles, which are never opened"
    refused_by_all(toast, path, 66, f"{path}: {said}", whole=True)
    counts(toast, path)
    index = {"weight_map": dict.fromkeys(SHAPES, "pytorch_model.bin")}
    (path / INDEX).write_text(json.dumps(index))
    refused_by_all(toast, path, 65, "pytorch_model.bin", whole=True)
    assert not (tmp_path / "opened").exists()


def test_no_code_of_a_checkpoint_runs(toast: Toast, make: Make, tmp_path: Path) -> None:
    code = f"open('{tmp_path}/opened', 'w')".encode()
    path = make(
        {"model_file": "own.py", "auto_map": {"AutoModel": "own.Model"}}, **{"own.py": code}
    )
    refused_by_all(toast, path, 65, "asks to run its own Python code, which is never done")
    assert not (tmp_path / "opened").exists()


# ------------------------------------------------------------------------------------- config


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"hidden_size": "32"}, "config.json does not describe a model"),
        ({"num_attention_heads": 0}, "config.json does not describe a model"),
        ({"num_hidden_layers": -1}, "config.json does not describe a model"),
        ({"num_hidden_layers": 10**9}, "layers"),
        ({"hidden_size": 10**9}, "hidden_size 1000000000, which no tensor has"),
        ({"rope_theta": "no"}, "config.json has no usable rope_theta"),
        ({"model_type": "llamma"}, "model type 'llamma' is not supported"),
        ({"model_type": "../../x"}, "model type '../../x' is not supported"),
        ({"model_type": "x" * 5000}, "is not supported"),
        ({"model_type": "base"}, "is a part of others"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_config_that_describes_no_model(
    toast: Toast, make: Make, config: dict, said: str
) -> None:
    path = make(config)
    refused_by_all(toast, path, 65, said)
    if "model_type" in config or None in config.values():
        counts(toast, path)


@pytest.mark.parametrize(
    "config",
    [{"model_type": None}, {"vocab_size": None}, {"vocab_size": "4096"}, {"vocab_size": 0}],
    ids=str,
)
def test_a_config_without_what_all_need(toast: Toast, make: Make, config: dict) -> None:
    path = make(config)
    refused_by_all(toast, path, 65, f"{path}: config.json has no", whole=True)
    refused(toast("tokenize", "--count", "-m", path, "hi"), 65, "config.json has no")


@pytest.mark.parametrize("config", [b"", b"{", b"[1]", b"\xff\xfe", b'{"a":' * 100_000])
def test_a_config_that_is_none(toast: Toast, make: Make, config: bytes) -> None:
    refused_by_all(toast, make(**{"config.json": config}), 65, "config.json is not", whole=True)


def test_a_tokenizer_of_another_size(toast: Toast, make: Make) -> None:
    """Rows that no id reaches are padding; ids that reach no row are an error."""
    larger = {"model.embed_tokens.weight": np.zeros((5000, 32))}
    path = make({"vocab_size": 5000}, larger)
    assert toast("decode", "-m", path, "-n", "2", "hi").returncode == 0
    smaller = {"model.embed_tokens.weight": np.zeros((1000, 32))}
    (path / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 1000}))
    (path / WEIGHTS).write_bytes(safetensors({**random_tensors(), **smaller}))
    refused(toast("decode", "-m", path, "-n", "2", "hi"), 65, "toast-decode: ", "tokenizer")


def test_no_tokenizer(toast: Toast, make: Make) -> None:
    path = make(**{"tokenizer.json": None})
    for command in (["decode"], ["tokenize", "--count"]):
        refused(toast(*command, "-m", path, "hi"), 66, f"{path}: no tokenizer.json")
    assert toast("model", "info", path).returncode == 0


GROWING = {"type": "Replace", "pattern": {"String": "h"}, "content": "h" * 1000}
SEARCHING = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated",
             "invert": False}  # fmt: skip


@pytest.mark.parametrize(
    ("part", "prompt", "said"),
    [
        ({"normalizer": {"type": "Sequence", "normalizers": [GROWING] * 3}}, "h", "1e+09 times as"),
        ({"decoder": {"type": "Sequence", "decoders": [GROWING] * 3}}, "h", "1e+09 times as long"),
        ({"pre_tokenizer": SEARCHING}, "a" * 38 + "b", "Regex search error: retry-limit-in-match"),
    ],
    ids=["normalizer", "decoder", "pattern"],
)
def test_a_tokenizer_that_never_ends(make: Make, part: dict, prompt: str, said: str) -> None:
    document = json.loads(locate("crumb").read("tokenizer.json") or b"")
    path = make(**{"tokenizer.json": json.dumps({**document, **part}).encode()})
    taken = run_hostile([executable("tokenize"), "-m", path, "--count", "--raw", prompt])
    assert taken.code == 65 and said in taken.error and not taken.out


# ---------------------------------------------------------------------------------- file system


def test_links_in_a_circle(toast: Toast, make: Make, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    refused_by_all(toast, tmp_path / "loop", 66, str(tmp_path / "loop"), whole=True)
    path = make(**{WEIGHTS: None})
    (path / WEIGHTS).symlink_to(WEIGHTS)
    refused_by_all(toast, path, 66, WEIGHTS, "too many levels of symbolic links", whole=True)
    (path / "config.json").unlink()
    (path / "config.json").symlink_to("config.json")
    refused_by_all(toast, path, 66, str(path), whole=True)


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
@pytest.mark.parametrize("kind", [os.mkdir, os.mkfifo], ids=["directory", "fifo"])
def test_what_is_no_file(toast: Toast, make: Make, name: str, kind: Callable) -> None:
    path = make(**{name: None})
    kind(path / name)
    for command in (["decode", "-m", path, "hi"], ["model", "info", path]):
        done = toast(*command)
        refused(done, done.returncode, str(path))
        assert done.returncode in (65, 66)


@pytest.mark.parametrize("closed", ["", "config.json", WEIGHTS, "tokenizer.json"])
def test_no_permission_to_read(make: Make, closed: str) -> None:
    path = make()
    mode = (path / closed).stat().st_mode
    (path / closed).chmod(0)
    early = closed in ("", "config.json")
    name, *arguments = ["model", "info"] if early else ["decode", "-n", "2", "hi", "-m"]
    try:
        done = run_without_privileges(name, *arguments, path)
        refused(done, 66, str(path), "permission denied")
    finally:
        (path / closed).chmod(mode)


def test_a_toast_file_that_is_none(toast: Toast, tmp_path: Path) -> None:
    path = tmp_path / "x.toast"
    for data in (b"hello", b"", bytes(10_000), safetensors({"w": np.ones(3)})):
        path.write_bytes(data)
        refused_by_all(toast, path, 65, str(path), whole=True)
        refused(toast("tokenize", "--count", "-m", path, "hi"), 65, str(path))
