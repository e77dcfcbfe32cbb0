"""Modules that multiply by weights: native products with MLX's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from toastkit.native import operations
from toastkit.native.functions import Native
from toastkit.native.library import BITS, DIGITS, FLOATS, GROUP_SIZES, NONE, in_use
from toastkit.native.operands import Operand

NARROW = (mx.float16, mx.bfloat16)


class Product(Native):
    """Base of modules that multiply, with the parameters of MLX's.

    _wide: the dtype of activations, and of parameters as others see them, if products read 16-bit
    parameters as stored; None if parameters have the dtype of activations. _activation_bits: with
    quantised weights, see kernels.h. _last_only: see last_position_only. They belong to a module
    rather than the library: two engines of a process may differ."""

    _wide: mx.Dtype | None = None
    _activation_bits: int = DIGITS
    _last_only: bool = False

    def __getattr__(self, key: str) -> Any:
        """A parameter as other readers see it: as if widened when it was loaded."""
        value = super().__getattr__(key)  # type: ignore[misc]
        widen = self._wide is not None and isinstance(value, mx.array) and value.dtype in NARROW
        return value.astype(self._wide) if widen else value

    def operand(self: Any) -> Operand | None:
        """The matrix it multiplies by; None if only MLX supports it, or more is to be done."""
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
        """Products (..., rows) of x (..., columns), or of x (..., m, columns) with the chosen
        experts, uint32 (...). bias: as in Library.multiply. None if only MLX supports it: other
        dtypes, other quantisations."""
        if self._wide is not None:
            x = x.astype(self._wide)
        library, operand = in_use(), self.operand()
        if library is None or operand is None or x.dtype not in FLOATS:
            return None
        if experts is not None and experts.dtype != mx.uint32:
            experts = experts.astype(mx.uint32)
        if operand.columns != x.shape[-1]:
            return None
        if self._last_only:
            x = x[..., -1:, :]
        weight, scales, biases, bits, group_size = operand
        return library.multiply(
            x, weight, scales, biases, experts, bits, group_size, self._activation_bits, bias
        )


class Linear(Product):
    """A matrix with an optional bias."""

    def __call__(self: Any, x: mx.array) -> mx.array:
        bias = self.get("bias")
        fused_bias = bias is not None and (self._wide or x.dtype) == bias.dtype == mx.float32
        y = self._multiply(x, bias=bias if fused_bias else None)
        if y is None:
            return super().__call__(x)  # type: ignore[misc]
        return y if fused_bias or bias is None else y + bias


class Embedding(Product):
    """Rows (..., columns) of a matrix by uint32 ids (...), float32 from any dtype."""

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
        """The rows in one operation, to the bit as below, if they become float32 from another
        dtype."""
        library, operand = in_use(), self.operand()
        if library is None or operand is None or x.dtype != mx.uint32:
            return None
        weight, scales, biases, bits, group_size = operand
        wide = self._wide or (None if scales is None else scales.dtype)
        if wide is None or wide != mx.float32 or (scales is None) is not (biases is None):
            return None
        out, rest = mx.array(0), [NONE if array is None else array for array in (scales, biases)]
        library.c.rows(out, x, weight, *rest, bits, group_size)
        return out

    def as_linear(self: Any, x: mx.array) -> mx.array:
        y = self._multiply(x)
        return super().as_linear(x) if y is None else y  # type: ignore[misc]


class Switch(Product):
    """A stack of matrices (experts); each vector is multiplied by the chosen ones."""

    def __call__(
        self: Any, x: mx.array, indices: mx.array, sorted_indices: bool = False
    ) -> mx.array:
        y = self._multiply(x, indices)
        if y is None:
            return super().__call__(x, indices, sorted_indices)  # type: ignore[misc]
        return y + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else y


class PerHead(Product):
    """A stack of matrices, one per head."""

    def __call__(self: Any, x: mx.array, transpose: bool = True) -> mx.array:
        """x: (B, heads or 1, positions, columns), or (..., rows) if not transposed. Returns (B,
        heads, positions, rows), or (..., columns)."""
        heads = operations.numbered(self["weight"].shape[:1])
        y = self._multiply(x, heads) if transpose else self._multiply_untransposed(x)
        return super().__call__(x, transpose) if y is None else y  # type: ignore[misc]

    def _multiply_untransposed(self: Any, x: mx.array) -> mx.array | None:
        if self.operand() is None or in_use() is None:
            return None
        weight = self["weight"]
        if "scales" in self:
            biases = None if self.get("biases") is None else self.biases
            packing = self.group_size, self.bits, self.mode
            weight = mx.dequantize(weight, self.scales, biases, *packing)
        return operations.matmul(x, weight)


def operands_of(parts: Sequence[Any]) -> list[Operand] | None:
    """The matrices by which parts multiply float32 vectors; None if the library cannot do one of
    them."""
    operands = []
    for part in parts:
        known = isinstance(part, (Linear, Switch, PerHead))
        is_float32 = known and (part._wide or mx.float32) == mx.float32
        operand = part.operand() if is_float32 else None
        if operand is None or ("bias" in part and part["bias"].dtype != mx.float32):
            return None
        operands.append(operand)
    return operands
