"""Finds an architecture in `mlx_lm.models` without running `mlx_lm/__init__`.

That file pulls in transformers and costs most of a second. So the package is put into `sys.modules`
as a module that has a path but has not run; the first attribute somebody asks of it (`mlx_lm.load`)
runs it after all, so that other users of mlx_lm in the same process notice nothing.
"""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

from toastkit.errors import DataError, UnavailableError
from toastkit.model.config import ModelConfig


class _Deferred(ModuleType):
    """A package whose `__init__` runs on the first access to one of its names."""

    def __getattr__(self, name: str):
        if self.__dict__.get("_running") or name in ("__all__", "__wrapped__", "__path__"):
            raise AttributeError(name)
        self.__dict__["_running"] = True
        spec = self.__spec__
        assert spec is not None and spec.loader is not None  # given by _mlx_lm
        spec.loader.exec_module(self)
        return getattr(self, name)


def _mlx_lm() -> ModuleType:
    module = sys.modules.get("mlx_lm")
    if module is not None:
        return module
    spec = importlib.machinery.PathFinder.find_spec("mlx_lm")
    if spec is None or spec.submodule_search_locations is None:
        raise UnavailableError("mlx_lm is not installed", hint="pip install mlx-lm")
    module = _Deferred("mlx_lm")
    module.__spec__ = spec
    module.__path__ = spec.submodule_search_locations
    module.__file__ = spec.origin
    module.__package__ = "mlx_lm"
    sys.modules["mlx_lm"] = module
    return module


def import_architecture(config: ModelConfig) -> ModuleType:
    """The `mlx_lm.models` module with `Model` and `ModelArgs` for a configuration.

    Raises DataError for a model type that mlx_lm does not know.
    """
    package = Path(next(iter(_mlx_lm().__path__)))
    if not re.fullmatch(r"[\w-]{1,100}", config.model_type):
        raise DataError(f"model type {config.model_type[:100]!r} is not supported")
    name = _module_name(package, config)
    if not (package / "models" / f"{name}.py").is_file():
        raise DataError(f"model type {config.model_type!r} is not supported by mlx_lm")
    module = importlib.import_module(f"mlx_lm.models.{name}")
    if not hasattr(module, "Model") or not hasattr(module, "ModelArgs"):
        raise DataError(f"model type {config.model_type!r} is a part of others, not a model")
    return module


def _module_name(package: Path, config: ModelConfig) -> str:
    """The file in mlx_lm/models for a model type, after mlx_lm's own two tables of synonyms.

    The tables are read out of utils.py as literals: importing that file would import transformers.
    """
    architectures = config.raw.get("architectures") or []
    if not isinstance(architectures, list):
        architectures = [architectures]
    architectures = [a for a in architectures if isinstance(a, str)]
    source = (package / "utils.py").read_text(encoding="utf-8")
    known = (package / "models" / f"{config.model_type}.py").is_file()
    if known and not any(a in source for a in architectures):
        return config.model_type
    tables = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name in ("MODEL_REMAPPING", "MODEL_ARCHITECTURE_REMAPPING"):
                tables[name] = ast.literal_eval(node.value)
    by_architecture = tables.get("MODEL_ARCHITECTURE_REMAPPING", {})
    for architecture in architectures:
        if (config.model_type, architecture) in by_architecture:
            return by_architecture[config.model_type, architecture]
    return tables.get("MODEL_REMAPPING", {}).get(config.model_type, config.model_type)
