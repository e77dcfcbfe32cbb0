"""What of a model's weights is on the device, and in which form: one account, one budget, one lock.

    holdings = Holdings(store, dtype, ledger)
    holdings.change({"model.layers.3.mlp.up_proj": packed(4), "model.layers.8.mlp.up_proj": ABSENT})

Policies decide forms; here they come about. A change reads, makes, hangs into the tree and enters
into the ledger what is wanted, or fails and leaves everything as it was. What it takes out of use
is kept within a budget, and what was not in use for longest goes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import mlx.core as mx

from toastkit.holdings.forms import ABSENT, ORIGINAL, Form
from toastkit.holdings.holding import Holding, Parts, holdings_of
from toastkit.holdings.packed import PathCounts
from toastkit.holdings.weights import Weights
from toastkit.store.ledger import GEARS, READING, Ledger
from toastkit.store.precision import row_bytes
from toastkit.store.store import Store

Key = tuple[Holding, Form]


class _Kept(NamedTuple):
    """parts: on the device and not in use. change: the number of the change that set them aside."""

    parts: Parts
    change: int


class Holdings:
    """The weights of one model.

    store: opened, with the architecture in it; it stays open. dtype: that floating weights are cast
    to, None for their own. ledger: is told of every byte; its lock is held during a change.
    budget: bytes that forms not in use may keep on the device; None for all that is packed, and no
    originals. notify: is told a line when weights seem to have been quantised before.

    modules: by path, by layer. counts: products of packed modules by the way they are computed.
    """

    def __init__(
        self,
        store: Store,
        dtype: mx.Dtype | None,
        ledger: Ledger,
        budget: int | None = None,
        notify: Callable[[str], None] | None = None,
    ):
        self.store = store
        self.ledger = ledger
        self.budget = budget
        self.counts = PathCounts()
        self.modules = {holding.path: holding for holding in holdings_of(store)}
        self._weights = Weights(store, dtype, notify)
        self._kept: dict[Key, _Kept] = {}  # the longest unused first
        self._coming: dict[Key, Parts] = {}
        self._changes = 0
        ledger.measure(READING, lambda: store.reader.held_bytes)
        self._freed = False

    # --------------------------------------------------------------------------------- questions

    def of_layer(self, index: int) -> list[Holding]:
        """The modules of a decoder layer."""
        return [holding for holding in self.modules.values() if holding.layer == index]

    def kept(self, path: str) -> list[Form]:
        """Forms in which a module is kept beside the one in use, the longest unused first."""
        return [form for holding, form in self._kept if holding.path == path]

    def matrix_bytes(self, paths: Iterable[str]) -> int:
        """Bytes on the device of some modules' matrices, in all forms, in use or not."""
        wanted = {self.modules[path] for path in paths}
        # Copies: another thread may ask while forms change.
        others = [(h, k.parts) for (h, _), k in list(self._kept.items())]
        others += [(h, parts) for (h, _), parts in list(self._coming.items())]
        return sum(holding.matrix_bytes for holding in wanted) + sum(
            parts.matrix_bytes for holding, parts in others if holding in wanted
        )

    def original_bytes(self, path: str) -> int:
        """Bytes of a module's matrix as it is loaded; 0 where it has none."""
        weight = self.modules[path].weight
        if weight is None:
            return 0
        stored = self.store.dtype(weight.name).size
        return self.store.nbytes(weight.name) // stored * self._item(weight.name)

    def packed_bytes(self, path: str, bits: int) -> int:
        """Bytes of a module's matrix in so many bits, with its scales."""
        holding = self.modules[path]
        assert holding.weight is not None  # whoever asks has seen it
        item = self._item(holding.weight.name)
        rows = self.original_bytes(path) // (item * holding.columns)
        return rows * row_bytes(bits, holding.columns, item)

    def _item(self, name: str) -> int:
        return self._weights.loaded_dtype(name).size

    # ----------------------------------------------------------------------------------- changes

    def change(self, wanted: Mapping[str, Form]) -> int | None:
        """Gives modules, by path, the forms that are wanted of them.

        Returns how many had to be read or made, None where all had their forms already. Raises
        DataError, IOFailure, NoInputError; every module is then in the form that it was in.
        """
        with self.ledger.lock:
            moves = [(h, form) for p, form in wanted.items() if (h := self.modules[p]).form != form]
            if not moves:
                return None
            ready = self._ready(moves)
            made = self._all_made([move for move in moves if move not in ready])
            self._changes += 1
            for key, parts in {**ready, **made}.items():
                self._put(key, parts)
            self._drop_coming()
            self._weights.forget_ahead()
            self._shrink()
            if self._freed:
                self._freed = False
                mx.clear_cache()  # or MLX would keep the memory for itself
            return sum(1 for holding, form in made if form != ABSENT)

    def prepare(self, wanted: Mapping[str, Form], share: float = 1.0) -> None:
        """Begins with what a change to these forms will need: originals are read ahead, of packed
        ones a share is made. Does nothing where there would be no room to keep them. What was
        prepared for another change is let go."""
        with self.ledger.lock:
            moves = [
                (h, form)
                for path, form in wanted.items()
                if (h := self.modules[path]).form != form and (h, form) not in self._kept
            ]
            if not moves:
                return
            self._drop_coming(keep=moves)
            self._weights.read_ahead([h for h, form in moves if form == ORIGINAL])
            missing = [m for m in moves if m[1].kind == "packed" and m not in self._coming]
            size = sum(self.packed_bytes(h.path, f.bits) for h, f in moves if f.kind == "packed")
            if missing and (self.budget is None or size <= self.budget - self.kept_bytes):
                self._coming.update(self._made(missing[: math.ceil(len(moves) * share)]))

    def _ready(self, moves: list[Key]) -> dict[Key, Parts]:
        """What need not be made, because it is kept or was prepared."""
        kept = {key: self._kept[key].parts for key in moves if key in self._kept}
        return {**kept, **{key: self._coming[key] for key in moves if key in self._coming}}

    def _all_made(self, moves: list[Key]) -> dict[Key, Parts]:
        """As `_made`, layer after layer; nothing stays of what was made when one fails."""
        made: dict[Key, Parts] = {}
        self._weights.sample([h for h, form in moves if form.kind == "packed"])
        # MLX reads a whole model quickest; later, only what is wanted is read.
        first = not self._changes and len(moves) == len(self.modules)
        with self._weights.whole() if first else nullcontext():
            try:
                for _, some in groupby(moves, lambda move: move[0].layer):
                    made.update(self._made(list(some)))
            except BaseException:
                for (holding, _), parts in made.items():
                    self._leave(holding, parts)
                raise
        return made

    def _made(self, moves: list[Key]) -> list[tuple[Key, Parts]]:
        """Modules in other forms, read or made, and in the ledger."""
        there = {h: p.matrix["weight"] for h, _ in moves if (p := self._original(h)) and p.matrix}
        made = list(zip(moves, self._weights.make(moves, there)))
        for (holding, _), parts in made:
            self.ledger.add(parts.owner, parts.matrix_bytes)
            self.ledger.add(holding.owner, parts.rest_bytes)
        return made

    def _original(self, holding: Holding) -> Parts | None:
        """Of a module, where it is on the device."""
        if holding.form == ORIGINAL:
            return holding.parts
        kept = self._kept.get((holding, ORIGINAL))
        return None if kept is None else kept.parts

    def _put(self, key: Key, parts: Parts) -> None:
        """Hangs a module's new form into the tree, and sets the old one aside; an absent module
        keeps nothing."""
        holding, form = key
        self._kept.pop(key, None)
        self._coming.pop(key, None)
        before = holding.hang(parts, self.counts, self._grown)
        if form == ABSENT:
            self._leave(holding, before)
            for other in [key for key in self._kept if key[0] is holding]:
                self._leave(holding, self._kept.pop(other).parts)
        elif before.matrix:
            self._kept[holding, before.form] = _Kept(replace(before, rest={}), self._changes)

    def _grown(self, count: int) -> None:
        """A dequantised copy was made, or dropped."""
        self.ledger.add(GEARS, count)

    def _leave(self, holding: Holding, parts: Parts) -> None:
        self._freed = True
        self.ledger.add(parts.owner, -parts.matrix_bytes)
        self.ledger.add(holding.owner, -parts.rest_bytes)

    def _drop_coming(self, keep: Iterable[Key] = ()) -> None:
        """Lets go what was prepared, for nothing."""
        for holding, form in set(self._coming).difference(keep):
            self._leave(holding, self._coming.pop((holding, form)))

    # -------------------------------------------------------------------------------- the budget

    @property
    def kept_bytes(self) -> int:
        """Bytes of what is kept beside the forms in use."""
        return sum(kept.parts.matrix_bytes for kept in self._kept.values())

    def _shrink(self) -> None:
        """Lets go, down to the budget: what was just set aside if it is too large by itself, then
        what was not in use for longest; what was set aside together goes together."""
        if self.budget is None:
            self._drop([key for key in self._kept if key[1] == ORIGINAL])
        else:
            last = [k for k, kept in self._kept.items() if kept.change == self._changes]
            if sum(self._kept[key].parts.matrix_bytes for key in last) > self.budget:
                self._drop(last)
            while self.kept_bytes > self.budget:
                oldest = next(iter(self._kept.values())).change
                self._drop([k for k, kept in self._kept.items() if kept.change == oldest])

    def _drop(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._leave(key[0], self._kept.pop(key).parts)

    def close(self) -> None:
        """Lets the checkpoint go; what is on the device stays usable."""
        self._weights.close()
