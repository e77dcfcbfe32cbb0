"""Modules that are extended in place: their class changes, never their identity."""

from __future__ import annotations

from functools import cache


@cache
def derived(mixin: type, base: type) -> type:
    """A subclass of `mixin` and `base`, named after both; isinstance holds for either."""
    return type(f"{mixin.__name__.lstrip('_')}{base.__name__}", (mixin, base), {})
