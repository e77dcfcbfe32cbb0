"""Mixtures of experts (MoE), each one node, of architectures whose forward was read (known.py).
Their projections remain modules, which are evicted and loaded as ever. What the node does not
support goes to the architecture's forward, made of native operations as far as possible."""

from __future__ import annotations

import ctypes
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from toastkit.native.forms.common import Known
from toastkit.native.functions import Native
from toastkit.native.library import Library, in_use
from toastkit.native.modules.feed_forward import FeedForward, SwitchNetwork
from toastkit.native.modules.products import Linear, operands_of
from toastkit.native.operands import (
    AHEAD,
    BEST,
    CHOSEN,
    NORMED,
    SCORED,
    SPARSE,
    Choice,
    Operand,
    Operands,
)
from toastkit.native.operations import matmul, weighted_sum

SUM_EPS = 1e-20  # that some architectures add to the sum of weights, against division by 0


def _grouped_choice(k: int, how: int, normed: Any, groups: int, kept: int, factor: float) -> Choice:
    """The choice of DeepSeek-V3. normed: the weights of several experts add up to the factor."""
    how |= NORMED * bool(normed and k > 1)
    if groups < 2:  # with a single group, any number may be kept
        groups = kept = 0
    return Choice(k, how, groups=groups, kept=kept, eps=SUM_EPS, factor=factor)


class Router(Native):
    """A router that is a module of its own: returns experts and weights of each vector. _part: its
    projection; None if the module holds the matrix. _bias: the attribute of the bias that is added
    for the choice. _how: see kernels/rows.h."""

    _part: str | None = None
    _bias: str | None = None
    _how = CHOSEN

    def __call__(self: Any, x: mx.array) -> tuple[mx.array, mx.array]:
        library = in_use()
        if library is None or x.dtype != mx.float32:
            return super().__call__(x)  # type: ignore[misc]
        logits = matmul(x, self["weight"].T) if self._part is None else self[self._part](x)
        bias = self.get(self._bias)
        if not _are_wide(logits, bias):
            return super().__call__(x)  # type: ignore[misc]
        return library.route(logits, self.choice(), bias)

    def choice(self: Any) -> Choice:
        """The settings of the choice as they are now."""
        return Choice(vars(self)["top_k"], self._how)

    def operand(self: Any) -> Operand | None:
        """Its matrix, if the module holds that itself."""
        weight = self["weight"]
        return Operand(weight) if weight.dtype == mx.float32 else None


class RouterScored(Router):
    """By sigmoids and a bias, in the best groups (DeepSeek-V3), or as `score_function` says."""

    _bias, _how = "e_score_correction_bias", AHEAD | SCORED

    def choice(self: Any) -> Choice:
        own = vars(self)
        return _grouped_choice(
            own["top_k"], self._how | SCORED * (own.get("score_function") == "sigmoid"),
            own["norm_topk_prob"], own["n_group"], own["topk_group"], own["routed_scaling_factor"],
        )  # fmt: skip


class RouterInGroups(Router):
    """DeepSeek-V2's."""

    def choice(self: Any) -> Choice:
        own = vars(self)
        groups = own["n_group"] if own["topk_method"] == "group_limited_greedy" else 0
        return Choice(
            own["top_k"], AHEAD | BEST, factor=own["routed_scaling_factor"], groups=groups,
            kept=own["topk_group"] if groups else 0,
        )  # fmt: skip


class Mixture(Native):
    """Routed experts and, in some architectures, a shared expert, which may have a gate: one node,
    unless the class of a part was replaced (by expert slots, which need the chosen experts): then
    the parts are called as ever.

    _router, _experts, _shared, _gate: attributes of the parts. _k: of the number of chosen experts.
    _normed: of the flag that their weights add up to 1. _bias: of the bias that is added for the
    choice. _how: see kernels/rows.h. _projection: of the projection in a router that has nothing
    else."""

    _router, _experts, _shared, _gate = "gate", "switch_mlp", "shared_expert", "shared_expert_gate"
    _k, _normed, _how = "top_k", "norm_topk_prob", 0
    _bias: str | None = None
    _projection: str | None = None

    def __call__(self: Any, x: mx.array) -> mx.array:
        library, unsharded = in_use(), vars(self).get("sharding_group") is None
        if library is None or not unsharded or x.dtype != mx.float32:
            return super().__call__(x)  # type: ignore[misc]
        if (shape := self.as_shape()) is not None:
            return _mixed(library, x, shape)
        router = self[self._router]
        if isinstance(router, Router):
            return super().__call__(x)  # type: ignore[misc]
        logits, bias = router(x), self.get(self._bias)
        if not _are_wide(logits, bias):
            return super().__call__(x)  # type: ignore[misc]
        experts, weights = library.route(logits, self.choice(), bias)
        y = self[self._experts](x, experts)
        if self._shared not in self:
            return weighted_sum(y, weights)
        shared = self[self._shared](x)
        if self._gate not in self:
            return weighted_sum(y, weights) + shared
        gate = self[self._gate](x)
        if not all(part.dtype == mx.float32 for part in (y, shared, gate)):
            return (y * weights[..., None]).sum(axis=-2) + mx.sigmoid(gate) * shared
        return library.blend(y, weights, shared, gate)

    def choice(self: Any) -> Choice:
        """The settings of the choice as they are now."""
        own = vars(self)
        return Choice(own[self._k], self._how | bool(own.get(self._normed)))

    def as_shape(self: Any, outer: Any = None) -> MixtureShape | None:
        """Return the mixture as the library takes it, for a primitive made now: its parts are
        marked as used. None if the parts must be called one by one. outer: a shared expert that is
        not one of its parts."""
        plan, unsharded = vars(self).get("_plan"), vars(self).get("sharding_group") is None
        if unsharded and (plan is None or plan[3] is not outer or not plan[0].is_valid()):
            plan = vars(self)["_plan"] = self._find_parts(outer)
        if not unsharded or plan is None:
            return None
        operands, shape, chooser, _ = plan
        operands.mark_used()
        shape.choice = chooser.choice()
        return shape

    def _find_parts(self: Any, outer: Any) -> tuple[Operands, MixtureShape, Any, Any] | None:
        """Operands and constants, the module that holds the settings of the choice, and `outer`."""
        switch, shared, router = self[self._experts], self.get(self._shared), self[self._router]
        shared = shared if outer is None else outer
        own_router = isinstance(router, Router)
        known_experts = type(switch).__call__ is SwitchNetwork.__call__
        if not known_experts or (experts := switch.form()) is None:
            return None
        expected: Any = Router.__call__ if own_router else Known.__call__
        if (own_router or self._projection) and type(router).__call__ is not expected:
            return None
        part = router._part if own_router else self._projection
        projection = router[part] if part else router
        parts, kinds = [switch[name] for name in experts.parts], [experts.kind]
        modules, names, gate = [self, router, switch], (), self.get(self._gate)
        if shared is not None:
            if type(shared).__call__ is not FeedForward.__call__:
                return None
            form = type(shared)._form
            names = form.parts
            parts += [*(shared[name] for name in names), *([] if gate is None else [gate])]
            kinds, modules = [*kinds, form.kind], [*modules, shared]
        found, router_operand = operands_of(parts), _router_operand(projection)
        known_gate = gate is None or isinstance(gate, Linear)
        if found is None or router_operand is None or not known_gate:
            return None
        chooser = router if own_router else self
        bias = chooser.get(chooser._bias)
        if not _are_wide(bias):
            return None
        biases = [None if bias is None else (chooser, chooser._bias)]
        operands = Operands([projection, *parts], [router_operand, *found], biases, modules)
        shape = MixtureShape(
            ctypes.addressof(operands), experts=len(experts.parts), shared=len(names),
            gated=gate is not None,
        )  # fmt: skip
        shape.activations[: len(kinds)] = kinds
        return operands, shape, chooser, outer


def is_mixture(network: Any) -> bool:
    """True for a mixture whose class was not replaced."""
    return type(network).__call__ is Mixture.__call__


def _are_wide(*arrays: mx.array | None) -> bool:
    """True if all arrays that are given are float32."""
    return all(array is None or array.dtype == mx.float32 for array in arrays)


def _router_operand(router: Any) -> Operand | None:
    """The router's matrix; None if the library cannot use it."""
    if isinstance(router, Router):
        return router.operand()
    found = operands_of([router]) if isinstance(router, Linear) else None
    return found[0] if found else None


class MixtureShape(ctypes.Structure):
    """toast_mixture, see glue/mixture.h."""

    _fields_ = (
        ("operands", ctypes.c_void_p), ("choice", Choice),
        *((name, ctypes.c_int32) for name in ("experts", "shared", "gated")),
        ("activations", ctypes.c_int32 * 2),
    )  # fmt: skip


def _mixed(library: Library, x: mx.array, mixture: MixtureShape) -> mx.array:
    out = x.__copy__()
    library.c.mixture(out, x, ctypes.byref(mixture))
    return out


class MixtureOfNarrow(Mixture):
    """With experts that may read a narrower latent (Nemotron-H): then its parts are called."""

    _shared = "shared_experts"

    def as_shape(self: Any, outer: Any = None) -> MixtureShape | None:
        return super().as_shape(outer) if self.moe_latent_size is None else None


class MixtureBiased(Mixture):
    """Sigmoids and a bias (LFM2)."""

    _bias = "expert_bias"

    def choice(self: Any) -> Choice:
        own = vars(self)
        normed = NORMED * bool(own["norm_topk_prob"])
        factor = own["routed_scaling_factor"]
        return Choice(own["top_k"], SCORED | normed, factor=factor, eps=1e-6)


class MixtureSparse(Mixture):
    """SparseMixer's (Phi-3.5-MoE)."""

    def choice(self: Any) -> Choice:
        own = vars(self)
        return Choice(own["top_k"], SPARSE, eps=2 * own["jitter_eps"])


class MixtureBiasedAhead(Mixture):
    """By sigmoids and a bias, and shares that add up to 1 (MiniMax)."""

    _bias = "e_score_correction_bias"

    def choice(self: Any) -> Choice:
        return Choice(vars(self)["num_experts_per_tok"], AHEAD | SCORED | NORMED, eps=SUM_EPS)


class MixtureOfActivation(Mixture):
    """Softmax or sigmoids, as one of its modules says (ERNIE 4.5)."""

    _shared = "shared_experts"

    def choice(self: Any) -> Choice:
        scored = SCORED * isinstance(self["gate_act"], nn.Sigmoid)
        return Choice(vars(self)["k"], AHEAD | NORMED | scored, eps=1e-12)


class MixtureOfWrapped(Mixture):
    """With a router module around a projection (Trinity)."""

    _router, _experts, _shared, _bias = "router", "experts", "shared_experts", "expert_bias"
    _projection = "gate"

    def choice(self: Any) -> Choice:
        own = vars(self)
        return _grouped_choice(
            own["num_experts_per_tok"], AHEAD | SCORED * (own["score_func"] == "sigmoid"),
            own["route_norm"], own["n_group"], own["topk_group"], own["route_scale"],
        )  # fmt: skip


class MixtureInGroups(Mixture):
    """Scores of its own, in the best groups (Kimi Linear)."""

    _shared, _bias = "shared_experts", "e_score_correction_bias"

    def choice(self: Any) -> Choice:
        args = self.args
        return _grouped_choice(
            args.num_experts_per_token,
            AHEAD | SCORED * (args.moe_router_activation_func == "sigmoid"), args.moe_renormalize,
            args.num_expert_group, args.topk_group, args.routed_scaling_factor,
        )  # fmt: skip
