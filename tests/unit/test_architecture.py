"""Architectures come from mlx_lm.models by name, and from nowhere else."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("mlx.core")

from toastkit.errors import DataError
from toastkit.model.architecture import import_architecture
from toastkit.model.config import ModelConfig


def module_for(model_type: str, **raw) -> str:
    return import_architecture(ModelConfig(model_type, 16, None, raw)).__name__


@pytest.mark.parametrize("model_type", ["mistral", "llama", "qwen3_next", "phi-msft", "llava"])
def test_the_synonyms_are_those_of_mlx_lm(model_type: str) -> None:
    from mlx_lm.utils import _get_classes

    model, arguments = _get_classes({"model_type": model_type})
    module = import_architecture(ModelConfig(model_type, 16, None, {}))
    assert (module.Model, module.ModelArgs) == (model, arguments)


@pytest.mark.parametrize(
    "model_type",
    [
        "nosuch", "", ".", "..", "../utils", "../x", "../../os", "/etc/passwd", "os", "os.path",
        "cache", "base", "__init__", "llama.py", "llama\n", "llama\0", "x" * 5000, "é", "llama ",
        "llama;import os", "Llama/../llama",
    ],
)  # fmt: skip
def test_names_of_nothing_and_tricks_with_paths(model_type: str) -> None:
    before = set(sys.modules)
    with pytest.raises(DataError) as caught:
        module_for(model_type)
    assert "is not supported" in caught.value.message or "a part of others" in caught.value.message
    assert "\n" not in caught.value.message
    new = {name for name in set(sys.modules) - before if not name.startswith("mlx_lm.models.")}
    assert not {name for name in new if name.split(".")[0] == "mlx_lm"}


@pytest.mark.parametrize("architectures", [5, {"a": 1}, [5, None], "LlamaForCausalLM", [], None])
def test_odd_lists_of_architectures(architectures) -> None:
    assert module_for("llama", architectures=architectures) == "mlx_lm.models.llama"


def test_mlx_lm_is_not_run_until_a_name_of_it_is_asked_for() -> None:
    """Whichever name that is: one that it has, or one that it has not."""
    code = """
import sys
from toastkit.model.architecture import import_architecture
from toastkit.model.config import ModelConfig
import_architecture(ModelConfig("llama", 16, None, {}))
heavy = {"transformers", "mlx_lm.utils", "huggingface_hub"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
import mlx_lm
assert not heavy & set(sys.modules)
assert mlx_lm.__version__
for name in [name for name in sys.modules if name.split(".")[0] == "mlx_lm"]:
    del sys.modules[name]
import_architecture(ModelConfig("llama", 16, None, {}))
import mlx_lm
try:
    mlx_lm.no_such_name
except AttributeError:
    pass
else:
    raise SystemExit("no AttributeError")
from mlx_lm import generate, load
import mlx_lm.utils
assert mlx_lm.load is load is mlx_lm.utils.load and "transformers" in sys.modules
assert mlx_lm.models.llama is sys.modules["mlx_lm.models.llama"]
"""
    subprocess.run([sys.executable, "-c", code], check=True)
