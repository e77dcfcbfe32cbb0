"""A module of the model and its arrays: the only place where the module tree is changed.

A module changes its class, never its identity: architectures keep references to their modules and
read attributes off them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from toastkit.holdings.derived import derived
from toastkit.holdings.forms import ABSENT, ORIGINAL, Form
from toastkit.holdings.packed import (
    Kind,
    PathCounts,
    activations,
    dense_bytes,
    is_fused,
    packed_class,
)
from toastkit.native.library import DIGITS, PAIRS, WIDE
from toastkit.native.modules.products import NARROW
from toastkit.native.replacing import narrow_keys, native, read_elsewhere
from toastkit.store.dtypes import Loading
from toastkit.store.ledger import EMBEDDING, EXPERTS, GEARS, OUTSIDE, layer_owner
from toastkit.store.precision import GEAR_OF, Rows, row_bytes
from toastkit.store.skeleton import holds_experts, is_matrix
from toastkit.store.store import Store


class Tensor(NamedTuple):
    """A parameter of a module. name: in the store. container, key: its place in the tree."""

    name: str
    container: Any
    key: str | int


@dataclass(eq=False)
class Parts:
    """The arrays of a module in one form: (rows, columns) or (experts, rows, columns), in the dtype
    of the device; packed ones as in precision.Rows. matrix: the weight, or the packed rows, by
    parameter. rest: the other parameters, by name in the store, shared by all forms but the absent
    one. owner: of the matrix, in the ledger. kind: class and attributes of the packed module."""

    form: Form
    matrix: dict[str, mx.array]
    rest: dict[str, mx.array]
    owner: str
    kind: Kind | None = None

    def with_rest(self, rest: dict[str, mx.array]) -> Parts:
        """A copy with other parameters beside the matrix."""
        return Parts(self.form, self.matrix, rest, self.owner, self.kind)

    @property
    def matrix_bytes(self) -> int:
        """Bytes of the weight in this form."""
        return sum(array.nbytes for array in self.matrix.values())

    @property
    def rest_bytes(self) -> int:
        """Bytes of the other parameters, if they came with it."""
        return sum(array.nbytes for array in self.rest.values())


class Holding:
    """A module and its form.

    path: in the module tree. layer: its decoder layer, None outside of them. owner: of its
    originals in the ledger. weight: the parameter that can be packed, (..., columns); None for a
    module without such a matrix. rest: its other parameters. form, parts: the current form, and its
    arrays. slots: the expert slots that a policy will give a stack; 0 for all experts.
    """

    def __init__(self, path: str, module: nn.Module, store: Store):
        self.path, self.module = path, module
        self.layer = store.layer_of(f"{path}.")
        self.owner = OUTSIDE if self.layer is None else layer_owner(self.layer)
        if self.layer is None and "embed" in path:
            self.owner = EMBEDDING
        self.weight: Tensor | None = None
        self.rest: list[Tensor] = []
        self.form = ABSENT
        self.parts = Parts(ABSENT, {}, {}, self.owner)
        self.columns = self.slots = 0
        self._class, self._attributes = type(module), dict(vars(module))

    def use_native(self, activation_bits: int) -> None:
        """Use native matmuls from now on, in every form that has one. activation_bits: of the
        activations that packed weights are multiplied by, see kernels.h."""
        self._class = native(self._class)
        self.module.__class__ = self._class
        own = {"_activation_bits": activation_bits}
        vars(self.module).update(own)
        self._attributes.update(own)

    def widen_rows(self, wide: mx.Dtype) -> None:
        """Have an embedding give its rows in this dtype: MLX gives them in bfloat16 if the scales
        of their format are bytes (mxfp4, mxfp8, nvfp4)."""
        if getattr(self.module, "mode", "affine") != "affine" and hasattr(self.module, "as_linear"):
            self._class = self.module.__class__ = derived(_WideRows, self._class)
            vars(self.module)["_row_dtype"] = self._attributes["_row_dtype"] = wide

    def keep_narrow(self, store: Store, wide: mx.Dtype) -> list[str]:
        """Keep 16-bit parameters as they are stored, where matmuls with activations of dtype wide
        can use them. Returns the names of these parameters."""
        keys = narrow_keys(self.module)
        names = [t.name for t in self.tensors if t.container is self.module and t.key in keys]
        dtypes = {store.dtype(name) for name in names}
        if len(dtypes) != 1 or dtypes.isdisjoint(NARROW):
            return []
        vars(self.module)["_wide"] = self._attributes["_wide"] = wide
        return names

    def add(self, tensor: Tensor, shape: tuple[int, ...]) -> None:
        """Add a parameter. The value that the architecture initialised it with is dropped."""
        own = tensor.container is self.module and tensor.key == "weight"
        if own and is_matrix(self.module):
            self.weight, self.columns = tensor, shape[-1]
        else:
            self.rest.append(tensor)
        _remove(tensor)

    @property
    def tensors(self) -> list[Tensor]:
        """All parameters, the matrix first."""
        return [self.weight, *self.rest] if self.weight else self.rest

    @property
    def names(self) -> list[str]:
        """Names of all parameters in the store, the matrix first."""
        return [tensor.name for tensor in self.tensors]

    @property
    def matrix_bytes(self) -> int:
        """Bytes of the matrix in use on the device, with its dequantised copy."""
        return self.parts.matrix_bytes + dense_bytes(self.module)

    def attach(self, parts: Parts, counts: PathCounts, grown: Callable[[int], None]) -> Parts:
        """Attach a form's arrays to the tree; returns the parts that they replace. grown(bytes):
        called for a dequantised copy that the module makes, or drops (negative)."""
        before = self.parts
        self._unpack(grown)
        rest = parts.rest or before.rest if parts.form.whole else {}
        for tensor in self.rest:
            if tensor.name in rest:
                tensor.container[tensor.key] = rest[tensor.name]
            else:
                _remove(tensor)
        dict.update(self.module, parts.matrix)
        self.form, self.parts = parts.form, parts.with_rest(rest)
        if parts.kind is not None:
            self._set_class(*parts.kind)
            vars(self.module).update(_counts=counts, _grown=grown)
        return before

    def _unpack(self, grown: Callable[[int], None]) -> None:
        """Restore the original class, without the matrix."""
        if dense := dense_bytes(self.module):
            grown(-dense)
        for name in self.parts.matrix:
            self.module.pop(name, None)
        if self.parts.kind is not None:
            self._set_class(self._class, self._attributes)

    def _set_class(self, cls: type, attributes: Mapping[str, Any]) -> None:
        self.module.__class__ = cls  # type: ignore[assignment]
        vars(self.module).clear()
        vars(self.module).update(attributes)

    def original(self, arrays: Mapping[str, mx.array], form: Form = ORIGINAL) -> Parts:
        """The parts of the original. arrays: by name in the store, in their stored shapes, such as
        (rows, columns), in the dtype of the device. form: mapped or not."""
        matrix = {"weight": arrays[self.weight.name]} if self.weight is not None else {}
        return Parts(form, matrix, self._rest_of(arrays), self.owner)

    def packed(self, rows: Rows, form: Form, arrays: Mapping[str, mx.array]) -> Parts:
        """The parts of a packed form. rows: (rows, columns * bits / 32) uint32, and scales in the
        dtype of the device. arrays: includes the rest, if that is not in the tree."""
        kind = packed_class(self._class, self._attributes, rows, form, self.columns)
        return Parts(form, rows._asdict(), self._rest_of(arrays), GEARS, kind)

    def copy_bytes(self, form: Form, size: int, dtype: mx.Dtype) -> int:
        """Bytes of the dequantised copy of the matrix packed in a form, 0 if it needs none. size:
        bytes of the matrix in dtype."""
        if is_fused(self._attributes, dtype, form, self.columns):
            return 0
        return size // dtype.size * activations(self._attributes, dtype).size

    def in_slots(self, form: Form, rows: Sequence[int]) -> Parts:
        """The parts of form.slots slots, with some of the experts on the device in them, evaluated.
        rows: of the current stacks, which are whole or slots, by new slot; the slots after them are
        empty."""
        arrays = {str(t.key): self.parts.rest[t.name] for t in self.rest if self.parts.rest}
        chosen, spare = mx.array(list(rows), mx.uint32), form.slots - len(rows)
        matrix = {}
        for key, array in {**self.parts.matrix, **arrays}.items():
            empty = mx.zeros((spare, *array.shape[1:]), array.dtype)
            matrix[key] = mx.concatenate([array[chosen], empty]) if spare else array[chosen]
            mx.eval(matrix[key])
        return Parts(form, matrix, {}, EXPERTS, self.parts.kind)

    def _rest_of(self, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        return {t.name: arrays[t.name] for t in self.rest if t.name in arrays}


class _WideRows:
    """An embedding that gives its rows (..., columns) in _row_dtype."""

    _row_dtype: mx.Dtype

    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(x).astype(self._row_dtype)  # type: ignore[misc]


def _remove(tensor: Tensor) -> None:
    """Remove a parameter from the tree. A list keeps its length."""
    if isinstance(tensor.container, list):
        tensor.container[int(tensor.key)] = None
    else:
        tensor.container.pop(tensor.key, None)


def holdings_of(store: Store) -> list[Holding]:
    """The modules of a store's model, by layer, in the store's order within one; a module shared by
    two places of the tree is one holding. Their parameters are removed from the tree."""
    found: dict[int, Holding] = {}
    slots: dict[tuple[int, str | int], tuple[Holding, Tensor]] = {}
    for name in sorted(
        store.names, key=lambda name: -1 if (i := store.layer_of(name)) is None else i
    ):
        path, module, tensor = _locate(store.model, name)
        if id(module) not in found:
            found[id(module)] = Holding(path, module, store)
        holding = found[id(module)]
        slots[id(tensor.container), tensor.key] = holding, tensor
    for holding, tensor in slots.values():
        holding.add(tensor, store.shape(tensor.name))
    return list(found.values())


def kept_narrow(store: Store, holdings: Iterable[Holding], types: Loading) -> frozenset[str]:
    """Keep 16-bit parameters as they are stored, where matmuls can use them: returns their names.
    Not those that the architecture itself reads, which would be widened again and again."""
    wide = types.cast
    elsewhere = read_elsewhere(store.model) if types.narrow else None
    if elsewhere is None or wide is None:
        return frozenset()
    found = [h for h in holdings if h.path.rpartition(".")[2] not in elsewhere]
    return frozenset(name for h in found for name in h.keep_narrow(store, wide))


def activation_bits(model: nn.Module, exact: bool) -> int:
    """Bits of the activations that packed weights are multiplied by, see kernels.h. exact: float32.
    A model with experts has more than others: between two experts of nearly equal score, a small
    error flips the choice, and everything after it differs."""
    if exact:
        return WIDE
    return DIGITS if any(map(holds_experts, model.modules())) else PAIRS


class LoadedSizes:
    """Bytes of modules, by path, once loaded. dtype_of: the dtype of a parameter on the device."""

    def __init__(
        self, store: Store, modules: Mapping[str, Holding], dtype_of: Callable[[str], mx.Dtype]
    ):
        self._store = store
        self._modules = modules
        self._dtype_of = dtype_of

    def matrix_bytes(self, path: str) -> int:
        """Bytes of a module's matrix; 0 if it has none."""
        weight = self._modules[path].weight
        return 0 if weight is None else self._bytes(weight.name)

    def packed_bytes(self, path: str, bits: int) -> int:
        """Bytes of a module's matrix packed to that many bits, with its scales."""
        holding = self._modules[path]
        assert holding.weight is not None  # the caller has checked
        item = self._dtype_of(holding.weight.name).size
        rows = self.matrix_bytes(path) // (item * holding.columns)
        return rows * row_bytes(bits, holding.columns, item)

    def form_bytes(self, path: str, form: Form) -> int:
        """Bytes of a module's parameters in a form, without slots; with the dequantised copy of a
        packed matrix that is multiplied from one."""
        holding, size = self._modules[path], self.stack_bytes(path)
        if form.kind != "packed" or holding.weight is None:
            return size
        matrix, dtype = self.matrix_bytes(path), self._dtype_of(holding.weight.name)
        copy = holding.copy_bytes(form, matrix, dtype)
        return size - matrix + self.packed_bytes(path, form.bits) + copy

    def reading_bytes(self, path: str, form: Form) -> int:
        """Bytes of a module while it is brought in a form: a gear that was not baked is made from
        the original."""
        size = self.form_bytes(path, form)
        gear = GEAR_OF.get(form.bits)
        baked = gear is not None and self._store.baked(path, gear)
        return size if form.kind != "packed" or baked else max(size, self.stack_bytes(path))

    def module_bytes(self, path: str) -> int:
        """Bytes of a module's parameters, or of its slots."""
        holding, size = self._modules[path], self.stack_bytes(path)
        slots = holding.slots
        return size // self._store.shape(holding.names[0])[0] * slots if slots else size

    def stack_bytes(self, path: str) -> int:
        """Bytes of a module's parameters, with all experts."""
        return sum(map(self._bytes, self._modules[path].names))

    def _bytes(self, name: str) -> int:
        return math.prod(self._store.shape(name)) * self._dtype_of(name).size


def _locate(model: nn.Module, name: str) -> tuple[str, nn.Module, Tensor]:
    """The innermost module that contains a parameter, with its path, and the parameter's place."""
    node: Any = model
    module, count = model, 0
    words = name.split(".")
    for n, word in enumerate(words[:-1], 1):
        node = node[int(word)] if isinstance(node, (list, tuple)) else node[word]
        if isinstance(node, nn.Module):
            module, count = node, n
    last = int(words[-1]) if isinstance(node, list) else words[-1]
    return ".".join(words[:count]), module, Tensor(name, node, last)
