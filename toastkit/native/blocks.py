"""Layers of the common form (forms.py): a few positions in one operation, with the cache that they
go to; many, or with other caches, masks and rotations, in two beside attention, what lies before it
and what lies behind. What is not as it says here goes to the architecture's own forward."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import byref
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx

from toastkit.native.forms import Block, Heads, adds_one, heads_of
from toastkit.native.functions import Native
from toastkit.native.kv_caches import (
    Kept,
    Room,
    appended_first,
    kept_of,
    offset_of,
    room_in,
    set_appended,
)
from toastkit.native.library import ACTIVATIONS, FLOATS, NONE, Library, in_use, need
from toastkit.native.mixtures import Mixture
from toastkit.native.modules import Linear, Norm, operands_of
from toastkit.native.operands import Operand, Operands
from toastkit.native.operations import is_mask
from toastkit.native.rotary import UNTURNED, is_rotary

FEW = 16  # positions that are one operation


class LayerShape(ctypes.Structure):
    """What of a layer is the same at every step: toast_layer, see glue/blocks.h."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in (
            "heads", "key_heads", "gated", "late", "joined", "shares", "own", "network",
            "activation",
        )),
        ("eps", ctypes.c_float * 8), ("plus", ctypes.c_float), ("multiplier", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("dims", "traditional", "inverse")),
        *((name, ctypes.c_float) for name in ("rotation_scale", "factor", "scale", "cap")),
    ]  # fmt: skip


class _Plan(NamedTuple):
    """A layer as it was looked at, for x (..., columns). It holds for as long as its operands do.

    turn: what turns queries and keys; late: what norms them once they are turned. left: the
    network, where it is left to itself, unless it is a mixture (mixes) that can be taken whole.
    turns: whether the rotation is one that the library has. heads: what attention calls its
    parts. plain: it is given x and nothing beside."""

    columns: int
    operands: Operands
    attention: Any
    turn: Any
    left: Any
    mixes: bool
    turns: bool
    shape: LayerShape
    heads: Heads
    late: tuple[Any, Any] | None
    plain: bool

    def fits(self, beside: Beside) -> bool:
        """Whether this is what it may be given."""
        own, wanted = beside.own, self.shape.own
        if self.heads.shares is (beside.kept is None) or (own is None) is bool(wanted):
            return False
        return own is None or (own.shape[-1] == wanted and own.dtype == mx.float32)


class Beside(NamedTuple):
    """What a layer may be given beside x (B, L, columns). scales: that queries are multiplied by,
    float32 (L, 1). own: its own input, float32 (B, L, n). kept: what it attends to, where that is
    another layer's. sum: what attention's is added to, in place of x, float32 as that. last: what
    it makes of the last position is wanted alone."""

    scales: mx.array | None = None
    own: mx.array | None = None
    kept: Kept | None = None
    sum: mx.array | None = None
    last: bool = False


NOTHING = Beside()


class Layer(Native):
    """One of that form. _block: what its class calls its parts. _plan: of the last step.
    _last_only: of all positions, which it keeps, only the last goes on (see last_position_only):
    for the last layer, where nobody asks for the others."""

    _block: Block
    _plan: _Plan | None = None
    _last_only: bool = False

    def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        y = self.natively(x, mask, cache)
        return super().__call__(x, mask, cache) if y is None else y  # type: ignore[misc]

    def natively(
        self: Any, x: mx.array, mask: Any, cache: Any, beside: Beside = NOTHING
    ) -> mx.array | None:
        """What it gives of x (B, L, columns) float32; None where a part is not as it has to be."""
        passed = self.passed(x, mask, cache, beside)
        if passed is None:
            return None
        y, *normed = passed[0]
        return y + self._plan.left(*normed) if normed else y

    def passed(
        self: Any, x: mx.array, mask: Any, cache: Any, beside: Beside
    ) -> tuple[list[mx.array], Kept] | None:
        """The same, or, where its network is left to itself, what that is added to and a norm of
        it, (B, L, columns) float32 each, or (B, 1, columns) of the last; and what it attended
        to."""
        library, kept = in_use(), beside.kept
        if library is None or (cache is None and kept is None) or x.dtype != mx.float32:
            return None
        plan = self.planned(x.shape[-1]) if x.ndim == 3 else None
        if plan is None or not (plan.plain if beside is NOTHING else plan.fits(beside)):
            return None
        batch, length, _ = x.shape
        known, room = mask is None or (isinstance(mask, str) and mask == "causal"), None
        if known and plan.turns and batch * length <= FEW:
            room = kept.room() if kept else room_in(cache, length)
        if room is None and (plan.heads.gated or not _can_cap(plan, mask, cache)):
            return None
        plan.operands.were_used()
        if self._last_only and length > 1:
            beside = beside._replace(last=True)
        if room is None:
            return _in_two(library, plan, x, mask, cache, beside)
        outs, kept = _in_one(library, plan, x, mask is not None, cache, room, beside)
        return [out[:, -1:] for out in outs] if beside.last else outs, kept

    def planned(self: Any, columns: int) -> _Plan | None:
        """How it is computed, for x of so many columns; None where a part is not as it has to
        be."""
        plan = self._plan
        if plan is None or plan.columns != columns or not plan.operands.hold():
            plan = vars(self)["_plan"] = _planned(self, columns)
        return plan

    def _heads(self: Any, attention: Any) -> Heads | None:
        """What its attention calls its parts; None for one of another form."""
        kind: Any = type(attention)
        return heads_of(kind)


class ScaledLayer(Layer):
    """One that is given what queries are multiplied by."""

    def __call__(  # type: ignore[override]
        self: Any, x: mx.array, attn_scale: Any = None, mask: Any = None, cache: Any = None
    ) -> mx.array:
        known = getattr(attn_scale, "shape", None) == (x.shape[1], 1)
        known = known and attn_scale.dtype == mx.float32
        y = self.natively(x, mask, cache, Beside(attn_scale)) if known else None
        if y is not None:
            return y
        return super(Layer, self).__call__(x, attn_scale, mask, cache)  # type: ignore[misc]


def _can_cap(plan: _Plan, mask: Any, cache: Any) -> bool:
    """Whether nothing is to be capped, or native attention is what is asked for."""
    return plan.heads.cap is None or (not hasattr(cache, "bits") and is_mask(mask))


def _in_one(
    library: Library, plan: _Plan, x: mx.array, causal: bool, cache: Any, room: Room,
    beside: Beside = NOTHING,
) -> tuple[list[mx.array], Kept]:  # fmt: skip
    """What a layer gives, and the norm of it, where its network is left to itself; lazy, (B, L,
    columns) each; and what it attended to. causal: a position sees none behind it."""
    mixture = plan.left.whole() if plan.mixes else None
    outs = copies(x, 1 if plan.left is None or mixture else 2)
    scales, own, kept, sum_, _ = beside
    keys, values, offset = kept[:3] if kept else (cache.keys, cache.values, cache.offset)
    caches = [] if kept else [*copies(keys, 1), *copies(values, 1)]
    made = (ctypes.py_object * (len(outs) + len(caches)))(*outs, *caches)
    places = byref(plan.operands), byref(plan.shape), byref(mixture) if mixture else None
    call = _functions(library)[0]
    given = (NONE if one is None else one for one in (scales, own, sum_))
    need(call(made, x, keys, values, *given, *room, offset, causal, *places))
    if kept:
        return outs, kept
    set_appended(cache, caches, x.shape[1], room.first)
    return outs, Kept(caches[0], caches[1], offset, x.shape[1], room.length)


def copies(x: Any, count: int) -> list[Any]:
    """Arrays that nobody else has: less work than new ones."""
    return [x.__copy__() for _ in range(count)]


def _in_two(
    library: Library, plan: _Plan, x: mx.array, mask: Any, cache: Any, beside: Beside = NOTHING
) -> tuple[list[mx.array], Kept]:
    """The same."""
    _, projected, closed = _functions(library)
    kept, attention, own = beside.kept, plan.attention, plan.heads
    heads = copies(x, 1 if kept else 3)
    places = byref(plan.operands), byref(plan.shape)
    need(projected((ctypes.py_object * len(heads))(*heads), x, *places))
    offset, length = kept.offset if kept else offset_of(cache), x.shape[1]
    starts = [offset, offset]
    if beside.last:
        heads[0], starts[0] = heads[0][:, :, -1:], offset + length - 1
        x, mask, beside = last_of(x, mask, beside)
    queries, *new = (plan.turn(one, offset=at) for one, at in zip(heads[:2], starts))
    if plan.late is not None:
        queries, *new = (norm(one) for norm, one in zip(plan.late, (queries, *new)))
    new += heads[2:]
    del heads
    if kept:
        keys, values = kept.fetched()
    else:
        keys, values = appended_first(cache, *new) or cache.update_and_fetch(*new)
        kept = Kept(kept_of(keys), kept_of(values), offset, length, keys.shape[2])
    del new
    if beside.scales is not None:
        queries = queries * beside.scales
    scale, cap = plan.shape.scale, plan.shape.cap
    if cap:
        attended = library.attend(queries, kept_of(keys), kept_of(values), scale, mask, cap=cap)
    else:
        sinks = {} if own.sinks is None else {"sinks": attention[own.sinks]}
        attended = own.attend(queries, keys, values, cache=cache, scale=scale, mask=mask, **sinks)
    outs = copies(x, 1 if plan.left is None else 2)
    made = (ctypes.py_object * len(outs))(*outs)
    x = x if beside.sum is None else beside.sum
    need(closed(made, x, attended, NONE if beside.own is None else beside.own, *places))
    return outs, kept


def last_of(x: mx.array, mask: Any, beside: Beside) -> tuple[mx.array, Any, Beside]:
    """What a layer is given, x (B, L, columns) float32, of the last position, which sees all."""
    scales, own, kept, total, _ = beside
    beside = beside._replace(
        scales=None if scales is None else scales[-1:],
        own=None if own is None else own[:, -1:],
        kept=None if kept is None else kept.last(),
        sum=None if total is None else total[:, -1:],
    )
    return x[:, -1:], mask[..., -1:, :] if isinstance(mask, mx.array) else None, beside


def _planned(layer: Any, columns: int) -> _Plan | None:
    """None where a part is not as it has to be for x (..., columns)."""
    block = layer._block
    attention, network = layer[block.attention], layer[block.network]
    own = layer._heads(attention)
    if own is None or own.scaled is not block.scaled:
        return None
    form = vars(type(network)).get("_form")
    parts = [attention[name] for name in (own.q, own.k, own.v, own.out)]
    behind = [network[name] for name in form.parts] if form else []
    norms = _norms_of(layer, attention, own)
    late = (norms.queries, norms.keys) if own.late and norms.queries is not None else None
    plus, multiplier = _added_by(norms), 1.0
    if block.multiplier is not None:
        multiplier = getattr(layer, block.multiplier)
    if block.depth is not None:
        multiplier /= getattr(layer, block.depth) ** 0.5
    found = _given(parts, columns, lambda before: _attended(attention, own, before))
    if plus is None or found is None or not isinstance(multiplier, (int, float)):
        return None
    sinks = None if own.sinks is None else (attention, own.sinks)
    if sinks is not None and attention[own.sinks].dtype != mx.float32:
        return None
    more = _given(behind, columns, lambda before: before[0].rows // (3 - len(before)))
    if not more and (norms.second is None or norms.fed is not None or multiplier != 1):
        return None
    inner = [] if block.own_gate is None else [layer[block.own_gate], layer[block.own_product]]
    inputs = _given(inner, columns, lambda before: before[0].rows)
    factor = None if block.factor is None else (layer, block.factor)
    if (inner and not inputs) or (factor and layer[block.factor].dtype != mx.float32):
        return None
    heads, key_heads, size = _counts(attention, own, found)
    shape = LayerShape(heads, key_heads, own.gated, own.late, own.joined and size)
    still = own.turning is not None and not getattr(attention, own.turning)
    turn = UNTURNED if still else attention[own.turn]
    shape.shares, shape.own = own.shares, inputs[0].rows if inputs else 0
    shape.eps[:] = [0.0 if norm is None else norm.eps for norm in norms]
    shape.plus, shape.multiplier, shape.scale = plus, multiplier, getattr(attention, own.scale)
    shape.cap = getattr(attention, own.cap) if own.cap else 0.0
    if more:
        shape.network, shape.activation = len(more), ACTIVATIONS.index(form.activation)
    frequencies = _rotated(shape, turn, size or found[1].rows // key_heads)
    weights = _Norms(*(None if norm is None else (norm, "weight") for norm in norms))
    if norms.values is not None:  # which has none
        ones = mx.full((size or found[2].rows // key_heads,), 1 - plus)
        weights = weights._replace(values=ones)
    around = [layer, attention, network, turn, *(norm for norm in norms if norm is not None)]
    operands = Operands(
        [*parts, *(behind if more else []), *inner], [*found, *(more or []), *(inputs or [])],
        [*weights, frequencies, sinks, factor], [*around, *([] if more else behind)],
    )  # fmt: skip
    return _Plan(
        columns, operands, attention, turn, None if more else network,
        type(network).__call__ is Mixture.__call__, frequencies is not None, shape, own, late,
        not (own.shares or own.scaled or inputs),
    )  # fmt: skip


def _counts(attention: Any, own: Heads, found: Sequence[Operand]) -> tuple[int, int, int]:
    """Heads of queries, of keys, and the numbers of each, or 0 where what queries, keys and values
    are multiplied with says it."""
    size = getattr(attention, own.size) if own.size else 0
    heads, key_heads = (
        one.rows // size if name is None else getattr(attention, name)
        for one, name in zip(found, (own.heads, own.key_heads))
    )
    return heads, key_heads, size


def _attended(attention: Any, own: Heads, found: Sequence[Operand]) -> int:
    """Numbers of a position that all heads give together."""
    heads, key_heads, size = _counts(attention, own, found)
    return heads * (size or found[2].rows // key_heads)


class _Norms(NamedTuple):
    """As toast_layer has them; None for those that there are not."""

    first: Any
    second: Any
    queries: Any
    keys: Any
    values: Any
    attended: Any
    fed: Any
    own: Any


def _norms_of(layer: Any, attention: Any, own: Heads) -> _Norms:
    block = layer._block
    if own.normed and not getattr(attention, own.normed):
        own = own._replace(q_norm=None, k_norm=None)
    names = [
        (layer, block.first_norm), (layer, block.second_norm), (attention, own.q_norm),
        (attention, own.k_norm), (attention, own.v_norm), (layer, block.attended_norm),
        (layer, block.fed_norm), (layer, block.own_norm),
    ]  # fmt: skip
    return _Norms(*(None if name is None else module[name] for module, name in names))


def _added_by(norms: Sequence[Any]) -> float | None:
    """What all of these add to their weights; None where one is no RMS norm of ours, or adds
    something else."""
    found = {_added(norm) for norm in norms if norm is not None}
    return found.pop() if len(found) == 1 else None


def _added(norm: Any) -> float | None:
    kind: Any = type(norm)
    if kind.__call__ is Norm.__call__:
        return 0.0 if "weight" not in norm or norm["weight"].dtype in FLOATS else None
    return 1.0 if adds_one(kind) and norm["weight"].dtype == mx.float32 else None


def _rotated(shape: LayerShape, turn: Any, size: int) -> mx.array | None:
    """Sets what a shape says of a rotation of heads; its frequencies, or None for one that is not
    known."""
    rotation = turn.rotation(size) if is_rotary(turn) else None
    if rotation is None or not 0 < rotation.dims <= size or rotation.dims % 2:
        return None
    shape.dims, frequencies, shape.inverse, shape.rotation_scale, shape.factor, last = rotation
    shape.traditional = last
    return frequencies


def _given(
    parts: Sequence[Any], columns: int, last: Callable[[Sequence[Operand]], int]
) -> list[Operand] | None:
    """What parts multiply vectors (..., columns) with, the last of them others, as long as `last`
    says of what those before it do; None where one is not to be multiplied so, or there are
    none."""
    found = operands_of(parts) if all(isinstance(part, Linear) for part in parts) else None
    if not found:
        return None
    lengths = [*[columns] * (len(found) - 1), last(found[:-1])]
    return found if [own.columns for own in found] == lengths else None


@cache
def _functions(library: Library) -> tuple[Any, Any, Any]:
    array, whole, place = ctypes.py_object, ctypes.c_int, ctypes.c_void_p
    one = library.function("whole", place, *[array] * 6, *[whole] * 4, *[place] * 3)
    projected = library.function("projected", place, array, place, place)
    closed = library.function("closed", place, *[array] * 3, place, place)
    return one, projected, closed
