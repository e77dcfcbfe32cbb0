"""THE weights store: tensors of a checkpoint, read on demand.

store = Store(files)
store.read(names)               # tensors by name, evaluated
store.request(names, AHEAD)     # starts reading, returns at once
store.layer(7)                  # the tensors of layer 7

Names are those of the model's parameters, after the architecture's own `sanitize`: experts stacked,
norms shifted, vision towers dropped. A tensor is read every time it is requested: a stored one as a
range of its file, a stacked one part by part into its rows, a computed one from its stored parts.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from toastkit.errors import as_data_error, did_you_mean
from toastkit.model.config import load_config
from toastkit.model.files import ModelFiles
from toastkit.model.normalise import Fitted
from toastkit.model.safetensors import Entry
from toastkit.model.toast_format import GEAR_PREFIX
from toastkit.store.jobs import Job
from toastkit.store.mapping import MappedFiles
from toastkit.store.raw import DTYPES, RawTensors
from toastkit.store.reader import Reader
from toastkit.store.request import Request
from toastkit.store.rows import WIDENED, RowReading
from toastkit.store.sanitizing import Made, Origin, Sanitizing, Stored
from toastkit.store.skeleton import (
    MISFITS,
    copied_model,
    fit_config,
    holds_experts,
    layers_path,
    new_model,
    quantisation_of,
    quantise_modules,
)
from toastkit.store.tied import has_own_head, untied
from toastkit.store.waiting import NOW
from toastkit.text.exact_numbers import counted

MAX_KNOWN_READS = 1024  # sets of names


class Store:
    """The weights of one checkpoint. A tensor has its stored dtype and shape: (rows, columns) of a
    matrix, (experts, rows, columns) of stacked experts; see `dtype` and `shape`.

    fitted: the configuration as the architecture reads it. model: the architecture, with quantised
    modules in place and no weights. quantization: settings of config.json, None if not quantised.
    names: of all tensors, in file order where known. layers_path: such as `model.layers`. reader:
    its threads, with their limit and statistics. row_reading: what it takes to read some rows.
    Raises DataError, NoInputError for a checkpoint that is broken, incomplete, or does not fit.
    """

    def __init__(self, files: ModelFiles):
        self.files, config = files, load_config(files)
        own_head = has_own_head(files)
        self.config = config = untied(config) if own_head else config
        self.fitted: Fitted = fit_config(files, config)
        self.model: nn.Module = new_model(files, config, self.fitted)
        self.quantization = quantisation_of(files, config)
        self._raw = RawTensors(files)
        self.mapping: MappedFiles | None = None
        self.reader = Reader(self._raw)
        self._known_reads: dict[tuple, tuple[dict, dict]] = {}
        try:
            tensors = self._survey()
            if self.quantization is not None:
                quantise_modules(self.model, self.quantization, tensors)
            self._check_fit()
            if own_head and not any("lm_head" in name for name in self.names):
                raise ValueError("it has no output matrix of its own, and one is stored")
            self.layers_path = layers_path(self.model)
        except MISFITS as error:
            failed = f"{files.name}: the weights do not fit the model"
            raise as_data_error(error, failed) from error
        self.layer_count = len(self.model.layers)
        self._by_layer: dict[int | None, list[str]] = {}
        for name in self.names:
            self._by_layer.setdefault(self.layer_of(name), []).append(name)
        # For whoever loads the whole model next, in the thread that these arrays belong to.
        self._unread: tuple[int, dict[str, mx.array]] | None = (threading.get_ident(), tensors)

    def _survey(self) -> dict[str, mx.array]:
        """Return all tensors, lazy; note each one's shape, dtype, and the stored tensor it appears
        to be."""
        raw = tensors = self._raw.load()
        sanitize = None
        if hasattr(self.model, "sanitize"):
            if self.files.is_baked:
                # Only for its effect on the model: some drop a module that has no weights.
                self.model.sanitize(self._raw.load())
            else:
                pristine = copied_model(self.model)
                sanitize = lambda given: copied_model(pristine).sanitize(given)  # noqa: E731
                tensors = self.model.sanitize(dict(raw))
        self._sanitizing = Sanitizing(self._raw, sanitize, raw)
        self.row_reading = RowReading(self._raw, self._sanitizing, self.dtype, self.tensor)
        by_identity = {id(array): name for name, array in raw.items()}
        self._stored = {n: by_identity[id(a)] for n, a in tensors.items() if id(a) in by_identity}
        self._about = {name: (tuple(a.shape), a.dtype) for name, a in tensors.items()}
        for name in self._raw.below(GEAR_PREFIX):
            _, entry = self._raw.place(name)
            self._about[name] = entry.shape, DTYPES[entry.dtype]
        order = {}
        for name, stored in self._stored.items():
            path, entry = self._raw.place(stored)
            order[name] = path, entry.start
        last = Path("\U0010ffff"), 0
        self.names = sorted(tensors, key=lambda name: order.get(name, last))
        return tensors

    def _check_fit(self) -> None:
        """Raise ValueError unless the tensors are exactly the model's parameters."""
        parameters: Any = tree_flatten(self.model.parameters())
        expected = {name: (tuple(array.shape), array.dtype) for name, array in parameters}
        for name in self.names:
            if name not in expected:
                raise ValueError(f"it has no parameter {name}{_nearest(name, expected)}")
            shape, dtype = expected[name]
            if self.shape(name) != shape:
                raise ValueError(f"{name} has shape {list(self.shape(name))}, not {list(shape)}")
            # Undecoded codes of a quantisation would pass for numbers, and others for packed ones.
            found = self.dtype(name)
            floating = mx.issubdtype(found, mx.floating)
            if mx.issubdtype(dtype, mx.floating) != floating or mx.uint32 == dtype != found:
                stored = self._stored.get(name)
                kind = found if stored is None else self._raw.place(stored)[1].dtype
                raise ValueError(f"{name} is stored as {kind}, which are no weights")
        missing = sorted(set(expected) - set(self.names))
        if missing:
            more = f" and {counted(len(missing) - 1, 'other')}" if len(missing) > 1 else ""
            raise ValueError(
                f"{missing[0]}{more} are missing" if more else f"{missing[0]} is missing"
            )

    # ---------------------------------------------------------------------------------- by name

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, or of a stored gear tensor. Raises KeyError for an unknown name, as
        the next three do."""
        return self._about[name][0]

    def dtype(self, name: str) -> mx.Dtype:
        """Stored dtype of a tensor."""
        return self._about[name][1]

    def nbytes(self, name: str) -> int:
        """Stored size of a tensor in bytes."""
        shape, dtype = self._about[name]
        return math.prod(shape) * dtype.size

    def source(self, name: str) -> tuple[Path, Entry] | None:
        """The file of a tensor and its entry there if it is stored unchanged, contiguous or
        interleaved with others; None if it is made of others."""
        origin = self._origin(name)
        return self._raw.place(origin.name) if isinstance(origin, Stored) else None

    def _origin(self, name: str) -> Origin:
        self.shape(name)  # raises KeyError
        return self._sanitizing.origin(name)

    # ---------------------------------------------------------------------------------- reading

    def load(self) -> dict[str, mx.array]:
        """All tensors, lazy: evaluating one in this thread reads it. Reading the whole model at
        once is fastest by MLX itself. Raises DataError, NoInputError, IOFailure."""
        unread, self._unread = self._unread, None
        if unread is None or unread[0] != threading.get_ident():
            unread = 0, self._sanitizing.of_all(self._raw.load())
        return {name: unread[1][name] for name in self.names}

    def read(self, names: Iterable[str]) -> dict[str, mx.array]:
        """Tensors by name, evaluated, in the stored dtype: to the bit what `load` gives. Also
        stored gear tensors, see `baked`. Raises KeyError; DataError for a changed file,
        NoInputError, IOFailure."""
        return self.request(names, at_once=True).result()

    def request(
        self,
        names: Iterable[str],
        priority: int = NOW,
        at_once: bool = False,
        widen: Container[str] = (),
        mapped: Container[str] = (),
        lazy: bool = False,
    ) -> Request[dict[str, mx.array]]:
        """Start reading and return at once; the result is that of `read`, to be taken in a thread
        that computes. priority: NOW, or AHEAD for what nobody waits for yet. at_once: see
        Reader.request. widen: names whose 16-bit floats become float32 while reading, if stored
        unchanged; the others keep the stored dtype. mapped: names that need not be read, see
        `can_map`. lazy: the caller evaluates the result."""
        self._unread = None
        names, arrays = list(names), {}
        if self.mapping is not None:
            arrays = self.mapping.arrays({n: self.source(n) for n in names if n in mapped})
            names = [name for name in names if name not in arrays]
        origins, jobs = self._reads(tuple(names), frozenset(n for n in names if n in widen))
        finish = partial(self._finish, origins, arrays, lazy)
        return self.reader.request(jobs, finish, priority, at_once)

    def _reads(
        self, names: tuple[str, ...], widen: frozenset[str]
    ) -> tuple[dict[str, Origin], dict[Any, Job]]:
        """Where tensors come from, and the jobs that read them; kept, since layers are streamed in
        every step."""
        key = names, widen
        if key not in self._known_reads:
            origins = {name: self._origin(name) for name in names}
            jobs: dict[Any, Job] = {}
            for name, origin in origins.items():
                if isinstance(origin, Made):
                    jobs.update(
                        (Stored(part), self.row_reading.job(Stored(part))) for part in origin.parts
                    )
                elif origin is not None:
                    job = self.row_reading.job(origin)
                    jobs[name] = replace(job, widened=name in widen and job.result_dtype in WIDENED)
            if len(self._known_reads) == MAX_KNOWN_READS:
                self._known_reads.clear()
            self._known_reads[key] = origins, jobs
        return self._known_reads[key]

    def _finish(
        self, origins: dict, mapped: dict[str, mx.array], lazy: bool, read: dict[Any, mx.array]
    ) -> dict[str, mx.array]:
        """The mapped tensors, and those in `origins`, made of what was read."""
        found = mapped | {name: read[name] for name in origins if name in read}
        layers: dict[int | None, list[str]] = {}
        for name, origin in origins.items():
            if isinstance(origin, Made):
                layers.setdefault(self.layer_of(name), []).append(name)
        stored = {key.name: array for key, array in read.items() if isinstance(key, Stored)}
        for made in layers.values():
            found.update(self._sanitizing.make(made, stored))
        if None in origins.values():
            whole = self.load()
            found.update((n, whole[n]) for n, origin in origins.items() if origin is None)
            del whole
        if not lazy:
            self.evaluate(found)
        return {name: found[name] for name in (*mapped, *origins)}

    def map(self, make_region: Callable[[int], Any]) -> None:
        """Memory-map the files, if the system can. make_region: see MappedFiles."""
        with suppress(OSError):
            self.mapping = MappedFiles(self._raw, make_region)

    def can_map(self, name: str) -> bool:
        """True if a tensor is stored unchanged in a mapped file."""
        place = self.source(name)
        return self.mapping is not None and place is not None and self.mapping.holds(place)

    def evaluate(self, arrays: Any) -> None:
        """Evaluate arrays, in nested lists or dictionaries, that depend on those of `load` and
        `read`. Raises DataError if MLX cannot read what they need."""
        try:
            mx.eval(arrays)
        except RuntimeError as error:
            raise as_data_error(error, f"{self.files.name}: cannot read the weights") from error

    @property
    def keeps_cached(self) -> bool:
        """True if what is read from now on may stay in the page cache."""
        return self._raw.cached

    @keeps_cached.setter
    def keeps_cached(self, kept: bool) -> None:
        self._raw.cached = kept

    def forget_cached(self, names: Iterable[str]) -> None:
        """Drop tensors that are stored unchanged from the page cache. Raises as
        RawTensors.forget_cached."""
        self._raw.forget_cached(place for name in names if (place := self.source(name)))

    def tensor(self, name: str) -> mx.array:
        """One tensor, evaluated."""
        return self.read([name])[name]

    def check_files(self) -> None:
        """Raise DataError if the files have changed since they were opened, NoInputError if one is
        gone. One system call per file."""
        self._raw.check_files()

    # --------------------------------------------------------------------------------- by layer

    def layer_of(self, name: str) -> int | None:
        """The layer index of a tensor, None outside the layers."""
        prefix = self.layers_path + "."
        if not name.startswith(prefix):
            return None
        index = name[len(prefix) :].split(".", 1)[0]
        return int(index) if index.isdecimal() else None

    def layer_names(self, index: int | None) -> list[str]:
        """The tensors of a layer; of None those outside: embedding, final norm, head."""
        return list(self._by_layer.get(index, ()))

    def layer(self, index: int) -> dict[str, mx.array]:
        """The tensors of a layer, evaluated."""
        return self.read(self.layer_names(index))

    def baked(self, path: str, gear: str) -> list[str]:
        """The stored names of a module's parameters in a gear ("low", "mid"), which `read` and
        `request` also accept; empty if that gear was not baked."""
        return self._raw.below(f"{GEAR_PREFIX}{gear}.{path}.")

    @property
    def has_baked_gears(self) -> bool:
        """True if any gear is stored beside the originals."""
        return bool(self._raw.below(GEAR_PREFIX))

    # ------------------------------------------------------------------------------- by expert

    def expert_names(self, layer: int) -> list[str]:
        """The tensors of a layer that are stacked by expert: (experts, ...)."""
        modules, own = self.model.layers[layer].named_modules(), f"{self.layers_path}.{layer}."
        paths = {own + path for path, module in modules if holds_experts(module)}
        return [name for name in self.layer_names(layer) if name.rpartition(".")[0] in paths]

    def rows(self, name: str, start: int, stop: int) -> mx.array:
        """tensor(name)[start:stop], evaluated; reads only those rows if the files allow it.
        Raises IndexError for rows out of range."""
        if not 0 <= start < stop <= (self.shape(name) or (0,))[0]:
            raise IndexError(f"{name} has no rows {start}:{stop}")
        jobs, make = self.row_reading.rows(name, [(start, stop)])
        (rows,) = map(mx.contiguous, self.reader.request(jobs, make, NOW).result())
        self.evaluate(rows)
        return rows

    # -------------------------------------------------------------------------------- closing

    def close(self) -> None:
        """Stop reading and close the files. Idempotent."""
        self._unread = None
        if self.mapping is not None:
            self.mapping.close()
        self.reader.close()
        self._raw.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _nearest(name: str, known: Iterable[str]) -> str:
    hint = did_you_mean(name, known)
    return f" ({hint})" if hint else ""
