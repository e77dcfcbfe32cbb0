"""What a chat template may cost: a budget of work, a size limit for each value, a deadline.

Counting makes a hostile template end the same way on every machine; the deadline is the second
line, for many operations that are each cheap to count and slow to do.
"""

from __future__ import annotations

import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, ValuesView
from types import BuiltinMethodType, FunctionType, GeneratorType, MethodType
from typing import Any

SECONDS = 10.0
STEP = 64  # units charged for a loop turn, a call, a filter, an attribute
ELEMENT = 16  # bytes charged for an element of a list, at least
BASE_WORK = 1 << 27  # units: 2 million steps
BASE_SIZE = 1 << 24  # characters, or bytes, of one value
MAX_DEPTH = 100  # lists in lists
FUNCTIONS = (FunctionType, BuiltinMethodType, MethodType, type)  # no data for a template
_CONTAINERS = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)


class TooCostly(Exception):
    """The template asks for more than its budget."""


class Budget:
    """Counts what a rendering costs. Every method raises TooCostly when it is too much.

    allowance: size of the messages and other arguments, in characters; the limits grow with it.
    """

    def __init__(self, allowance: int):
        self.size_limit = BASE_SIZE + 8 * allowance
        self._work = BASE_WORK + 64 * allowance
        self._deadline = time.monotonic() + SECONDS

    def step(self, text_size: int = 0) -> None:
        """One loop turn, call, filter or attribute. text_size: characters it writes anyway."""
        self._charge(STEP + text_size)
        if time.monotonic() > self._deadline:
            raise TooCostly(f"it runs for over {SECONDS:.0f} seconds")

    def expect(self, size: int) -> None:
        """Before a value is made. size: an upper bound of its characters or bytes."""
        if size > self.size_limit:
            raise TooCostly("it makes a value too large")

    def made(self, value: Any) -> Any:
        """After a value is made: checks and charges it, and returns it, a generator counted."""
        kind = type(value)
        if kind is GeneratorType:
            return self.counted(value)
        if kind is str:
            self.expect(len(value))
            self._charge(len(value) // 4)
        elif value is not None and kind is not bool:
            size, elements = measure(value, self.size_limit)
            self.expect(size)
            self._charge(elements * ELEMENT)
        return value

    def counted(self, values: Iterable) -> Iterator:
        """The same elements, each charged when it is taken."""
        for value in values:
            self.step()
            yield self.made(value)

    def _charge(self, units: int) -> None:
        self._work -= units
        if self._work < 0:
            raise TooCostly("it does too much work")


def measure(value: Any, limit: int) -> tuple[int, int]:
    """The size of a value written out, in characters, and its number of elements.

    What is in it twice counts twice, so that a few nested lists cannot stand for a huge text.
    Counting ends above `limit`. Raises TooCostly for one nested too deep, TypeError for functions.
    """
    size = elements = 0
    stack = [(iter((value,)), 0)]
    while stack and size <= limit:
        children, depth = stack[-1]
        item = next(children, stack)  # `stack` itself stands for the end
        if item is stack:
            stack.pop()
            continue
        elements += 1
        size += ELEMENT
        if isinstance(item, (str, bytes)):
            size += len(item)
        elif isinstance(item, int):
            size += item.bit_length() // 3
        elif isinstance(item, FUNCTIONS):
            raise TypeError(f"a {type(item).__name__} is no data")
        elif isinstance(item, (dict, *_CONTAINERS)):
            if depth >= MAX_DEPTH:
                raise TooCostly("it nests values too deep")
            stack.append((_children(item), depth + 1))
    return size, elements


def _children(value: Any) -> Iterator:
    if isinstance(value, dict):
        return (part for pair in value.items() for part in pair)
    return iter(value)
