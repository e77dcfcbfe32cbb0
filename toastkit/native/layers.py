"""Mixtures of experts and gated delta rules, each of few nodes, of architectures whose forward is
one that was read (known.py). Their products stay modules, and leave and come back as ever. What a
node has not goes to the architecture's forward, made of native operations as far as there are any.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import mlx.core as mx

from toastkit.native.functions import Native
from toastkit.native.library import ACTIVATIONS, Library, in_use, need
from toastkit.native.modules import FeedForward, Linear, SwitchGLU, gate_of, operands_of
from toastkit.native.operands import Operands
from toastkit.native.operations import weighted_sum
from toastkit.native.recurrent import MOST_KERNEL

AHEAD, CHOSEN = 2, 4  # see toast_route


class DeltaLayer(Native):
    """Of gated delta rules. _parts: its projections."""

    _parts: tuple[str, ...]

    def __call__(
        self: Any, inputs: mx.array, mask: mx.array | None = None, cache: Any = None
    ) -> mx.array:
        library = in_use()
        known = mask is None and cache is not None and cache.lengths is None
        if library is None or not known or not _is_plain(self, inputs, cache):
            return super().__call__(inputs, mask, cache)  # type: ignore[misc]
        y, cache[0], cache[1] = library.delta_layer(
            [self[part](inputs) for part in self._parts],
            (self["conv1d"]["weight"], self["A_log"], self["dt_bias"], self["norm"]["weight"]),
            (self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim),
            self["norm"].eps,
            cache[0],
            cache[1],
        )
        cache.advance(inputs.shape[1])
        return self["out_proj"](y)


class FourProjections(DeltaLayer):
    _parts = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")


class TwoProjections(DeltaLayer):
    _parts = ("in_proj_qkvz", "in_proj_ba")


def _is_plain(layer: Any, inputs: mx.array, cache: Any) -> bool:
    """Whether all of a layer is in float32, between which kernels round nothing, and on one
    machine."""
    own = layer["conv1d"]["weight"], layer["A_log"], layer["dt_bias"], layer["norm"]["weight"]
    arrays = [inputs, *own, *(kept for kept in (cache[0], cache[1]) if kept is not None)]
    plain = "bias" not in layer["conv1d"] and own[0].shape[1] <= MOST_KERNEL
    alone = getattr(layer, "sharding_group", None) is None
    return plain and alone and all(array.dtype == mx.float32 for array in arrays)


class Mixture(Native):
    """Experts, and perhaps one that all tokens go through, which has a gate: one node, unless
    somebody stands before its parts (slots, who asks for a choice), who is called as ever.

    _router, _experts: what they are called. _k: the attribute that holds how many. _normed: that
    says whether their shares add up to 1. _how: see kernels/rows.h."""

    _router, _experts, _k, _normed, _how = "gate", "switch_mlp", "top_k", "norm_topk_prob", 0

    def __call__(self: Any, x: mx.array) -> mx.array:
        library, alone = in_use(), vars(self).get("sharding_group") is None
        if library is None or not alone or x.dtype != mx.float32:
            return super().__call__(x)  # type: ignore[misc]
        if (whole := self.whole()) is not None:
            return _mixed(library, x, whole)
        logits = self[self._router](x)
        if logits.dtype != mx.float32:
            return super().__call__(x)  # type: ignore[misc]
        which, shares = library.route(logits, *self.choice())
        y = self[self._experts](x, which)
        if "shared_expert" not in self:
            return weighted_sum(y, shares)
        more, gate = self["shared_expert"](x), self["shared_expert_gate"](x)
        if not all(part.dtype == mx.float32 for part in (y, more, gate)):
            return (y * shares[..., None]).sum(axis=-2) + mx.sigmoid(gate) * more
        return library.blend(y, shares, more, gate)

    def choice(self: Any) -> tuple[int, int]:
        """Experts of a vector, and how they are chosen, at this moment."""
        own = vars(self)
        return own[self._k], self._how | bool(own.get(self._normed))

    def whole(self: Any) -> MixtureShape | None:
        """What the library takes it as, for a primitive that is made now: its parts count as used.
        None where it is to be called, or they are one by one."""
        kept, alone = vars(self).get("_kept"), vars(self).get("sharding_group") is None
        if alone and (kept is None or not kept[0].hold()):
            kept = vars(self)["_kept"] = self._found()
        if not alone or kept is None:
            return None
        operands, shape = kept
        operands.were_used()
        shape.chosen, shape.how = self.choice()
        return shape

    def _found(self: Any) -> tuple[Operands, MixtureShape] | None:
        switch, shared = self[self._experts], self.get("shared_expert")
        if type(switch).__call__ is not SwitchGLU.__call__:
            return None
        stacks = [switch[name] for name in ("gate_proj", "up_proj", "down_proj")]
        own = [self[self._router], *stacks]
        kinds, around, names = [gate_of(switch.activation)], [self, switch], ()
        if shared is not None:
            if type(shared).__call__ is not FeedForward.__call__:
                return None
            names, kind = type(shared)._form
            own += [*(shared[name] for name in names), self["shared_expert_gate"]]
            kinds, around = [*kinds, kind], [*around, shared]
        calls = [own[0], own[-1]] if names else own[:1]
        if None in kinds or not all(isinstance(part, Linear) for part in calls):
            return None
        if (found := operands_of(own)) is None:
            return None
        operands = Operands(own, found, around=around)
        shape = MixtureShape(ctypes.addressof(operands), shared=len(names))
        shape.activations[: len(kinds)] = [ACTIVATIONS.index(kind) for kind in kinds]
        return operands, shape


class MixtureShape(ctypes.Structure):
    """toast_mixture, see glue/mixture.h."""

    _fields_ = (
        ("operands", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("chosen", "how", "shared")),
        ("activations", ctypes.c_int32 * 2),
    )  # fmt: skip


def _mixed(library: Library, x: mx.array, mixture: MixtureShape) -> mx.array:
    out = x.__copy__()
    need(_function(library)(out, x, ctypes.byref(mixture)))
    return out


@cache
def _function(library: Library) -> Any:
    array, place = ctypes.py_object, ctypes.c_void_p
    return library.function("mixture", array, array, place)


class MixtureAhead(Mixture):
    _how = AHEAD


class MixtureChosen(Mixture):
    _k, _how = "num_experts_per_tok", AHEAD | CHOSEN


class MixtureRouted(Mixture):
    _router, _experts, _k, _how = "router", "experts", "num_experts_per_tok", CHOSEN
