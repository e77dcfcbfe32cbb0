"""Functions that architectures call by name: `scaled_dot_product_attention(queries, keys, ...)`.

A class whose methods call one of them gets a class derived from it, with these methods made anew:
the same code, over a copy of its module's globals in which the names stand for ours. The module,
mlx_lm and MLX stay as they are. What a method calls by way of functions of its own module is made
anew with it; what is wrapped (mx.compile, a decorator) is not, and goes on calling MLX's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeGuard

import mlx.nn as nn

Space = dict[str, Any]  # globals of a module
# Of (module, name in it), by what is called instead, with the same parameters: see `stands_for`.
_OURS: dict[tuple[str, str], Callable[..., Any]] = {}
_spaces: dict[int, tuple[Space, Space]] = {}  # by the id of the first


def stands_for(module: str, name: str) -> Callable[[Any], Any]:
    """Has a function called in place of one of mlx or mlx_lm, by its module and its name there,
    which may be of one in it: stands_for("mlx.core", "fast.rms_norm")."""

    def register(ours: Any) -> Any:
        _OURS[module, name] = ours
        methods_anew.cache_clear()
        _spaces.clear()
        return ours

    return register


@cache
def methods_anew(cls: type[nn.Module]) -> dict[str, FunctionType]:
    """The methods of a class of an architecture that call what we have, made anew, by name. Empty
    where there are none."""
    made: dict[str, FunctionType] = {}
    for base in reversed(cls.__mro__):
        if not issubclass(base, nn.Module) or base.__module__.startswith("mlx."):
            continue
        for name, method in vars(base).items():
            made.pop(name, None)  # overridden
            if isinstance(method, FunctionType) and _calls_ours(method, set()):
                made[name] = _over(method, _space_of(method.__globals__))
    return made


def _calls_ours(function: FunctionType, seen: set[FunctionType]) -> bool:
    """By itself, or through functions of its module. seen: those that are being looked at."""
    space = function.__globals__
    names = set(_names(function.__code__))
    values = [space[name] for name in names if name in space]
    originals = _originals()
    if any(id(value) in originals for value in values):
        return True
    for module, name in _OURS:
        if any(value is sys.modules.get(module) for value in values) and names.issuperset(
            name.split(".")
        ):
            return True
    seen.add(function)
    return any(
        _calls_ours(value, seen) for value in values if _is_of(space, value) and value not in seen
    )


def _is_of(space: Space, value: Any) -> TypeGuard[FunctionType]:
    """Whether it is a plain function of a module's own."""
    return isinstance(value, FunctionType) and value.__globals__ is space


def _names(code: CodeType) -> Iterator[str]:
    """Globals and attributes that code names, that of functions within it included."""
    yield from code.co_names
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _names(value)


def _originals() -> dict[int, Callable[..., Any]]:
    """Ours by the id of what they stand for, as far as its module is imported."""
    found = {}
    for (module, name), ours in _OURS.items():
        value: Any = sys.modules.get(module)
        for word in name.split("."):
            value = getattr(value, word, None)
        if value is not None:
            found[id(value)] = ours
    return found


def _space_of(theirs: Space) -> Space:
    """The globals that stand for those of an architecture's module."""
    if id(theirs) not in _spaces:
        originals, made = _originals(), dict(theirs)
        _spaces[id(theirs)] = theirs, made
        for name, value in theirs.items():
            if id(value) in originals:
                made[name] = originals[id(value)]
            elif isinstance(value, ModuleType):
                made[name] = _module_anew(value)
            elif _is_of(theirs, value) and _calls_ours(value, set()):
                made[name] = _over(value, made)
    return _spaces[id(theirs)][1]


def _module_anew(module: ModuleType) -> ModuleType:
    """A copy of a module of MLX in which ours are; the module where it has none of them."""
    ours = {name: f for (where, name), f in _OURS.items() if where == module.__name__}
    return _copied(module, ours) if ours else module


def _copied(module: ModuleType, ours: Mapping[str, Callable[..., Any]]) -> ModuleType:
    copy = ModuleType(module.__name__, module.__doc__)
    vars(copy).update(vars(module))
    for name, function in ours.items():
        first, _, rest = name.partition(".")
        setattr(copy, first, _copied(getattr(copy, first), {rest: function}) if rest else function)
    return copy


def _over(function: FunctionType, space: Space) -> FunctionType:
    """The same function over other globals."""
    made = FunctionType(
        function.__code__, space, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    made.__qualname__, made.__doc__ = function.__qualname__, function.__doc__
    vars(made).update(vars(function))
    return made
