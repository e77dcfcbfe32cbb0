"""Layers of the common form (forms.py): a few positions in one operation, with the cache that they
go to; many, or with other caches, masks and rotations, in two beside attention, what lies before it
and what lies behind. What is not as it says here goes to the architecture's own forward."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import byref
from functools import cache
from operator import is_, itemgetter
from typing import Any, NamedTuple

import mlx.core as mx

from toastkit.native.forms import Block, Heads, heads_of
from toastkit.native.functions import Native
from toastkit.native.kv_caches import appended_first, has_room, set_appended
from toastkit.native.layers import Mixture, operands_of, to_be_told
from toastkit.native.library import ACTIVATIONS, FLOATS, Library, Operand, in_use, need
from toastkit.native.modules import KEYS, Linear, Norm
from toastkit.native.rotary import is_rotary

FEW = 16  # positions that are one operation


class _Shape(ctypes.Structure):
    """What of a layer is the same at every step: toast_layer, see glue/blocks.h."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in (
            "heads", "key_heads", "normed", "network", "activation", "activation_bits",
            "before", "gated",
        )),
        ("parts", ctypes.c_int32 * 7), ("eps", ctypes.c_float * 4),
        *((name, ctypes.c_int32) for name in ("dims", "traditional", "inverse")),
        *((name, ctypes.c_float) for name in ("rotation_scale", "factor", "scale")),
    ]  # fmt: skip


class _Plan(NamedTuple):
    """A layer as it was looked at. It holds for as long as its modules are these, of these classes,
    with as many parameters. Their arrays are asked for at each step: they come and go.

    of_attention, of_network: give the modules in these; modules: all, with the layer's own, of
    `kinds` and `sizes`. places: of the arrays, as the library takes them. fixed: the frequencies,
    which lie behind so many of these. own: the modules that have to be asked, and told. left: the
    network, where it is left to itself, unless it is a mixture (mixes) that can be taken whole."""

    columns: int
    of_attention: Callable[[Any], tuple]
    of_network: Callable[[Any], tuple]
    modules: list[Any]
    kinds: list[type]
    sizes: list[int]
    places: list[tuple[Any, str]]
    fixed: mx.array | None
    own: list[Any]
    left: Any
    mixes: bool
    shape: _Shape
    heads: Heads

    def holds(self, layer: Any) -> bool:
        """Whether it still does for a layer."""
        own = attention, _, network, _ = [layer[name] for name in layer._block]
        modules = [*own, *self.of_attention(attention), *self.of_network(network)]
        same = all(map(is_, modules, self.modules)) and [*map(type, modules)] == self.kinds
        return same and [*map(len, modules)] == self.sizes

    def objects(self) -> Any:
        """The arrays."""
        arrays: list[Any] = [module[key] for module, key in self.places]
        if self.fixed is not None:
            arrays.insert(self.shape.before - 1, self.fixed)
        return (ctypes.py_object * len(arrays))(*arrays)


class Layer(Native):
    """One of that form. _block: what its class calls its parts. _plan: of the last step."""

    _block: Block
    _plan: _Plan | None = None

    def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        y = self.natively(x, mask, cache)
        return super().__call__(x, mask, cache) if y is None else y  # type: ignore[misc]

    def natively(self: Any, x: mx.array, mask: Any, cache: Any) -> mx.array | None:
        """What it gives of x (B, L, columns) float32; None where a part is not as it has to be."""
        library = in_use()
        if library is None or cache is None or x.dtype != mx.float32 or x.ndim != 3:
            return None
        plan, (batch, length, columns) = self._plan, x.shape
        if plan is None or plan.columns != columns or not plan.holds(self):
            plan = vars(self)["_plan"] = _planned(self, columns)
        if plan is None or any(part.operand() is None for part in plan.own):
            return None
        few = plan.fixed is not None and batch * length <= FEW
        known = mask is None or (isinstance(mask, str) and mask == "causal")
        one = few and known and has_room(cache, length)
        if plan.heads.gated and not one:
            return None
        for part in plan.own:
            part.was_used()
        y, *normed = (_in_one if one else _in_two)(library, plan, x, mask, cache)
        return y + plan.left(*normed) if normed else y


def _in_one(library: Library, plan: _Plan, x: mx.array, mask: Any, cache: Any) -> list[mx.array]:
    """What a layer gives, and the norm of it, where its network is left to itself; lazy, (B, L,
    columns) each. For a cache that has room."""
    mixture = plan.left.whole() if plan.mixes else None
    outs = _copies(x, 1 if plan.left is None or mixture else 2)
    keys, values = cache.keys, cache.values
    caches = [*_copies(keys, 1), *_copies(values, 1)]
    causal, call = mask is not None, _functions(library)[0]
    made = (ctypes.py_object * (len(outs) + 2))(*outs, *caches)
    objects, more = plan.objects(), byref(mixture) if mixture else None
    shape = byref(plan.shape)
    need(call(made, x, keys, values, cache.offset, causal, objects, shape, more))
    set_appended(cache, caches, x.shape[1])
    return outs


def _copies(x: Any, count: int) -> list[Any]:
    """Arrays that nobody else has: less work than new ones."""
    return [x.__copy__() for _ in range(count)]


def _in_two(library: Library, plan: _Plan, x: mx.array, mask: Any, cache: Any) -> list[mx.array]:
    """The same."""
    _, projected, closed = _functions(library)
    heads = _copies(x, 3)
    objects, shape, own = plan.objects(), byref(plan.shape), plan.heads
    need(projected((ctypes.py_object * 3)(*heads), x, objects, shape))
    turn = plan.modules[0][own.turn]
    queries, keys = (turn(one, offset=cache.offset) for one in heads[:2])
    new = keys, heads.pop()
    del heads
    keys, values = appended_first(cache, *new) or cache.update_and_fetch(*new)
    del new
    scale = plan.shape.scale
    attended = own.attend(queries, keys, values, cache=cache, scale=scale, mask=mask)
    outs = _copies(x, 1 if plan.left is None else 2)
    made = (ctypes.py_object * len(outs))(*outs)
    need(closed(made, x, attended, objects, shape))
    return outs


def _planned(layer: Any, columns: int) -> _Plan | None:
    """None where a part is not as it has to be for x (..., columns)."""
    attention, first, network, second = of_layer = [layer[name] for name in layer._block]
    kind: Any = type(attention)
    if (own := heads_of(kind)) is None:
        return None
    form = vars(type(network)).get("_form")
    names = [own.q, own.k, own.v, own.out]
    *before, out = parts = [attention[name] for name in names]
    norms = [attention[name] for name in (own.q_norm, own.k_norm) if name is not None]
    behind = [network[name] for name in form.parts] if form else []
    if not _are_plain(first, second, *norms) or (found := _given(before, columns)) is None:
        return None
    heads, key_heads = getattr(attention, own.heads), getattr(attention, own.key_heads)
    joined = heads * (found[2].weight.shape[-2] // key_heads)
    if _given([out], joined) is None:
        return None
    more = form and _is_multiplied(behind, columns)
    used = parts + behind if more else parts
    shape, turn = _Shape(), attention[own.turn]
    shape.heads, shape.key_heads, shape.normed = heads, key_heads, bool(norms)
    shape.gated = own.gated
    shape.scale, shape.activation_bits = getattr(attention, own.scale), out._activation_bits
    shape.eps[:] = [norm.eps for norm in (first, second, *norms)] + [0.0] * (2 - len(norms))
    if more:
        shape.network, shape.activation = len(behind), ACTIVATIONS.index(form.activation)
    shape.parts[: len(used)] = [
        sum(1 << i for i, key in enumerate(KEYS[1:]) if key in part) for part in used
    ]
    places = [(norm, "weight") for norm in (first, *norms)]
    places += [(part, key) for part in before for key in KEYS if key in part]
    shape.before = len(places)
    fixed = _rotated(shape, turn, found[1].weight.shape[-2] // key_heads)
    places.append((second, "weight"))
    places += [(part, key) for part in used[3:] for key in KEYS if key in part]
    names += [own.turn, *(name for name in (own.q_norm, own.k_norm) if name is not None)]
    of_attention: Any = itemgetter(*names)
    of_network: Any = itemgetter(*form.parts) if form else lambda network: ()
    modules = [*of_layer, *of_attention(attention), *of_network(network)]
    return _Plan(
        columns, of_attention, of_network, modules, [*map(type, modules)], [*map(len, modules)],
        places, fixed, to_be_told(used), None if more else network,
        type(network).__call__ is Mixture.__call__, shape, own,
    )  # fmt: skip


def _rotated(shape: _Shape, turn: Any, size: int) -> mx.array | None:
    """Sets what a shape says of a rotation of heads; its frequencies, or None for one that is not
    known."""
    rotation = turn.rotation(size) if is_rotary(turn) else None
    if rotation is None or not 0 < rotation.dims <= size or rotation.dims % 2:
        return None
    shape.dims, frequencies, shape.inverse, shape.rotation_scale, shape.factor, last = rotation
    shape.traditional = last
    shape.before += 1
    return frequencies


def _are_plain(*norms: Any) -> bool:
    """Whether they are RMS norms of ours and nothing else."""
    return all(
        type(norm).__call__ is Norm.__call__ and norm["weight"].dtype in FLOATS for norm in norms
    )


def _given(parts: Sequence[Any], columns: int) -> list[Operand] | None:
    """What parts multiply vectors (..., columns) with; None where one is not to be multiplied
    so."""
    found = operands_of(parts) if all(isinstance(part, Linear) for part in parts) else None
    return found if found and all(own.columns == columns for own in found) else None


def _is_multiplied(network: Sequence[Any], columns: int) -> bool:
    """Whether all parts of a network are."""
    *first, down = network
    if (found := _given(first, columns)) is None:
        return False
    return _given([down], found[0].weight.shape[-2] // (3 - len(first))) is not None


@cache
def _functions(library: Library) -> tuple[Any, Any, Any]:
    array, whole, place = ctypes.py_object, ctypes.c_int, ctypes.c_void_p
    one = library.function("whole", place, *[array] * 3, whole, whole, *[place] * 3)
    projected = library.function("projected", place, array, place, place)
    closed = library.function("closed", place, array, array, place, place)
    return one, projected, closed
