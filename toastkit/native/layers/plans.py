"""What a layer of the common form (forms/common.py) is made of, and what of it is the same at every
step: looked at once, and right for as long as nothing of it changes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from toastkit.native.forms.common import Heads, adds_one
from toastkit.native.kv_caches import Kept
from toastkit.native.library import FLOATS
from toastkit.native.modules.mixtures import Mixture
from toastkit.native.modules.norms import CentredNorm, Norm
from toastkit.native.modules.products import Linear, PerHead, operands_of
from toastkit.native.modules.rotary import UNTURNED, is_rotary
from toastkit.native.operands import Operand, Operands


class LayerShape(ctypes.Structure):
    """What of a layer is the same at every step: toast_layer, see glue/blocks.h."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in (
            "heads", "key_heads", "gated", "late", "joined", "shares", "own", "network",
            "activation", "latent", "still", "narrow", "opened", "centred", "parallel",
        )),
        ("eps", ctypes.c_float * 8), ("plus", ctypes.c_float), ("multiplier", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("dims", "traditional", "inverse")),
        *((name, ctypes.c_float) for name in ("rotation_scale", "factor", "scale", "cap")),
    ]  # fmt: skip


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


class Plan(NamedTuple):
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

    def is_one(self, length: int) -> bool:
        """Whether so many positions may be one operation: what goes to a latent is, of one."""
        return self.turns and (length == 1 or self.heads.unembed is None)


def planned(layer: Any, columns: int) -> Plan | None:
    """None where a part is not as it has to be for x (..., columns). layer: with a `_block`, and
    `_heads` of its attention."""
    block = layer._block
    attention, network = layer[block.attention], block.network and layer[block.network]
    own = layer._heads(attention)
    if own is None or own.scaled is not block.scaled:
        return None
    look = _attention_of if own.latent is None else _latent_of
    form = vars(type(network)).get("_form")
    behind = [network[name] for name in form.parts] if form else []
    norms = _norms_of(layer, attention, own)
    plus, multiplier = _added_by(norms), multiplier_of(layer)
    attends, centred = look(attention, own, columns), _are_centred(norms)
    if plus is None or centred is None or attends is None:
        return None
    if not isinstance(multiplier, (int, float)):
        return None
    sinks = None if own.sinks is None else (attention, own.sinks)
    if sinks is not None and attention[own.sinks].dtype != mx.float32:
        return None
    more = _given(behind, columns, lambda before: form.hidden(before))
    if not more and (norms.second is None) is not (network is None):
        return None
    inner = [] if block.own_gate is None else [layer[block.own_gate], layer[block.own_product]]
    inputs = _given(inner, columns, lambda before: before[0].rows)
    factor = None if block.factor is None else (layer, block.factor)
    if (inner and not inputs) or (factor and layer[block.factor].dtype != mx.float32):
        return None
    if not more and (block.parallel or factor or inputs):  # which goes with its parts
        return None
    shape = attends.shape
    still = own.turn is None or (own.turning is not None and not getattr(attention, own.turning))
    turn = UNTURNED if still else attention[own.turn]
    shape.shares, shape.own = own.shares, inputs[0].rows if inputs else 0
    shape.centred, shape.parallel = centred, block.parallel
    shape.eps[:] = [0.0 if norm is None else norm.eps for norm in norms]
    shape.plus, shape.multiplier, shape.scale = plus, multiplier, getattr(attention, own.scale)
    shape.cap = getattr(attention, own.cap) if own.cap else 0.0
    if more:
        shape.network, shape.activation = len(more), form.kind
    frequencies = _rotated(shape, turn, attends.turned)
    weights = _Norms(*(None if norm is None else (norm, "weight") for norm in norms))
    if norms.values is not None:  # which has none
        weights = weights._replace(values=mx.full((attends.value,), 1 - plus))
    parts_of = [attention, network, turn, *norms]
    around = [layer, *(part for part in parts_of if part is not None)]
    parts = [*attends.parts, *(behind if more else []), *inner, *attends.besides]
    found = [*attends.found, *(more or []), *(inputs or []), *attends.found_besides]
    operands = Operands(
        parts, found, [*weights, frequencies, sinks, factor, *_biases(norms)],
        [*around, *([] if more else behind)],
    )  # fmt: skip
    return Plan(
        columns, operands, attention, turn, None if more else network,
        type(network).__call__ is Mixture.__call__, frequencies is not None, shape, own,
        (norms.queries, norms.keys) if own.late and norms.queries is not None else None,
        not (own.shares or own.scaled or inputs),
    )  # fmt: skip


def multiplier_of(layer: Any) -> Any:
    """A factor of what attention and network give."""
    block = layer._block
    factor = 1.0 if block.multiplier is None else getattr(layer, block.multiplier)
    return factor if block.depth is None else factor / getattr(layer, block.depth) ** 0.5


class _Attends(NamedTuple):
    """What attention multiplies with: parts for queries, keys, values and what comes out, and
    gates, or those that latent attention has besides. turned, value: numbers of a head that may be
    turned, and of one of values. shape: what it says of attention."""

    parts: list[Any]
    found: list[Operand]
    turned: int
    value: int
    shape: LayerShape
    besides: list[Any] = []
    found_besides: list[Operand] = []


def _attention_of(attention: Any, own: Heads, columns: int) -> _Attends | None:
    parts = [attention[name] for name in (own.q, own.k, own.v, own.out)]
    found = _given(parts, columns, lambda before: _attended(attention, own, before))
    if found is None:
        return None
    heads, key_heads, size = _counts(attention, own, found)
    turned, value = (size or one.rows // key_heads for one in found[1:3])
    gates = [] if own.gate is None else [attention[own.gate]]
    more = _given(gates, columns, lambda _: columns)
    if gates and not more:
        return None
    shape = LayerShape(heads, key_heads, 2 if gates else own.gated, own.late, own.joined and size)
    return _Attends(parts, found, turned, value, shape, gates, more or [])


def _latent_of(attention: Any, own: Heads, columns: int) -> _Attends | None:
    names = (own.q, own.k, own.v, own.out, own.narrow, own.unembed)
    parts = [attention[name] for name in names if name is not None]
    stacks = () if own.unembed is None else (own.v, own.unembed)
    kinds = [PerHead if name in stacks else Linear for name in names if name is not None]
    found = operands_of(parts) if all(map(isinstance, parts, kinds)) else None
    if found is None:
        return None
    counts: list[Any] = [own.heads, own.latent, own.still]
    heads, latent, still = (getattr(attention, name) for name in counts)
    narrow = 0 if own.narrow is None else found[4].rows
    value = found[-1].rows if stacks else found[2].rows // heads - still
    lengths = [narrow or columns, columns, still if stacks else latent, heads * value]
    lengths += [columns] * (own.narrow is not None) + [latent] * len(stacks[:1])
    if [one.columns for one in found] != lengths:
        return None
    shape = LayerShape(heads, 1 if stacks else heads)
    shape.latent, shape.still, shape.narrow, shape.opened = latent, still, narrow, not stacks
    turned = found[1].rows - latent
    return _Attends(parts[:4], found[:4], turned, value, shape, parts[4:], found[4:])


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


def _are_centred(norms: _Norms) -> bool | None:
    """Whether norms of what attention and network are given are layer norms; None where one is and
    another is not, or one has no weight, which that of values need not have."""
    found = {_is_centred(norm) for norm in norms[:2] if norm is not None}
    if any(_is_centred(norm) for norm in norms[2:]) or found == {True, False}:
        return None
    weighed = [norm for norm in norms._replace(values=None) if norm is not None]
    return None if any("weight" not in norm for norm in weighed) else True in found


def _is_centred(norm: Any) -> bool:
    kind: Any = type(norm)
    return kind.__call__ is CentredNorm.__call__


def _biases(norms: _Norms) -> list[tuple[Any, str] | None]:
    """What layer norms add."""
    return [
        (norm, "bias") if norm is not None and _is_centred(norm) and "bias" in norm else None
        for norm in norms[:2]
    ]


def _added(norm: Any) -> float | None:
    kind: Any = type(norm)
    if _is_centred(norm):
        return 0.0 if all(array.dtype == mx.float32 for array in norm.values()) else None
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
