"""Formats numbers exactly, as the command line takes them: two that differ never look alike. And
counts of things in a sentence."""

from __future__ import annotations


def exact_size(count: int) -> str:
    """Format bytes with the largest of T, G, M and K (powers of 1,024) that divides them, else with
    B, as 0 is."""
    units = zip((40, 30, 20, 10), "TGMK")
    shift, unit = next((x for x in units if count and count % (1 << x[0]) == 0), (0, "B"))
    return f"{count >> shift}{unit}"


def exact_number(value: float) -> str:
    """Return the shortest text that parses as that number; small ones have no exponent."""
    text = repr(value + 0.0).removesuffix(".0")  # -0.0 becomes 0
    if "e-" not in text:
        return text
    from decimal import Decimal

    return f"{Decimal(text):f}"


def counted(number: int, thing: str, form: str = "") -> str:
    """Format a count: 1 token, 2 tokens; with the form "," 1,024 tokens."""
    return f"{number:{form}} {thing}{'' if number == 1 else 's'}"


def are(number: int) -> str:
    """Return the verb for that number: "is" or "are"."""
    return "is" if number == 1 else "are"
