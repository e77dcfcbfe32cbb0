"""What `toast-model info` says of an architecture, against the model itself, loaded and run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from tests.model.checkpoints import loaded_model, open_store, quantised_qwen3
from tests.model.published import NAMES, write_published
from tests.model.reference import OLD_MLX_LM
from toastkit.model.files import ModelFiles
from toastkit.model.locate import locate
from toastkit.store.anatomy import PARTS, anatomy, part_of
from toastkit.store.skeleton import new_model
from toastkit.store.store import Store

# An old mlx_lm's qwen3_moe is made without a dense layer.
QWEN3_MOE = {"attention, MoE": 3} if OLD_MLX_LM else {"attention, MoE": 2, "attention, dense": 1}
KINDS = {
    "llama": {"attention, dense": 3},
    "llama_tied": {"attention, dense": 2},
    "qwen2": {"attention, dense": 2},
    "qwen3": {"attention, dense": 3},
    "gemma3_text": {"sliding attention, dense": 2, "attention, dense": 1},
    "phi3": {"attention, dense": 2},
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe_quantised": QWEN3_MOE,
    "qwen2_moe": {"attention, MoE": 2},
    "olmoe": {"attention, MoE": 2},
    "mixtral": {"attention, MoE": 2},
    "gpt_oss": {"sliding attention, MoE": 2, "attention, MoE": 2},
    "qwen3_next": {"recurrent, MoE": 2, "attention, MoE": 1},
    "qwen3_5": {"recurrent, dense": 2, "attention, dense": 1},
    "qwen3_5_moe": {"recurrent, MoE": 2, "attention, MoE": 1},
    "mamba2": {"recurrent": 2},
    "falcon_h1": {"attention and recurrent, dense": 2},
}
EXPERTS = {"total": 8, "active": 2, "shared": 0}
SHARED = ("qwen2_moe", "qwen3_next", "qwen3_5_moe")


def look(files: ModelFiles) -> tuple[Store, dict[str, Any]]:
    store = open_store(files)
    return store, anatomy(store, pytest.fail)


@pytest.mark.parametrize("name", NAMES)
def test_an_architecture(name: str, tmp_path: Path) -> None:
    files = locate(str(write_published(tmp_path / name, name)))
    store, found = look(files)
    assert found["layer_kinds"] == KINDS[name]
    assert found["layers"] == sum(KINDS[name].values()) == store.layer_count
    moe = any("MoE" in kind for kind in KINDS[name])
    shared = {"shared": 1} if name in SHARED else {}
    assert found["experts"] == ({**EXPERTS, **shared} if moe else None)
    # Parameters are those of the model before it is quantised.
    plain: Any = tree_flatten(new_model(files, store.config, store.fitted).parameters())
    sizes = {path: array.size for path, array in plain if path in store.names}
    assert found["parameters"] == sum(sizes.values())
    stacked = sum(n for path, n in sizes.items() if ".switch_" in path or ".experts." in path)
    assert bool(stacked) == moe
    assert found["active_parameters"] == sum(sizes.values()) - stacked * 6 // 8
    check_bytes(name, store, found)
    check_caches(files, found["cache"])


def check_bytes(name: str, store: Store, found: dict[str, Any]) -> None:
    """Bytes by part."""
    sizes = found["bytes"]
    assert tuple(sizes) == PARTS
    assert sum(sizes.values()) == sum(map(store.nbytes, store.names))
    assert sizes["embedding"] and sizes["mixer"] and sizes["other"]
    assert (sizes["head"] == 0) == found["tied_head"]
    assert found["tied_head"] != any("lm_head" in n for n in store.names)
    kinds = " ".join(KINDS[name])
    assert (sizes["experts"] > 0) == ("MoE" in kinds)
    assert (sizes["mlp"] > 0) == ("dense" in kinds or name in SHARED)


def check_caches(files: ModelFiles, found: dict[str, Any]) -> None:
    """Their sizes are those of the caches of the loaded model after a step."""
    model = loaded_model(files)
    cache = make_prompt_cache(model)
    model(mx.zeros((1, 1), mx.uint32), cache=cache)  # lazy: the CPU has no experts in 16 bits
    grows = window = state = 0
    for part in [part for layer in cache for part in getattr(layer, "caches", [layer])]:
        if getattr(part, "keys", None) is None:
            state += part.nbytes
        elif hasattr(part, "max_size"):
            window += part.nbytes * part.max_size // part.keys.shape[2]
        else:
            grows += part.nbytes * 1024 // part.keys.shape[2]
    assert (found["bytes_per_1024_tokens"], found["window_bytes"]) == (grows, window)
    assert found["state_bytes"] == state


def test_packings_are_those_of_the_weights(tmp_path: Path) -> None:
    """Whatever config.json says, from which a model is not packed either."""
    path = quantised_qwen3(tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    config["quantization"] = config["quantization_config"] = {"group_size": 64, "bits": 8}
    (path / "config.json").write_text(json.dumps(config))
    store, found = look(locate(str(path)))
    four = {"bits": 4, "group_size": 32, "mode": "affine"}
    scales = sum(name.endswith(".scales") for name in store.names)
    assert found["packed"] == [{**four, "modules": scales}]
    assert look(locate("crumb"))[1]["packed"] == []


def test_crumb_is_what_its_card_says() -> None:
    store, found = look(locate("crumb"))
    assert found["parameters"] == 7_719_280
    assert found["layer_kinds"] == {"recurrent, MoE": 6, "attention, MoE": 2}
    assert found["experts"] == {"total": 16, "active": 4, "shared": 1}
    assert found["tied_head"] and found["cache"]["dtype"] == "bfloat16"
    parts = {name: part_of(store, name.rpartition(".")[0]) for name in store.layer_names(0)}
    short = {name.split(".", 3)[3]: part for name, part in parts.items()}
    assert short["linear_attn.A_log"] == short["linear_attn.conv1d.weight"] == "mixer"
    assert short["mlp.switch_mlp.up_proj.weight"] == "experts"
    assert short["mlp.shared_expert.up_proj.weight"] == "mlp"
    assert short["mlp.gate.weight"] == short["input_layernorm.weight"] == "other"


def test_nothing_is_read() -> None:
    """Neither weights nor what the model makes of them is ever computed."""
    store = open_store("crumb")
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    anatomy(store, pytest.fail)
    assert mx.get_peak_memory() - before < 1 << 16


def test_what_cannot_be_run_is_told_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*rest, **named):
        raise TypeError("odd\nmodel")

    store = open_store("crumb")
    monkeypatch.setattr(type(store.model), "__call__", refuse)
    told: list[str] = []
    found = anatomy(store, told.append)
    assert told == ["the caches cannot be looked at: odd model"]
    assert "cache" not in found and found["parameters"] == 7_719_280
    assert found["layer_kinds"] == {"MoE": 8}
    assert found["experts"] == {"total": 16, "active": None, "shared": 1}
    assert found["active_parameters"] == found["parameters"]
