"""What an architecture's `sanitize` makes of the stored tensors, and how to recompute one layer of
it without the others.

`sanitize` is recorded once as a graph, without computing anything. The graph tells whether a tensor
is stored, stacked from several, or computed, and from which. To compute a layer's tensors,
`sanitize` runs on that layer's stored tensors and as many placeholders as it takes to reproduce the
same graph, to the last constant; failing that, on all names.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import mlx.core as mx

from toastkit.model.toast_format import GEAR_PREFIX
from toastkit.store.by_row import ByRow, by_row
from toastkit.store.graph import STORED, Function, Graph
from toastkit.store.raw import DTYPES, RawTensors

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # between dots


class Stored(NamedTuple):
    """A tensor that is stored unchanged."""

    name: str


class Stacked(NamedTuple):
    """A tensor whose rows are stored ones: (parts, ...)."""

    parts: tuple[str, ...]


class Made(NamedTuple):
    """A tensor computed from stored ones."""

    parts: tuple[str, ...]


Origin = Stored | Stacked | Made | None


class Sanitizing:
    """The tensors that `sanitize` makes of the stored ones.

    sanitize: a dictionary of arrays, such as (rows, columns) in the stored dtype, -> another; may
    modify the first, and arrays in place. None: tensors are as they are stored. names: of the
    stored tensors it is given.
    """

    def __init__(self, raw: RawTensors, sanitize: Function | None, names: Iterable[str]):
        self._raw, self._names = raw, list(names)
        self._is_identity = sanitize is None
        self._sanitize: Function = sanitize or (lambda given: given)
        self._lock = threading.Lock()
        self._graph = Graph()
        self._origins: dict[str, Origin] = {}
        self._by_row: dict[str, ByRow | None] = {}
        self._whole: dict[str, int] | None = None
        self._layers: dict[str, str | None] = {}  # by the first number in a stored name
        self._cover: set[str | None] = set()
        self._subsets: dict[frozenset, tuple[list[str], set[str]]] = {}

    def of_all(self, stored: dict[str, mx.array]) -> dict[str, mx.array]:
        """What `sanitize` makes of all stored tensors, lazy; it may modify the dictionary."""
        return self._sanitize(stored)

    def origin(self, name: str) -> Origin:
        """Where a tensor comes from; None if `sanitize` reads values and so cannot be recorded."""
        if self._is_identity or name.startswith(GEAR_PREFIX):
            return Stored(name)
        node = self._recorded().get(name)
        if node is None:
            return None
        if name not in self._origins:
            self._origins[name] = self._origin(node)
        return self._origins[name]

    def _origin(self, node: int) -> Origin:
        operation, arguments, operands, *_ = self._graph[node]
        if operation == STORED:
            return Stored(*arguments)
        if operation == "Concatenate" and arguments == (0,):
            rows = [self._graph[operand] for operand in operands]
            parts = [
                self._graph[row.operands[0]] for row in rows if row[:2] == ("ExpandDims", ([0],))
            ]
            if len(parts) == len(rows) and all(part.operation == STORED for part in parts):
                return Stacked(tuple(part.arguments[0] for part in parts))
        return Made(tuple(self._graph.stored_below([node])))

    def by_row(self, name: str) -> ByRow | None:
        """How rows of a computed tensor are computed separately; None if that is not known to be
        possible."""
        node = self._recorded()[name]
        with self._lock:
            if name not in self._by_row:
                self._by_row[name] = by_row(self._graph, node, self._placeholder)
            return self._by_row[name]

    def make(self, names: Iterable[str], stored: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Compute tensors, lazily. stored: all their parts, evaluated."""
        names = list(names)
        with self._lock:
            subset = self._subset(names)
        placeholders: dict[tuple, mx.array] = {}
        given = {}
        for name in subset:
            if name in stored:
                given[name] = stored[name][...]  # a new object, as it may be modified in place
                continue
            _, entry = self._raw.place(name)
            key = (entry.shape, entry.dtype)
            if key not in placeholders:
                placeholders[key] = self._placeholder(name)
            given[name] = placeholders[key][...]
        made = self._sanitize(given)
        return {name: made[name] for name in names}

    # -------------------------------------------------------------------- which names it takes

    def _subset(self, names: list[str]) -> list[str]:
        """The stored names that `sanitize` must see to make these tensors as if from all."""
        whole = self._whole or {}
        parts = self._graph.stored_below(whole[name] for name in names)
        layers = frozenset(self._layers[part] for part in parts)
        if layers not in self._subsets:
            seen = layers | self._cover
            subset = [name for name in self._names if self._layers[name] in seen]
            found = self._record(subset)  # empty if it needs all layers
            same = {name for name, node in found.items() if whole.get(name) == node}
            self._subsets[layers] = (subset, same)
        subset, same = self._subsets[layers]
        return subset if same.issuperset(names) else self._names

    def _recorded(self) -> dict[str, int]:
        """The node of each tensor in the full graph, recorded on the first call."""
        with self._lock:
            if self._whole is None:
                numbers = {name: NUMBER.search(name) for name in self._names}
                self._layers = {name: n.group() if n else None for name, n in numbers.items()}
                self._cover = self._covering()
                self._whole = self._record(self._names)
            return self._whole

    def _covering(self) -> set[str | None]:
        """Layers that together contain every kind of name, because many sanitizes check whether one
        exists; also names outside the layers, and layer 0, which many look at."""
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

    def _record(self, names: list[str]) -> dict[str, int]:
        """Record `sanitize` on stored tensors of these names: the node of each tensor that it
        makes. Empty if it fails, as it does if it misses a layer or reads values."""
        return self._graph.record(self._sanitize, {name: self._placeholder(name) for name in names})

    def _placeholder(self, name: str) -> mx.array:
        """A lazy placeholder of a stored tensor's shape, such as (rows, columns), and dtype."""
        _, entry = self._raw.place(name)
        return mx.zeros(entry.shape, DTYPES[entry.dtype])
