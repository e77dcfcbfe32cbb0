"""Which modules are feed-forward networks of a common form, whatever architecture they are of:
those whose forward is, instruction by instruction, one of the forwards below, by other names."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import mlx.nn as nn


class Form(NamedTuple):
    """parts: the attributes that hold gate, up and down. activation: as library.ACTIVATIONS has
    it."""

    parts: tuple[str, str, str]
    activation: str


# What the forwards below call is looked up by those that they are compared with.
swiglu: Any = None


def _gated(self: Any, x: Any) -> Any:
    return self.down(swiglu(self.gate(x), self.up(x)))


def _gated_and_kept(self: Any, x: Any) -> Any:
    y = self.down(swiglu(self.gate(x), self.up(x)))
    return y


def _multiplied(self: Any, x: Any) -> Any:
    return self.down(nn.silu(self.gate(x)) * self.up(x))


def _multiplied_gelu(self: Any, x: Any) -> Any:
    return self.down(nn.gelu_approx(self.gate(x)) * self.up(x))


# Each with what it calls: a function, by module and name, or one of mlx.nn by its name.
SWIGLU = ("mlx_lm.models.activations", "swiglu")
FORWARDS: list[tuple[Callable, tuple[str, str], str]] = [
    (_gated, SWIGLU, "silu"),
    (_gated_and_kept, SWIGLU, "silu"),
    (_multiplied, ("mlx.nn", "silu"), "silu"),
    (_multiplied_gelu, ("mlx.nn", "gelu_approx"), "gelu"),
]


@cache
def form_of(cls: type) -> Form | None:
    """Of a class of an architecture; None for a class that is no such network."""
    forwards = (vars(base)["__call__"] for base in cls.__mro__ if "__call__" in vars(base))
    if not isinstance(forward := next(forwards, None), FunctionType):
        return None
    for known, (module, function), activation in FORWARDS:
        names, there = _names_in(forward, known), sys.modules.get(module)
        if names is None or there is None:
            continue
        if "nn" in names:
            calls_it = forward.__globals__.get(names["nn"]) is there and names[function] == function
        else:
            calls_it = forward.__globals__.get(names[function]) is getattr(there, function)
        if calls_it:
            return Form((names["gate"], names["up"], names["down"]), activation)
    return None


def _names_in(forward: FunctionType, known: Callable) -> dict[str, str] | None:
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
