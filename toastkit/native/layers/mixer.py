"""Layers of Nemotron-H and Granite 4, each one node: mixers of Mamba-2 where attention would be,
and networks alone. Known by what their forwards are (known.py)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx

from toastkit.native.forms.common import Block, Known
from toastkit.native.layers.blocks import Layer, copies
from toastkit.native.layers.plans import NOTHING, Beside, LayerShape, multiplier_of
from toastkit.native.library import NONE, Library, in_use, need
from toastkit.native.modules.mixtures import Mixture, MixtureShape
from toastkit.native.modules.norms import Norm
from toastkit.native.modules.products import Linear, operands_of
from toastkit.native.modules.recurrent import Convolution, Mixer
from toastkit.native.operands import Operands

NORMS = 8  # that a layer may have, as toast_layer has them
OF_VALUES = 4  # which that of what a recurrence gives is


class GatedNorm(Known):
    """A mixer's, known by its source: of all its numbers together."""

    @property
    def together(self: Any) -> int:
        """Numbers that are normed together."""
        return self["weight"].size


class GatedNormInGroups(GatedNorm):
    @property
    def together(self: Any) -> int:
        return self.group_size


class StepPlan(NamedTuple):
    """A layer of a recurrence, or of a network alone, as it was looked at; right for as long as its
    operands hold. left: the network, where it is left to itself, unless it is a mixture that can be
    taken whole. of: what of a recurrence is the same at every step."""

    columns: int
    operands: Operands
    shape: LayerShape
    left: Any
    of: Any = None


class MixerLayer(Layer):
    """One of attention, of a mixer, or of a network alone. All (B, L, columns) float32."""

    def _stepped(self: Any, x: mx.array, mask: Any, cache: Any) -> mx.array | None:
        """Of a recurrence and what lies behind it; None where a part is not as it has to be."""
        library = in_use()
        if library is None or mask is not None or cache is None or cache.lengths is not None:
            return None
        kept = list(cache.cache)
        begun = [one for one in kept if one is not None]
        if any(one.dtype != mx.float32 for one in (x, *begun)) or x.ndim != 3:
            return None
        if begun and len(begun) < len(kept):
            return None
        if (plan := self._looked_at(x.shape[-1])) is None:
            return None
        plan.operands.were_used()
        mixture = self._whole(plan.left) if _mixes(plan.left) else None
        outs, last = copies(x, 1 if plan.left is None or mixture else 2), copies(x, len(kept))
        made = (ctypes.py_object * (len(outs) + len(last)))(*outs, *last)
        given = [NONE if one is None else one for one in kept]
        need(self._make(library, made, x, given, plan, byref(mixture) if mixture else None))
        for i, one in enumerate(last):
            cache[i] = one
        cache.advance(x.shape[1])
        y, *normed = [out[:, -1:] for out in outs] if self._last_only else outs
        return y + self._fed(plan.left, *normed) if normed else y

    def _plan_of(self: Any, columns: int) -> StepPlan | None:
        return _mixer_plan(self, columns)

    def _make(
        self: Any,
        library: Library,
        made: Any,
        x: mx.array,
        kept: list[Any],
        plan: StepPlan,
        more: Any,
    ) -> bytes | None:
        """Makes what a layer gives of x (B, L, columns) float32, and what it keeps. Returns what is
        wrong."""
        places = byref(plan.operands), byref(plan.shape), byref(plan.of)
        return _functions(library)[0](made, x, *kept, *places, more)

    def _fed_alone(self: Any, x: mx.array) -> mx.array | None:
        """Of a network alone; None where a part is not as it has to be."""
        library = in_use()
        if library is None or x.ndim != 3 or x.dtype != mx.float32:
            return None
        if (plan := self._looked_at(x.shape[-1])) is None:
            return None
        mixture = self._whole(plan.left) if plan.left is not None else None
        if plan.left is not None and mixture is None:
            return None
        plan.operands.were_used()
        out = x.__copy__()
        places = byref(plan.operands), byref(plan.shape), byref(mixture) if mixture else None
        need(_functions(library)[1](out, x, *places))
        return out

    def _looked_at(self: Any, columns: int) -> StepPlan | None:
        plan = vars(self).get("_kept")
        if plan is None or plan.columns != columns or not plan.operands.hold():
            plan = vars(self)["_kept"] = self._plan_of(columns)
        return plan


class NemotronLayer(MixerLayer):
    """Nemotron-H's: what its one part makes of a norm is added, (B, L, columns) float32."""

    _block = Block("mixer", "norm", None, None)

    @property
    def keeps_nothing(self: Any) -> bool:
        """Whether it has no cache."""
        return self.block_type not in ("M", "*")

    def _plan_of(self: Any, columns: int) -> StepPlan | None:
        return (_network_plan if self.keeps_nothing else _mixer_plan)(self, columns)

    def natively(
        self: Any, x: mx.array, mask: Any, cache: Any, beside: Beside = NOTHING
    ) -> mx.array | None:
        if self.block_type == "*":
            return super().natively(x, mask, cache, beside)
        if self.block_type == "M":
            return self._stepped(x, mask, cache)
        return self._fed_alone(x)


class HybridLayer(MixerLayer):
    """Granite 4's, of attention or a mixer, and a network, or experts beside one: (B, L, columns)
    float32."""

    @property
    def _block(self: Any) -> Block:  # type: ignore[override]
        return Block(
            "self_attn" if self.layer_type == "attention" else "mamba", "input_layernorm",
            "block_sparse_moe" if self.use_moe else "mlp", "post_attention_layernorm",
            multiplier="residual_multiplier",
        )  # fmt: skip

    def natively(
        self: Any, x: mx.array, mask: Any, cache: Any, beside: Beside = NOTHING
    ) -> mx.array | None:
        if self.layer_type != "attention":
            return self._stepped(x, mask, cache)
        return super().natively(x, mask, cache, beside)

    def _fed(self: Any, network: Any, normed: mx.array) -> mx.array:
        y = network(normed)
        if self.use_moe:
            y = y + self["shared_mlp"](normed)
        return y * self.residual_multiplier

    def _whole(self: Any, mixture: Mixture) -> MixtureShape | None:
        return mixture.whole(self["shared_mlp"])


def _mixer_plan(layer: Any, columns: int) -> StepPlan | None:
    """None where a part is not as it has to be for x (..., columns)."""
    block = layer._block
    mixer, network = layer[block.attention], block.network and layer[block.network]
    conv, norm = mixer["conv1d"], mixer.get("norm")
    calls: Any = Mixer.__call__, Convolution.__call__
    if (type(mixer).__call__, type(conv).__call__) != calls or not conv.is_plain():
        return None
    if norm is not None and type(norm).__call__ is not Known.__call__:
        return None
    own = [(conv, "weight"), (conv, "bias") if "bias" in conv else None, None]
    own += [(mixer, name) for name in ("A_log", "D", "dt_bias")]
    weights = [*own, None if norm is None else (norm, "weight")]
    if any(one[0][one[1]].dtype != mx.float32 for one in weights if one is not None):
        return None
    if (norms := norms_of(layer, norm)) is None:
        return None
    parts, around = [*[mixer["in_proj"]] * 3, mixer["out_proj"]], (layer, mixer, conv)
    of = mixer.shape(0 if norm is None else norm.together)
    return step_plan(layer, columns, around, parts, network, [], norms, own, of)


def _network_plan(layer: Any, columns: int) -> StepPlan | None:
    """The same of a layer that is a network, or a mixture, alone."""
    block = layer._block
    network, norm = layer[block.attention], layer[block.first_norm]
    known = "_form" in vars(type(network)) or _mixes(network)
    if type(norm).__call__ is not Norm.__call__ or not known:
        return None
    norms = [None, norm, *[None] * (NORMS - 2)]
    return step_plan(layer, columns, (layer,), [], network, [], norms, [None] * 3)


def _mixes(network: Any) -> bool:
    return type(network).__call__ is Mixture.__call__


def step_plan(
    layer: Any, columns: int, around: Sequence[Any], parts: list[Any], network: Any,
    more: list[Any], norms: list[Any], own: list[Any], of: Any = None,
) -> StepPlan | None:  # fmt: skip
    """Of parts before a network's and behind them, and arrays beside norms; None where one is not
    to be multiplied with. around: modules besides. of: as StepPlan has it."""
    form = vars(type(network)).get("_form")
    parts = [*parts, *((network[name] for name in form.parts) if form else ()), *more]
    found = operands_of(parts) if all(isinstance(part, Linear) for part in parts) else None
    if found is None or (found and found[0].columns != columns):
        return None
    shape = LayerShape(1, 1, multiplier=multiplier_of(layer))
    if form:
        shape.network, shape.activation = len(form.parts), form.kind
    shape.eps[:] = [0.0 if norm is None else norm.eps for norm in norms]
    places = [None if one is None else (one, "weight") for one in norms]
    modules = [one for one in (*around, network, *norms) if one is not None]
    operands = Operands(parts, found, [*places, *own], modules)
    return StepPlan(columns, operands, shape, None if form else network, of)


def norms_of(layer: Any, own: Any) -> list[Any] | None:
    """As toast_layer has them, with one of what a recurrence gives; None where one of the others is
    no RMS norm of ours."""
    norms: list[Any] = [None] * NORMS
    for place, name in enumerate((layer._block.first_norm, layer._block.second_norm)):
        norms[place] = None if name is None else layer[name]
    plain = all(type(one).__call__ is Norm.__call__ for one in norms if one is not None)
    norms[OF_VALUES] = own
    return norms if plain else None


@cache
def _functions(library: Library) -> tuple[Any, Any]:
    array, place = ctypes.py_object, ctypes.c_void_p
    layer = library.function("mixer_layer", place, *[array] * 3, *[place] * 4)
    return layer, library.function("fed", array, array, *[place] * 3)
