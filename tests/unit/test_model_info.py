"""What toast-model info reports from small files and headers alone, and its wording."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_model_files import files_with
from toastkit.errors import DataError, NoInputError
from toastkit.model.files import ModelFiles
from toastkit.model.info import anatomy_lines, count, human, summary, summary_lines
from toastkit.model.locate import locate
from toastkit.model.safetensors import ITEM_BYTES

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 4096,
    "max_position_embeddings": 32768,
}  # fmt: skip


def weights(**tensors: tuple[str, list[int]]) -> bytes:
    """A safetensors file of zeros."""
    header, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        first, at = at, at + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [first, at]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(at)


def checkpoint(path: Path, config: dict, **files: Any) -> ModelFiles:
    return files_with(path, **{"config.json": config, **files})


def test_crumb() -> None:
    facts = summary(locate("crumb"))
    assert facts["name"] == "crumb" and facts["model_type"] == "qwen3_next"
    assert facts["architecture"] == "Qwen3NextForCausalLM"
    assert (facts["vocabulary"], facts["context"]) == (4096, 8192)
    assert facts["dtypes"] == {"bfloat16": 2 * 7_719_280} and facts["chat_template"]
    assert facts["quantization"] is None and facts["gears"] == []
    assert facts["size"] == sum((locate("crumb").weight_files()[0].stat().st_size,))
    assert json.loads(json.dumps(facts)) == facts


def test_shards_dtypes_and_quantisation(tmp_path: Path) -> None:
    settings = {"bits": 4, "group_size": 64, "mode": "affine", "a.b": {"bits": 8}, "a.c": False}
    config = {**CONFIG, "quantization": settings, "quantization_config": settings}
    index = {"weight_map": {"w": "model-1.safetensors", "v": "model-2.safetensors"}}
    shards = {
        "model.safetensors.index.json": index,
        "model-1.safetensors": weights(w=("U32", [4, 8]), s=("BF16", [4])),
        "model-2.safetensors": weights(v=("F32", [3])),
    }
    facts = summary(checkpoint(tmp_path, config, **shards))
    assert facts["files"] == ["model-1.safetensors", "model-2.safetensors"]
    assert (facts["tensors"], facts["dtypes"]) == (3, {"U32": 128, "float32": 12, "bfloat16": 8})
    told = {"bits": 4, "group_size": 64, "mode": "affine", "exceptions": 2}
    assert facts["quantization"] == told
    lines = dict(summary_lines(facts))
    assert lines["quantised"] == "4 bits, groups of 64, affine, 2 modules otherwise"
    assert lines["dtypes"] == "U32 128 B, float32 12 B, bfloat16 8 B"
    assert lines["files"].startswith("2, ") and lines["context"] == "32,768 tokens"


@pytest.mark.parametrize(
    ("raw", "expected"),
    [({}, None), ({"quantization": {}}, None), ({"quantization": 7, "text_config": 3}, None),
     ({"quantization_config": {"quant_method": "mxfp4"}}, {"quant_method": "mxfp4"}),
     ({"text_config": {"quantization_config": {"quant_method": "x"}}}, {"quant_method": "x"}),
     ({"quantization": {"bits": [4], "group_size": 32}}, {"group_size": 32})],
)  # fmt: skip
def test_quantisation(tmp_path: Path, raw: dict, expected: dict | None) -> None:
    found = summary(checkpoint(tmp_path, {**CONFIG, **raw}))["quantization"]
    assert found == (None if expected is None else {**expected, "exceptions": 0})


def test_chat_template(tmp_path: Path) -> None:
    for number, (files, expected) in enumerate((
        ({}, False), ({"tokenizer_config.json": {"chat_template": "x"}}, True),
        ({"tokenizer_config.json": {"chat_template": None}}, False),
        ({"chat_template.jinja": b"x"}, True),
        ({"chat_template.json": {"chat_template": "x"}}, True),
    )):  # fmt: skip
        found = summary(checkpoint(tmp_path / str(number), CONFIG, **files))
        assert found["chat_template"] is expected


def test_a_config_of_odd_values(tmp_path: Path) -> None:
    for architectures in (None, [], "Named", [3], {"a": 1}, ["A\x1b[31m"]):
        facts = summary(checkpoint(tmp_path, {**CONFIG, "architectures": architectures}))
        lines = dict(summary_lines(facts))
        assert "\x1b" not in "".join(lines.values())
    assert lines["architecture"] == r"A\x1b[31m"
    facts = summary(checkpoint(tmp_path, {"model_type": "x", "vocab_size": 8}))
    assert dict(summary_lines(facts))["context"] == "no limit given"


def test_gears_of_a_baked_file(tmp_path: Path) -> None:
    inside = json.dumps(CONFIG).encode()
    tensors = {
        "__file__.config.json": ("U8", [len(inside)]), "w": ("BF16", [4]),
        "__gear__.low.w": ("U32", [2]), "__gear__.mid.w": ("U32", [4]), "__pad__.0": ("U8", [5]),
    }  # fmt: skip
    data = weights(**tensors)
    start = 8 + struct.unpack("<Q", data[:8])[0]
    (tmp_path / "x.toast").write_bytes(data[:start] + inside + data[start + len(inside) :])
    facts = summary(ModelFiles(tmp_path / "x.toast", "x"))
    assert (facts["tensors"], facts["dtypes"]) == (1, {"bfloat16": 8})
    assert (facts["gears"], facts["gear_bytes"]) == (["low", "mid"], 24)
    assert dict(summary_lines(facts))["gears"] == "low, mid: 24 B"


def test_what_is_broken_is_told_before_anything_else(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        summary(checkpoint(tmp_path, CONFIG, **{"model.safetensors": b"\xff" * 100}))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(NoInputError):
        summary(ModelFiles(tmp_path, "m"))


def test_the_lines_of_an_anatomy() -> None:
    found: dict[str, Any] = {
        "layers": 4, "layer_kinds": {"recurrent, MoE": 3, "attention, MoE": 1},
        "experts": {"total": 128, "active": 8, "shared": 1},
        "parameters": 30_532_122_624, "active_parameters": 3_345_000_000,
        "bytes": {"embedding": 1 << 20, "mixer": 5, "mlp": 0, "experts": 10**9, "head": 0},
        "tied_head": True, "packed": [], "window_not_kept": 4096, "cautions": ["rounds \u03b2"],
        "cache": {"dtype": "bfloat16", "bytes_per_1024_tokens": 98304, "window_bytes": 1,
                  "state_bytes": 2000},
    }  # fmt: skip
    assert list(anatomy_lines(found)) == [
        ("layers", "4: 3 recurrent, MoE; 1 attention, MoE"),
        ("experts", "128, 8 for a token, 1 shared"),
        ("parameters", "30.5 G, 3.35 G for a token"),
        ("bytes", "1.00 GB"),
        ("  embedding", "1.05 MB"),
        ("  attention, mixer", "5 B"),
        ("  experts", "1.00 GB"),
        ("  head", "is the embedding"),
        ("window", "4,096 tokens, which mlx_lm does not keep to"),
        ("caution", "mlx_lm rounds \u03b2"),
        ("cache", "98.3 kB per 1,024 tokens, at most 1 B of windows, 2.00 kB of state (bfloat16)"),
    ]
    del found["cache"]
    found.update(window_not_kept=None, cautions=[])
    found.update(experts=None, active_parameters=found["parameters"], tied_head=False)
    lines = dict(anatomy_lines(found))
    assert lines["parameters"] == "30.5 G"
    assert not {"experts", "cache", "window", "caution", "  head"} & set(lines)


def test_weights_packed_otherwise_than_config_says() -> None:
    four = {"bits": 4, "group_size": 32, "mode": "affine", "modules": 16}
    eight = {"bits": 8, "group_size": 32, "mode": "affine", "modules": 1}
    found = {
        "packed": [four, eight], "layers": 1, "layer_kinds": {}, "experts": None, "parameters": 1,
        "active_parameters": 1, "bytes": {}, "window_not_kept": None, "cautions": [],
    }  # fmt: skip
    said = "4 bits, groups of 32, affine (16 modules); 8 bits, groups of 32, affine (1 module)"
    of_four = {"bits": 4, "group_size": 32}
    for settings, told in (
        ({"bits": 8, "group_size": 64, "exceptions": 0}, said),
        ({**of_four, "exceptions": 0}, said),
        ({**of_four, "exceptions": 1}, None),
        ({**of_four, "mode": "mxfp4", "exceptions": 1}, said),
        ({"quant_method": "mxfp4", "exceptions": 0}, None),
        (None, None),
    ):
        assert dict(anatomy_lines(found, settings)).get("packed in fact") == told


def test_sizes() -> None:
    assert {size: human(size) for size in SIZES} == SIZES
    assert count(7_719_280) == "7.72 M" and count(12) == "12"


SIZES = {
    0: "0 B", 999: "999 B", 1000: "1.00 kB", 9994: "9.99 kB", 9996: "10.0 kB", 99_960: "100 kB",
    999_499: "999 kB", 999_500: "1.00 MB", 15_495_336: "15.5 MB", 10**12: "1.00 TB",
    10**16: "10000 TB",
}  # fmt: skip
