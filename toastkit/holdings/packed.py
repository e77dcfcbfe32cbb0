"""Modules with packed weights: two ways to multiply (paper 003, section 7).

Fused: MLX's quantised matmul (`mx.quantized_matmul`, and `mx.gather_qmm` for experts) applies the
scales as it goes, reading a quarter of the bytes. Dequantised: the dense weight is computed once
and multiplied as usual, which holds it twice; for modules whose rows fit no group size of MLX, and
on request. MLX's kernels take any number of rows, and on the CPU are no slower than its dense
matmul for 64 of them, so prefill is fused too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from toastkit.holdings.derived import derived
from toastkit.holdings.forms import Form
from toastkit.native.operands import Operand
from toastkit.native.replacing import is_native, native
from toastkit.store.precision import Rows, dequantise_rows, group_size_of


def fused_is_exact(dtype: mx.Dtype) -> bool:
    """True if MLX's quantised matmul accumulates in float32 for activations of that dtype. On the
    CPU it accumulates 16-bit ones in 16 bits, which is off by a tenth over 2,048 columns."""
    return dtype == mx.float32 or mx.default_device() != mx.Device(mx.cpu)


@dataclass
class PathCounts:
    """Matmuls of packed modules, counted as graphs are built: fused, or from a dequantised copy
    that was there (hit) or had to be made (miss)."""

    fused: int = 0
    hit: int = 0
    miss: int = 0


class Kind(NamedTuple):
    """What a module is turned into. cls: its class. attributes: the whole of its __dict__."""

    cls: type
    attributes: dict[str, Any]


class _Packed:
    """Mixin for the class of a packed module.

    packed_bits: of a weight. _columns: of the original. _fused: true if the base class multiplies
    packed weights. _original: class and attributes of the original. _dense: the dequantised copy,
    or None. _counts: shared by all modules of a model. _grown: called with the bytes of the copy.
    """

    packed_bits: int
    _columns: int
    _fused: bool
    _original: Kind
    _dense: Any
    _counts: PathCounts
    _grown: Callable[[int], None]

    def __call__(self, *args: Any, **rest: Any) -> mx.array:
        if self._fused:
            self._counts.fused += 1
            return super().__call__(*args, **rest)  # type: ignore[misc]
        if self._dense is None:
            self._counts.miss += 1
            dense: Any = self._dequantised()
            vars(self)["_dense"] = dense
            self._grown(dense.weight.nbytes)
        else:
            self._counts.hit += 1
        return self._dense(*args, **rest)

    def operand(self) -> Operand | None:
        """See native.modules; None if the dequantised copy is multiplied."""
        return super().operand() if self._fused else None  # type: ignore[misc]

    def was_used(self) -> None:
        """See native.operands: the operand was used in a matmul."""
        self._counts.fused += 1

    def _dequantised(self) -> nn.Module:
        """The original module with the dequantised weight, in the activations' dtype."""
        own: Any = self
        rows = Rows(*(own[name] for name in Rows._fields))
        weight = dequantise_rows(rows, self.packed_bits, self._columns)
        rest = {name: value for name, value in own.items() if name not in Rows._fields}
        dtype = activations(self._original.attributes, rows.scales.dtype)
        return _bare(self._original, {**rest, "weight": weight.astype(dtype)})


def activations(attributes: Mapping[str, Any], scales: mx.Dtype) -> mx.Dtype:
    """The dtype of the activations of a packed matrix: that of its scales, unless native matmuls
    keep these in 16 bits. attributes: of the original."""
    return attributes.get("_wide") or scales


def _bare(kind: Kind, parameters: Mapping[str, Any]) -> Any:
    """A module of that class, attributes and parameters, without running __init__."""
    module: Any = nn.Module.__new__(kind.cls)
    vars(module).update(kind.attributes)
    dict.update(module, parameters)
    return module


def is_fused(attributes: Mapping[str, Any], scales: mx.Dtype, form: Form, columns: int) -> bool:
    """True if a matrix is multiplied as it is packed in a form, False if from a dequantised copy.
    attributes: of the original. scales: their dtype. columns: of the original."""
    return form.fused and columns % 32 == 0 and fused_is_exact(activations(attributes, scales))


def packed_class(
    cls: type, attributes: Mapping[str, Any], rows: Rows, form: Form, columns: int
) -> Kind:
    """The class and attributes of a module in a packed form.

    cls, attributes: of the original, a class with `to_quantized`. rows: from quantise_rows, padded
    if columns, the original's, is no multiple of 32.
    """
    fused = is_fused(attributes, rows.scales.dtype, form, columns)
    base = original = Kind(cls, dict(attributes))
    if fused:
        # Never evaluated: only its class and settings are used.
        shape = (*rows.weight.shape[:-1], columns)
        made = _bare(original, {"weight": mx.zeros(shape)}).to_quantized(
            group_size=group_size_of(columns), bits=form.bits
        )
        inherited = {"_wide", "_activation_bits"} & attributes.keys()
        same = {name: attributes[name] for name in inherited}
        kind = native(type(made)) if is_native(cls) else type(made)
        base = Kind(kind, {**vars(made), **same})
    own = {
        "packed_bits": form.bits, "_columns": columns, "_fused": fused, "_original": original,
        "_dense": None,
    }  # fmt: skip
    return Kind(derived(_Packed, base.cls), {**base.attributes, **own})


def dense_bytes(module: Any) -> int:
    """Bytes of a module's dequantised copy, 0 without one."""
    dense = vars(module).get("_dense")
    return 0 if dense is None else dense.weight.nbytes


def drop_dense(module: Any) -> None:
    """Drop a module's dequantised copy, as its packed weights have changed."""
    if count := dense_bytes(module):
        vars(module)["_dense"] = None
        module._grown(-count)
