"""What an architecture's `sanitize` makes of the stored tensors, and how one layer of it is made
again without all others.

`sanitize` is recorded once as a graph, in which nothing is computed. The graph says of each tensor
whether it is a stored one, several of them stacked, or computed, and of which. To compute the
tensors of a layer, `sanitize` is run over that layer's stored tensors and as many placeholders as
it takes to have the same graph come out; to the last constant, or it is run over all names.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from toastkit.store.raw import DTYPES, RawTensors
from toastkit.store.skeleton import MISFITS

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # between dots
RECORDING = threading.Lock()
Sanitize = Callable[[dict[str, mx.array]], dict[str, mx.array]]


class Stored(NamedTuple):
    """A tensor that is a stored one."""

    name: str


class Stacked(NamedTuple):
    """A tensor whose rows are stored ones: (parts, ...)."""

    parts: tuple[str, ...]


class Made(NamedTuple):
    """A tensor that is computed of stored ones."""

    parts: tuple[str, ...]


class Sanitizing:
    """The tensors that a sanitize makes of those of the files.

    sanitize: a dictionary of arrays, such as (rows, columns) in the stored dtype, -> another; may
    change the first, and arrays in place. names: of the stored tensors that it is given.
    """

    def __init__(self, raw: RawTensors, sanitize: Sanitize, names: Iterable[str]):
        self._raw, self._sanitize, self._names = raw, sanitize, list(names)
        self._lock = threading.Lock()
        # Operation, arguments and operands, by which equal parts of two graphs are one number.
        self._numbers: dict[tuple, int] = {}
        self._nodes: list[tuple] = []
        self._whole: dict[str, int] | None = None
        self._layers: dict[str, str | None] = {}  # by the first number in a stored name
        self._cover: set[str | None] = set()
        self._subsets: dict[frozenset, tuple[list[str], set[str]]] = {}

    def origin(self, name: str) -> Stored | Stacked | Made | None:
        """Where a tensor comes from; None where the sanitize looks at values, so that it cannot be
        recorded."""
        node = self._recorded().get(name)
        if node is None:
            return None
        operation, arguments, operands, _ = self._nodes[node]
        if operation == "stored":
            return Stored(arguments)
        if operation == "Concatenate" and arguments == "[0]":
            rows = [self._nodes[operand] for operand in operands]
            parts = [self._nodes[row[2][0]] for row in rows if row[:2] == ("ExpandDims", "[[0]]")]
            if len(parts) == len(rows) and all(part[0] == "stored" for part in parts):
                return Stacked(tuple(part[1] for part in parts))
        return Made(tuple(self._stored_below([node])))

    def make(self, names: Iterable[str], stored: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Tensors that are computed, lazy. stored: all their parts, evaluated."""
        names = list(names)
        with self._lock:
            subset = self._subset(names)
        blanks: dict[tuple, mx.array] = {}
        given = {}
        for name in subset:
            if name in stored:
                given[name] = stored[name][...]  # a new object: it may be changed in place
                continue
            _, entry = self._raw.place(name)
            key = (entry.shape, entry.dtype)
            if key not in blanks:
                blanks[key] = mx.zeros(entry.shape, DTYPES[entry.dtype][1])
            given[name] = blanks[key][...]
        made = self._sanitize(given)
        return {name: made[name] for name in names}

    # -------------------------------------------------------------------- which names it takes

    def _subset(self, names: list[str]) -> list[str]:
        """The stored names that sanitize has to see, to make these tensors as of all."""
        whole = self._whole or {}
        parts = self._stored_below([whole[name] for name in names])
        layers = frozenset(self._layers[part] for part in parts)
        if layers not in self._subsets:
            seen = layers | self._cover
            subset = [name for name in self._names if self._layers[name] in seen]
            found = self._record(subset)  # nothing where it wants all layers
            same = {name for name, node in found.items() if whole.get(name) == node}
            self._subsets[layers] = (subset, same)
        subset, same = self._subsets[layers]
        return subset if same.issuperset(names) else self._names

    def _recorded(self) -> dict[str, int]:
        """The graph of all, by tensor."""
        with self._lock:
            if self._whole is None:
                numbers = {name: NUMBER.search(name) for name in self._names}
                self._layers = {name: n.group() if n else None for name, n in numbers.items()}
                self._cover = self._covering()
                self._whole = self._record(self._names)
            return self._whole

    def _covering(self) -> set[str | None]:
        """Layers of which every kind of name is in one: many sanitizes look whether there is any
        such name. Also what is outside the layers, and layer 0, which many look at."""
        kinds: dict[str | None, set[str]] = {}
        for name, layer in self._layers.items():
            kinds.setdefault(layer, set()).add(NUMBER.sub("*", name))
        chosen: set[str | None] = {None, "0"}
        seen = set().union(*(kinds.get(layer, ()) for layer in chosen))
        for layer, own in kinds.items():
            if not own <= seen:
                seen |= own
                chosen.add(layer)
        return chosen

    # ------------------------------------------------------------------------------- recording

    def _record(self, names: list[str]) -> dict[str, int]:
        """sanitize over stored tensors of these names: the node of each tensor that it makes.
        Empty where it fails, as where it misses a layer or looks at values."""
        found: list[str] = []
        nodes: dict[str, int] = {}
        outputs: list[str] = []

        def run(*arrays: mx.array) -> list[mx.array]:
            made = self._sanitize(dict(zip(names, arrays)))
            found[:] = made
            return list(made.values())

        def note(event: dict[str, Any]) -> None:
            kind = event["type"]
            if kind == "inputs":
                for name, (identity, *_) in zip(names, event["inputs"]):
                    nodes[identity] = self._number("stored", name)
            elif kind == "constants":
                for identity, value in event["constants"]:
                    key = (str(value.dtype), tuple(value.shape), bytes(memoryview(value)))
                    nodes[identity] = self._number("constant", key)
            elif kind == "primitive":
                operands = tuple(nodes[identity] for identity, *_ in event["inputs"])
                for index, (identity, *_) in enumerate(event["outputs"]):
                    nodes[identity] = self._number(
                        event["name"], repr(event["arguments"]), operands, index
                    )
            elif kind == "outputs":
                outputs[:] = [identity for identity, *_ in event["outputs"]]

        blanks = [
            mx.zeros(entry.shape, DTYPES[entry.dtype][1])
            for _, entry in map(self._raw.place, names)
        ]
        try:
            with _recordable():
                mx.export_function(note, run, *blanks)
        except MISFITS:
            return {}
        return {name: nodes[identity] for name, identity in zip(found, outputs)}

    def _number(
        self, operation: str, arguments: Any, operands: tuple[int, ...] = (), index: int = 0
    ) -> int:
        key = (operation, arguments, operands, index)
        number = self._numbers.setdefault(key, len(self._nodes))
        if number == len(self._nodes):
            self._nodes.append(key)
        return number

    def _stored_below(self, nodes: list[int]) -> list[str]:
        """The stored tensors that nodes are made of."""
        found, seen, left = [], set(nodes), list(nodes)
        while left:
            operation, arguments, operands, _ = self._nodes[left.pop()]
            if operation == "stored":
                found.append(arguments)
            left += (node for node in set(operands) if node not in seen)
            seen.update(operands)
        return found


@contextmanager
def _recordable() -> Iterator[None]:
    """Lets sanitize call what MLX cannot record. In this thread it leaves a mark in the graph, of
    as many operations as it takes to tell which it was."""
    mark, thread = mx.stop_gradient, threading.get_ident()
    marks: dict[str, Callable] = {
        "contiguous": lambda array, *_, **__: mark(array),
        "from_fp8": lambda array, dtype=mx.bfloat16, **_: mark(mark(array.astype(dtype))),
    }

    def instead(name: str, *arguments: Any, **named: Any) -> mx.array:
        called = marks if threading.get_ident() == thread else plain
        return called[name](*arguments, **named)

    with RECORDING:
        plain = {name: getattr(mx, name) for name in marks}
        try:
            for name in plain:
                setattr(mx, name, partial(instead, name))
            yield
        finally:
            for name, function in plain.items():
                setattr(mx, name, function)
