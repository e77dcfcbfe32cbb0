"""Where the arrays of a form come from: the checkpoint that was opened.

It is read again whenever a form is wanted again, so that nothing has to be kept in memory for it;
the file, or rather the system's cache of it, is the host memory of paper 003, section 6.3. A packed
form is read where it was baked, and else quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import NamedTuple

import mlx.core as mx

from toastkit.errors import DataError
from toastkit.holdings.forms import ORIGINAL, Form
from toastkit.holdings.holding import Holding, Parts
from toastkit.store.ledger import EXPERTS
from toastkit.store.precision import (
    GEAR_BITS,
    Rows,
    empty_rows,
    looks_quantised,
    quantise_rows,
)
from toastkit.store.request import Request
from toastkit.store.store import Store
from toastkit.store.waiting import AHEAD, NOW

WIDENED_BYTES = 2 << 20  # from which on tensors are widened as they are read
SAMPLED_MODULES = 3  # whose rows are looked at for an earlier quantisation
Move = tuple[Holding, Form]
GEAR_OF = {bits: gear for gear, bits in GEAR_BITS.items()}


class Reading(NamedTuple):
    """Moves whose arrays are being read. names: of what. there: originals on the device. request:
    None where nothing has to be read."""

    moves: Sequence[Move]
    names: list[str]
    there: Mapping[Holding, mx.array]
    request: Request[dict[str, mx.array]] | None

    @property
    def nbytes(self) -> int:
        """Of the arrays that are read."""
        return 0 if self.request is None else self.request.nbytes

    def wait(self) -> None:
        """Waits until it has been read, and takes nothing. Raises DataError, NoInputError,
        IOFailure."""
        if self.request is not None:
            self.request.result()

    def cancel(self) -> None:
        """Wants it no longer."""
        if self.request is not None:
            self.request.cancel()

    def give_back(self) -> None:
        """Nothing is computed any more of what was read: see Request.give_back."""
        if self.request is not None:
            self.request.give_back()


class Weights:
    """The checkpoint behind a model.

    store: stays open. dtype: that weights are cast to, None for their own. narrow: names of those
    that keep their own nevertheless, packed too. notify: is told once when they seem to have been
    quantised before.
    """

    def __init__(
        self,
        store: Store,
        dtype: mx.Dtype | None,
        narrow: Container[str] = (),
        notify: Callable[[str], None] | None = None,
    ):
        self._store, self._dtype, self._notify = store, dtype, notify
        self._narrow = narrow
        self._known = frozenset(store.names)
        self._whole: dict[str, mx.array] | None = None
        self._ahead: Reading | None = None
        self._sampled: set[Holding] = set()

    def loaded_dtype(self, name: str) -> mx.Dtype:
        """Of a parameter on the device; of the scales, where it is a matrix that is packed."""
        stored = self._store.dtype(name)
        cast = name not in self._narrow and mx.issubdtype(stored, mx.floating)
        return self._dtype if self._dtype is not None and cast else stored

    def request(
        self,
        moves: Sequence[Move],
        there: Mapping[Holding, mx.array] = MappingProxyType({}),
        priority: int = NOW,
        at_once: bool = False,
    ) -> Reading:
        """Begins to read what it takes to give modules other forms: of modules that lie together, a
        layer say. What is read ahead is not held against the files: nobody may come to want it, and
        who does has to (`check_files`). there: originals, (..., columns), of matrices on the
        device, in its dtype. priority, at_once: as of Store.request. Raises DataError, IOFailure,
        NoInputError where the files cannot be read, or are no longer those that were opened."""
        names = [name for move in moves for name in self._wanted(*move, there)]
        if not names or self._whole is not None:
            return Reading(moves, names, there, None)
        if priority == NOW:
            self._store.check_files()
        cast = self._cast(names, moves)
        widen = {name for name in cast if self.loaded_dtype(name) == mx.float32}
        if sum(map(self._store.nbytes, widen)) < WIDENED_BYTES:
            widen = set()  # MLX casts so little as quickly, and needs no numpy
        mapped = {t.name for h, form in moves if form.mapped for t in h.tensors}
        mapped = {name for name in mapped if self.loaded_dtype(name) == self._store.dtype(name)}
        request = self._store.request(names, priority, at_once, widen, mapped, lazy=True)
        return Reading(moves, names, there, request)

    def finish(self, reading: Reading, lazy: bool = False) -> list[Parts]:
        """The arrays of each module in its new form, evaluated, or, if lazy, read. Raises as
        `request`; DataError for weights that cannot be quantised."""
        arrays = self._read(reading)
        arrays.update({h.weight.name: weight for h, weight in reading.there.items() if h.weight})
        made = []
        for holding, form in reading.moves:
            parts = self._parts(holding, form, arrays)
            for name in holding.names:
                arrays.pop(name, None)
            if form.kind == "packed":
                mx.eval(parts.matrix)  # now, which lets the original go
            made.append(parts)
        if not lazy:
            self._store.evaluate([(parts.matrix, parts.rest) for parts in made])
        return made

    def _wanted(self, holding: Holding, form: Form, there: Container[Holding]) -> list[str]:
        """The parameters to read: the rest where it is not in the tree, and the matrix unless the
        original is there to be packed; where it is baked, that."""
        if not form.whole:
            return []  # what is in slots is fetched when it is wanted
        names = [] if holding.form.whole else [t.name for t in holding.rest]
        if baked := self._baked(holding, form):
            return [*names, *baked.values()]
        if holding.weight is not None and (form.kind == "original" or holding not in there):
            names.append(holding.weight.name)
        return names

    def _baked(self, holding: Holding, form: Form) -> dict[str, str]:
        """The stored names of a packed matrix, by part, where the checkpoint holds it."""
        if form.kind != "packed" or form.bits not in GEAR_OF:
            return {}
        names = self._store.baked(holding.path, GEAR_OF[form.bits])
        return {name.rpartition(".")[2]: name for name in names}

    def _read(self, reading: Reading) -> dict[str, mx.array]:
        """Parameters by name, in the dtype of the device, and baked parts as they are."""
        if self._whole is not None:
            self._store.check_files()
            # Once cast, what was read is let go.
            arrays = {name: self._whole.pop(name) for name in reading.names}
        else:
            arrays = {} if reading.request is None else reading.request.result()
        for name in self._cast(reading.names, reading.moves):
            arrays[name] = arrays[name].astype(self.loaded_dtype(name))
        return arrays

    def _cast(self, names: Iterable[str], moves: Iterable[Move]) -> frozenset[str]:
        """Of what is read, what gets the dtype of the device: not what is baked, nor what is to be
        packed, which begins in the dtype of the file."""
        packed = {h.weight.name for h, form in moves if form.kind == "packed" and h.weight}
        return self._known.intersection(names) - packed

    @contextmanager
    def whole(self) -> Iterator[None]:
        """While most of the model is read at once: MLX does that quickest."""
        self._whole = self._store.load()
        try:
            yield
        finally:
            self._whole = None

    def _parts(self, holding: Holding, form: Form, arrays: Mapping[str, mx.array]) -> Parts:
        if form.away:
            return Parts(form, {}, {}, holding.owner)
        if form.slots:
            return self._empty_slots(holding, form)
        if form.kind == "original" or holding.weight is None:
            return holding.original(arrays, form if form.mapped else ORIGINAL)
        name = holding.weight.name
        if baked := self._baked(holding, form):
            rows = Rows(*(arrays[baked[part]] for part in Rows._fields))
        else:
            rows = self._quantised(holding, form.bits, arrays[name])
        dtype = self.loaded_dtype(name)
        rows = Rows(rows.weight, rows.scales.astype(dtype), rows.biases.astype(dtype))
        return holding.packed(rows, form, arrays)

    def _empty_slots(self, holding: Holding, form: Form) -> Parts:
        """Slots of a stack's parameters, (slots, ...), with no expert in them."""
        kind, matrix, tensors = None, {}, list(holding.rest)
        if holding.weight is not None and form.kind == "packed":
            name = holding.weight.name
            shape = (form.slots, *self._store.shape(name)[1:])
            rows = empty_rows(shape, form.bits, self.loaded_dtype(name))
            parts = holding.packed(rows, form, {})
            matrix, kind = parts.matrix, parts.kind
        elif holding.weight is not None:
            tensors.append(holding.weight)
        for tensor in tensors:
            shape = (form.slots, *self._store.shape(tensor.name)[1:])
            matrix[str(tensor.key)] = mx.zeros(shape, self.loaded_dtype(tensor.name))
        return Parts(form, matrix, {}, EXPERTS, kind)

    def sources(self, holding: Holding) -> dict[str, str]:
        """The stored names of a slotted module's parameters, by where they hang; of a packed matrix
        that is not baked, of its original."""
        names = {str(t.key): t.name for t in holding.rest}
        if holding.weight is None:
            return names
        if holding.form.kind != "packed":
            return {**names, "weight": holding.weight.name}
        made = dict.fromkeys(Rows._fields, holding.weight.name)
        return {**names, **(self._baked(holding, holding.form) or made)}

    def expert_rows(self, holding: Holding, name: str, rows: mx.array) -> dict[str, mx.array]:
        """What is made for experts of a slotted module, of one of its `sources`: (experts, ...)
        in the dtype of the device, by where it hangs, lazy. rows: of the source, (experts, ...)
        of its stored dtype. Raises DataError where they cannot be quantised."""
        made = {key: rows for key, source in self.sources(holding).items() if source == name}
        if holding.form.kind == "packed" and holding.weight and holding.weight.name == name:
            made = self._quantised(holding, holding.form.bits, rows)._asdict()
        return {key: a.astype(holding.parts.matrix[key].dtype) for key, a in made.items()}

    def _quantised(self, holding: Holding, bits: int, weight: mx.array) -> Rows:
        """A matrix, (..., columns) in the dtype of the file or of the device, in so many bits."""
        assert holding.weight is not None  # it is about to be packed
        name = holding.weight.name
        self._look_at(holding, weight)
        try:
            # In the dtype of the file, as baking does: a gear is the same, baked or made here.
            return quantise_rows(weight.astype(self._store.dtype(name)), bits, pad=True)
        except DataError as error:
            raise DataError(f"{name}: {error.message}", error.hint) from error

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

    @property
    def is_reading_ahead(self) -> bool:
        """Whether `read_ahead` has begun with something."""
        return self._ahead is not None

    def read_ahead(self, holdings: Sequence[Holding]) -> None:
        """Begins to read originals, and these alone, and returns at once; what was being read
        ahead and is not among them is let go."""
        moves = [(h, ORIGINAL) for h in holdings if h.weight is not None]
        if self._ahead is None or moves != self._ahead.moves:
            self.forget_ahead()
            self._ahead = self.request(moves, priority=AHEAD)

    def forget_ahead(self) -> None:
        """Lets go what was read ahead and is not needed, or has been taken by now."""
        if self._ahead is not None:
            self._ahead.cancel()
        self._ahead = None

    def check_files(self) -> None:
        """Raises DataError, NoInputError where the files are not those that were opened."""
        self._store.check_files()

    def close(self) -> None:
        """Lets the checkpoint go."""
        self.forget_ahead()
        self._store.close()
