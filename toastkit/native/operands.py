"""What the modules of a layer multiply vectors with, and what lies beside it, as the library takes
it: looked for once, and right for as long as nothing of them changes; and how a router chooses."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from operator import getitem, is_
from typing import Any, NamedTuple

import mlx.core as mx

KEYS = ("weight", "scales", "biases", "bias")  # of a part, as glue/matrices.h has them
NORMED, AHEAD, CHOSEN, SCORED, BEST = 1, 2, 4, 8, 16  # how a router chooses, see kernels/rows.h
Place = tuple[Any, str, Any]  # a module, a name, what it has by that name


class Operand(NamedTuple):
    """A matrix (rows, columns), or a stack of them, of one of FLOATS; or packed, as `multiply`
    takes it, of mxfp4 without biases."""

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


class Given(ctypes.Structure):
    """toast_operands, see glue/matrices.h: arrays of Python's, which it does not hold."""

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
        places = [
            (ctypes.c_void_p * len(some))(*[None if one is None else id(one) for one in some])
            for some in (parts, rest)
        ]
        numbers = (ctypes.c_int * len(packing))(*packing)
        self.parts, self.rest = map(ctypes.addressof, places)
        self.packing, self._pointed = ctypes.addressof(numbers), (*places, numbers)


class Operands(Given):
    """Those of modules, right for as long as they `hold`. What leaves its module is gone all the
    same: no array is held but those that stay."""

    def __init__(
        self,
        parts: Sequence[Any],
        own: Sequence[Operand],
        rest: Sequence[tuple[Any, str] | mx.array | None] = (),
        around: Sequence[Any] = (),
    ):
        """own: what the parts, which are modules, multiply with. rest: arrays beside them, each a
        module and its name there, one that stays, or None. around: modules that parts are in, and
        others that have to stay as they are."""
        places: list[Place] = [
            (part, key, array)
            for part, operand in zip(parts, own)
            for key, array in zip(KEYS, (*operand[:3], part.get("bias")))
        ]
        beside: list[Place] = [
            (*one, one[0][one[1]]) if isinstance(one, tuple) else (None, "", one) for one in rest
        ]
        super().__init__(
            [array for _, _, array in places],
            [number for operand in own for number in operand[3:]],
            next((p._activation_bits for p in parts if hasattr(p, "_activation_bits")), 0),
            [array for _, _, array in beside],
        )
        self._fixed = [array for module, _, array in beside if module is None]
        self._told = to_be_told(parts)
        self._watch([*around, *parts], [*places, *beside])

    def _watch(self, modules: list[Any], places: Sequence[Place]) -> None:
        """Remembers what must not change."""
        known = {id(module) for module in modules}
        within = [(one, *item) for one in modules for item in one.items() if id(item[1]) in known]
        arrays = [one for one in places if one[0] is not None and one[2] is not None]
        self._modules, self._kinds = modules, [*map(type, modules)]
        self._sizes = [*map(len, modules)]
        self._holders = [one[0] for one in (*within, *arrays)]
        self._keys = [one[1] for one in (*within, *arrays)]
        self._within = [one[2] for one in within]
        self._arrays = [weakref.ref(one[2]) for one in arrays]

    def hold(self) -> bool:
        """Whether it is still so: modules of these classes, with as many parameters, in each other,
        and these arrays in them."""
        if [*map(type, self._modules)] != self._kinds or [*map(len, self._modules)] != self._sizes:
            return False
        wanted = [*self._within, *[reference() for reference in self._arrays]]
        try:
            return all(map(is_, map(getitem, self._holders, self._keys), wanted))
        except KeyError:
            return False

    def were_used(self) -> None:
        """The parts were multiplied with."""
        for part in self._told:
            part.was_used()


def to_be_told(parts: Sequence[Any]) -> list[Any]:
    """Those that have to hear when they were multiplied with, each once."""
    return [*{id(part): part for part in parts if hasattr(type(part), "was_used")}.values()]


class Choice(ctypes.Structure):
    """toast_choice, see kernels/rows.h: chosen experts of a vector."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("chosen", "how", "groups", "kept")),
        ("eps", ctypes.c_float), ("factor", ctypes.c_float),
    )  # fmt: skip

    def __init__(self, chosen: int, how: int = 0, *, factor: float = 1.0, **rest: Any):
        super().__init__(chosen, how, factor=factor, **rest)
