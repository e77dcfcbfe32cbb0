"""A model without weights: the architecture, with quantised classes for the modules that the
checkpoint stores quantised."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping
from copy import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from toastkit.errors import DataError, ToastError, as_data_error
from toastkit.model.architecture import import_architecture
from toastkit.model.config import ModelConfig, digits
from toastkit.model.files import ModelFiles
from toastkit.model.normalise import Fitted, fit
from toastkit.text.exact_numbers import counted

# What an architecture raises for a configuration that it does not support.
MISFITS = (
    TypeError, KeyError, ValueError, AttributeError, IndexError, ArithmeticError, RuntimeError,
    MemoryError, AssertionError,
)  # fmt: skip
LAYER_COUNTS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
# Fields that are array sizes, by their last word; a tensor packed in two bits has a sixteenth of
# its columns.
SIZES = re.compile(r"(?:^|_)(?:size|dim|heads|experts|rank|embd|inner|kernel|groups|model)$")
NO_SIZES = re.compile(r"window|chunk|block|image|patch|index")
MAX_PACKED = 16
# Modes of quantisation -> group sizes and bits that MLX has, the default first. Scales of all but
# affine are bytes.
MODES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "affine": ((64, 32, 128), (4, 2, 3, 5, 6, 8)),
    "mxfp4": ((32,), (4,)),
    "nvfp4": ((16,), (4,)),
    "mxfp8": ((32,), (8,)),
}
SAME_BYTES = ("mxfp4", "mxfp8")  # modes that are a quant_method of others, with MLX's bytes


def cannot_run(name: str, error: Exception) -> ToastError:
    """The error for a failed first pass. name: of the checkpoint. error: one of MISFITS."""
    return as_data_error(error, f"{name}: mlx_lm cannot run a model with this config.json")


def new_model(files: ModelFiles, config: ModelConfig, fitted: Fitted) -> nn.Module:
    """Instantiate the architecture of a configuration; its parameters are lazy and must not be
    evaluated.
    Raises DataError if config.json does not describe a model that mlx_lm has."""
    architecture = import_architecture(config)
    try:
        model = architecture.Model(_arguments(architecture.ModelArgs, fitted.config))
        if fitted.yarn is not None:
            _set_yarn(model, fitted.yarn)
    except MISFITS as error:
        failed = f"{files.name}: config.json does not describe a model"
        raise as_data_error(error, failed) from error
    return model.eval()


def _arguments(fields: Any, config: Mapping[str, Any]) -> Any:
    """What from_dict of a ModelArgs makes of a configuration. That of BaseModelArgs, which most
    inherit, computes the same signature again for each name: 5 ms of crumb's 190 until the first
    token."""
    from mlx_lm.models.base import BaseModelArgs

    usual: Any = BaseModelArgs.from_dict
    if fields.from_dict.__func__ is not usual.__func__:
        return fields.from_dict(config)
    names = inspect.signature(fields).parameters
    return fields(**{name: value for name, value in config.items() if name in names})


def _set_yarn(model: nn.Module, scaling: Mapping[str, Any]) -> None:
    """Set the RoPE frequencies of a YaRN scaling (arXiv 2309.00071, section 3.4) with the exact
    range between its two betas; mlx_lm rounds it to whole dimensions.

    scaling: factor, original_max_position_embeddings, rope_theta, and betas if not 32 and 1.
    """
    base, factor = scaling["rope_theta"], scaling["factor"]
    span = scaling["original_max_position_embeddings"] / (2 * math.pi)
    for module in model.modules():
        if type(module).__name__ != "YarnRoPE":
            continue
        ends = []
        for name, usual in (("beta_fast", 32), ("beta_slow", 1)):
            turns = scaling.get(name) or usual
            ends.append(module.dims * math.log(span / turns) / (2 * math.log(base)))
        low, high = max(ends[0], 0), min(ends[1], module.dims - 1)
        ramp = mx.clip((mx.arange(module.dims // 2) - low) / ((high - low) or 0.001), 0, 1)
        plain = base ** (mx.arange(0, module.dims, 2, dtype=mx.float32) / module.dims)
        module._freqs = 1 / (ramp / (factor * plain) + (1 - ramp) / plain)


def copied_model(module: nn.Module) -> nn.Module:
    """Copy a model's structure, down to its lists of layers, so that changing it leaves the
    original alone: some sanitizes drop a module (a tied head) or set attributes on the model."""
    made = copy(module)
    for name, child in module.items():
        if isinstance(child, nn.Module):
            made[name] = copied_model(child)
    return made


def fit_config(files: ModelFiles, config: ModelConfig) -> Fitted:
    """The configuration as the architecture's class reads it. Raises DataError, before allocating,
    for sizes that the weights do not have, and as `fit` does."""
    if config.raw.get("model_file") is not None:
        raise DataError(f"{files.name}: asks to run its own Python code, which is never done")
    entries = [entry for header in files.headers for entry in header.entries.values()]
    largest = max((d for e in entries if e.nbytes for d in e.shape), default=0) * MAX_PACKED
    for fields in config.levels:
        for name, value in fields.items():
            parts = value if isinstance(value, list) else [value]
            most = max((part for part in parts if type(part) is int), default=0)
            if name in LAYER_COUNTS and most > len(entries):
                raise DataError(
                    f"{files.name}: config.json has {name} {digits(most)}, "
                    f"the weights {counted(len(entries), 'tensor')}"
                )
            if SIZES.search(name) and not NO_SIZES.search(name) and most > max(largest, 4096):
                raise DataError(
                    f"{files.name}: config.json has {name} {digits(most)}, which no tensor has"
                )
    return fit(config, files.name)


def quantisation_of(files: ModelFiles, config: ModelConfig) -> dict | None:
    """The quantisation settings of a checkpoint: a default, and exceptions by module path
    (False: not quantised). None if it is not quantised.

    Raises DataError for a format that is not MLX's.
    """
    settings = config.raw.get("quantization")
    if settings is not None:
        if not isinstance(settings, dict) or not {"group_size", "bits"} <= set(settings):
            raise DataError(f"{files.name}: config.json has no usable quantization")
        return settings
    top, text = config.levels
    foreign = top.get("quantization_config", text.get("quantization_config"))
    if foreign is None and files.read("hf_quant_config.json") is not None:
        foreign = {"quant_method": "modelopt"}
    if not foreign:
        return None
    method = foreign.get("quant_method") if isinstance(foreign, dict) else None
    if method in SAME_BYTES:
        return default_settings(method)
    if method == "fp8":
        return None  # the architecture's sanitize dequantises it, or the weights do not fit
    if method is None:
        raise DataError(f"{files.name}: config.json has no usable quantization_config")
    raise DataError(
        f"{files.name}: quantised with {str(method)[:40]}, which is not read here",
        hint="convert it with mlx_lm.convert first",
    )


def default_settings(mode: str) -> dict[str, Any]:
    """Settings in config.json's terms. mode: a key of MODES."""
    groups, bits = MODES[mode]
    return {"group_size": groups[0], "bits": bits[0], "mode": mode}


def quantise_modules(
    model: nn.Module, settings: Mapping[str, Any], tensors: Mapping[str, mx.array]
) -> None:
    """Replace the modules that are stored quantised with their quantised classes.

    settings: as from quantisation_of. tensors: by name; only shapes and dtypes of weights,
    (rows, words) uint32, and scales, (rows, groups), are read: they give bits and group size of
    modules without an exception.
    Raises ValueError for a module whose packing is ambiguous.
    """

    def choose(path: str, module: nn.Module) -> bool | dict:
        if path in settings:
            return settings[path]
        if not hasattr(module, "to_quantized") or f"{path}.scales" not in tensors:
            return False
        return _packing(path, module, tensors)

    nn.quantize(
        model,
        group_size=settings["group_size"],
        bits=settings["bits"],
        mode=settings.get("mode", "affine"),
        class_predicate=choose,
    )


def _packing(path: str, module: nn.Module, tensors: Mapping[str, mx.array]) -> dict:
    columns = module.weight.shape[-1]
    scales = tensors[f"{path}.scales"]
    bits = tensors[f"{path}.weight"].shape[-1] * 32 // columns
    group_size = columns // scales.shape[-1]
    found = {"group_size": group_size, "bits": bits, "mode": "affine"}
    if scales.dtype == mx.uint8:
        modes = [mode for mode, sizes in MODES.items() if sizes == ((group_size,), (bits,))]
        if not modes:
            raise ValueError(f"{path} has {bits} bits in groups of {group_size}, which MLX has not")
        found["mode"] = modes[0]
    return found


def is_matrix(module: Any) -> bool:
    """True if a module's weight is a matrix that can be packed as MLX's are; not so an embedding,
    whose rows are looked up, nor a linear layer that packs itself otherwise (AFM 7)."""
    if isinstance(module, nn.Linear):
        return type(module).to_quantized is nn.Linear.to_quantized
    return hasattr(module, "to_quantized") and not isinstance(module, nn.Embedding)


def holds_experts(module: nn.Module) -> bool:
    """True if it is a stack of matrices, one per expert, of which a token uses a few."""
    names = {cls.__name__ for cls in type(module).__mro__}
    return not names.isdisjoint(("SwitchLinear", "QuantizedSwitchLinear"))


def layers_path(model: nn.Module) -> str:
    """The path of the decoder layers in the module tree, such as `model.layers`.
    Raises ValueError for a model without layers."""
    layers = list(getattr(model, "layers", None) or ())
    first = next((layer for layer in layers if layer is not None), None)
    found = None if first is None else _find_list(model, first, "")
    if found is None:
        raise ValueError("it has no decoder layers")
    return found


def _find_list(module: nn.Module, first: nn.Module, prefix: str) -> str | None:
    """The path of the list that holds `first`."""
    for name, value in module.items():
        path = f"{prefix}{name}"
        if isinstance(value, list):
            if any(item is first for item in value):
                return path
        elif isinstance(value, nn.Module):
            found = _find_list(value, first, f"{path}.")
            if found is not None:
                return found
    return None
