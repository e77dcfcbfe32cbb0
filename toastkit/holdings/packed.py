"""What a module becomes while its weights are packed: two ways to multiply (paper 003, section 7).

Fused: MLX multiplies packed numbers by their scales as it goes (`mx.quantized_matmul`, and
`mx.gather_qmm` for experts), reading a quarter of the bytes. Dequantised: the weight is computed
once and multiplied as ever, which holds it twice; for a module whose rows MLX has no groups for,
and wherever it is asked for. MLX's kernels take any number of rows, and on the CPU are no slower
than its dense product for 64 of them, so a pass over many tokens is fused too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from toastkit.holdings.derived import derived
from toastkit.holdings.forms import Form
from toastkit.native.operands import Operand
from toastkit.native.replacing import is_native, native
from toastkit.store.precision import Rows, dequantise_rows, group_size_of


def fused_is_exact(dtype: mx.Dtype) -> bool:
    """Whether MLX's quantised matmul adds up in float32 for activations of that dtype. On the CPU
    it adds 16-bit ones up in 16 bits, which is off by a tenth over 2,048 columns."""
    return dtype == mx.float32 or mx.default_device() != mx.Device(mx.cpu)


@dataclass
class PathCounts:
    """Products by the way they were computed, as their graphs were built."""

    fused: int = 0
    hit: int = 0
    miss: int = 0

    def as_map(self) -> dict[str, int]:
        """For a report."""
        return asdict(self)


class Kind(NamedTuple):
    """cls: that a module takes on. attributes: all that is in its __dict__ then."""

    cls: type
    attributes: dict[str, Any]


class _Packed:
    """What a packed module does in addition to the class whose product it computes.

    packed_bits: of a weight. _columns: of the original. _fused: whether the class below reads
    packed numbers. _original: class and attributes of the original. _counts: shared by all of a
    model. _grown: is told the bytes of the dequantised copy.
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
        """As native.modules has it: none while the dequantised copy is what is multiplied."""
        return super().operand() if self._fused else None  # type: ignore[misc]

    def was_used(self) -> None:
        """As native.operands has it: the operand was multiplied with."""
        self._counts.fused += 1

    def _dequantised(self) -> nn.Module:
        """The original with the weight that the numbers stand for, in the activations' dtype."""
        own: Any = self
        rows = Rows(*(own[name] for name in Rows._fields))
        weight = dequantise_rows(rows, self.packed_bits, self._columns)
        rest = {name: value for name, value in own.items() if name not in Rows._fields}
        dtype = _activations(self._original.attributes, rows)
        return _bare(self._original, {**rest, "weight": weight.astype(dtype)})


def _activations(attributes: Mapping[str, Any], rows: Rows) -> mx.Dtype:
    """The dtype that a packed matrix is multiplied in: that of its scales, unless native products
    meet these in 16 bits. attributes: of the original."""
    return attributes.get("_wide") or rows.scales.dtype


def _bare(kind: Kind, parameters: Mapping[str, Any]) -> Any:
    """A module of a class with these attributes and parameters."""
    module: Any = nn.Module.__new__(kind.cls)
    vars(module).update(kind.attributes)
    dict.update(module, parameters)
    return module


def packed_class(
    cls: type, attributes: Mapping[str, Any], rows: Rows, form: Form, columns: int
) -> Kind:
    """What a module becomes in a packed form.

    cls, attributes: of the original, a class with `to_quantized`. rows: as quantise_rows gives
    them, padded where columns, the original's, are no multiple of 32.
    """
    fits = rows.weight.shape[-1] * 32 // form.bits == columns
    fused = fits and form.fused and fused_is_exact(_activations(attributes, rows))
    base = original = Kind(cls, dict(attributes))
    if fused:
        # Never evaluated: only the class and its settings are wanted.
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
    """Lets go a module's dequantised copy, which is of numbers that have changed."""
    if count := dense_bytes(module):
        vars(module)["_dense"] = None
        module._grown(-count)
