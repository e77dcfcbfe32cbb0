"""Matrices and other arrays of a layer's modules as the library takes them: collected once, and
valid as long as the modules do not change; and the settings of RoPE and of a router."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from operator import getitem, is_
from typing import Any, NamedTuple

import mlx.core as mx

KEYS = ("weight", "scales", "biases", "bias")  # of a part, in the order of glue/matrices.h
NORMED, AHEAD, CHOSEN, SCORED, BEST, SPARSE = 1, 2, 4, 8, 16, 32  # Choice.how, see kernels/rows.h
Place = tuple[Any, str, Any]  # a module, a name in it, its value


class Operand(NamedTuple):
    """A matrix (rows, columns), or a stack of them, of one of FLOATS; or quantised, as `multiply`
    takes it, mxfp4 without biases."""

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    bits: int = 0
    group_size: int = 0

    @property
    def rows(self) -> int:
        return self.weight.shape[-2]

    @property
    def columns(self) -> int:
        length = self.weight.shape[-1]
        return length * 32 // self.bits if self.bits else length


class OperandPointers(ctypes.Structure):
    """toast_operands, see glue/matrices.h: borrowed pointers to Python's arrays."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("parts", "packing", "rest")),
        ("activation_bits", ctypes.c_int32),
    )

    def __init__(
        self,
        parts: Sequence[mx.array | None],
        packing: Sequence[int],
        activation_bits: int,
        rest: Sequence[mx.array | None] = (),
    ):
        super().__init__(activation_bits=activation_bits)
        pointers = [
            (ctypes.c_void_p * len(group))(*[None if one is None else id(one) for one in group])
            for group in (parts, rest)
        ]
        packed = (ctypes.c_int * len(packing))(*packing)
        self.parts, self.rest = map(ctypes.addressof, pointers)
        self.packing, self._pointed = ctypes.addressof(packed), (*pointers, packed)


class Operands(OperandPointers):
    """Operands of modules, to be used while they are valid. They do not keep parameters alive: only
    arrays of no module are held."""

    def __init__(
        self,
        parts: Sequence[Any],
        operands: Sequence[Operand],
        rest: Sequence[tuple[Any, str] | mx.array | None] = (),
        around: Sequence[Any] = (),
    ):
        """operands: matrices of the parts, which are modules. rest: other arrays, each a module and
        a name in it, an array to hold, or None. around: further modules that must stay the same,
        such as those that contain parts."""
        places: list[Place] = [
            (part, key, array)
            for part, operand in zip(parts, operands)
            for key, array in zip(KEYS, (*operand[:3], part.get("bias")))
        ]
        others: list[Place] = [
            (*one, one[0][one[1]]) if isinstance(one, tuple) else (None, "", one) for one in rest
        ]
        super().__init__(
            [array for _, _, array in places],
            [number for operand in operands for number in operand[3:]],
            next((p._activation_bits for p in parts if hasattr(p, "_activation_bits")), 0),
            [array for _, _, array in others],
        )
        self._fixed = [array for module, _, array in others if module is None]
        self._tracked = usage_tracked(parts)
        modules = {id(module): module for module in (*around, *parts)}
        self._watch([*modules.values()], [*places, *others])

    def _watch(self, modules: list[Any], places: Sequence[Place]) -> None:
        """Record what must not change."""
        ids = {id(module) for module in modules}
        submodules = [(one, *item) for one in modules for item in one.items() if id(item[1]) in ids]
        owned = (one for one in places if one[0] is not None and one[2] is not None)
        arrays = {(id(one[0]), one[1]): one for one in owned}.values()  # parts may be repeated
        self._modules, self._types = modules, [*map(type, modules)]
        self._sizes = [*map(len, modules)]
        self._holders = [one[0] for one in (*submodules, *arrays)]
        self._keys = [one[1] for one in (*submodules, *arrays)]
        self._submodules = [one[2] for one in submodules]
        self._arrays = [weakref.ref(one[2]) for one in arrays]

    def is_valid(self) -> bool:
        """True if the modules still have the same classes, numbers of parameters, submodules and
        arrays."""
        if [*map(type, self._modules)] != self._types or [*map(len, self._modules)] != self._sizes:
            return False
        expected = [*self._submodules, *[reference() for reference in self._arrays]]
        try:
            return all(map(is_, map(getitem, self._holders, self._keys), expected))
        except KeyError:
            return False

    def mark_used(self) -> None:
        """Report to the parts that they were multiplied by."""
        for part in self._tracked:
            part.was_used()


def usage_tracked(parts: Sequence[Any]) -> list[Any]:
    """The parts that want to know when they are used, each once."""
    return [*{id(part): part for part in parts if hasattr(type(part), "was_used")}.values()]


class Rotation(NamedTuple):
    """RoPE of heads (..., n). frequencies: (dims / 2,), in radians per position, of any floating
    dtype; inverse: their reciprocals. scale: of positions. factor: of the `dims` rotated numbers.
    traditional: pairs are neighbours."""

    dims: int
    frequencies: mx.array
    inverse: bool = False
    scale: float = 1.0
    factor: float = 1.0
    traditional: bool = False


class Choice(ctypes.Structure):
    """toast_choice, see kernels/rows.h: how a router chooses experts."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("chosen", "how", "groups", "kept")),
        ("eps", ctypes.c_float), ("factor", ctypes.c_float),
    )  # fmt: skip

    def __init__(self, chosen: int, how: int = 0, *, factor: float = 1.0, **rest: Any):
        super().__init__(chosen, how, factor=factor, **rest)
