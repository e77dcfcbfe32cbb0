"""Where the weights of a gear come from: the checkpoint that the model was loaded from.

It is read again, so that nothing has to be kept in memory for it; the file, or rather the system's
cache of it, is the host memory of paper 003, section 6.3. A packed gear is read where it was baked,
and else quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from toastkit.errors import DataError
from toastkit.gears.discovery import discover
from toastkit.store.ledger import OUTSIDE, layer_owner
from toastkit.store.precision import GEAR_BITS, Rows, looks_quantised, quantise_rows
from toastkit.store.reading import AHEAD, Request
from toastkit.store.store import Store

SAMPLED_MODULES = 3  # whose rows are looked at for an earlier quantisation


@dataclass
class Place:
    """A managed matrix. parents: where in the tree it hangs, (container, key). shell: the original
    module, with its weight only while the originals are on the device. owner: of the original, in
    the ledger. columns, nbytes: of the original as it was loaded."""

    path: str
    shell: Any
    parents: list[tuple[Any, Any]]
    owner: str
    columns: int
    nbytes: int

    @property
    def weight_name(self) -> str:
        """Of the parameter."""
        return f"{self.path}.weight"

    def put(self, module: nn.Module) -> None:
        """Hangs a module into the tree."""
        for container, key in self.parents:
            container[key] = module


def places_of(store: Store, scope: str) -> list[Place]:
    """The managed matrices of a store's loaded model, by layer; one that hangs in two places of the
    tree is one."""
    by_module: dict[int, Place] = {}
    for path, module, _ in discover(store.model, scope):
        container, key = _parent(store.model, path)
        place = by_module.get(id(module))
        if place is not None:
            place.parents.append((container, key))
            continue
        weight = module["weight"]
        index = store.layer_of(f"{path}.weight")
        owner = OUTSIDE if index is None else layer_owner(index)
        by_module[id(module)] = Place(
            path, module, [(container, key)], owner, weight.shape[-1], weight.nbytes
        )
    return list(by_module.values())


def _parent(model: nn.Module, path: str) -> tuple[Any, Any]:
    """The container of a module, a dict or a list, and the key in it."""
    node: Any = model
    *parts, last = path.split(".")
    for part in parts:
        node = node[int(part)] if isinstance(node, list) else node[part]
    return node, int(last) if isinstance(node, list) else last


class Sources:
    """The checkpoint behind a loaded model.

    store: stays open. dtype: that weights were cast to, None for their own. notify: is told once
    when they seem to have been quantised before.
    """

    def __init__(self, store: Store, dtype: mx.Dtype | None, notify: Callable[[str], None] | None):
        self.name = store.files.name
        self._store, self._dtype, self._notify = store, dtype, notify
        self._ahead: Request | None = None

    def stored_dtype(self, place: Place) -> mx.Dtype:
        """Of the original in the checkpoint."""
        return self._store.dtype(place.weight_name)

    def loaded_dtype(self, place: Place) -> mx.Dtype:
        """Of the original on the device, and of the scales of its packed gears."""
        return self._dtype or self.stored_dtype(place)

    def originals(self, places: list[Place]) -> list[mx.array]:
        """The weights of these places as they were loaded, to the bit; read anew where they have
        left. Raises DataError, NoInputError, IOFailure."""
        if places and "weight" in places[0].shell:
            return [place.shell["weight"] for place in places]
        self._store.check_files()
        found = self._store.read(place.weight_name for place in places)
        arrays = [found[place.weight_name] for place in places]
        return arrays if self._dtype is None else [a.astype(self._dtype) for a in arrays]

    def packed(self, gear: str, bits: int, places: list[Place]) -> Iterator[Rows]:
        """The rows of these places in a packed gear, evaluated, one after another. Raises DataError
        for weights that cannot be quantised, and as `originals`."""
        baked = self._baked(gear, bits, places)
        weights: list[Any] = [] if baked else self.originals(places)
        self._look_at(weights)
        for n, place in enumerate(places):
            rows = baked[n] if baked else self._quantised(place, weights[n], bits)
            if weights:
                weights[n] = None  # read anew, it is let go as soon as it is packed
            dtype = self.loaded_dtype(place)
            rows = Rows(rows.weight, rows.scales.astype(dtype), rows.biases.astype(dtype))
            mx.eval(rows)
            yield rows

    def _quantised(self, place: Place, weight: Any, bits: int) -> Rows:
        # In the dtype of the file, as baking does: a gear is the same, baked or made here.
        try:
            return quantise_rows(weight.astype(self.stored_dtype(place)), bits, pad=True)
        except DataError as error:
            raise DataError(f"{place.weight_name}: {error.message}", error.hint) from error

    def _baked(self, gear: str, bits: int, places: list[Place]) -> list[Rows]:
        """The gear as the checkpoint holds it; empty where it does not hold all of it."""
        if GEAR_BITS.get(gear) != bits:
            return []
        self._store.check_files()
        if not all(self._store.baked(place.path, gear) for place in places):
            return []
        found = []
        for place in places:
            parts = self._store.module(place.path, gear)
            found.append(Rows(*(parts[f"{place.path}.{name}"] for name in Rows._fields)))
        return found

    def _look_at(self, weights: list[Any]) -> None:
        """Says once that the weights seem to have been quantised before (sections 6.4, 13.3)."""
        if self._notify is None or not weights:
            return
        step = max(1, len(weights) // SAMPLED_MODULES)
        if any(looks_quantised(weight) for weight in weights[::step]):
            self._notify(
                f"warning: {self.name}: its weights look as if they had been quantised before; "
                "gears do so again, which adds up, most of all in low gear"
            )
        self._notify = None

    def read_ahead(self, places: list[Place]) -> None:
        """Begins to read the originals, and returns at once."""
        if self._ahead is None:
            self._ahead = self._store.request((place.weight_name for place in places), AHEAD)

    def forget_ahead(self) -> None:
        """Lets go what was read ahead and is not needed, or has been read by now."""
        if self._ahead is not None:
            self._ahead.cancel()
        self._ahead = None

    def close(self) -> None:
        """Lets the checkpoint go."""
        self._store.close()
