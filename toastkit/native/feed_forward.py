"""Which modules are feed-forward networks of a common form, whatever architecture they are of:
those whose forward is, instruction by instruction, one of the forwards below, by other names."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn


class Form(NamedTuple):
    """parts: the attributes that hold gate, up and down; or gate and up in one, and down.
    activation: as library.ACTIVATIONS has it."""

    parts: tuple[str, ...]
    activation: str


# What the forwards below call is looked up by those that they are compared with.
swiglu: Any = None
PARTS = ("gate", "up", "both", "down")  # theirs may have any name


def _gated(self: Any, x: Any) -> Any:
    return self.down(swiglu(self.gate(x), self.up(x)))


def _gated_and_kept(self: Any, x: Any) -> Any:
    y = self.down(swiglu(self.gate(x), self.up(x)))
    return y


def _multiplied(self: Any, x: Any) -> Any:
    return self.down(nn.silu(self.gate(x)) * self.up(x))


def _multiplied_gelu(self: Any, x: Any) -> Any:
    return self.down(nn.gelu_approx(self.gate(x)) * self.up(x))


def _multiplied_gelu_erf(self: Any, x: Any) -> Any:
    return self.down(nn.gelu(self.gate(x)) * self.up(x))


def _halved(self: Any, x: Any) -> Any:
    x = self.both(x)
    gate, x = mx.split(x, 2, axis=-1)
    return self.down(swiglu(gate, x))


def _halved_by_names(self: Any, x: Any) -> Any:
    x = self.both(x)
    gate, up = mx.split(x, 2, axis=-1)
    return self.down(swiglu(gate, up))


def _halved_at_once(self: Any, x: Any) -> Any:
    gate, up = mx.split(self.both(x), 2, axis=-1)
    return self.down(swiglu(gate, up))


# Each with what `swiglu` stands for in it, by module and name.
SWIGLU = ("mlx_lm.models.activations", "swiglu")
FORWARDS: list[tuple[Callable, tuple[str, str], str]] = [
    (_gated, SWIGLU, "silu"),
    (_gated, ("mlx_lm.models.gemma4_text", "geglu"), "gelu"),
    (_gated_and_kept, SWIGLU, "silu"),
    (_multiplied, SWIGLU, "silu"),
    (_multiplied_gelu, SWIGLU, "gelu"),
    (_multiplied_gelu_erf, SWIGLU, "gelu_erf"),
    (_halved, SWIGLU, "silu"),
    (_halved_by_names, SWIGLU, "silu"),
    (_halved_at_once, SWIGLU, "silu"),
]


@cache
def form_of(cls: type) -> Form | None:
    """Of a class of an architecture; None for a class that is no such network."""
    forwards = (vars(base)["__call__"] for base in cls.__mro__ if "__call__" in vars(base))
    if not isinstance(forward := next(forwards, None), FunctionType):
        return None
    for known, (module, function), activation in FORWARDS:
        names = names_in(forward, known)
        gates = getattr(sys.modules.get(module), function, None)
        stand_for = {"nn": nn, "mx": mx, "swiglu": gates}
        if names is not None and all(
            forward.__globals__.get(there) is stand_for[name] is not None
            if name in stand_for
            else name in PARTS or there == name
            for name, there in names.items()
        ):
            return Form(tuple(names[part] for part in PARTS if part in names), activation)
    return None


def names_in(forward: FunctionType, known: Callable) -> dict[str, str] | None:
    """What a forward calls the names of a known one; None where it is another."""
    code, own = forward.__code__, known.__code__  # type: ignore[attr-defined]
    alike = (
        code.co_code == own.co_code
        and code.co_argcount == own.co_argcount
        and code.co_consts[1:] == own.co_consts[1:]  # the first is a docstring
        and len(code.co_names) == len(own.co_names)
        and not code.co_freevars
    )
    return dict(zip(own.co_names, code.co_names)) if alike else None
