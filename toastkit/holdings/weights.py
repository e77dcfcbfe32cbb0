"""Where the arrays of a form come from: the checkpoint that was opened.

It is read again whenever a form is wanted again, so that nothing has to be kept in memory for it;
the file, or rather the system's cache of it, is the host memory of paper 003, section 6.3. A packed
form is read where it was baked, and else quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx

from toastkit.errors import DataError
from toastkit.holdings.forms import ABSENT, ORIGINAL, Form
from toastkit.holdings.holding import Holding, Parts
from toastkit.store.precision import GEAR_BITS, Rows, looks_quantised, quantise_rows
from toastkit.store.store import Store

SAMPLED_MODULES = 3  # whose rows are looked at for an earlier quantisation
GEAR_OF = {bits: gear for gear, bits in GEAR_BITS.items()}


class Weights:
    """The checkpoint behind a model.

    store: stays open. dtype: that weights are cast to, None for their own. notify: is told once
    when they seem to have been quantised before.
    """

    def __init__(self, store: Store, dtype: mx.Dtype | None, notify: Callable[[str], None] | None):
        self._store, self._dtype, self._notify = store, dtype, notify
        self._files = _identities(store)
        self._sampled: set[Holding] = set()

    def loaded_dtype(self, name: str) -> mx.Dtype:
        """Of a parameter on the device."""
        stored = self._store.dtype(name)
        floating = mx.issubdtype(stored, mx.floating)
        return self._dtype if self._dtype is not None and floating else stored

    def make(self, moves: Sequence[tuple[Holding, Form]]) -> list[Parts]:
        """The arrays of each module in its new form, evaluated; of modules that lie together, a
        layer say, so that they are read together.

        Raises DataError, IOFailure, NoInputError where the files cannot be read, are no longer
        those that were opened, or hold weights that cannot be quantised.
        """
        baked = {h.path: names for h, form in moves if (names := self._baked(h, form)) is not None}
        arrays = self._read([name for move in moves for name in self._wanted(*move, baked)])
        made = []
        for holding, form in moves:
            parts = self._parts(holding, form, baked.get(holding.path), arrays)
            for name in holding.names:
                arrays.pop(name, None)
            if form.kind == "packed":
                mx.eval(parts.matrix)  # now, which lets the original go
            made.append(parts)
        mx.eval([(parts.matrix, parts.rest) for parts in made])
        return made

    def _wanted(self, holding: Holding, form: Form, baked: Mapping[str, Rows]) -> list[str]:
        """The parameters to read: the rest where it is not in the tree, and the matrix unless it
        is baked, or the original is there to be packed."""
        if form == ABSENT:
            return []
        names = [t.name for t in holding.rest] if holding.form == ABSENT else []
        there = holding.path in baked or (form != ORIGINAL and holding.form == ORIGINAL)
        if holding.weight is not None and not there:
            names.append(holding.weight.name)
        return names

    def _read(self, names: list[str]) -> dict[str, mx.array]:
        """Parameters by name, in the dtype of the device."""
        if not names:
            return {}
        self._check_files()
        found = self._store.tensors(names)
        return {name: found[name].astype(self.loaded_dtype(name)) for name in names}

    def _parts(
        self, holding: Holding, form: Form, baked: Rows | None, arrays: Mapping[str, mx.array]
    ) -> Parts:
        if form == ABSENT:
            return Parts(ABSENT, {}, {}, holding.owner)
        if form == ORIGINAL or holding.weight is None:
            return holding.original(arrays)
        name = holding.weight.name
        dtype = self.loaded_dtype(name)
        rows = baked
        if rows is None:
            weight = arrays[name] if name in arrays else holding.parts.matrix["weight"]
            self._look_at(holding, weight)
            try:
                # In the dtype of the file, as baking does: a gear is the same, baked or made here.
                rows = quantise_rows(weight.astype(self._store.dtype(name)), form.bits, pad=True)
            except DataError as error:
                raise DataError(f"{name}: {error.message}", error.hint) from error
        rows = Rows(rows.weight, rows.scales.astype(dtype), rows.biases.astype(dtype))
        return holding.packed(rows, form, arrays)

    def _baked(self, holding: Holding, form: Form) -> Rows | None:
        """A packed matrix as the checkpoint holds it, where it does."""
        if form.kind != "packed" or form.bits not in GEAR_OF:
            return None
        try:
            parts = self._store.module(holding.path, GEAR_OF[form.bits])
        except KeyError:
            return None
        return Rows(*(parts[f"{holding.path}.{name}"] for name in Rows._fields))

    def sample(self, holdings: Sequence[Holding]) -> None:
        """Chooses, once, of modules that are about to be packed those whose weights are looked at
        for an earlier quantisation (paper 003, sections 6.4 and 13.3)."""
        if self._notify is not None and not self._sampled:
            self._sampled = set(holdings[:: max(1, len(holdings) // SAMPLED_MODULES)])

    def _look_at(self, holding: Holding, weight: mx.array) -> None:
        """Says once that weights that are packed seem to have been quantised before."""
        if self._notify is None or holding not in self._sampled or not looks_quantised(weight):
            return
        self._notify(
            f"warning: {self._store.files.name}: its weights look as if they had been quantised "
            "before; gears do so again, which adds up, most of all in low gear"
        )
        self._notify = None

    def read_ahead(self, holdings: Sequence[Holding]) -> None:
        """Starts reading originals, and returns at once."""
        layers = {holding.layer for holding in holdings}
        self._store.prefetch(sorted(layer for layer in layers if layer is not None))

    def _check_files(self) -> None:
        if _identities(self._store) != self._files:
            raise DataError(
                f"{self._store.files.name}: its files have changed since the model was loaded",
                hint="start again, or keep the originals with a larger --gear-cache",
            )

    def close(self) -> None:
        """Lets the checkpoint go."""
        self._store.close()


def _identities(store: Store) -> list[tuple[int, int, int]]:
    import os

    from toastkit.errors import from_os_error

    found = []
    for header in store.files.headers:
        try:
            about = os.stat(header.path)
        except OSError as error:
            raise from_os_error(error, f"cannot read {header.path}") from error
        found.append((about.st_ino, about.st_size, about.st_mtime_ns))
    return found
