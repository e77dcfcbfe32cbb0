"""Layers of the common form (forms/common.py): a few positions in one operation, with the cache
that they go to; many, or with other caches, masks and rotations, in two beside attention, what lies
before it and what lies behind. What is not as it says here goes to the architecture's own
forward."""

from __future__ import annotations

import ctypes
from ctypes import byref
from functools import cache
from typing import Any

import mlx.core as mx

from toastkit.native.forms.common import Block, Heads, KnownAttention, heads_of
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
from toastkit.native.layers import latent_attention
from toastkit.native.layers.plans import NOTHING, Beside, Plan, multiplier_of, planned
from toastkit.native.library import NONE, Library, in_use, need
from toastkit.native.modules.mixtures import Mixture, MixtureShape
from toastkit.native.operations import is_mask

FEW = 16  # positions that are one operation


class Layer(Native):
    """One of that form. _block: what its class calls its parts. _plan: of the last step.
    _last_only: of all positions, which it keeps, only the last goes on (see last_position_only):
    for the last layer, where nobody asks for the others."""

    _block: Block
    _plan: Plan | None = None
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
        return y + self._fed(self._plan.left, *normed) if normed else y

    def _fed(self: Any, network: Any, normed: mx.array) -> mx.array:
        """What is added behind a network that is left to itself, (B, L, columns)."""
        y, multiplier = network(normed), multiplier_of(self)
        if self._block.fed_norm is not None:
            y = self[self._block.fed_norm](y)
        return y if multiplier == 1 else y * multiplier

    def _whole(self: Any, mixture: Mixture) -> MixtureShape | None:
        """A mixture that is its network, where it is a part of the layer's node."""
        return mixture.whole()

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
        if known and batch * length <= FEW and plan.is_one(length):
            room = kept.room() if kept else room_in(cache, length)
        if room is None and not _may_be_two(plan, mask, cache):
            return None
        plan.operands.were_used()
        if self._last_only and length > 1:
            beside = beside._replace(last=True)
        if room is None:
            return _in_two(library, plan, x, mask, cache, beside)
        mixture = self._whole(plan.left) if plan.mixes else None
        outs, kept = _in_one(library, plan, x, mask is not None, cache, room, beside, mixture)
        return [out[:, -1:] for out in outs] if beside.last else outs, kept

    def planned(self: Any, columns: int) -> Plan | None:
        """How it is computed, for x of so many columns; None where a part is not as it has to
        be."""
        plan = self._plan
        if plan is None or plan.columns != columns or not plan.operands.hold():
            plan = vars(self)["_plan"] = planned(self, columns)
        return plan

    def _heads(self: Any, attention: Any) -> Heads | None:
        """What its attention calls its parts; None for one of another form."""
        kind: Any = type(attention)
        return attention.heads() if issubclass(kind, KnownAttention) else heads_of(kind)


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


def _may_be_two(plan: Plan, mask: Any, cache: Any) -> bool:
    """Whether it may be two operations beside attention, which is native, or, unless scores are
    capped or there is a latent, whatever else is asked for."""
    heads = plan.heads
    native = not hasattr(cache, "bits") and is_mask(mask) and (plan.turns or heads.latent is None)
    return native or heads.cap is heads.latent is None


def _in_one(
    library: Library, plan: Plan, x: mx.array, causal: bool, cache: Any, room: Room,
    beside: Beside = NOTHING, mixture: MixtureShape | None = None,
) -> tuple[list[mx.array], Kept]:  # fmt: skip
    """What a layer gives, and the norm of it, where its network is left to itself; lazy, (B, L,
    columns) each; and what it attended to. causal: a position sees none behind it."""
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
    library: Library, plan: Plan, x: mx.array, mask: Any, cache: Any, beside: Beside = NOTHING
) -> tuple[list[mx.array], Kept]:
    """As `_in_one`, in two operations around attention."""
    kept, length = beside.kept, x.shape[1]
    offset = kept.offset if kept else offset_of(cache)
    queries, *new = _projected(library, plan, x, offset, beside)
    gates = new.pop() if plan.heads.gated else NONE
    if beside.last:
        x, mask, beside = last_of(x, mask, beside)
    if kept:
        keys, values = kept.fetched()
    else:
        keys, values = appended_first(cache, *new) or cache.update_and_fetch(*new)
        kept = Kept(kept_of(keys), kept_of(values), offset, length, keys.shape[2])
    del new
    if beside.scales is not None:
        queries = queries * beside.scales
    attended = _attended(library, plan, queries, keys, values, mask, cache)
    outs = copies(x, 1 if plan.left is None else 2)
    made = (ctypes.py_object * len(outs))(*outs)
    x = x if beside.sum is None else beside.sum
    own = NONE if beside.own is None else beside.own
    closed = _functions(library)[2]
    need(closed(made, x, attended, gates, own, byref(plan.operands), byref(plan.shape)))
    return outs, kept


def _projected(
    library: Library, plan: Plan, x: mx.array, offset: int | mx.array, beside: Beside
) -> list[mx.array]:
    """Queries, keys and values of x (B, L, columns), turned and normed, and gates if there are any:
    (B, heads, L, size) each; queries alone, where they meet others' keys, and of the last position,
    as gates, where that is wanted."""
    heads = copies(x, 1 if beside.kept else 3 + plan.heads.gated)
    places, starts = (byref(plan.operands), byref(plan.shape)), [offset, offset]
    if plan.heads.latent is not None:
        latent_attention.latent_heads(library, heads, x, offset, *places)
        return [heads[0][:, :, -1:], *heads[1:]] if beside.last else heads
    need(_functions(library)[1]((ctypes.py_object * len(heads))(*heads), x, *places))
    if beside.last:
        heads[0], starts[0] = heads[0][:, :, -1:], offset + x.shape[1] - 1
        heads[3:] = [gates[:, :, -1:] for gates in heads[3:]]
    turned = [plan.turn(one, offset=at) for one, at in zip(heads[:2], starts)]
    if plan.late is not None:
        turned = [norm(one) for norm, one in zip(plan.late, turned)]
    return [*turned, *heads[2:]]


def _attended(
    library: Library, plan: Plan, queries: mx.array, keys: mx.array, values: mx.array, mask: Any,
    cache: Any,
) -> mx.array:  # fmt: skip
    """What queries (B, heads, L, size) attend to, lazy, (B, heads, L, value)."""
    scale, cap, own = plan.shape.scale, plan.shape.cap, plan.heads
    if own.unembed is not None:
        return latent_attention.attend(library, queries, keys, values, scale, mask)
    if cap:
        return library.attend(queries, kept_of(keys), kept_of(values), scale, mask, cap=cap)
    sinks = {} if own.sinks is None else {"sinks": plan.attention[own.sinks]}
    return own.attend(queries, keys, values, cache=cache, scale=scale, mask=mask, **sinks)


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


@cache
def _functions(library: Library) -> tuple[Any, Any, Any]:
    array, whole, place = ctypes.py_object, ctypes.c_int, ctypes.c_void_p
    one = library.function("whole", place, *[array] * 6, *[whole] * 4, *[place] * 3)
    projected = library.function("projected", place, array, place, place)
    closed = library.function("closed", place, *[array] * 4, place, place)
    return one, projected, closed
