"""Estimates of what a template's operations, methods and filters would make, before they run.

Only those that can make much out of little, or take long over it, are here.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from typing import Any

from jinja2 import filters, pass_environment, pass_eval_context

from toastkit.text.budget import ELEMENT, Budget, TooCostly, measure

# Not for chat templates: random text, HTML, quadratic patterns, Python's view of a value.
REFUSED = (
    "filesizeformat", "pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr",
)  # fmt: skip
MAX_WIDTH = 10_000
_PADDING = ("center", "ljust", "rjust", "zfill")
_SCANNING = ("rfind", "rindex", "rsplit", "rpartition", "strip", "lstrip", "rstrip")


def check_str_method(budget: Budget, name: str, text: str, args: tuple) -> None:
    """Whether `text.name(*args)` may be large or slow; raises TooCostly."""
    if name == "replace" and len(args) >= 2:
        _check_replace(budget, text, args[0], args[1])
    elif name in _PADDING and args:
        _check_width(args[0])
    elif name == "join" and args:
        _check_join(budget, text, args[0])
    elif name == "splitlines" or (name.endswith("split") and not args):
        budget.expect(ELEMENT * sum(map(text.count, ("\n", "\r", " ", "\t"))))
    elif name.endswith("split") and isinstance(args[0], str) and args[0]:
        budget.expect(ELEMENT * text.count(args[0]))
    if name in _SCANNING and args and isinstance(args[0], str):
        _check_scan(text, args[0])


def replacements(budget: Budget) -> dict[str, Callable]:
    """Filter name -> the filter with its check."""

    def center(value: str, width: int = 80) -> str:
        _check_width(width)
        return filters.do_center(value, width)

    def indent(s: str, width: Any = 4, first: bool = False, blank: bool = False) -> str:
        _check_width(len(width) if isinstance(width, str) else width)
        pad = len(width) if isinstance(width, str) else width
        budget.expect(len(s) + (s.count("\n") + 1) * pad)
        return filters.do_indent(s, width, first, blank)

    def batch(value: Any, linecount: int, fill_with: Any = None) -> Any:
        _check_width(linecount)
        return filters.do_batch(value, linecount, fill_with)

    def slices(value: Any, slices: int, fill_with: Any = None) -> Any:
        _check_width(slices)
        return filters.sync_do_slice(value, slices, fill_with)

    def rounded(value: float, precision: int = 0, method: Any = "common") -> float:
        _check_width(precision * 100)
        return filters.do_round(value, precision, method)

    def formatted(value: str, *args: Any, **kwargs: Any) -> str:
        check_percent(budget, str(value), kwargs or args)
        return filters.do_format(value, *args, **kwargs)

    @pass_eval_context
    def replace(eval_ctx: Any, s: str, old: str, new: str, count: int | None = None) -> str:
        _check_replace(budget, str(s), old, new)
        return filters.do_replace(eval_ctx, s, old, new, count)

    @pass_eval_context
    def join(eval_ctx: Any, value: Any, d: str = "", attribute: Any = None) -> str:
        value = list(value)
        _check_join(budget, d, value)
        return filters.sync_do_join(eval_ctx, value, d, attribute)

    @pass_environment
    def total(environment: Any, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
        if not isinstance(start, (int, float)):
            raise TypeError("the start of a sum is not a number")
        return filters.sync_do_sum(environment, iterable, attribute, start)

    def trim(value: str, chars: str | None = None) -> str:
        _check_scan(str(value), chars or "")
        return filters.do_trim(value, chars)

    def listed(value: Any) -> list:
        if isinstance(value, str):
            budget.expect(ELEMENT * len(value))
        return list(value)

    return {
        "batch": batch, "center": center, "format": formatted, "indent": indent, "join": join,
        "list": listed, "replace": replace, "round": rounded, "slice": slices, "sum": total,
        "tojson": _tojson(budget), "trim": trim,
    }  # fmt: skip


def _tojson(budget: Budget) -> Callable:
    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """As Hugging Face has it: characters as they are, no HTML escapes, Python's spacing."""
        for pad in (indent, *(separators or ())):
            if (len(pad) if isinstance(pad, str) else pad or 0) > 16:
                raise TooCostly("an indentation or separator of tojson over 16")
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        pieces, size = [], 0
        for piece in encoder.iterencode(value):
            size += len(piece)
            budget.expect(size)
            pieces.append(piece)
        return "".join(pieces)

    return tojson


def _check_width(width: Any) -> None:
    if not isinstance(width, (int, float)) or width > MAX_WIDTH:
        raise TooCostly(f"a width over {MAX_WIDTH}")


def _check_replace(budget: Budget, text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        budget.expect(len(text) + (text.count(old) if old else len(text) + 1) * len(new))


def _check_join(budget: Budget, separator: Any, values: Any) -> None:
    if isinstance(values, (list, tuple, dict, str)):
        size = measure(values, budget.size_limit)[0]
        budget.expect(size + len(values) * len(str(separator)))


def _check_scan(text: str, needle: str) -> None:
    """Python looks for these from the right, or one by one: the product of the lengths in time."""
    if len(text) * len(needle) > 1 << 32 and len(needle) > 64:
        raise TooCostly("a search for a long text in a long text")


# ---------------------------------------------------------------------------------------- estimates


def check_operation(budget: Budget, operator: str, left: Any, right: Any) -> None:
    """Whether `left operator right` may be large; raises TooCostly."""
    if operator == "*":
        for value, times in ((left, right), (right, left)):
            if isinstance(times, int) and isinstance(value, (str, list, tuple)):
                budget.expect(_size(budget, value) * max(times, 0))
    elif operator == "+" and isinstance(left, (str, list, tuple)):
        budget.expect(_size(budget, left) + _size(budget, right))
    elif operator == "%" and isinstance(left, str):
        check_percent(budget, left, right)
    if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        if (bits * right if operator == "**" else bits + right.bit_length()) > 1 << 16:
            raise TooCostly("it makes a number too large")


def _size(budget: Budget, value: Any) -> int:
    return len(value) if isinstance(value, str) else measure(value, budget.size_limit)[0]


def check_percent(budget: Budget, template: str, values: Any) -> None:
    """An estimate for `template % values`."""
    if "*" in template:
        raise TooCostly("a width of '*' in a format")
    _check_fields(budget, template, template.count("%"), values)


def check_format(budget: Budget, template: str, values: Any) -> None:
    """An estimate for `template.format(...)`."""
    for _, _, spec, _ in string.Formatter().parse(template):
        if spec and "{" in spec:
            raise TooCostly("a field within a field in a format")
    _check_fields(budget, template, template.count("{"), values)


def _check_fields(budget: Budget, template: str, fields: int, values: Any) -> None:
    """Each field may write the largest value, or the widest number that stands in the template."""
    digits = "".join(c if c.isdecimal() else " " for c in template).split()
    widest = max((int(number[:9]) for number in digits), default=0) if fields else 0
    budget.expect(len(template) + fields * (widest + measure(values, budget.size_limit)[0]))
