"""The table of model types agrees with what mlx_lm has, and what cannot work is refused by name."""

from __future__ import annotations

import ast
import importlib.util
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

if importlib.util.find_spec("mlx_lm") is None:
    pytest.skip("mlx_lm is not installed", allow_module_level=True)

from toastkit.errors import DataError
from toastkit.model import supported as module
from toastkit.model.architecture import import_architecture
from toastkit.model.config import ModelConfig
from toastkit.model.supported import (
    TESTED,
    UNSUPPORTED,
    check_supported,
    mlx_lm_folder,
    module_name,
    reads_on_host,
    supported,
)

ROWS = supported()
KNOWN = {row.model_type: row for row in ROWS}


def top_names(path: Path) -> set[str]:
    """What a file defines or imports at its top level, by a full parse."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
    return names


def test_every_architecture_of_mlx_lm_is_there() -> None:
    files = (mlx_lm_folder() / "models").glob("*.py")
    expected = {path.stem for path in files if {"Model", "ModelArgs"} <= top_names(path)}
    assert {row.module for row in ROWS} == expected
    assert {row.model_type for row in ROWS if row.model_type == row.module} == expected


def test_the_synonyms_are_there() -> None:
    from mlx_lm import utils

    for model_type, name in utils.MODEL_REMAPPING.items():
        assert KNOWN[model_type].module == name == module_name(model_type)
    architectures = getattr(utils, "MODEL_ARCHITECTURE_REMAPPING", {})
    for (model_type, architecture), name in architectures.items():
        (row,) = [r for r in ROWS if (r.model_type, r.module) == (model_type, name)]
        assert architecture in row.note
        assert module_name(model_type, [architecture]) == name
        assert module_name(model_type, architecture) == name
        assert module_name(model_type, ["Other"]) == module_name(model_type) == model_type


def test_the_table_is_in_order() -> None:
    keys = [(row.model_type.lower(), row.note) for row in ROWS]
    assert keys == sorted(keys) and len({(r.model_type, r.module) for r in ROWS}) == len(ROWS)
    assert {row.status for row in ROWS} == {"tested", "compared", "expected", "unsupported"}
    assert sorted(row.model_type for row in ROWS if row.status == "tested") == sorted(TESTED)
    assert all(row.note for row in ROWS if row.status == "unsupported")
    assert list(TESTED) == sorted(TESTED) and not set(TESTED) & set(UNSUPPORTED)
    assert KNOWN["mistral"].note.startswith("runs as llama, which is tested; ")
    assert KNOWN["qwen3_5"].note == "text only" and KNOWN["llama"].note == ""


@pytest.mark.parametrize("row", [r for r in ROWS if r.status == "unsupported"], ids=str)
def test_what_cannot_work_is_refused_with_the_reason(row) -> None:
    before = f"mlx_lm.models.{row.module}" in sys.modules
    with pytest.raises(DataError) as caught:
        import_architecture(ModelConfig(row.model_type, 16, None, {}))
    assert caught.value.message == f"model type {row.model_type!r} is not supported: {row.note}"
    assert (f"mlx_lm.models.{row.module}" in sys.modules) == before


@pytest.mark.parametrize(
    ("model_type", "hint"), [("llamma", "did you mean llama?"), ("zzzzzzzz", None)]
)
def test_a_misspelt_type_is_told_its_nearest(model_type: str, hint: str | None) -> None:
    with pytest.raises(DataError) as caught:
        import_architecture(ModelConfig(model_type, 16, None, {}))
    assert caught.value.hint == hint


def test_what_works_is_not_refused() -> None:
    for row in ROWS:
        if row.status != "unsupported":
            check_supported(row.model_type, row.module)
    check_supported("nosuch", module_name("nosuch"))  # somebody else's error
    with pytest.raises(DataError, match="is not supported"):
        module_name("../utils")


def test_metal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for platform, refused in (("linux", True), ("darwin", False)):
        monkeypatch.setattr(module.sys, "platform", platform)
        for name in module.METAL_ONLY:
            with pytest.raises(DataError) if refused else nullcontext():
                check_supported(name, name)


def test_steps_that_wait_for_their_token() -> None:
    assert reads_on_host("dbrx")
    assert not any(map(reads_on_host, TESTED))
