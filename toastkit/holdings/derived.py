"""Modules that are extended in place: their class changes, never their identity; and what they keep
for themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any


@cache
def derived(mixin: type, base: type) -> type:
    """A subclass of `mixin` and `base`, named after both; isinstance holds for either."""
    return type(f"{mixin.__name__.lstrip('_')}{base.__name__}", (mixin, base), {})


def extend(module: Any, mixin: type, **own: Any) -> None:
    """Give a module what a mixin has, and the attributes that the mixin declares."""
    _set_class(module, derived(mixin, module.__class__))
    vars(module).update(own)


def restore(module: Any) -> None:
    """Undo the last `extend` of a module."""
    mixin, base = module.__class__.__bases__
    _set_class(module, base)
    for name in mixin.__annotations__:
        vars(module).pop(name)


def _set_class(module: Any, cls: type) -> None:
    # nn.Module's __setattr__ would look for a parameter of that name, which is slow.
    object.__setattr__(module, "__class__", cls)


@contextmanager
def as_before(modules: Iterable[Any]) -> Iterator[None]:
    """Context after which each attribute of modules that was None before is None again: what a
    first pass makes of weights for later ones, as Kimi K3's does of norms, is not kept."""
    before = [(module, [n for n, v in vars(module).items() if v is None]) for module in modules]
    try:
        yield
    finally:
        for module, names in before:
            for name in names:
                setattr(module, name, None)
