"""Record what a function does with stored tensors as a graph, without computing anything.

A node (operation, arguments, operands) has one number across all graphs of a recorder: equal
numbers mean the same computation, to the last constant.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from toastkit.store.skeleton import MISFITS

RECORDING = threading.Lock()
STORED, CONSTANT = "stored", "constant"
Function = Callable[[dict[str, mx.array]], dict[str, mx.array]]


class Node(NamedTuple):
    """An array. operation: MLX's name, or STORED or CONSTANT. arguments: of the operation; the name
    of a stored tensor; the value of a constant. operands: node numbers. result: which of the
    operation's results it is. shape: such as (rows, columns)."""

    operation: str
    arguments: tuple
    operands: tuple[int, ...]
    result: int
    shape: tuple[int, ...]


class Graph:
    """The nodes of all recorded functions, by number."""

    def __init__(self) -> None:
        self._numbers: dict[tuple, int] = {}
        self._nodes: list[Node] = []

    def __getitem__(self, number: int) -> Node:
        return self._nodes[number]

    def record(self, function: Function, given: Mapping[str, mx.array]) -> dict[str, int]:
        """Return the node of each tensor that a function makes of stored ones, of which only the
        shape, such as (rows, columns), and dtype matter. Empty if it fails, as it does if it reads
        values."""
        names = list(given)
        found: list[str] = []
        nodes: dict[str, int] = {}
        outputs: list[str] = []

        def run(*arrays: mx.array) -> list[mx.array]:
            made = function(dict(zip(names, arrays)))
            found[:] = made
            return list(made.values())

        def note(event: dict[str, Any]) -> None:
            kind = event["type"]
            if kind == "inputs":
                for name, (identity, shape, _) in zip(names, event["inputs"]):
                    nodes[identity] = self._number(Node(STORED, (name,), (), 0, tuple(shape)))
            elif kind == "constants":
                for identity, value in event["constants"]:
                    key = (str(value.dtype), tuple(value.shape), bytes(memoryview(value)))
                    node = Node(CONSTANT, (value,), (), 0, tuple(value.shape))
                    nodes[identity] = self._number(node, key)
            elif kind == "primitive":
                operands = tuple(nodes[identity] for identity, *_ in event["inputs"])
                for index, (identity, shape, _) in enumerate(event["outputs"]):
                    arguments = tuple(event["arguments"])
                    node = Node(event["name"], arguments, operands, index, tuple(shape))
                    nodes[identity] = self._number(node)
            elif kind == "outputs":
                outputs[:] = [identity for identity, *_ in event["outputs"]]

        try:
            with _recordable():
                mx.export_function(note, run, *given.values())
        except MISFITS:
            return {}
        return {name: nodes[identity] for name, identity in zip(found, outputs)}

    def _number(self, node: Node, arguments: Any = None) -> int:
        """arguments: a stand-in for the node's own in its identity."""
        arguments = repr(node.arguments) if arguments is None else arguments
        key = (node.operation, arguments, node.operands, node.result)
        number = self._numbers.setdefault(key, len(self._nodes))
        if number == len(self._nodes):
            self._nodes.append(node)
        return number

    def stored_below(self, numbers: Iterable[int]) -> list[str]:
        """The stored tensors that nodes depend on."""
        numbers = list(numbers)
        found, seen, left = [], set(numbers), numbers
        while left:
            node = self._nodes[left.pop()]
            if node.operation == STORED:
                found.append(node.arguments[0])
            left += (operand for operand in set(node.operands) if operand not in seen)
            seen.update(node.operands)
        return found


@contextmanager
def _recordable() -> Iterator[None]:
    """Let a function call what MLX cannot record. In this thread something else is recorded
    instead: for `contiguous` the array itself, which is equal; for 8-bit codes their square, which
    nobody computes of bytes."""
    thread = threading.get_ident()
    records: dict[str, Callable] = {
        "contiguous": lambda array, *_, **__: array[...],
        "from_fp8": _squared,
    }

    def instead(name: str, *arguments: Any, **named: Any) -> mx.array:
        called = records if threading.get_ident() == thread else plain
        return called[name](*arguments, **named)

    with RECORDING:
        plain = {name: getattr(mx, name) for name in records}
        try:
            for name in plain:
                setattr(mx, name, partial(instead, name))
            yield
        finally:
            for name, function in plain.items():
                setattr(mx, name, function)


def _squared(codes: mx.array, dtype: mx.Dtype = mx.bfloat16, **_: Any) -> mx.array:
    if codes.dtype != mx.uint8:
        raise ValueError("codes of 8 bits are bytes")
    return mx.square(codes).astype(dtype)
