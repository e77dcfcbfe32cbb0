"""Numbers as the command line takes them, to the last digit: two that differ never look alike. And
numbers of things, which a sentence tells."""

from __future__ import annotations


def exact_size(count: int) -> str:
    """A number of bytes, with the largest of T, G, M and K (powers of 1,024) of which it is a whole
    number, else with B, as 0 is."""
    units = zip((40, 30, 20, 10), "TGMK")
    shift, unit = next((x for x in units if count and count % (1 << x[0]) == 0), (0, "B"))
    return f"{count >> shift}{unit}"


def exact_number(value: float) -> str:
    """The shortest text that is read as that number; a small one has no exponent."""
    said = repr(value + 0.0).removesuffix(".0")  # of -0.0, 0
    if "e-" not in said:
        return said
    from decimal import Decimal

    return f"{Decimal(said):f}"


def counted(number: int, thing: str, form: str = "") -> str:
    """1 token, 2 tokens; with the form "," 1,024 tokens."""
    return f"{number:{form}} {thing}{'' if number == 1 else 's'}"


def are(number: int) -> str:
    """What so many things do."""
    return "is" if number == 1 else "are"
