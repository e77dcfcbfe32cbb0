"""Sizes in bytes as the command line takes them."""

from __future__ import annotations


def exact_size(count: int) -> str:
    """A number of bytes, with the largest of T, G, M and K (powers of 1,024) of which it is a whole
    number, else with B."""
    units = zip((40, 30, 20, 10, 0), "TGMKB")
    shift, unit = next(x for x in units if count % (1 << x[0]) == 0)
    return f"{count >> shift}{unit}"
