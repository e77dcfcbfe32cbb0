"""Layers of Nemotron-H and Granite 4, each one node: with a Mamba-2 mixer in place of attention, or
a network alone. Recognised by their source (known.py)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref
from typing import Any, NamedTuple

import mlx.core as mx

from toastkit.native.forms.common import Block, Known
from toastkit.native.layers.blocks import Layer, unshared
from toastkit.native.layers.plans import NO_EXTRAS, Extras, LayerShape, multiplier_of
from toastkit.native.library import NONE, Library, in_use
from toastkit.native.modules.mixtures import Mixture, MixtureShape
from toastkit.native.modules.norms import Norm
from toastkit.native.modules.products import Linear, operands_of
from toastkit.native.modules.recurrent import Convolution, Mixer
from toastkit.native.operands import Operands

NORM_COUNT = 8  # as in toast_layer
VALUE_NORM = 4  # index of the norm of a recurrence's output


class GatedNorm(Known):
    """A mixer's norm over all its numbers, recognised by its source."""

    @property
    def normed_size(self: Any) -> int:
        """Numbers per group that is normed."""
        return self["weight"].size


class GatedNormInGroups(GatedNorm):
    @property
    def normed_size(self: Any) -> int:
        return self.group_size


class StepPlan(NamedTuple):
    """The plan of a layer with a recurrence, or with a network alone; valid as long as its operands
    are. network: the network if it is not part of the node, or a mixture, which may be. recurrence:
    constants of the recurrence."""

    columns: int
    operands: Operands
    shape: LayerShape
    network: Any
    recurrence: Any = None


class MixerLayer(Layer):
    """A layer of attention, of a mixer, or of a network alone. All (B, L, columns) float32."""

    def _recurrent_step(self: Any, x: mx.array, mask: Any, cache: Any) -> mx.array | None:
        """The output of a layer with a recurrence; None if the library cannot compute it."""
        library = in_use()
        if library is None or mask is not None or cache is None or cache.lengths is not None:
            return None
        states = list(cache.cache)
        present = [one for one in states if one is not None]
        if any(one.dtype != mx.float32 for one in (x, *present)) or x.ndim != 3:
            return None
        if present and len(present) < len(states):
            return None
        if (plan := self._current_plan(x.shape[-1])) is None:
            return None
        plan.operands.mark_used()
        mixture = self._mixture_shape(plan.network) if _is_mixture(plan.network) else None
        outs = unshared(x, 1 if plan.network is None or mixture else 2)
        last = unshared(x, len(states))
        pointers = (ctypes.py_object * (len(outs) + len(last)))(*outs, *last)
        optional = [NONE if one is None else one for one in states]
        self._make(library, pointers, x, optional, plan, byref(mixture) if mixture else None)
        for i, one in enumerate(last):
            cache[i] = one
        cache.advance(x.shape[1])
        y, *normed = [out[:, -1:] for out in outs] if self._last_only else outs
        return y + self._feed_forward(plan.network, *normed) if normed else y

    def _plan_of(self: Any, columns: int) -> StepPlan | None:
        return _mixer_plan(self, columns)

    def _make(
        self: Any,
        library: Library,
        outs: Any,
        x: mx.array,
        states: list[Any],
        plan: StepPlan,
        mixture: Any,
    ) -> None:
        """Set `outs` to the outputs for x (B, L, columns) float32 and the new states."""
        layer = byref(plan.operands), byref(plan.shape), byref(plan.recurrence)
        library.c.mixer_layer(outs, x, *states, *layer, mixture)

    def _network_only(self: Any, x: mx.array) -> mx.array | None:
        """The output of a layer that is a network alone; None if the library cannot compute it."""
        library = in_use()
        if library is None or x.ndim != 3 or x.dtype != mx.float32:
            return None
        if (plan := self._current_plan(x.shape[-1])) is None:
            return None
        mixture = self._mixture_shape(plan.network) if plan.network is not None else None
        if plan.network is not None and mixture is None:
            return None
        plan.operands.mark_used()
        out = x.__copy__()
        layer = byref(plan.operands), byref(plan.shape), byref(mixture) if mixture else None
        library.c.fed(out, x, *layer)
        return out

    def _current_plan(self: Any, columns: int) -> StepPlan | None:
        plan = vars(self).get("_step_plan")
        if plan is None or plan.columns != columns or not plan.operands.is_valid():
            plan = vars(self)["_step_plan"] = self._plan_of(columns)
        return plan


class NemotronLayer(MixerLayer):
    """Nemotron-H's: its only part reads a norm and is added to the residual, (B, L, columns)
    float32."""

    _block = Block("mixer", "norm", None, None)

    @property
    def keeps_nothing(self: Any) -> bool:
        """True if it has no cache."""
        return self.block_type not in ("M", "*")

    def _plan_of(self: Any, columns: int) -> StepPlan | None:
        return (_network_plan if self.keeps_nothing else _mixer_plan)(self, columns)

    def natively(
        self: Any, x: mx.array, mask: Any, cache: Any, extras: Extras = NO_EXTRAS
    ) -> mx.array | None:
        if self.block_type == "*":
            return super().natively(x, mask, cache, extras)
        if self.block_type == "M":
            return self._recurrent_step(x, mask, cache)
        return self._network_only(x)


class HybridLayer(MixerLayer):
    """Granite 4's: attention or a mixer, then a network, or experts beside one: (B, L, columns)
    float32."""

    @property
    def _block(self: Any) -> Block:  # type: ignore[override]
        return Block(
            "self_attn" if self.layer_type == "attention" else "mamba", "input_layernorm",
            "block_sparse_moe" if self.use_moe else "mlp", "post_attention_layernorm",
            multiplier="residual_multiplier",
        )  # fmt: skip

    def natively(
        self: Any, x: mx.array, mask: Any, cache: Any, extras: Extras = NO_EXTRAS
    ) -> mx.array | None:
        if self.layer_type != "attention":
            return self._recurrent_step(x, mask, cache)
        return super().natively(x, mask, cache, extras)

    def _feed_forward(self: Any, network: Any, normed: mx.array) -> mx.array:
        y = network(normed)
        if self.use_moe:
            y = y + self["shared_mlp"](normed)
        return y * self.residual_multiplier

    def _mixture_shape(self: Any, mixture: Mixture) -> MixtureShape | None:
        return mixture.as_shape(self["shared_mlp"])


def _mixer_plan(layer: Any, columns: int) -> StepPlan | None:
    """The plan for x (..., columns); None if the library cannot compute a part."""
    block = layer._block
    mixer, network = layer[block.attention], block.network and layer[block.network]
    conv, norm = mixer["conv1d"], mixer.get("norm")
    calls: Any = Mixer.__call__, Convolution.__call__
    if (type(mixer).__call__, type(conv).__call__) != calls or not conv.is_plain():
        return None
    if norm is not None and type(norm).__call__ is not Known.__call__:
        return None
    arrays = [(conv, "weight"), (conv, "bias") if "bias" in conv else None, None]
    arrays += [(mixer, name) for name in ("A_log", "D", "dt_bias")]
    weights = [*arrays, None if norm is None else (norm, "weight")]
    if any(pair[0][pair[1]].dtype != mx.float32 for pair in weights if pair is not None):
        return None
    if (norms := norms_of(layer, norm)) is None:
        return None
    parts, modules = [*[mixer["in_proj"]] * 3, mixer["out_proj"]], (layer, mixer, conv)
    recurrence = mixer.shape(0 if norm is None else norm.normed_size)
    return step_plan(layer, columns, modules, parts, network, [], norms, arrays, recurrence)


def _network_plan(layer: Any, columns: int) -> StepPlan | None:
    """The plan of a layer that is a network, or a mixture, alone."""
    block = layer._block
    network, norm = layer[block.attention], layer[block.first_norm]
    known = "_form" in vars(type(network)) or _is_mixture(network)
    if type(norm).__call__ is not Norm.__call__ or not known:
        return None
    norms = [None, norm, *[None] * (NORM_COUNT - 2)]
    return step_plan(layer, columns, (layer,), [], network, [], norms, [None] * 3)


def _is_mixture(network: Any) -> bool:
    return type(network).__call__ is Mixture.__call__


def step_plan(
    layer: Any, columns: int, modules: Sequence[Any], parts: list[Any], network: Any,
    extra_parts: list[Any], norms: list[Any], arrays: list[Any], recurrence: Any = None,
) -> StepPlan | None:  # fmt: skip
    """Return the plan of a layer: parts before the network's, extra_parts after them, arrays after
    the norms. None if the library cannot multiply by a part. modules: others that must stay the
    same. recurrence: see StepPlan."""
    form = vars(type(network)).get("_form")
    parts = [*parts, *((network[name] for name in form.parts) if form else ()), *extra_parts]
    found = operands_of(parts) if all(isinstance(part, Linear) for part in parts) else None
    if found is None or (found and found[0].columns != columns):
        return None
    shape = LayerShape(1, 1, multiplier=multiplier_of(layer))
    if form:
        shape.network, shape.activation = len(form.parts), form.kind
    shape.eps[:] = [0.0 if norm is None else norm.eps for norm in norms]
    weights = [None if one is None else (one, "weight") for one in norms]
    owners = [one for one in (*modules, network, *norms) if one is not None]
    operands = Operands(parts, found, [*weights, *arrays], owners)
    return StepPlan(columns, operands, shape, None if form else network, recurrence)


def norms_of(layer: Any, value_norm: Any) -> list[Any] | None:
    """Return the norms in the order of toast_layer, with value_norm that of the recurrence's
    output. None if one of the others is not a native RMS norm."""
    norms: list[Any] = [None] * NORM_COUNT
    for place, name in enumerate((layer._block.first_norm, layer._block.second_norm)):
        norms[place] = None if name is None else layer[name]
    plain = all(type(one).__call__ is Norm.__call__ for one in norms if one is not None)
    norms[VALUE_NORM] = value_norm
    return norms if plain else None
