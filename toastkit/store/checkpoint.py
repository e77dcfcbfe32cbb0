"""Reads a checkpoint's weights into a model: sharded safetensors, plain or MLX-quantised."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from toastkit.errors import DataError
from toastkit.model.architecture import import_architecture
from toastkit.model.config import ModelConfig
from toastkit.model.files import ModelFiles

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def load_model(files: ModelFiles, config: ModelConfig, dtype: str | None) -> nn.Module:
    """The model with its weights on the default device.

    dtype: activations and unquantised weights are cast to it; None keeps the checkpoint's own.
    Raises DataError for a checkpoint that is broken or that mlx_lm has no architecture for.
    """
    if config.raw.get("model_file") is not None:
        raise DataError(f"{files.name}: asks to run its own Python code, which is never done")
    architecture = import_architecture(config)
    try:
        model = architecture.Model(architecture.ModelArgs.from_dict(config.raw))
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise DataError(f"{files.name}: config.json does not describe a model: {error}") from error
    weights = _read_tensors(files)
    try:
        if hasattr(model, "sanitize"):
            weights = model.sanitize(weights)
        _quantise_modules(files, config, model, weights)
        model.eval()
        model.load_weights(list(weights.items()), strict=True)
        if dtype is not None:
            model.set_dtype(DTYPES[dtype])
        mx.eval(model.parameters())
    except (ValueError, KeyError, RuntimeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise DataError(f"{files.name}: the weights do not fit the model: {reason}") from error
    return model


def _read_tensors(files: ModelFiles) -> dict[str, mx.array]:
    """All tensors by name, not yet read: MLX reads each when it is first needed."""
    weights: dict[str, mx.array] = {}
    for path in files.weight_files():
        try:
            tensors = mx.load(str(path))
            assert isinstance(tensors, dict)  # what a safetensors file gives
            weights.update(tensors)
        except (RuntimeError, ValueError, OSError) as error:
            reason = str(error).strip().split("\n")[0]
            raise DataError(f"{files.name}: cannot read {path.name}: {reason}") from error
    return weights


def _quantise_modules(
    files: ModelFiles, config: ModelConfig, model: nn.Module, weights: dict[str, mx.array]
) -> None:
    """Turns the layers that the checkpoint stores quantised into their quantised classes.

    `quantization` holds a default and, by module path, exceptions (or false: kept as it is).
    """
    settings = config.raw.get("quantization")
    if settings is None:
        if foreign := config.raw.get("quantization_config"):
            method = foreign.get("quant_method", "?") if isinstance(foreign, dict) else "?"
            raise DataError(
                f"{files.name}: quantised with {method}, which is not read here",
                hint="convert it with mlx_lm.convert first",
            )
        return

    def choose(path: str, module: nn.Module) -> bool | dict:
        if path in settings:
            return settings[path]
        return hasattr(module, "to_quantized") and f"{path}.scales" in weights

    nn.quantize(
        model,
        group_size=settings["group_size"],
        bits=settings["bits"],
        mode=settings.get("mode", "affine"),
        class_predicate=choose,
    )


def activation_dtype(on_cpu: bool) -> str | None:
    """The dtype a checkpoint runs in unless told otherwise: float32 on the CPU, where MLX emulates
    the 16-bit types, and the checkpoint's own (None) elsewhere."""
    return "float32" if on_cpu else None
