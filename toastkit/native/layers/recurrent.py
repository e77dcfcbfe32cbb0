"""Layers of which some have a recurrence in place of attention: one node each. Recognised by their
source (known.py)."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from typing import Any, NamedTuple

import mlx.core as mx

from toastkit.native.layers.blocks import Layer
from toastkit.native.layers.plans import NO_EXTRAS, Extras, LayerShape, multiplier_of
from toastkit.native.library import NONE, in_use, objects, unshared
from toastkit.native.modules.mixtures import is_mixture
from toastkit.native.modules.norms import Norm
from toastkit.native.modules.products import Linear, operands_of
from toastkit.native.operands import Operands

NORM_COUNT = 8  # as in toast_layer
VALUE_NORM = 4  # index of the norm of a recurrence's output


class StepPlan(NamedTuple):
    """The plan of a layer with a recurrence, or with a network alone; valid as long as its operands
    are. network: the network if it is not part of the node, or a mixture, which may be.
    network_is_mixture: its class was not replaced. recurrence: constants of the recurrence, of a
    type of ctypes, or None. given: pointers to operands, shape and recurrence, as the library takes
    them."""

    columns: int
    operands: Operands
    shape: LayerShape
    network: Any
    network_is_mixture: bool
    recurrence: Any
    given: tuple[Any, ...]


class RecurrentLayer(Layer):
    """A layer of attention, or of a recurrence. All (B, L, columns) float32. _function: of the
    library, that computes a layer with a recurrence."""

    _function: str

    @property
    def _attends(self: Any) -> bool:
        """True if it has attention, and no recurrence."""
        return not self.is_linear

    def natively(
        self: Any, x: mx.array, mask: Any, cache: Any, extras: Extras = NO_EXTRAS
    ) -> mx.array | None:
        if self._attends:
            return super().natively(x, mask, cache, extras)
        return self._recurrent_step(x, mask, cache)

    def _recurrent_step(self: Any, x: mx.array, mask: Any, cache: Any) -> mx.array | None:
        """The output of a layer with a recurrence; None if the library cannot compute it."""
        library = in_use()
        if library is None or mask is not None or cache is None or cache.lengths is not None:
            return None
        states, begun = cache.cache, cache[0] is not None
        if x.dtype != mx.float32 or x.ndim != 3:
            return None
        for one in states:
            if (one is not None) is not begun or (begun and one.dtype != mx.float32):
                return None
        _, length, columns = x.shape
        if (plan := self.current_plan(columns)) is None:
            return None
        plan.operands.mark_used()
        mixture = self._mixture_shape(plan.network) if plan.network_is_mixture else None
        count = 1 if plan.network is None or mixture is not None else 2
        made = unshared(x, count + len(states))
        before = states if begun else [NONE] * len(states)
        pointer = None if mixture is None else byref(mixture)
        getattr(library.c, self._function)(objects(*made), x, *before, *plan.given, pointer)
        outs, states[:] = made[:count], made[count:]
        cache.advance(length)
        y, *normed = [out[:, -1:] for out in outs] if self._last_only else outs
        return y + self._feed_forward(plan.network, *normed) if normed else y

    def _plan_of(self: Any, columns: int) -> Any:
        return super()._plan_of(columns) if self._attends else self._step_plan(columns)

    def _step_plan(self, columns: int) -> StepPlan | None:
        """The plan of a layer without attention for x (..., columns); None if the library cannot
        compute a part."""
        raise NotImplementedError


def step_plan(
    layer: Any, columns: int, modules: Sequence[Any], parts: list[Any], network: Any,
    extra_parts: list[Any], norms: list[Any], arrays: list[Any], recurrence: Any = None,
) -> StepPlan | None:  # fmt: skip
    """Return the plan of a layer: parts before the network's, extra_parts after them, arrays after
    the norms. None if the library cannot multiply by a part, or what belongs to the recurrence is
    not float32. modules: others that must stay the same. recurrence: see StepPlan."""
    weights = [None if one is None else (one, "weight") for one in norms]
    own = [one for one in (*arrays, weights[VALUE_NORM]) if isinstance(one, tuple)]
    if any(module[key].dtype != mx.float32 for module, key in own):
        return None
    form = vars(type(network)).get("_form")
    parts = [*parts, *((network[name] for name in form.parts) if form else ()), *extra_parts]
    found = operands_of(parts) if all(isinstance(part, Linear) for part in parts) else None
    if found is None or (found and found[0].columns != columns):
        return None
    shape = LayerShape(1, 1, multiplier=multiplier_of(layer))
    if form:
        shape.network, shape.activation = len(form.parts), form.kind
    shape.eps[:] = [0.0 if norm is None else norm.eps for norm in norms]
    owners = [one for one in (*modules, network, *norms) if one is not None]
    operands = Operands(parts, found, [*weights, *arrays], owners)
    given = byref(operands), byref(shape), None if recurrence is None else byref(recurrence)
    rest, mixed = None if form else network, not form and is_mixture(network)
    return StepPlan(columns, operands, shape, rest, mixed, recurrence, given)


def norms_of(layer: Any, value_norm: Any) -> list[Any] | None:
    """Return the norms in the order of toast_layer, with value_norm that of the recurrence's
    output. None if one of the others is not a native RMS norm."""
    norms: list[Any] = [None] * NORM_COUNT
    for place, name in enumerate((layer._block.first_norm, layer._block.second_norm)):
        norms[place] = None if name is None else layer[name]
    plain = all(type(one).__call__ is Norm.__call__ for one in norms if one is not None)
    norms[VALUE_NORM] = value_norm
    return norms if plain else None
