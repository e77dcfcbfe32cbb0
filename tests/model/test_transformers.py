"""Checkpoints that transformers saved give the log-probabilities that transformers gives for them,
with the names of its configurations, old and new; and where they do not, it is said.

tests/oracle records; torch is not needed here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.model.checkpoints import SIZES, open_model, write_random
from tests.model.reference import OLD_MLX_LM, needs_new_mlx_lm
from tests.native_library import NATIVE
from tests.oracle.cases import CASES, LEFT_OUT, LENGTH, PLAIN, POSITIONS, VOCAB, WINDOW
from tests.oracle.old_names import old_names
from tests.oracle.weights import prompt, weight
from toastkit.errors import DataError
from toastkit.model.supported import COMPARED, TESTED, TEXT_ONLY, supported

if OLD_MLX_LM:
    pytest.skip("what is recorded holds for a newer mlx_lm", allow_module_level=True)

RECORDED = Path(__file__).parents[1] / "oracle" / "recorded"
NAMES = sorted([*PLAIN, *CASES])
TOLERANCE = 4e-4  # of a log-probability; recorded to 1e-4
# What mlx_lm does not compute, and a part of the message.
REFUSED = {
    "glm": "rotates 100% of each head, not 50%",
    "llama_gelu": "does not compute hidden_act gelu_pytorch_tanh",
    "minicpm3": "does not scale the logits of a tied head",
    "qwen3_moe_yarn": "knows no rope scaling of type yarn",
}
# Past its window mlx_lm looks further back.
WINDOWED = {
    "dots1_window", "gemma2", "mistral", "mixtral_window", "phi3_window", "qwen2_window",
    "qwen3_window", "starcoder2_window",
}  # fmt: skip
# What mlx_lm computes otherwise: a part of the warning, and how far off the oracle it may be.
CAUTIONED = {
    "ernie4_5_moe": ("without their correction bias", 9),
    "gemma": ("computes GELU exactly", 0.02),
    "gpt_bigcode": ("computes GELU exactly", 0.002),
    "gpt_neox": ("approximates GELU", 0.01),
    "gpt_neox_whole": ("approximates GELU", 0.01),
    "jamba": ("weighs the chosen experts", 0.3),
    "llama_longrope": ("by long_factor also within the first 64 tokens", 9),
    "llama_longrope_long": ("by long_factor also within the first 32 tokens", TOLERANCE),
    "phi3_longrope": ("by long_factor also within the first 64 tokens", 9),
    "phi3_longrope_long": ("by long_factor also within the first 32 tokens", TOLERANCE),
    "starcoder2": ("computes GELU exactly", 0.02),
    "starcoder2_window": ("computes GELU exactly", 0.02),
}


def recorded(name: str) -> dict[str, Any]:
    return json.loads((RECORDED / f"{name}.json").read_text())


def write(path: Path, made: dict[str, Any]) -> Path:
    """The checkpoint, made anew of names and shapes."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(made["config"]))
    arrays = {name: weight(name, tuple(shape)) for name, shape in made["tensors"].items()}
    if made["config"]["model_type"] == "gpt_oss":
        arrays = split_experts(arrays)
    tensors = {name: mx.array(array) for name, array in arrays.items()}
    mx.save_safetensors(str(path / "model.safetensors"), tensors, metadata={"format": "pt"})
    return path


def write_recorded(path: Path, architecture: str) -> Path:
    """A checkpoint of an architecture, of those that are recorded."""
    name = next(n for n in NAMES if n == architecture or n.startswith(f"{architecture}_"))
    return write(path, recorded(name))


def split_experts(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """gpt_oss in the layout of mlx_lm.convert: transformers does not save the four bits in which it
    is published."""
    made = {}
    for name, array in arrays.items():
        name = name.replace("_proj_bias", "_proj.bias")
        if ".experts." in name and not name.endswith(".bias"):
            name, array = f"{name}.weight", array.swapaxes(-1, -2)
        if "gate_up_proj" in name:
            axis = -1 if name.endswith(".bias") else -2
            for n, part in enumerate(("gate_proj", "up_proj")):
                half = np.arange(n, array.shape[axis], 2)
                made[name.replace("gate_up_proj", part)] = np.take(array, half, axis)
        else:
            made[name] = array
    return made


def score(path: Path, config: dict[str, Any], native: str) -> tuple[np.ndarray, list[str]]:
    """Log-probabilities (LENGTH, VOCAB), and what was said."""

    (path / "config.json").write_text(json.dumps(config))
    said: list[str] = []
    engine = open_model(path, device_name="cpu", notify=said.append, native=native)
    logits = np.array(engine.score(prompt(LENGTH, VOCAB), engine.new_cache()), np.float64)
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True), said


def test_each_is_recorded_or_left_out_for_a_reason() -> None:
    assert sorted(path.stem for path in RECORDED.glob("*.json")) == NAMES
    assert {*REFUSED, *WINDOWED, *CAUTIONED} <= set(NAMES)
    there = {row.model_type for row in supported()}
    types = {CASES.get(name, (name,))[0] for name in NAMES} - set(LEFT_OUT)
    assert types <= there and set(LEFT_OUT) <= there
    assert set(TEXT_ONLY) <= {*types, "qwen3_5_moe_text"}


def test_what_is_said_to_be_compared_is() -> None:
    agreeing = [name for name in NAMES if name not in REFUSED and name not in CAUTIONED]
    types = {recorded(name)["config"]["model_type"] for name in agreeing}
    assert list(COMPARED) == sorted(types - set(TESTED))


@pytest.mark.parametrize("name", NAMES)
def test_it_is_as_transformers(name: str, tmp_path: Path) -> None:
    made = recorded(name)
    assert made["old_agrees"]  # what is called the old names are what transformers takes for them
    path = write(tmp_path / name, made)
    expected = np.array(made["log_probabilities"])
    # By MLX's operations, and by our own where there are some.
    for config, native in ((made["config"], "off"), (old_names(made["config"]), NATIVE)):
        if name in REFUSED:
            with pytest.raises(DataError, match=REFUSED[name]):
                score(path, config, native)
            continue
        found, said = score(path, config, native)
        assert found.max() > found.min() + 1  # a model that looks at its input
        caution, tolerance = CAUTIONED.get(name, ("", TOLERANCE))
        rows = [n for n, at in enumerate(POSITIONS) if name not in WINDOWED or at < WINDOW]
        apart = np.abs(found[list(POSITIONS)] - expected).max(-1)
        assert apart[rows].max() < tolerance
        wanted = [caution] * (name in CAUTIONED) + [f"past {WINDOW} tokens"] * (name in WINDOWED)
        assert len(said) == len(wanted) and all(a in b for a, b in zip(wanted, said))
        if name in WINDOWED:
            assert apart.max() > 0.1


def test_a_config_that_an_architecture_cannot_run(tmp_path: Path) -> None:
    """Which shows in its first pass: four layers, and the sixth is looked at."""
    made = recorded("gemma3_text")
    config = {k: v for k, v in made["config"].items() if k != "layer_types"}
    with pytest.raises(DataError, match="cannot run a model with this config.json"):
        score(write(tmp_path / "m", made), {**config, "sliding_window_pattern": 6}, NATIVE)


@needs_new_mlx_lm
def test_what_is_cautioned_of_plamo3(tmp_path: Path) -> None:
    """Which transformers has not: mlx_lm's prompts are not as its steps."""
    config = {"model_type": "plamo3", **SIZES, "window_size": 8}
    said: list[str] = []
    engine = open_model(write_random(tmp_path / "m", config), notify=said.append, native="off")
    assert any("sees one key more in a prompt than in steps" in line for line in said)
    for count, alike in ((8, True), (20, False)):
        ids, cache = prompt(count, SIZES["vocab_size"]), engine.new_cache()
        whole = engine.prefill(ids, engine.new_cache())
        *_, last = (engine.step(one, cache) for one in ids)
        assert mx.allclose(whole, last, atol=1e-4) == alike
