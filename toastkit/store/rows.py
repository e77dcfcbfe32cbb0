"""Rows of a tensor, such as single experts, without reading the others."""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from toastkit.store.store import Store

# In published checkpoints an expert is tensors of its own: `...mlp.experts.3.gate_proj.weight`.
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)")
NUMBER = re.compile(r"\.\d+(?=\.)")
COMPARE_BYTES = 4 << 20


class RowReader:
    """Reads rows of a store's tensors: of one that lies in a file as it is, a range of bytes; of
    one that sanitize stacks from a tensor an expert, those tensors. Otherwise the whole tensor is
    read and cut.

    Which stored tensors make up a stacked one is not guessed from names: the first time it is
    found by comparing contents, and from then on holds for all layers.
    """

    def __init__(self, store: Store):
        self._store = store
        self._raw = store._raw
        self._matches: dict[str, tuple[str, str] | None] = {}

    @cached_property
    def _parts(self) -> dict[tuple[str, str], list[str]]:
        """(path of the experts, name below an expert) -> stored names, by expert."""
        numbered: dict[tuple[str, str], dict[int, str]] = {}
        for name in self._raw.names():
            match = EXPERT.fullmatch(name)
            if match:
                path, index, tail = match.groups()
                numbered.setdefault((path, tail), {})[int(index)] = name
        whole = {k: v for k, v in numbered.items() if set(v) == set(range(len(v)))}
        return {key: [v[i] for i in range(len(v))] for key, v in whole.items()}

    def read(self, name: str, start: int, stop: int) -> mx.array:
        """Rows start:stop of a tensor, evaluated."""
        if (place := self._store.source(name)) is not None:
            return self._raw.read(place[1].name, start, stop - start)
        parts = self._parts_of(name)
        if parts is not None:
            rows = mx.stack([self._raw.read(part) for part in parts[start:stop]])
        else:
            rows = mx.contiguous(self._store.tensor(name)[start:stop])
        mx.eval(rows)
        return rows

    def _parts_of(self, name: str) -> list[str] | None:
        """The stored tensors that a stacked one is made of."""
        shape = self._store.shape(name)
        layer = self._store.layer_of(name)
        # By what layers have in common: of a layer 0 there may be two, one of them of an MTP head.
        candidates = {
            (kind_of(f"{path}."), tail): parts
            for (path, tail), parts in self._parts.items()
            if layer is not None and _layer_in(path) == layer and len(parts) == shape[0]
        }
        kind = kind_of(name)
        if kind not in self._matches:
            self._matches[kind] = self._compare(name, candidates) if candidates else None
        match = self._matches[kind]
        return None if match is None else candidates.get(match)

    def _compare(
        self, name: str, candidates: dict[tuple[str, str], list[str]]
    ) -> tuple[str, str] | None:
        """The candidate whose first and last tensors are the first and last rows."""
        whole = self._store.tensor(name)
        first, last = mx.contiguous(whole[0]), mx.contiguous(whole[-1])
        mx.eval(first, last)
        del whole
        for key, parts in candidates.items():
            if self._same(parts[0], first) and self._same(parts[-1], last):
                return key
        return None

    def _same(self, part: str, row: mx.array) -> bool:
        stored = self._raw.read(part)
        same = stored.shape == row.shape and stored.dtype == row.dtype
        return same and bool(mx.array_equal(_bits(stored), _bits(row)).item())

    def is_stored(self, name: str, part: str) -> bool:
        """Whether a tensor has the very bytes of a stored one. Holds one copy of it at a time."""
        array = self._store.tensor(name)
        if array.ndim == 0 or array.size == 0:
            return self._same(part, array)
        _, entry = self._raw.place(part)
        rows = max(1, COMPARE_BYTES * entry.shape[0] // entry.nbytes)
        for start in range(0, entry.shape[0], rows):
            count = min(rows, entry.shape[0] - start)
            ours = mx.contiguous(array[start : start + count])
            theirs = self._raw.read(part, start, count)
            if ours.dtype != theirs.dtype or not mx.array_equal(_bits(ours), _bits(theirs)).item():
                return False
        return True


def kind_of(name: str) -> str:
    """A tensor's name without the numbers in it: what layers and experts have in common."""
    return NUMBER.sub(".*", name)


def _bits(array: mx.array) -> mx.array:
    """The bytes of an array, in which NaN equals NaN."""
    return array.reshape(-1).view(mx.uint8)


def _layer_in(path: str) -> int | None:
    """The first number in a path, which is the layer's."""
    found = re.search(r"\.(\d+)\.", path)
    return int(found.group(1)) if found else None
