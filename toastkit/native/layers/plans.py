"""Plans of layers of the common form (forms/common.py): their matrices, arrays and constants as the
library takes them. A plan is made once, and is valid as long as its modules and arrays stay the
same."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from toastkit.native.forms.common import Heads, adds_one
from toastkit.native.kv_caches import LayerKV
from toastkit.native.library import FLOATS
from toastkit.native.modules.mixtures import is_mixture
from toastkit.native.modules.norms import LayerNorm, Norm
from toastkit.native.modules.products import Linear, PerHead, operands_of
from toastkit.native.modules.rotary import NO_ROPE, is_rotary
from toastkit.native.operands import Operand, Operands


class LayerShape(ctypes.Structure):
    """The constants of a layer: toast_layer, see glue/blocks.h."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in (
            "heads", "key_heads", "gated", "norm_after_rope", "fused_head", "shares_cache",
            "layer_input", "network", "activation", "latent", "nope", "query_rank", "expanded",
            "layer_norms", "parallel", "grouped",
        )),
        ("eps", ctypes.c_float * 8), ("plus", ctypes.c_float), ("multiplier", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("dims", "traditional", "inverse")),
        *((name, ctypes.c_float) for name in ("rotation_scale", "factor", "scale", "cap")),
    ]  # fmt: skip


class Extras(NamedTuple):
    """Optional inputs of a layer besides x (B, L, columns). query_scales: factors of queries,
    float32 (L, 1). layer_input: the per-layer input (Gemma 4), float32 (B, L, n). shared_kv: the
    keys and values of an earlier layer, to attend to. residual: what the attention output is added
    to in place of x, float32 as x. last_only: only the output of the last position is wanted."""

    query_scales: mx.array | None = None
    layer_input: mx.array | None = None
    shared_kv: LayerKV | None = None
    residual: mx.array | None = None
    last_only: bool = False


NO_EXTRAS = Extras()


class Plan(NamedTuple):
    """How a layer is computed for x (..., columns); valid as long as its operands are.

    rope: the module that rotates queries and keys; rope_known: the library can do that.
    norms_after_rope: those of queries and keys, if they follow RoPE. network: the network if it is
    not part of the node, or a mixture (network_is_mixture), which may be. heads: the attention's
    names of its parts. takes_only_x: the layer has no other inputs."""

    columns: int
    operands: Operands
    attention: Any
    rope: Any
    network: Any
    network_is_mixture: bool
    rope_known: bool
    shape: LayerShape
    heads: Heads
    norms_after_rope: tuple[Any, Any] | None
    takes_only_x: bool

    def accepts(self, extras: Extras) -> bool:
        """True if these are the inputs that the layer takes."""
        own, size = extras.layer_input, self.shape.layer_input
        if self.heads.shares_cache is (extras.shared_kv is None) or (own is None) is bool(size):
            return False
        return own is None or (own.shape[-1] == size and own.dtype == mx.float32)

    def is_one_node(self, length: int) -> bool:
        """True if `length` positions can be one node; with absorbed latent attention only one
        can."""
        return self.rope_known and (length == 1 or self.heads.unembed is None)


def plan_of(layer: Any, columns: int) -> Plan | None:
    """Return the plan of a layer for x (..., columns); None if the library cannot compute one of
    its parts. The layer has a `_block`, and `_heads` of its attention."""
    block, (holder, attention, network) = layer._block, _members_of(layer)
    names = layer._heads(attention)
    if names is None or names.scaled is not block.scaled:
        return None
    find_parts = _attention_of if names.latent is None else _latent_of
    form = vars(type(network)).get("_form")
    network_parts = [network[name] for name in form.parts] if form else []
    norms = _norms_of(layer, attention, names)
    plus, multiplier = _common_plus(norms), multiplier_of(layer)
    attends, layer_norms = find_parts(attention, names, columns), _have_layer_norms(norms)
    if plus is None or layer_norms is None or attends is None:
        return None
    if not isinstance(multiplier, (int, float)):
        return None
    sinks = None if names.sinks is None else (attention, names.sinks)
    if sinks is not None and attention[names.sinks].dtype != mx.float32:
        return None
    matrices = _operands_for(network_parts, columns, lambda others: form.hidden(others))
    if not matrices and (norms.second is None) is not (network is None):
        return None
    input_parts = _input_parts_of(layer)
    inputs = _operands_for(input_parts, columns, lambda others: others[0].rows)
    factor = None if block.factor is None else (layer, block.factor)
    if (input_parts and not inputs) or (factor and layer[block.factor].dtype != mx.float32):
        return None
    if not matrices and (block.parallel or factor or inputs):  # needs the network in the node
        return None
    shape = attends.shape
    rope = _rope_of(attention, names)
    shape.shares_cache, shape.layer_input = names.shares_cache, inputs[0].rows if inputs else 0
    shape.layer_norms, shape.parallel = layer_norms, block.parallel
    shape.eps[:] = [0.0 if norm is None else norm.eps for norm in norms]
    shape.plus, shape.multiplier, shape.scale = plus, multiplier, getattr(attention, names.scale)
    shape.cap = getattr(attention, names.cap) if names.cap else 0.0
    if matrices:
        shape.network, shape.activation = len(matrices), form.kind
    frequencies = set_rope(shape, rope, attends.rope_size)
    weights = _Norms(*(None if norm is None else (norm, "weight") for norm in norms))
    if norms.values is not None:  # it has no weight: 1 - plus makes it neutral
        weights = weights._replace(values=mx.full((attends.value_size,), 1 - plus))
    owners = layer, holder, attention, network, rope, *norms
    modules = [one for one in owners if one is not None]
    parts = [
        *attends.parts, *(network_parts if matrices else []), *input_parts, *attends.extra_parts
    ]  # fmt: skip
    found = [*attends.operands, *(matrices or []), *(inputs or []), *attends.extra_operands]
    operands = Operands(
        parts, found, [*weights, frequencies, sinks, factor, *_norm_biases(norms)],
        [*modules, *([] if matrices else network_parts)],
    )  # fmt: skip
    return Plan(
        columns, operands, attention, rope, None if matrices else network,
        is_mixture(network), frequencies is not None, shape, names,
        _norms_after_rope(norms, names),
        not (names.shares_cache or names.scaled or inputs),
    )  # fmt: skip


def _members_of(layer: Any) -> tuple[Any, Any, Any]:
    """The module that has the attention, which may be the layer; the attention; the network."""
    block = layer._block
    holder = layer if block.holder is None else layer[block.holder]
    return holder, holder[block.attention], block.network and layer[block.network]


def _input_parts_of(layer: Any) -> list[Any]:
    """Gate and projection of the per-layer input, if it has one."""
    gate, projection = layer._block.input_gate, layer._block.input_projection
    return [] if gate is None else [layer[gate], layer[projection]]


def _rope_of(attention: Any, names: Heads) -> Any:
    used = names.use_rope is None or getattr(attention, names.use_rope)
    return attention[names.rope] if names.rope is not None and used else NO_ROPE


def _norms_after_rope(norms: _Norms, names: Heads) -> tuple[Any, Any] | None:
    late = names.norm_after_rope and norms.queries is not None
    return (norms.queries, norms.keys) if late else None


def multiplier_of(layer: Any) -> Any:
    """Return the factor of what attention and network add to the residual stream."""
    block = layer._block
    multiplier = 1.0 if block.multiplier is None else getattr(layer, block.multiplier)
    return multiplier if block.depth is None else multiplier / getattr(layer, block.depth) ** 0.5


class _AttentionParts(NamedTuple):
    """The matrices of attention: parts for queries, keys, values and output; extra_parts: gates, or
    the further parts of latent attention. rope_size, value_size: of the part of a head that RoPE
    may rotate, of a head of values. shape: with the constants of attention."""

    parts: list[Any]
    operands: list[Operand]
    rope_size: int
    value_size: int
    shape: LayerShape
    extra_parts: list[Any] = []
    extra_operands: list[Operand] = []


def _attention_of(attention: Any, names: Heads, columns: int) -> _AttentionParts | None:
    parts = [attention[name] for name in (names.q, names.k, names.v, names.out)]
    operands = _operands_for(
        parts, columns, lambda others: _attended_size(attention, names, others)
    )
    if operands is None:
        return None
    heads, key_heads, size = _head_counts(attention, names, operands)
    rope_size, value_size = (size or one.rows // key_heads for one in operands[1:3])
    gate_parts = [] if names.gate is None else [attention[names.gate]]
    gate_operands = _operands_for(gate_parts, columns, lambda _: columns)
    if gate_parts and not gate_operands:
        return None
    shape = LayerShape(
        heads, key_heads, 2 if gate_parts else names.gated, names.norm_after_rope,
        names.fused and size, grouped=names.grouped,
    )  # fmt: skip
    return _AttentionParts(
        parts, operands, rope_size, value_size, shape, gate_parts, gate_operands or []
    )


def _latent_of(attention: Any, names: Heads, columns: int) -> _AttentionParts | None:
    part_names = (names.q, names.k, names.v, names.out, names.query_down, names.unembed)
    parts = [attention[name] for name in part_names if name is not None]
    stacks = () if names.unembed is None else (names.v, names.unembed)
    classes = [PerHead if name in stacks else Linear for name in part_names if name is not None]
    operands = operands_of(parts) if all(map(isinstance, parts, classes)) else None
    if operands is None:
        return None
    attributes: list[Any] = [names.heads, names.latent, names.nope]
    heads, latent, nope = (getattr(attention, name) for name in attributes)
    query_rank = 0 if names.query_down is None else operands[4].rows
    value_size = operands[-1].rows if stacks else operands[2].rows // heads - nope
    expected = [query_rank or columns, columns, nope if stacks else latent, heads * value_size]
    expected += [columns] * (names.query_down is not None) + [latent] * len(stacks[:1])
    if [one.columns for one in operands] != expected:
        return None
    shape = LayerShape(heads, 1 if stacks else heads)
    shape.latent, shape.nope, shape.query_rank, shape.expanded = (
        latent,
        nope,
        query_rank,
        not stacks,
    )
    rope_size = operands[1].rows - latent
    return _AttentionParts(
        parts[:4], operands[:4], rope_size, value_size, shape, parts[4:], operands[4:]
    )


def _head_counts(attention: Any, names: Heads, operands: Sequence[Operand]) -> tuple[int, int, int]:
    """Heads of queries, heads of keys, and their size, or 0 if it follows from the rows of the
    projections."""
    size = getattr(attention, names.size) if names.size else 0
    heads, key_heads = (
        operand.rows // size if name is None else getattr(attention, name)
        for operand, name in zip(operands, (names.heads, names.key_heads))
    )
    return heads, key_heads, size


def _attended_size(attention: Any, names: Heads, operands: Sequence[Operand]) -> int:
    """Size of the attention output of a position."""
    heads, key_heads, size = _head_counts(attention, names, operands)
    return heads * (size or operands[2].rows // key_heads)


class _Norms(NamedTuple):
    """The norms of a layer in the order of toast_layer; None where absent."""

    first: Any
    second: Any
    queries: Any
    keys: Any
    values: Any
    attended: Any
    fed: Any
    layer_input: Any


def _norms_of(layer: Any, attention: Any, names: Heads) -> _Norms:
    block = layer._block
    if names.use_norms and not getattr(attention, names.use_norms):
        names = names._replace(q_norm=None, k_norm=None)
    places = [
        (layer, block.first_norm), (layer, block.second_norm), (attention, names.q_norm),
        (attention, names.k_norm), (attention, names.v_norm), (layer, block.attended_norm),
        (layer, block.fed_norm), (layer, block.input_norm),
    ]  # fmt: skip
    return _Norms(*(None if name is None else module[name] for module, name in places))


def _common_plus(norms: Sequence[Any]) -> float | None:
    """What all norms add to their weights; None if one is not native, or they differ."""
    found = {_plus_of(norm) for norm in norms if norm is not None}
    return found.pop() if len(found) == 1 else None


def _have_layer_norms(norms: _Norms) -> bool | None:
    """True if the input norms of attention and network are layer norms; None for a mix of both
    kinds, a layer norm elsewhere, or a norm without weight, which only that of values may be."""
    found = {_is_layer_norm(norm) for norm in norms[:2] if norm is not None}
    if any(_is_layer_norm(norm) for norm in norms[2:]) or found == {True, False}:
        return None
    weighted = [norm for norm in norms._replace(values=None) if norm is not None]
    return None if any("weight" not in norm for norm in weighted) else True in found


def _is_layer_norm(norm: Any) -> bool:
    kind: Any = type(norm)
    return kind.__call__ is LayerNorm.__call__


def _norm_biases(norms: _Norms) -> list[tuple[Any, str] | None]:
    """The biases of the two input norms, if they are layer norms."""
    return [
        (norm, "bias") if norm is not None and _is_layer_norm(norm) and "bias" in norm else None
        for norm in norms[:2]
    ]


def _plus_of(norm: Any) -> float | None:
    kind: Any = type(norm)
    if _is_layer_norm(norm):
        return 0.0 if all(array.dtype == mx.float32 for array in norm.values()) else None
    if kind.__call__ is Norm.__call__:
        return 0.0 if "weight" not in norm or norm["weight"].dtype in FLOATS else None
    return 1.0 if adds_one(kind) and norm["weight"].dtype == mx.float32 else None


def set_rope(shape: LayerShape, rope: Any, size: int) -> mx.array | None:
    """Set the RoPE fields of a shape for heads of `size` numbers. Returns the frequencies,
    float32 (n,), half as many as dims; None if the library cannot do this RoPE."""
    rotation = rope.rotation(size) if is_rotary(rope) else None
    if rotation is None or not 0 < rotation.dims <= size or rotation.dims % 2:
        return None
    shape.dims, frequencies, shape.inverse, shape.rotation_scale, shape.factor, last = rotation
    shape.traditional = last
    return frequencies.astype(mx.float32)


def _operands_for(
    parts: Sequence[Any], columns: int, last_columns: Callable[[Sequence[Operand]], int]
) -> list[Operand] | None:
    """The matrices of parts that multiply vectors (..., columns), except the last, which multiplies
    vectors as long as last_columns says, given the other matrices. None if there are no parts, or
    one does not fit."""
    operands = operands_of(parts) if all(isinstance(part, Linear) for part in parts) else None
    if not operands:
        return None
    expected = [*[columns] * (len(operands) - 1), last_columns(operands[:-1])]
    return operands if [operand.columns for operand in operands] == expected else None
