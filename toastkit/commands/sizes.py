"""Parameter types: numbers, 5, 0.7; sizes and durations, 2G, 512M, 16K; 30s, 5m, 1h; and a base for
those of other modules."""

from __future__ import annotations

import os
import re
import sys
from typing import Any, NamedTuple

import click

from toastkit.commands import completion
from toastkit.text.exact_numbers import exact_size

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SECONDS = {"ms": 0.001, "": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_LIMIT = 1 << 62
_NUMBER = r"([0-9]{1,18}(?:\.[0-9]{1,9})?)"
_DIGITS = 9  # after the decimal point, at most
_INTEGER = re.compile("[+-]?[0-9]{1,30}")
_FLOAT = re.compile(
    r"[+-]?([0-9]{1,40}(\.[0-9]{0,40})?|\.[0-9]{1,40})(e[+-]?[0-9]{1,3})?|[+-]?(nan|inf)",
    re.IGNORECASE | re.ASCII,
)


def is_number(text: str) -> bool:
    """True for the usual spelling of numbers. Python also takes 1_0, and digits of any script."""
    return _FLOAT.fullmatch(text) is not None


class _Written(click.ParamType):
    """Refuse unusual spellings of numbers before the class it is mixed with parses them."""

    form, said = _INTEGER, "a whole number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number; surrounding blanks do not matter. Anything else is a usage error."""
        if isinstance(value, str) and self.form.fullmatch(value.strip()) is None:
            self.fail(f"{value[:40]!r} is not {self.said}", param, ctx)
        return super().convert(value, param, ctx)


class Integer(_Written, click.types.IntParamType):
    """Any whole number."""


class IntegerRange(_Written, click.IntRange):
    """An integer in a range, see click.IntRange."""


class Float(_Written, click.types.FloatParamType):
    """Any number; callers check for NaN and infinity."""

    form, said = _FLOAT, "a number"


class Switch(click.types.BoolParamType):
    """A flag that a variable sets."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bool:
        """True for 1, yes, true and on, False for their opposites. Others are a usage error."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"{value[:40]!r} is neither 1 nor 0", param, ctx)


def switched_on(flag: str) -> bool:
    """True if a flag was typed or its variable is set, as far as a command that failed early can
    tell."""
    value = os.environ.get("TOAST_" + flag[2:].replace("-", "_").upper()) or "0"
    try:
        return flag in sys.argv[1:] or Switch().convert(value, None, None)
    except click.BadParameter:
        return True  # the failure was perhaps this


class Word(click.ParamType):
    """A word with a meaning, given by `parse`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse a word. One without meaning is a usage error."""
        if not isinstance(value, str):
            return value  # click converts what has been converted again
        try:
            return self.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)

    def parse(self, word: str) -> Any:
        """The meaning of a word. Raises ValueError, which says why it has none."""
        raise NotImplementedError


class Size(Word):
    """Bytes: a number, with K, M, G or T for powers of 1024; an iB or B after it changes nothing.
    low: minimum."""

    name = "size"

    def __init__(self, low: int = 0):
        self._low = low

    def parse(self, word: str) -> int:
        """The number of bytes."""
        form = _NUMBER + "([KMGT]?)(?:i?B)?"
        found = re.fullmatch(form, word.strip(), re.IGNORECASE | re.ASCII)  # no Kelvin is a K
        if found is None:
            raise ValueError(f"{word!r} is not a size, such as 512M or 2G")
        whole, _, part = found[1].partition(".")  # no float, which has 53 bits
        size = int(whole + part.ljust(_DIGITS, "0")) * _UNITS[found[2].upper()] // 10**_DIGITS
        if size < self._low:
            raise ValueError(f"{word!r} is less than {exact_size(self._low)}")
        if size > _LIMIT:
            raise ValueError(f"{word!r} is too large")
        return size


class Amount(NamedTuple):
    """kind: one of the words, what is counted, "percent" or "bytes". amount: of the last three."""

    kind: str
    amount: float = 0


class HowMany(Word):
    """One of some words, a number of things, or a size with its unit.

    name: of the type. words: with a meaning by themselves. count: the things, in the plural. share:
    accept percentages too. said: all that, for a person.
    """

    def __init__(self, words: tuple[str, ...], count: str, said: str, share: bool = False):
        self.name = count
        self._words, self._count, self._said, self._share = words, count, said, share

    def parse(self, word: str) -> Amount:
        """What was asked for."""
        lower = word.strip().lower()
        if lower in self._words:
            return Amount(lower)
        if re.fullmatch(r"[0-9]{1,9}", lower):
            return Amount(self._count, int(lower))
        found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)%", lower) if self._share else None
        if found:
            if float(found[1]) > 100:
                raise ValueError(f"{word!r} is more than 100%")
            return Amount("percent", float(found[1]))
        if re.fullmatch(r"[0-9.]+[kmgtib]+", lower):
            return Amount("bytes", Size().parse(word))
        raise ValueError(f"{word[:40]!r} is not {self._said}")

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str):
        """The words; there are too many numbers."""
        return completion.beginning(incomplete, self._words)


class Duration(Word):
    """Seconds: a number, with ms, s, m, h or d for its unit."""

    name = "duration"

    def parse(self, word: str) -> float:
        """The seconds."""
        found = re.fullmatch(_NUMBER + r"(ms|[smhd]?)", word.strip())
        if found is None:
            raise ValueError(f"{word!r} is not a duration, such as 30s or 5m")
        seconds = float(found[1]) * _SECONDS[found[2]]
        if seconds > _LIMIT:
            raise ValueError(f"{word!r} is too long")
        return seconds
