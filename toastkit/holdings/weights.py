"""The source of each form's arrays: the open checkpoint.

It is read again whenever a form is needed again, so that nothing is kept in memory for that: the
file, or rather the page cache, is the host memory of paper 003, section 6.3. A packed form is read
if it was baked, and quantised otherwise.
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
from toastkit.store.precision import GEAR_OF, Rows, empty_rows, looks_quantised, quantise_rows
from toastkit.store.request import Request
from toastkit.store.store import Store
from toastkit.store.waiting import AHEAD, NOW

MAX_COPIED_BYTES = 64 << 10  # of a tensor that is copied from a mapped file
WIDENED_BYTES = 2 << 20  # from which on tensors are widened while they are read
SAMPLED_MODULES = 3  # checked for an earlier quantisation
Move = tuple[Holding, Form]


class Reading(NamedTuple):
    """The reading of the arrays for moves. names: of the parameters. there: originals on the
    device. request: None if nothing has to be read."""

    moves: Sequence[Move]
    names: list[str]
    there: Mapping[Holding, mx.array]
    request: Request[dict[str, mx.array]] | None

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that are read."""
        return 0 if self.request is None else self.request.nbytes

    def wait(self) -> None:
        """Wait until everything has been read. Raises DataError, NoInputError, IOFailure."""
        if self.request is not None:
            self.request.result()

    def cancel(self) -> None:
        """Cancel the request."""
        if self.request is not None:
            self.request.cancel()

    def give_back(self) -> None:
        """Return the buffers, which no computation uses any more: see Request.give_back."""
        if self.request is not None:
            self.request.give_back()


class Weights:
    """The checkpoint behind a model.

    store: stays open. dtype: that weights are cast to, None for none. narrow: names of weights that
    keep their own dtype nevertheless, packed too. notify: called once with a warning if weights
    seem to have been quantised before.
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
        self._gears: dict[tuple[Holding, int], dict[str, str]] = {}  # names of baked parts

    def loaded_dtype(self, name: str) -> mx.Dtype:
        """The dtype of a parameter on the device; of the scales, if it is packed."""
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
        """Start reading what new forms of modules take: of modules stored together, such as a
        layer. A read-ahead does not check the files for changes: it may never be used, and its user
        has to (`check_files`). there: original matrices on the device, (..., columns), in its
        dtype. priority, at_once: as for Store.request. Raises DataError, IOFailure, NoInputError if
        the files cannot be read, or have changed since they were opened."""
        names = [name for move in moves for name in self._wanted(*move, there)]
        if not names or self._whole is not None:
            return Reading(moves, names, there, None)
        if priority == NOW:
            self._store.check_files()
        cast = self._cast(names, moves)
        widen = {name for name in cast if self.loaded_dtype(name) == mx.float32}
        if sum(map(self._store.nbytes, widen)) < WIDENED_BYTES:
            widen = set()  # MLX casts this little as fast, without numpy
        mapped = {t.name for h, form in moves if form.mapped for t in h.tensors}
        mapped = {name for name in mapped if self.loaded_dtype(name) == self._store.dtype(name)}
        if self._store.mapping is not None:
            # Reading them from the file would leave small pages in its cache, before the map's.
            mapped.update(n for n in names if self._store.nbytes(n) <= MAX_COPIED_BYTES)
        request = self._store.request(names, priority, at_once, widen, mapped, lazy=True)
        return Reading(moves, names, there, request)

    def finish(self, reading: Reading, lazy: bool = False) -> list[Parts]:
        """The arrays of each module in its new form, evaluated; if lazy, only read. Raises as
        `request`, and DataError for weights that cannot be quantised."""
        arrays = self._read(reading)
        arrays.update({h.weight.name: weight for h, weight in reading.there.items() if h.weight})
        made = []
        for holding, form in reading.moves:
            parts = self._parts(holding, form, arrays)
            for name in holding.names:
                arrays.pop(name, None)
            if form.kind == "packed":
                mx.eval(parts.matrix)  # now, to free the original
            made.append(parts)
        if not lazy:
            self._store.evaluate([(parts.matrix, parts.rest) for parts in made])
        return made

    def _wanted(self, holding: Holding, form: Form, there: Container[Holding]) -> list[str]:
        """The parameters to read: the rest unless it is in the tree, and the baked matrix, or else
        the original, unless it is on the device to be packed."""
        if not form.whole:
            return []  # experts in slots are fetched on demand
        names = [] if holding.form.whole else [t.name for t in holding.rest]
        if baked := self._baked(holding, form):
            return [*names, *baked.values()]
        if holding.weight is not None and (form.kind == "original" or holding not in there):
            names.append(holding.weight.name)
        return names

    def _baked(self, holding: Holding, form: Form) -> dict[str, str]:
        """The stored names of a packed matrix, by part, if the checkpoint holds it. Raises
        DataError if what it holds is no such matrix."""
        if form.kind != "packed" or form.bits not in GEAR_OF or holding.weight is None:
            return {}
        key = holding, form.bits
        if key not in self._gears:
            store, gear = self._store, GEAR_OF[form.bits]
            found = {name.rpartition(".")[2]: name for name in store.baked(holding.path, gear)}
            rows = empty_rows(store.shape(holding.weight.name), form.bits, mx.float32)._asdict()
            shapes = {part: store.shape(name) for part, name in found.items()}
            sound = shapes == {part: array.shape for part, array in rows.items()}
            if found and not (sound and store.dtype(found["weight"]) == mx.uint32):
                raise DataError(
                    f"{store.files.name}: its {gear} gear of {holding.path} is damaged",
                    hint="toast-model verify says what is wrong",
                )
            self._gears[key] = found
        return self._gears[key]

    def _read(self, reading: Reading) -> dict[str, mx.array]:
        """Parameters by name, in the dtype of the device; baked parts as they are stored."""
        if self._whole is not None:
            self._store.check_files()
            # Popped, so that what was read is freed once it is cast.
            arrays = {name: self._whole.pop(name) for name in reading.names}
        else:
            arrays = {} if reading.request is None else reading.request.result()
        for name in self._cast(reading.names, reading.moves):
            arrays[name] = arrays[name].astype(self.loaded_dtype(name))
        return arrays

    def _cast(self, names: Iterable[str], moves: Iterable[Move]) -> frozenset[str]:
        """The names among those read that are cast to the dtype of the device: not baked parts, nor
        matrices to be packed, which are quantised in the dtype of the file."""
        packed = {h.weight.name for h, form in moves if form.kind == "packed" and h.weight}
        return self._known.intersection(names) - packed

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Context in which the whole model is read by MLX, which is fastest for most of it."""
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
        """Empty slots of a stack's parameters, (slots, ...)."""
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
        """The stored names of a slotted module's parameters, by key; for a packed matrix that is
        not baked, the original's."""
        names = {str(t.key): t.name for t in holding.rest}
        if holding.weight is None:
            return names
        if holding.form.kind != "packed":
            return {**names, "weight": holding.weight.name}
        made = dict.fromkeys(Rows._fields, holding.weight.name)
        return {**names, **(self._baked(holding, holding.form) or made)}

    def expert_rows(self, holding: Holding, name: str, rows: mx.array) -> dict[str, mx.array]:
        """The parameters of experts of a slotted module that are made from one of its `sources`:
        (experts, ...) in the dtype of the device, by key, lazy. rows: of the source, (experts, ...)
        in its stored dtype. Raises DataError if they cannot be quantised."""
        made = {key: rows for key, source in self.sources(holding).items() if source == name}
        if holding.form.kind == "packed" and holding.weight and holding.weight.name == name:
            made = self._quantised(holding, holding.form.bits, rows)._asdict()
        return {key: a.astype(holding.parts.matrix[key].dtype) for key, a in made.items()}

    def _quantised(self, holding: Holding, bits: int, weight: mx.array) -> Rows:
        """Quantise a matrix, (..., columns) in the dtype of the file or of the device, to bits."""
        assert holding.weight is not None  # as its form is packed
        name = holding.weight.name
        self._check_sample(holding, weight)
        try:
            # In the dtype of the file, as baking does: so both give the same gear.
            return quantise_rows(weight.astype(self._store.dtype(name)), bits, pad=True)
        except DataError as error:
            raise DataError(f"{name}: {error.message}", error.hint) from error

    def sample(self, holdings: Sequence[Holding]) -> None:
        """Choose, once, which of the modules to be packed are checked for an earlier quantisation
        (paper 003, sections 6.4 and 13.3)."""
        if self._notify is not None and not self._sampled:
            self._sampled = set(holdings[:: max(1, len(holdings) // SAMPLED_MODULES)])

    def _check_sample(self, holding: Holding, weight: mx.array) -> None:
        """Warn, once, if a sampled weight seems to have been quantised before."""
        if self._notify is None or holding not in self._sampled or not looks_quantised(weight):
            return
        self._notify(
            f"warning: {self._store.files.name}: its weights look as if they had been quantised "
            "before; gears do so again, which adds up, most of all in low gear"
        )
        self._notify = None

    @property
    def is_reading_ahead(self) -> bool:
        """True if `read_ahead` has begun a reading."""
        return self._ahead is not None

    def read_ahead(self, holdings: Sequence[Holding]) -> None:
        """Start reading originals ahead, in place of any earlier read-ahead of others; returns at
        once."""
        moves = [(h, ORIGINAL) for h in holdings if h.weight is not None]
        if self._ahead is None or moves != self._ahead.moves:
            self.forget_ahead()
            self._ahead = self.request(moves, priority=AHEAD)

    def forget_ahead(self) -> None:
        """Cancel the read-ahead, which is not needed or has been used by now."""
        if self._ahead is not None:
            self._ahead.cancel()
        self._ahead = None

    def close(self) -> None:
        """Close the checkpoint."""
        self.forget_ahead()
        self._store.close()
