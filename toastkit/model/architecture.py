"""Finds an architecture in `mlx_lm.models` without running `mlx_lm/__init__`.

That file imports transformers and takes most of a second. So the package is put into `sys.modules`
as a module that has a path but has not run; the first attribute requested of it (`mlx_lm.load`)
runs it, so that other users of mlx_lm in the same process notice nothing.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from toastkit.errors import DataError, did_you_mean
from toastkit.model.config import ModelConfig
from toastkit.model.supported import (
    check_supported,
    mlx_lm_folder,
    mlx_lm_spec,
    module_name,
    supported,
)


class _Deferred(ModuleType):
    """A package whose `__init__` runs on the first access to one of its names."""

    def __getattr__(self, name: str):
        if self.__dict__.get("_running") or name in ("__all__", "__wrapped__", "__path__"):
            raise AttributeError(name)
        self.__dict__["_running"] = True
        spec = self.__spec__
        assert spec is not None and spec.loader is not None  # set by _defer_mlx_lm
        spec.loader.exec_module(self)
        return getattr(self, name)


def _defer_mlx_lm() -> None:
    if "mlx_lm" in sys.modules:
        return
    spec = mlx_lm_spec()
    module = _Deferred("mlx_lm")
    module.__spec__ = spec
    module.__path__ = spec.submodule_search_locations or []
    module.__file__ = spec.origin
    module.__package__ = "mlx_lm"
    sys.modules["mlx_lm"] = module


def import_architecture(config: ModelConfig) -> ModuleType:
    """Import the `mlx_lm.models` module with `Model` and `ModelArgs` for a configuration.

    Raises DataError for a model type that mlx_lm does not know, or that cannot work here.
    """
    _defer_mlx_lm()
    name = module_name(config.model_type, config.raw.get("architectures"))
    check_supported(config.model_type, name)
    if not (mlx_lm_folder() / "models" / f"{name}.py").is_file():
        raise DataError(
            f"model type {config.model_type!r} is not supported by mlx_lm",
            hint=did_you_mean(
                config.model_type, [row.model_type for row in supported()], cutoff=0.8
            ),
        )
    module = importlib.import_module(f"mlx_lm.models.{name}")
    if not hasattr(module, "Model") or not hasattr(module, "ModelArgs"):
        raise DataError(f"model type {config.model_type!r} is a part of others, not a model")
    return module
