"""Modules whose products are native: they change their class, as all modules that change their form
do, and nothing else of them. Nothing of MLX is changed, and no module that is not ours."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from toastkit.native import operations
from toastkit.native.forms import Form, block_of, form_of
from toastkit.native.functions import Native, methods_anew
from toastkit.native.library import (
    BITS,
    DIGITS,
    FLOATS,
    GROUP_SIZES,
    NONE,
    Library,
    in_use,
    need,
)
from toastkit.native.operands import Operand, to_be_told
from toastkit.native.recurrent import Convolution
from toastkit.native.rotary import (
    AlphaRope,
    DeepseekRope,
    FreqsRope,
    LongRope,
    Rope,
    Unturned,
    YarnRope,
)

NARROW = (mx.float16, mx.bfloat16)
# Activations of experts by module and name, and what that of gpt-oss is called with in the kernels.
GATES = {
    ("switch_layers", "SwiGLU"): "silu", ("gemma4_text", "GeGLU"): "gelu",
    ("activations", "SwigluOAI"): "swiglu_oai",
}  # fmt: skip
OAI = (1.702, 7.0)
# Where an architecture reads a parameter of one of its modules, and does not call the module.
READ_ELSEWHERE = re.compile(
    r"\bself\.(?:[\w\[\]]+\.)*(\w+)(?:\[\w+\])*(?:\.|\[[\"'])(?:weight|scales|biases)\b"
)


def native(cls: type) -> type:
    """The class that computes natively in place of one of mlx or mlx_lm; the class itself where
    there is none, or it is native."""
    if is_native(cls):
        return cls
    if mixin := MIXINS.get((cls.__module__, cls.__name__)):
        return _derived(mixin, cls)
    made = _anew(cls) if methods_anew(cls) else cls
    from toastkit.native.blocks import Layer, ScaledLayer  # which are made of modules
    from toastkit.native.known import layer_of

    if layer := layer_of(cls):
        return _under_its_name(made, layer)
    if block := block_of(cls):
        return _under_its_name(made, ScaledLayer if block.scaled else Layer, _block=block)
    form = form_of(cls)
    return made if form is None else _under_its_name(made, FeedForward, _form=form)


def use_native(modules: Iterable[nn.Module]) -> None:
    """Has modules compute natively that hold no weights of their own, or none that ever leave."""
    modules = list(modules)
    # What a class has its modules be by default is one for all models of the process.
    shared = {id(part) for module in modules for part in _defaults(type(module))}
    for module in modules:
        if id(module) not in shared and (cls := native(type(module))) is not type(module):
            module.__class__ = cls


def is_native(cls: type) -> bool:
    """Whether it is such a class."""
    return issubclass(cls, Native)


def narrow_keys(module: Any) -> tuple[str, ...]:
    """The parameters that a native module multiplies as they are stored, in 16 bits or in float32:
    the weight, or, of a packed one, scales and biases; none where MLX multiplies."""
    if not isinstance(module, _Product):
        return ()
    if not hasattr(module, "bits"):
        return ("weight",)
    known = module.mode == "affine" and module.bits in BITS and module.group_size in GROUP_SIZES
    return ("scales", "biases") if known else ()


@contextmanager
def last_position_only(modules: Iterable[Any]) -> Iterator[None]:
    """While native modules multiply the last position of x (..., positions, columns) alone. Those
    that are not, and what only MLX has, go on with all."""
    modules = [module for module in modules if hasattr(type(module), "_last_only")]
    try:
        for module in modules:
            vars(module)["_last_only"] = True
        yield
    finally:
        for module in modules:
            vars(module).pop("_last_only", None)


def read_elsewhere(model: Any) -> frozenset[str] | None:
    """The last words of the paths of modules whose parameters others than themselves read: a head
    that is `x @ self.embed_tokens.weight.T`, say. None where the sources are not there to tell."""
    classes = {cls for kind in {*map(type, model.modules())} for cls in kind.__mro__}
    origins = {cls.__module__ for cls in classes if cls.__module__.startswith("mlx_lm.")}
    try:
        return frozenset().union(*map(_read_in, origins))
    except OSError:
        return None


@cache
def _read_in(name: str) -> frozenset[str]:
    """Raises OSError where there is no source."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        raise FileNotFoundError(name)
    return frozenset(READ_ELSEWHERE.findall(Path(file).read_text(encoding="utf-8")))


def _defaults(cls: type[nn.Module]) -> tuple[Any, ...]:
    given = [vars(base).get("__init__") for base in cls.__mro__]
    return tuple(v for f in given for v in getattr(f, "__defaults__", None) or ())


@cache
def _derived(mixin: type, base: type) -> type:
    """Under the name of the class: architectures ask for it."""
    return type(base.__name__, (mixin, base), {"__module__": __name__})


@cache
def _anew(base: type) -> type:
    """Its methods call our functions (functions.py)."""
    own = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (Native, base), {**methods_anew(base), **own})


@cache
def _under_its_name(base: type, *mixins: type, **own: Any) -> type:
    """Of the module of the architecture, too."""
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (*mixins, base), {**names, **own})


class _Product(Native):
    """What those that multiply have in common. They are modules of MLX, with its parameters.

    _wide: the dtype that activations have, and parameters for everybody but the products, where
    these meet them in 16 bits; None where parameters are in the dtype of the activations.
    _activation_bits: that packed weights meet, see kernels.h. _last_only: see last_position_only.
    They are of a module and not of the library: two engines of a process may differ.
    """

    _wide: mx.Dtype | None = None
    _activation_bits: int = DIGITS
    _last_only: bool = False

    def __getattr__(self, key: str) -> Any:
        """A parameter, for whoever else reads it, as if it had been widened when it was loaded."""
        value = super().__getattr__(key)  # type: ignore[misc]
        narrow = self._wide is not None and isinstance(value, mx.array) and value.dtype in NARROW
        return value.astype(self._wide) if narrow else value

    def operand(self: Any) -> Operand | None:
        """What it multiplies with; None for what only MLX has, or where more is to be done."""
        weight, scales = self["weight"], self.get("scales")
        if scales is None:
            return Operand(weight) if weight.dtype in FLOATS else None
        biases = self.get("biases")
        if self.mode == "affine":
            alike = biases is not None and biases.dtype == scales.dtype in FLOATS
            known = alike and self.bits in BITS and self.group_size in GROUP_SIZES
        else:
            known = self.mode == "mxfp4" and biases is None and scales.dtype == mx.uint8
        return Operand(weight, scales, biases, self.bits, self.group_size) if known else None

    def _multiply(
        self: Any, x: mx.array, experts: mx.array | None = None, bias: mx.array | None = None
    ) -> mx.array | None:
        """Products (..., rows) of x, (..., columns), or of x (..., m, columns) with the experts
        that are chosen, uint32 (...). bias: as of Library.multiply. None for what only MLX has:
        other dtypes, other packings."""
        if self._wide is not None:
            x = x.astype(self._wide)
        library, own = in_use(), self.operand()
        if library is None or own is None or x.dtype not in FLOATS:
            return None
        if experts is not None and experts.dtype != mx.uint32:
            experts = experts.astype(mx.uint32)
        if own.columns != x.shape[-1]:
            return None
        if self._last_only:
            x = x[..., -1:, :]
        weight, scales, biases, bits, group_size = own
        return library.multiply(
            x, weight, scales, biases, experts, bits, group_size, self._activation_bits, bias
        )


class Linear(_Product):
    """A matrix, and a bias if it has one."""

    def __call__(self: Any, x: mx.array) -> mx.array:
        bias = self.get("bias")
        wide = bias is not None and (self._wide or x.dtype) == bias.dtype == mx.float32
        y = self._multiply(x, bias=bias if wide else None)
        if y is None:
            return super().__call__(x)  # type: ignore[misc]
        return y if wide or bias is None else y + bias


@cache
def _rows(library: Library) -> Any:
    array, whole = ctypes.py_object, ctypes.c_int
    return library.function("rows", *[array] * 5, whole, whole)


class _Embedding(_Product):
    def __call__(self: Any, x: mx.array) -> mx.array:
        if (y := self._float_rows(x)) is not None:
            return y
        if self._wide is None:
            return super().__call__(x)  # type: ignore[misc]
        rows = self["weight"][x]
        if "scales" not in self:
            return rows.astype(self._wide)
        scales, biases = (self[key][x].astype(self._wide) for key in ("scales", "biases"))
        return mx.dequantize(rows, scales, biases, self.group_size, self.bits, self.mode)

    def _float_rows(self: Any, x: mx.array) -> mx.array | None:
        """In one operation, to the bit as below, where they become float32 from something else."""
        library, own = in_use(), self.operand()
        if library is None or own is None or x.dtype != mx.uint32:
            return None
        weight, scales, biases, bits, group_size = own
        wide = self._wide or (None if scales is None else scales.dtype)
        if wide is None or wide != mx.float32 or (scales is None) is not (biases is None):
            return None
        out, more = mx.array(0), [NONE if array is None else array for array in (scales, biases)]
        need(_rows(library)(out, x, weight, *more, bits, group_size))
        return out

    def as_linear(self: Any, x: mx.array) -> mx.array:
        y = self._multiply(x)
        return super().as_linear(x) if y is None else y  # type: ignore[misc]


class Switch(_Product):
    """A stack of matrices, of which each vector is multiplied with those that are chosen."""

    def __call__(
        self: Any, x: mx.array, indices: mx.array, sorted_indices: bool = False
    ) -> mx.array:
        y = self._multiply(x, indices)
        if y is None:
            return super().__call__(x, indices, sorted_indices)  # type: ignore[misc]
        return y + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else y


class PerHead(_Product):
    """A stack of matrices, one for each head."""

    def __call__(self: Any, x: mx.array, transpose: bool = True) -> mx.array:
        """x: (B, heads or 1, positions, columns); (..., rows) instead where not to be transposed.
        Gives (B, heads, positions, rows), or (..., columns)."""
        heads = operations.numbered(self["weight"].shape[:1])
        y = self._multiply(x, heads) if transpose else self._turned(x)
        return super().__call__(x, transpose) if y is None else y  # type: ignore[misc]

    def _turned(self: Any, x: mx.array) -> mx.array | None:
        if self.operand() is None or in_use() is None:
            return None
        weight = self["weight"]
        if "scales" in self:
            biases = None if self.get("biases") is None else self.biases
            how = self.group_size, self.bits, self.mode
            weight = mx.dequantize(weight, self.scales, biases, *how)
        return operations.matmul(x, weight)


def operands_of(parts: Sequence[Any]) -> list[Operand] | None:
    """What parts multiply float32 vectors with; None where one is not to be multiplied so."""
    found = []
    for part in parts:
        known = isinstance(part, (Linear, Switch, PerHead))
        wide = known and (part._wide or mx.float32) == mx.float32
        operand = part.operand() if wide else None
        if operand is None or ("bias" in part and part["bias"].dtype != mx.float32):
            return None
        found.append(operand)
    return found


class FeedForward(Native):
    """One of a known form: in one operation, where its parts are computed natively."""

    _form: Form

    def __call__(self: Any, x: mx.array) -> mx.array:
        y = _fed_forward(x, [self[name] for name in self._form.parts], self._form.activation)
        return super().__call__(x) if y is None else y  # type: ignore[misc]


class SwitchGLU(Native):
    """A layer's experts."""

    def __call__(self: Any, x: mx.array, indices: mx.array) -> mx.array:
        y = None
        if activation := gate_of(self.activation):
            parts = [self[name] for name in ("gate_proj", "up_proj", "down_proj")]
            y = _fed_forward(x, parts, activation, indices)
        return super().__call__(x, indices) if y is None else y  # type: ignore[misc]


def gate_of(activation: Any) -> str | None:
    """What the kernels call the activation of experts; None for one that they have not."""
    kind = type(activation)
    found = GATES.get((kind.__module__.removeprefix("mlx_lm.models."), kind.__name__))
    own = found != "swiglu_oai" or (activation._alpha, activation._limit) == OAI
    return found if own else None


def _fed_forward(
    x: mx.array, parts: list[Any], activation: str, experts: mx.array | None = None
) -> mx.array | None:
    """Of gate, up and down, or of gate and up in one, and down; None where only MLX has it, or
    biases are added in 16 bits."""
    library = in_use()
    own = [o for part in parts if isinstance(part, _Product) and (o := part.operand()) is not None]
    if library is None or len(own) < len(parts):
        return None
    biases = [part.get("bias") for part in parts]
    if (wide := parts[0]._wide) is not None:
        x = x.astype(wide)
    hidden = own[0].weight.shape[-2] // (2 if len(own) == 2 else 1)
    columns = [*[x.shape[-1]] * (len(own) - 1), hidden]
    if x.dtype not in FLOATS or [operand.columns for operand in own] != columns:
        return None
    if any(b is not None and (b.dtype, x.dtype) != (mx.float32, mx.float32) for b in biases):
        return None
    if experts is not None and experts.dtype != mx.uint32:
        experts = experts.astype(mx.uint32)
    for part in to_be_told(parts):
        part.was_used()
    return library.feed_forward(x, own, activation, experts, parts[0]._activation_bits, biases)


class Norm(Native):
    """An RMS norm; one without a weight, too."""

    def __call__(self: Any, x: mx.array) -> mx.array:
        return operations.rms_norm(x, self.get("weight"), self.eps)


class CentredNorm(Native):
    """A layer norm."""

    def __call__(self: Any, x: mx.array) -> mx.array:
        return operations.layer_norm(x, self.get("weight"), self.get("bias"), self.eps)


MIXINS: dict[tuple[str, str], type] = {  # by name: mlx_lm's are imported where they are used
    ("mlx.nn.layers.linear", "Linear"): Linear,
    ("mlx.nn.layers.quantized", "QuantizedLinear"): Linear,
    ("mlx.nn.layers.embedding", "Embedding"): _Embedding,
    ("mlx.nn.layers.quantized", "QuantizedEmbedding"): _Embedding,
    ("mlx.nn.layers.normalization", "RMSNorm"): Norm,
    ("mlx.nn.layers.normalization", "LayerNorm"): CentredNorm,
    ("mlx.nn.layers.positional_encoding", "RoPE"): Rope,
    ("mlx.nn.layers.convolution", "Conv1d"): Convolution,
    ("mlx_lm.models.gemma4_text", "RMSNormNoScale"): Norm,
    ("mlx_lm.models.rope_utils", "SuScaledRoPE"): LongRope,
    ("mlx_lm.models.rope_utils", "YarnRoPE"): YarnRope,
    ("mlx_lm.models.rope_utils", "Llama3RoPE"): FreqsRope,
    ("mlx_lm.models.rope_utils", "ProportionalRoPE"): FreqsRope,
    ("mlx_lm.models.deepseek_v2", "DeepseekV2YarnRotaryEmbedding"): DeepseekRope,
    ("mlx_lm.models.smollm3", "NoPE"): Unturned,
    ("mlx_lm.models.hunyuan_v1_dense", "DynamicNTKAlphaRoPE"): AlphaRope,
    ("mlx_lm.models.hunyuan", "DynamicNTKAlphaRoPE"): AlphaRope,
    ("mlx_lm.models.mla", "MultiLinear"): PerHead,
    ("mlx_lm.models.mla", "QuantizedMultiLinear"): PerHead,
    ("mlx_lm.models.switch_layers", "SwitchGLU"): SwitchGLU,
    ("mlx_lm.models.switch_layers", "SwitchLinear"): Switch,
    ("mlx_lm.models.switch_layers", "QuantizedSwitchLinear"): Switch,
}
