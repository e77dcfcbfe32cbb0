"""Make modules native by changing their class, as all modules that change form do, and nothing else
of them. Neither MLX nor modules that are not ours are changed."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import mlx.nn as nn

from toastkit.native.forms.common import block_of, form_of
from toastkit.native.functions import Native, rebuilt_methods, under_its_name
from toastkit.native.library import BITS, GROUP_SIZES
from toastkit.native.modules.feed_forward import FeedForward, SwitchGLU, SwitchMLP
from toastkit.native.modules.norms import LayerNorm, Norm
from toastkit.native.modules.products import Embedding, Linear, PerHead, Product, Switch
from toastkit.native.modules.recurrent import Convolution
from toastkit.native.modules.rotary import (
    AlphaRope,
    DeepseekRope,
    FreqsRope,
    LongRope,
    NoRope,
    Rope,
    YarnRope,
)

# Source that reads a parameter of a module instead of calling the module.
READ_ELSEWHERE = re.compile(
    r"\bself\.(?:[\w\[\]]+\.)*(\w+)(?:\[\w+\])*(?:\.|\[[\"'])(?:weight|scales|biases)\b"
)


def native(cls: type) -> type:
    """Return the native class for one of mlx or mlx_lm; the class itself if there is none, or it is
    native."""
    if is_native(cls):
        return cls
    if mixin := MIXINS.get((cls.__module__, cls.__name__)):
        return _mixed_in(mixin, cls)
    methods = rebuilt_methods(cls)  # that call our functions
    rebuilt = under_its_name(cls, Native, **methods) if methods else cls
    from toastkit.native.known import layer_of
    from toastkit.native.layers.blocks import Layer  # they import modules/

    if layer := layer_of(cls):
        return under_its_name(rebuilt, layer)
    if block := block_of(cls):
        return under_its_name(rebuilt, Layer, _block=block)
    form = form_of(cls)
    return rebuilt if form is None else under_its_name(rebuilt, FeedForward, _form=form)


def use_native(modules: Iterable[nn.Module]) -> None:
    """Make modules native that have no weights of their own, or whose weights are never evicted."""
    modules = list({id(module): module for module in modules}.values())  # some are shared
    classes = {cls: native(cls) for cls in {*map(type, modules)}}
    # Modules that are default arguments of __init__ are shared by all models of the process.
    shared = {id(part) for cls in classes for part in _defaults(cls)}
    for module in modules:
        if id(module) not in shared and (cls := classes[type(module)]) is not type(module):
            module.__class__ = cls


def is_native(cls: type) -> bool:
    """True for a native class."""
    return issubclass(cls, Native)


def narrow_keys(module: Any) -> tuple[str, ...]:
    """Parameters that a native module can multiply by as stored, in 16 bits or float32: the weight,
    or the scales and biases of a quantised one; none if MLX multiplies."""
    if not isinstance(module, Product):
        return ()
    if not hasattr(module, "bits"):
        return ("weight",)
    known = module.mode == "affine" and module.bits in BITS and module.group_size in GROUP_SIZES
    return ("scales", "biases") if known else ()


@contextmanager
def last_position_only(modules: Iterable[Any]) -> Iterator[None]:
    """Context in which native modules multiply only the last position of x (..., positions,
    columns). Other modules go on with all positions."""
    modules = [module for module in modules if hasattr(type(module), "_last_only")]
    try:
        for module in modules:
            vars(module)["_last_only"] = True
        yield
    finally:
        for module in modules:
            vars(module).pop("_last_only", None)


def read_elsewhere(model: Any) -> frozenset[str] | None:
    """Last words of the paths of modules whose parameters are read by others, such as a head that
    is `x @ self.embed_tokens.weight.T`. None if there is no source to tell."""
    classes = {cls for kind in {*map(type, model.modules())} for cls in kind.__mro__}
    origins = {cls.__module__ for cls in classes if cls.__module__.startswith("mlx_lm.")}
    try:
        return frozenset().union(*map(_read_in, origins))
    except OSError:
        return None


@cache
def _read_in(name: str) -> frozenset[str]:
    """Raises OSError if there is no source."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        raise FileNotFoundError(name)
    return frozenset(READ_ELSEWHERE.findall(Path(file).read_text(encoding="utf-8")))


def _defaults(cls: type[nn.Module]) -> tuple[Any, ...]:
    initialisers = [vars(base).get("__init__") for base in cls.__mro__]
    return tuple(v for f in initialisers for v in getattr(f, "__defaults__", None) or ())


@cache
def _mixed_in(mixin: type, base: type) -> type:
    """Has the name of the class: architectures look for it."""
    return type(base.__name__, (mixin, base), {"__module__": __name__})


MIXINS: dict[tuple[str, str], type] = {  # by module and name, so that mlx_lm is not imported here
    ("mlx.nn.layers.linear", "Linear"): Linear,
    ("mlx.nn.layers.quantized", "QuantizedLinear"): Linear,
    ("mlx.nn.layers.embedding", "Embedding"): Embedding,
    ("mlx.nn.layers.quantized", "QuantizedEmbedding"): Embedding,
    ("mlx.nn.layers.normalization", "RMSNorm"): Norm,
    ("mlx.nn.layers.normalization", "LayerNorm"): LayerNorm,
    ("mlx.nn.layers.positional_encoding", "RoPE"): Rope,
    ("mlx.nn.layers.convolution", "Conv1d"): Convolution,
    ("mlx_lm.models.gemma4_text", "RMSNormNoScale"): Norm,
    ("mlx_lm.models.rope_utils", "SuScaledRoPE"): LongRope,
    ("mlx_lm.models.rope_utils", "YarnRoPE"): YarnRope,
    ("mlx_lm.models.rope_utils", "Llama3RoPE"): FreqsRope,
    ("mlx_lm.models.rope_utils", "ProportionalRoPE"): FreqsRope,
    ("mlx_lm.models.deepseek_v2", "DeepseekV2YarnRotaryEmbedding"): DeepseekRope,
    ("mlx_lm.models.smollm3", "NoPE"): NoRope,
    ("mlx_lm.models.hunyuan_v1_dense", "DynamicNTKAlphaRoPE"): AlphaRope,
    ("mlx_lm.models.hunyuan", "DynamicNTKAlphaRoPE"): AlphaRope,
    ("mlx_lm.models.mla", "MultiLinear"): PerHead,
    ("mlx_lm.models.mla", "QuantizedMultiLinear"): PerHead,
    ("mlx_lm.models.switch_layers", "SwitchGLU"): SwitchGLU,
    ("mlx_lm.models.switch_layers", "SwitchMLP"): SwitchMLP,
    ("mlx_lm.models.switch_layers", "SwitchLinear"): Switch,
    ("mlx_lm.models.switch_layers", "QuantizedSwitchLinear"): Switch,
}
