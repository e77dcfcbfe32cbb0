"""Modules that do more than their architecture has them do: their class changes, and not they."""

from __future__ import annotations

from functools import cache


@cache
def derived(mixin: type, base: type) -> type:
    """`base`, doing what `mixin` does in addition, under both their names; isinstance still holds
    for it."""
    return type(f"{mixin.__name__.lstrip('_')}{base.__name__}", (mixin, base), {})
