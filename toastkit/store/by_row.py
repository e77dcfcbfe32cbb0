"""Computed tensors whose rows (experts, for instance) can be computed one at a time, from the same
row of stored tensors or from stored tensors of their own.

The recorded `sanitize` is replayed on some rows instead of all. That a row equals that of the whole
tensor is proved, not tested: each operation is known to leave the first axis alone or not, and
replaying all rows must reproduce the recorded graph exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import mlx.core as mx

from toastkit.store.graph import CONSTANT, STORED, Graph

# Operations that keep the bytes in the same order.
SAME_BYTES = {"View", "Reshape", "Flatten", "Unflatten", "Squeeze", "ExpandDims"}
Part = tuple[str, int, int | None]  # of a stored tensor: name, first, stop (None: all of it)


class Operation(NamedTuple):
    """run(arguments, operands...): replays it; gives a list if it has several results.
    by_row(arguments): True if row n of the result depends on row n of the operands only, where both
    have as many."""

    run: Callable[..., Any]
    by_row: Callable[[Sequence[Any]], bool] = lambda _: True


OPERATIONS = {
    "Add": Operation(lambda _, x, y: x + y),
    "Subtract": Operation(lambda _, x, y: x - y),
    "Multiply": Operation(lambda _, x, y: x * y),
    "Divide": Operation(lambda _, x, y: x / y),
    "Negative": Operation(lambda _, x: -x),
    "AsType": Operation(lambda a, x: x.astype(a[0])),
    "View": Operation(lambda a, x: x.view(a[0])),
    "Reshape": Operation(lambda a, x: x.reshape(a[0])),
    "Flatten": Operation(lambda a, x: mx.flatten(x, a[0], a[1]), lambda a: a[0] > 0),
    "Unflatten": Operation(lambda a, x: mx.unflatten(x, a[0], a[1]), lambda a: a[0] > 0),
    "Squeeze": Operation(lambda a, x: mx.squeeze(x, a[0]), lambda a: min(a[0], default=1) > 0),
    "ExpandDims": Operation(
        lambda a, x: mx.expand_dims(x, a[0]), lambda a: min(a[0], default=1) > 0
    ),
    "Transpose": Operation(lambda a, x: mx.transpose(x, a[0]), lambda a: a[0][0] == 0),
    "Slice": Operation(
        lambda a, x: x[tuple(map(slice, *a))], lambda a: (a[0][0], a[2][0]) == (0, 1)
    ),
    "Split": Operation(lambda a, x: mx.split(x, list(a[0]), a[1]), lambda a: a[1] > 0),
    "Concatenate": Operation(lambda a, *x: mx.concatenate(list(x), a[0]), lambda a: a[0] > 0),
    "Pad": Operation(
        lambda a, x, value: mx.pad(x, list(zip(a[1], a[2])), constant_values=value),
        lambda _: False,
    ),
    "Broadcast": Operation(lambda a, x: mx.broadcast_to(x, a[0])),
    # 8-bit codes, see graph.py: passed on, the next operation decodes them.
    "Square": Operation(lambda _, x: x),
}


class ByRow:
    """A tensor whose rows are computed one at a time. kinds: for each node it depends on, whether
    that has one row per row of the tensor; None if every row is a node of its own."""

    def __init__(self, graph: Graph, number: int, kinds: Mapping[int, bool] | None):
        self._graph, self._number, self._kinds = graph, number, kinds
        nodes = ((graph[n], kind) for n, kind in (kinds or {}).items())
        self._has_rows = {n.arguments[0]: kind for n, kind in nodes if n.operation == STORED}

    def parts(self, start: int, stop: int) -> list[Part]:
        """The stored parts that rows start:stop are computed from."""
        if self._kinds is None:
            nodes = self._graph[self._number].operands[start:stop]
            return [(name, 0, None) for name in self._graph.stored_below(nodes)]
        return [(n, start, stop) if by else (n, 0, None) for n, by in self._has_rows.items()]

    def piece(self, row_bytes: Callable[[str], int]) -> tuple[str, int, int] | None:
        """Locate a row that is stored unchanged and contiguous in the same row of a stored tensor:
        (name, first byte, bytes), else None. row_bytes: bytes per row of a stored tensor."""
        return None if self._kinds is None else _piece(self._graph, self._number, row_bytes)

    def make(self, start: int, stop: int, read: Mapping[Part, mx.array]) -> mx.array:
        """Compute those rows, (rows, ...) in the tensor's dtype, lazily. read: at least their
        parts, in the stored dtype."""
        given = {part[0]: read[part] for part in self.parts(start, stop)}
        if self._kinds is not None:
            return _replayed(self._graph, self._number, given, self._kinds, stop - start)
        nodes = self._graph[self._number].operands[start:stop]
        return mx.concatenate([_replayed(self._graph, node, given) for node in nodes])


def by_row(graph: Graph, number: int, placeholder: Callable[[str], mx.array]) -> ByRow | None:
    """Return how to compute rows of a node's tensor; None if that cannot be proved. placeholder:
    makes an array of a stored tensor's shape, such as (rows, columns), and dtype."""
    node = graph[number]
    count = node.shape[0] if node.shape else 0
    kinds: dict[int, bool | None] | None = None
    if not (node[:2] == ("Concatenate", (0,)) and len(node.operands) == count):
        kinds = {}
        if not _kind(graph, number, count, kinds):
            return None
    found = ByRow(graph, number, kinds)  # type: ignore[arg-type]  # none is None
    parts = found.parts(0, count)

    def all_rows(given: dict[str, mx.array]) -> dict[str, mx.array]:
        return {"": found.make(0, count, {part: given[part[0]] for part in parts})}

    again = graph.record(all_rows, {name: placeholder(name) for name, *_ in parts})
    return found if again == {"": number} else None


def _kind(graph: Graph, number: int, count: int, known: dict[int, bool | None]) -> bool | None:
    """True if a node has one row for each of the tensor's `count`, computed from those rows only;
    False if it is the same for all rows; None for neither. known: memo."""
    if number not in known:
        known[number] = _kind_of(graph, number, count, known)
    return known[number]


def _kind_of(graph: Graph, number: int, count: int, known: dict[int, bool | None]) -> bool | None:
    node = graph[number]
    shapes = [graph[operand].shape for operand in node.operands]
    if node.operation in (STORED, CONSTANT):
        return node.operation == STORED and node.shape[:1] == (count,)
    if node.operation not in OPERATIONS:
        return None
    kinds = {_kind(graph, operand, count, known) for operand in node.operands}
    if kinds == {False}:
        if node.operation != "Broadcast" or node.shape[:1] != (count,):
            return False
        return len(shapes[0]) < len(node.shape) or shapes[0][0] == 1
    aligned = {(len(shape), shape[0]) for shape in shapes} if kinds == {True} else set()
    if len(aligned) != 1 or node.shape[:1] != (count,):
        return None
    same_rank = node.operation != "Broadcast" or len(shapes[0]) == len(node.shape)
    return True if same_rank and OPERATIONS[node.operation].by_row(node.arguments) else None


def _piece(
    graph: Graph, number: int, row_bytes: Callable[[str], int]
) -> tuple[str, int, int] | None:
    """As ByRow.piece, for a node that has rows."""
    node = graph[number]
    if node.operation == STORED:
        name = node.arguments[0]
        return name, 0, row_bytes(name)
    if node.operation not in SAME_BYTES | {"Slice", "Split"}:
        return None
    below = _piece(graph, node.operands[0], row_bytes)
    if below is None or node.operation in SAME_BYTES:
        return below
    before, after = graph[node.operands[0]].shape[1:], node.shape[1:]
    if node.operation == "Slice":
        starts, _, steps = (of[1:] for of in node.arguments)
    else:
        steps, starts = (1,) * len(before), [0] * len(before)
        starts[node.arguments[1] - 1] = (0, *node.arguments[0])[node.result]
    cut = max((n for n, size in enumerate(before) if after[n] != size), default=0)
    if any(size > 1 and (n < cut or step != 1) for n, (size, step) in enumerate(zip(after, steps))):
        return None
    name, first, size = below
    item = size // max(math.prod(before), 1)
    skipped = sum(start * math.prod(before[n + 1 :]) for n, start in enumerate(starts))
    return name, first + skipped * item, math.prod(after) * item


def _replayed(
    graph: Graph,
    number: int,
    given: Mapping[str, mx.array],
    kinds: Mapping[int, bool] = MappingProxyType({}),
    count: int = 0,
) -> mx.array:
    """Recompute a node from other arrays. given: by stored name. kinds: nodes that have `count`
    rows now instead of the recorded number."""
    node = graph[number]
    if node.operation in (STORED, CONSTANT):
        return given[node.arguments[0]] if node.operation == STORED else node.arguments[0]
    arguments = list(node.arguments)
    if kinds.get(number):
        if node.operation in ("Reshape", "Broadcast"):
            arguments[0] = (count, *arguments[0][1:])
        elif node.operation == "Slice":
            arguments[1] = (count, *arguments[1][1:])
    operands = [_replayed(graph, operand, given, kinds, count) for operand in node.operands]
    below = graph[node.operands[0]].operation if node.operands else ""
    if node.operation == "AsType" and below == "Square":
        return mx.from_fp8(operands[0], dtype=arguments[0])
    made = OPERATIONS[node.operation].run(arguments, *operands)
    return made[node.result] if isinstance(made, list) else made
