"""THE weights store: tensors of a checkpoint, read when somebody asks for them.

    store = Store(files, config)
    store.layer(7)                  # dict of lazy arrays: evaluating them reads layer 7
    store.expert(7, 3)              # expert 3 of layer 7

Names are those of the model's parameters, after the architecture's own `sanitize`: experts stacked,
norms shifted, vision towers dropped. `sanitize` runs over lazy arrays, so it reads nothing; what it
builds for a tensor is evaluated with the tensor. Each lazy array is handed out once. When one is
asked for again, as streaming does, the whole set is built anew: some milliseconds for a pass over
all layers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from copy import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from toastkit.errors import DataError, did_you_mean
from toastkit.model.config import ModelConfig
from toastkit.model.files import ModelFiles
from toastkit.model.normalise import Fitted
from toastkit.model.safetensors import Entry
from toastkit.model.toast_format import GEAR_PREFIX, is_model_tensor
from toastkit.store.prefetch import Prefetcher, Range
from toastkit.store.raw import RawTensors
from toastkit.store.rows import RowReader, kind_of
from toastkit.store.skeleton import (
    MISFITS,
    fit_config,
    holds_experts,
    layers_path,
    new_model,
    quantisation_of,
    quantise_modules,
)
from toastkit.store.tied import has_own_head, untied


class Store:
    """The weights of one checkpoint.

    fitted: the configuration as the architecture reads it. model: the architecture, with quantised
    modules in place and no weights. quantization: settings of config.json, None if not quantised.
    names: of all tensors, in the order of the files where that is known. layers_path: such as
    `model.layers`.
    Raises DataError, NoInputError for a checkpoint that is broken, not whole, or does not fit.
    """

    def __init__(self, files: ModelFiles, config: ModelConfig):
        self.files = files
        own_head = has_own_head(files)
        self.config = config = untied(config) if own_head else config
        self.fitted: Fitted = fit_config(files, config)
        self.model: nn.Module = new_model(files, config, self.fitted)
        self.quantization = quantisation_of(files, config)
        self._lock = threading.Lock()
        self._raw = RawTensors(files)
        self._prefetcher: Prefetcher | None = None
        try:
            self._waiting = self._survey()
            if self.quantization is not None:
                quantise_modules(self.model, self.quantization, self._waiting)
            self._check_fit()
            if own_head and not any("lm_head" in name for name in self.names):
                raise ValueError("it has no output matrix of its own, and one is stored")
            self.layers_path = layers_path(self.model)
        except MISFITS as error:
            reason = str(error).strip().split("\n")[0][:300]
            raise DataError(f"{files.name}: the weights do not fit the model: {reason}") from error
        self.layer_count = len(self.model.layers)
        self._by_layer: dict[int | None, list[str]] = {}
        for name in self.names:
            self._by_layer.setdefault(self.layer_of(name), []).append(name)
        self._rows = RowReader(self)
        # Some sanitizes multiply arrays in place, which leaves no trace but in the values.
        self._untouched: dict[str, bool] = {}

    def _build(self, raw: dict[str, mx.array]) -> dict[str, mx.array]:
        """All tensors by name, lazy, made of the stored ones."""
        return raw if self._pristine is None else _copied(self._pristine).sanitize(raw)

    def _survey(self) -> dict[str, mx.array]:
        """Builds once, and notes each tensor's shape and dtype, and where it lies if sanitize left
        it as it was."""
        sanitizes = hasattr(self.model, "sanitize")
        self._pristine: Any = None
        if sanitizes and not self.files.is_baked:
            self._pristine = _copied(self.model)
        raw = self._raw.load()
        by_identity = {id(array): name for name, array in raw.items()}
        tensors = raw
        if sanitizes:
            if self.files.is_baked:
                # Only for what it does to the model: some drop a module that has no weights.
                self.model.sanitize(self._raw.load())
            else:
                tensors = self.model.sanitize(dict(raw))
        origin = {name: by_identity.get(id(array)) for name, array in tensors.items()}
        self._sources = {name: self._raw.place(o) for name, o in origin.items() if o is not None}
        self._about = {name: (tuple(a.shape), a.dtype) for name, a in tensors.items()}
        order = {name: (str(path), entry.start) for name, (path, entry) in self._sources.items()}
        last = ("\U0010ffff", 0)
        self.names = sorted(tensors, key=lambda name: order.get(name, last))
        return tensors

    def _check_fit(self) -> None:
        """Raises ValueError unless the tensors are exactly the model's parameters."""
        parameters: Any = tree_flatten(self.model.parameters())
        expected = {name: (tuple(array.shape), array.dtype) for name, array in parameters}
        for name in self.names:
            if name not in expected:
                raise ValueError(f"it has no parameter {name}{_nearest(name, expected)}")
            shape, dtype = expected[name]
            if self.shape(name) != shape:
                raise ValueError(f"{name} has shape {list(self.shape(name))}, not {list(shape)}")
            # Codes of some quantisation that nobody has decoded would pass for numbers.
            if mx.issubdtype(dtype, mx.floating) != mx.issubdtype(self.dtype(name), mx.floating):
                stored = self._sources.get(name)
                kind = self.dtype(name) if stored is None else stored[1].dtype
                raise ValueError(f"{name} is stored as {kind}, which are no weights")
        missing = sorted(set(expected) - set(self.names))
        if missing:
            more = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
            raise ValueError(
                f"{missing[0]}{more} are missing" if more else f"{missing[0]} is missing"
            )

    # ---------------------------------------------------------------------------------- by name

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor. Raises KeyError, as the next three do, for a name there is not."""
        return self._about[name][0]

    def dtype(self, name: str) -> mx.Dtype:
        """Stored dtype of a tensor."""
        return self._about[name][1]

    def nbytes(self, name: str) -> int:
        """Stored size of a tensor in bytes."""
        shape, dtype = self._about[name]
        count = dtype.size
        for side in shape:
            count *= side
        return count

    def source(self, name: str) -> tuple[Path, Entry] | None:
        """The file and the place where a tensor lies exactly as it is; None if it is made of
        others."""
        if name not in self._about:
            raise KeyError(name)
        place = self._sources.get(name)
        if place is None or self.files.is_baked:
            return place
        kind = kind_of(name)
        if kind not in self._untouched:
            self._untouched[kind] = self._rows.is_stored(name, place[1].name)
        return place if self._untouched[kind] else None

    def tensors(self, names: Iterable[str]) -> dict[str, mx.array]:
        """Tensors by name, lazy: evaluating one reads it, dropping it frees it."""
        names = list(names)
        with self._lock:
            if any(name not in self._waiting for name in names):
                for name in names:
                    if name not in self._about:
                        raise KeyError(name)
                self._waiting = self._build(self._raw.load())
            return {name: self._waiting.pop(name) for name in names}

    def tensor(self, name: str) -> mx.array:
        """One tensor, lazy."""
        return self.tensors([name])[name]

    # --------------------------------------------------------------------------------- by layer

    def layer_of(self, name: str) -> int | None:
        """The index of the layer that a tensor belongs to, None outside the layers."""
        prefix = self.layers_path + "."
        if not name.startswith(prefix):
            return None
        index = name[len(prefix) :].split(".", 1)[0]
        return int(index) if index.isdecimal() else None

    def layer_names(self, index: int) -> list[str]:
        """The tensors of a layer."""
        return list(self._by_layer.get(index, ()))

    def outside_names(self) -> list[str]:
        """The tensors outside the layers: embedding, last norm, head."""
        return list(self._by_layer.get(None, ()))

    def layer(self, index: int) -> dict[str, mx.array]:
        """The tensors of a layer, lazy."""
        return self.tensors(self.layer_names(index))

    def outside(self) -> dict[str, mx.array]:
        """The tensors outside the layers, lazy."""
        return self.tensors(self.outside_names())

    def module(self, path: str, precision: str | None = None) -> dict[str, mx.array]:
        """The parameters below a module path, by full name, lazy. precision: "low" or "mid" gives
        them as they were baked in that gear, evaluated. Raises KeyError where there are none."""
        prefix = f"{path}."
        if precision is None:
            names = [name for name in self.names if name.startswith(prefix)]
            if not names:
                raise KeyError(path)
            return self.tensors(names)
        stored = f"{GEAR_PREFIX}{precision}.{prefix}"
        found = [name for name in self._raw.names() if name.startswith(stored)]
        if not found:
            raise KeyError(f"{path} in {precision} gear")
        skip = len(f"{GEAR_PREFIX}{precision}.")
        return {name[skip:]: self._raw.read(name) for name in found}

    # ------------------------------------------------------------------------------- by expert

    def expert_names(self, layer: int) -> list[str]:
        """The tensors of a layer that are stacked by expert: (experts, ...)."""
        paths = []
        for path, module in self.model.layers[layer].named_modules():
            if holds_experts(module):
                paths.append(f"{self.layers_path}.{layer}.{path}")
        return [name for name in self.layer_names(layer) if name.rpartition(".")[0] in paths]

    def expert(self, layer: int, start: int, stop: int | None = None) -> dict[str, mx.array]:
        """Experts start:stop (one without stop) of a layer: (stop - start, ...) by tensor name,
        evaluated."""
        stop = start + 1 if stop is None else stop
        return {name: self.rows(name, start, stop) for name in self.expert_names(layer)}

    def rows(self, name: str, start: int, stop: int) -> mx.array:
        """tensor(name)[start:stop], evaluated; reads only those rows where the files allow it.
        Raises IndexError for rows that there are not."""
        if not 0 <= start < stop <= (self.shape(name) or (0,))[0]:
            raise IndexError(f"{name} has no rows {start}:{stop}")
        return self._rows.read(name, start, stop)

    # ---------------------------------------------------------------------------- reading ahead

    def prefetch(self, layers: Iterable[int]) -> None:
        """Starts reading layers into the page cache and returns at once."""
        if self._prefetcher is None:
            self._prefetcher = Prefetcher()
        ranges: list[Range] = []
        for index in layers:
            ranges += self._raw.ranges(self._raw_names(index))
        self._prefetcher.ask(ranges)

    def _raw_names(self, index: int) -> list[str]:
        """Stored tensors of a layer. Where sanitize renames, the layer's number is still in the
        name, behind the last word of the path: `layers.7.`."""
        word = f".{self.layers_path.rpartition('.')[2]}.{index}."
        return [name for name in self._raw.names() if word in f".{name}" and is_model_tensor(name)]

    def close(self) -> None:
        """Stops reading ahead and lets the files go."""
        if self._prefetcher is not None:
            self._prefetcher.close()
        self._waiting = {}


def _copied(module: nn.Module) -> nn.Module:
    """A model that may be changed without changing this one, down to its lists of layers: some
    sanitizes drop a module (a tied head) or note on the model what they saw."""
    made = copy(module)
    for name, child in module.items():
        if isinstance(child, nn.Module):
            made[name] = _copied(child)
    return made


def _nearest(name: str, known: Iterable[str]) -> str:
    hint = did_you_mean(name, known)
    return f" ({hint})" if hint else ""
