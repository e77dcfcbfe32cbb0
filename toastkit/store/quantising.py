"""Choose which modules of a model to quantise and how, as `mlx_lm.convert` does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from toastkit.errors import UsageError
from toastkit.store.precision import check_finite
from toastkit.store.skeleton import MODES, default_settings
from toastkit.store.store import Store

# Half-way between the values of e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
E2M1_LIMITS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
PACKED_TOGETHER = 32  # numbers that MLX's CPU backend quantises at once: two groups of nvfp4
# By mode, a power of two of which a group's scale is still one of its bytes. That of smaller
# weights alone wraps around in MLX, to 2^126.
LEAST = {"mxfp4": 2.0**-124, "mxfp8": 2.0**-117}


@dataclass(frozen=True)
class QuantizationOptions:
    """How to quantise weights. bits, group_size: None for the mode's default. mode: a key of MODES.
    Raises UsageError for what MLX does not support."""

    bits: int | None = None
    group_size: int | None = None
    mode: str = "affine"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UsageError(f"no such quantisation mode: {self.mode[:40]} ({', '.join(MODES)})")
        groups, bits = MODES[self.mode]
        for word, value, known in (
            ("bits", self.bits, bits), ("group size", self.group_size, groups)
        ):  # fmt: skip
            if value is not None and value not in known:
                names = ", ".join(map(str, sorted(known)))
                raise UsageError(f"{self.mode} quantisation has no {word} {value}, only {names}")

    def settings(self) -> dict[str, Any]:
        """The settings in config.json's terms."""
        asked = {"group_size": self.group_size, "bits": self.bits}
        chosen = {key: value for key, value in asked.items() if value is not None}
        return default_settings(self.mode) | chosen


Quantise = Callable[[mx.array], dict[str, mx.array]]


def packing(group_size: int, bits: int, mode: str) -> Quantise:
    """Return the function that quantises one module: (..., columns) in any floating dtype -> weight
    (..., columns * bits / 32) uint32, scales and, in affine mode, biases
    (..., columns / group_size). It is lazy once the weights have been looked at, and raises
    DataError for NaN and infinite ones. Weights for which the mode has no scale become 0."""
    on_cpu = mx.default_device() == mx.Device(mx.cpu)

    def quantise(weight: mx.array) -> dict[str, mx.array]:
        check_finite(weight)
        if mode in LEAST:
            weight = mx.where(mx.abs(weight) < LEAST[mode], 0, weight)
        if weight.size % PACKED_TOGETHER:
            return _with_one_row_more(weight)
        packed, *parameters = mx.quantize(weight, group_size, bits, mode=mode)
        if on_cpu and mode.endswith("fp4"):
            packed = _packed_e2m1(weight, parameters[0], mode)
        return dict(zip(("weight", "scales", "biases"), (packed, *parameters)))

    def _with_one_row_more(weight: mx.array) -> dict[str, mx.array]:
        rows = weight.reshape(-1, weight.shape[-1])
        made = quantise(mx.pad(rows, [(0, 1), (0, 0)]))
        return {part: a[:-1].reshape(*weight.shape[:-1], -1) for part, a in made.items()}

    return quantise


def _packed_e2m1(weight: mx.array, scales: mx.array, mode: str) -> mx.array:
    """Return the packed weights that mx.quantize gives with these scales, (..., columns / 8)
    uint32, in a fifth of its time on the CPU, where it measures the distance of each weight to all
    sixteen values. As there, what lies half-way between two values becomes the smaller one, and a
    group whose scale is 0 becomes 0; what is too large for the largest scale becomes the largest
    value, and not 0."""
    if mode == "nvfp4":
        unit = mx.from_fp8(scales, weight.dtype)
    else:
        unit = mx.power(mx.array(2.0, weight.dtype), scales.astype(weight.dtype) - 127)
    unit = unit[..., None]
    rows = weight.reshape(*scales.shape, -1) / unit
    rows = mx.where(unit == 0, 0, rows).astype(mx.float32)
    size = mx.abs(rows)
    code = (rows < -E2M1_LIMITS[0]).astype(mx.uint8) * 8
    for limit in E2M1_LIMITS:
        code = code + (size > limit).astype(mx.uint8)
    code = code.reshape(*weight.shape[:-1], -1, 8).astype(mx.uint32)
    return mx.sum(code << mx.arange(0, 32, 4, mx.uint32), axis=-1)


def choose_modules(
    store: Store, options: QuantizationOptions
) -> tuple[dict[str, Quantise], dict[str, Any]]:
    """Return the quantising function of each module, by path, and the `quantization` for
    config.json.

    As mlx_lm.utils.quantize_model: every quantisable module whose rows divide into groups, except
    those that the architecture excludes or wants in other bits.
    Raises UsageError if the checkpoint is quantised already, or nothing in it can be.
    """
    name = store.files.name
    if store.quantization is not None:
        raise UsageError(f"{name} is quantised already")
    settings = options.settings()
    base = dict(settings)
    predicate = getattr(store.model, "quant_predicate", None)
    chosen: dict[str, Quantise] = {}
    for path, module in leaf_modules(store.model):
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % base["group_size"]:
            continue
        answer = True if predicate is None else predicate(path, module)
        if not answer:
            continue
        if isinstance(answer, dict):
            settings[path] = answer
        try:
            made = module.to_quantized(**(answer if isinstance(answer, dict) else base))
        except (ValueError, TypeError) as error:
            reason = str(error).strip().split("\n")[0][:200]
            raise UsageError(f"{name}: {path} cannot be quantised so: {reason}") from error
        chosen[path] = packing(made.group_size, made.bits, getattr(made, "mode", "affine"))
    if not chosen:
        size = base["group_size"]
        raise UsageError(f"{name}: no module's rows divide into groups of {size}")
    return chosen, settings


def leaf_modules(model: nn.Module) -> list[tuple[str, Any]]:
    """(path, module) of all modules without children."""
    leaves: Any = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    return leaves
