"""Matrices in whole numbers, put into the model in the place of its own.

Paper 003, section 7.2, which way a product is computed, first that applies:

    fused         MLX's quantised matmul reads the packed numbers (its own kernels on Metal, CUDA
                  and CPU); rows that do not divide into MLX's groups cannot go this way
    dequant hit   a dequantised copy is there from an earlier product in this gear
    dequant miss  the copy is made now, and kept until the gear changes (section 7.1)

The paper's fused kernels take single vectors only. MLX's take any number, and on the CPU are no
slower than its dense product for 64 of them, so a pass over many tokens is fused too.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from toastkit.store.groups import group_size_of
from toastkit.store.precision import Rows, dequantise_rows


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
        return {field.name: getattr(self, field.name) for field in fields(self)}


class _Packed:
    """What a packed module does in addition to the class whose product it computes.

    counts: shared by all of a model. _shell: the original without its weight. _columns: of the
    original. _fused: whether the class below reads packed numbers.
    """

    _shell: Any
    _dense: Any
    _columns: int
    _fused: bool
    packed_bits: int
    counts: PathCounts

    def __call__(self, *args: Any, **rest: Any) -> mx.array:
        if self._fused:
            self.counts.fused += 1
            return super().__call__(*args, **rest)  # type: ignore[misc]
        if self._dense is None:
            self.counts.miss += 1
            self._dense = self._dequantised()
        else:
            self.counts.hit += 1
        return self._dense(*args, **rest)

    def _dequantised(self) -> nn.Module:
        """The original with the weight that the numbers stand for, in the scales' dtype."""
        dense = copy(self._shell)
        weight = dequantise_rows(self._rows, self.packed_bits, self._columns)
        dense.weight = weight.astype(self["scales"].dtype)  # type: ignore[index]
        return dense

    @property
    def _rows(self) -> Rows:
        return Rows(self["weight"], self["scales"], self["biases"])  # type: ignore[index]

    def forget_dense(self) -> None:
        """Drops the dequantised copy; the gear has changed."""
        self._dense = None

    @property
    def dense_bytes(self) -> int:
        """Bytes of the dequantised copy, 0 without one."""
        return 0 if self._dense is None else self._dense.weight.nbytes

    @property
    def packed_bytes(self) -> int:
        """Bytes of numbers, scales and biases."""
        return sum(part.nbytes for part in self._rows)


@cache
def _packed_class(base: type) -> type:
    """`base`, computing its product as above; isinstance still holds for it."""
    return type(f"Packed{base.__name__}", (_Packed, base), {})


def packed_module(
    shell: nn.Module, rows: Rows, bits: int, columns: int, fused: bool, counts: PathCounts
) -> Any:
    """The module that takes the original's place.

    shell: the original, a module with `to_quantized`, without its weight; its bias is kept. rows:
    as quantise_rows gives them, padded where columns, the original's, are no multiple of 32.
    fused: multiply packed numbers where that is possible.
    """
    fits = rows.weight.shape[-1] * 32 // bits == columns
    whole = copy(shell)
    if fits and fused:
        size = group_size_of(columns)
        # Never evaluated: only the class and its settings are wanted.
        whole.weight = mx.zeros((*rows.weight.shape[:-1], columns))
        module = whole.to_quantized(group_size=size, bits=bits)
    else:
        module = whole
    module.weight, module.scales, module.biases = rows
    module.__class__ = _packed_class(module.__class__)
    for name, value in (
        ("_shell", shell), ("_dense", None), ("_columns", columns), ("_fused", fits and fused),
        ("packed_bits", bits), ("counts", counts),
    ):  # fmt: skip
        object.__setattr__(module, name, value)  # beside the module tree, not in it
    return module
