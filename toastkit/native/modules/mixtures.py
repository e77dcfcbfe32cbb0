"""Mixtures of experts, each one node, of architectures whose forward was read (known.py). Their
products stay modules, and leave and come back as ever. What a node has not goes to the
architecture's forward, made of native operations as far as there are any."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from toastkit.native.forms.common import Known
from toastkit.native.functions import Native
from toastkit.native.library import Library, in_use, need
from toastkit.native.modules.feed_forward import FeedForward, SwitchNetwork
from toastkit.native.modules.products import Linear, operands_of
from toastkit.native.operands import AHEAD, BEST, CHOSEN, NORMED, SCORED, Choice, Operand, Operands
from toastkit.native.operations import matmul, weighted_sum

LEAST = 1e-20  # what some add to the sum of shares, and others do not, who would divide by 0


def _in_groups(k: int, how: int, normed: Any, groups: int, kept: int, factor: float) -> Choice:
    """As DeepSeek-V3 chooses. normed: whether shares of several experts add up to the factor."""
    how |= NORMED * bool(normed and k > 1)
    if groups < 2:  # of one, how many are kept may be anything
        groups = kept = 0
    return Choice(k, how, groups=groups, kept=kept, eps=LEAST, factor=factor)


class Router(Native):
    """Which experts a vector goes to, where a module of its own says that. _part: what asks it, a
    product; None where the module has the matrix. _bias: that is added to what is chosen by."""

    _part: str | None = None
    _bias: str | None = None

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
        """How it chooses at this moment."""
        return Choice(vars(self)["top_k"], CHOSEN)

    def operand(self: Any) -> Operand | None:
        """What it multiplies with, where it has that itself."""
        weight = self["weight"]
        return Operand(weight) if weight.dtype == mx.float32 else None


class RouterOfPart(Router):
    """As Granite's: by the logits that are chosen alone."""

    _part = "layer"


class RouterScored(Router):
    """As DeepSeek-V3's: by sigmoids and a bias, in the best groups."""

    _bias = "e_score_correction_bias"

    def choice(self: Any) -> Choice:
        own = vars(self)
        return _in_groups(
            own["top_k"], AHEAD | SCORED, own["norm_topk_prob"], own["n_group"], own["topk_group"],
            own["routed_scaling_factor"],
        )  # fmt: skip


class RouterOfPartInGroups(Router):
    """As Ling's: in groups, by sigmoids or shares of all."""

    _part, _bias = "gate_proj", "expert_bias"
    _how = 0

    def choice(self: Any) -> Choice:
        own = vars(self)
        return _in_groups(
            own["top_k"], self._how | SCORED * (own["score_function"] == "sigmoid"),
            own["norm_topk_prob"], own["n_group"], own["topk_group"], own["routed_scaling_factor"],
        )  # fmt: skip


class RouterOfPartInGroupsAhead(RouterOfPartInGroups):
    _how = AHEAD


class RouterInGroups(Router):
    """As DeepSeek-V2's."""

    def choice(self: Any) -> Choice:
        own = vars(self)
        groups = own["n_group"] if own["topk_method"] == "group_limited_greedy" else 0
        return Choice(
            own["top_k"], AHEAD | BEST, factor=own["routed_scaling_factor"], groups=groups,
            kept=own["topk_group"] if groups else 0,
        )  # fmt: skip


class RouterAhead(Router):
    """As DeepSeek's first."""

    def choice(self: Any) -> Choice:
        return Choice(vars(self)["top_k"], AHEAD)


class Mixture(Native):
    """Experts, and perhaps one that all tokens go through, which may have a gate: one node, unless
    somebody stands before its parts (slots, who asks for a choice), who is called as ever.

    _router, _experts, _shared, _gate: what they are called. _k: the attribute that holds how many.
    _normed: that says whether their shares add up to 1. _bias: that is added to what is chosen by.
    _how: see kernels/rows.h. _within: the product of a router that is nothing else."""

    _router, _experts, _shared, _gate = "gate", "switch_mlp", "shared_expert", "shared_expert_gate"
    _k, _normed, _how = "top_k", "norm_topk_prob", 0
    _bias: str | None = None
    _within: str | None = None

    def __call__(self: Any, x: mx.array) -> mx.array:
        library, alone = in_use(), vars(self).get("sharding_group") is None
        if library is None or not alone or x.dtype != mx.float32:
            return super().__call__(x)  # type: ignore[misc]
        if (whole := self.whole()) is not None:
            return _mixed(library, x, whole)
        router = self[self._router]
        if isinstance(router, Router):
            return super().__call__(x)  # type: ignore[misc]
        logits, bias = router(x), self.get(self._bias)
        if not _are_wide(logits, bias):
            return super().__call__(x)  # type: ignore[misc]
        which, shares = library.route(logits, self.choice(), bias)
        y = self[self._experts](x, which)
        if self._shared not in self:
            return weighted_sum(y, shares)
        more = self[self._shared](x)
        if self._gate not in self:
            return weighted_sum(y, shares) + more
        gate = self[self._gate](x)
        if not all(part.dtype == mx.float32 for part in (y, more, gate)):
            return (y * shares[..., None]).sum(axis=-2) + mx.sigmoid(gate) * more
        return library.blend(y, shares, more, gate)

    def choice(self: Any) -> Choice:
        """How experts are chosen at this moment."""
        own = vars(self)
        return Choice(own[self._k], self._how | bool(own.get(self._normed)))

    def whole(self: Any, beside: Any = None) -> MixtureShape | None:
        """What the library takes it as, for a primitive that is made now: its parts count as used.
        None where it is to be called, or they are one by one. beside: a network that all tokens go
        through, where that is none of its parts."""
        kept, alone = vars(self).get("_kept"), vars(self).get("sharding_group") is None
        if alone and (kept is None or kept[3] is not beside or not kept[0].hold()):
            kept = vars(self)["_kept"] = self._found(beside)
        if not alone or kept is None:
            return None
        operands, shape, chooses, _ = kept
        operands.were_used()
        shape.choice = chooses.choice()
        return shape

    def _found(self: Any, beside: Any) -> tuple[Operands, MixtureShape, Any, Any] | None:
        """With who says how experts are chosen, and what is beside it."""
        switch, shared, router = self[self._experts], self.get(self._shared), self[self._router]
        shared = shared if beside is None else beside
        own = isinstance(router, Router)
        known = type(switch).__call__ is SwitchNetwork.__call__
        if not known or (experts := switch.form()) is None:
            return None
        plain: Any = Router.__call__ if own else Known.__call__
        if (own or self._within) and type(router).__call__ is not plain:
            return None
        part = router._part if own else self._within
        asked = router[part] if part else router
        parts, kinds = [switch[name] for name in experts.parts], [experts.kind]
        around, names, gate = [self, router, switch], (), self.get(self._gate)
        if shared is not None:
            if type(shared).__call__ is not FeedForward.__call__:
                return None
            form = type(shared)._form
            names = form.parts
            parts += [*(shared[name] for name in names), *([] if gate is None else [gate])]
            kinds, around = [*kinds, form.kind], [*around, shared]
        found, first = operands_of(parts), _asked(asked)
        calls = gate is None or isinstance(gate, Linear)
        if found is None or first is None or not calls:
            return None
        chooses = router if own else self
        bias = chooses.get(chooses._bias)
        if not _are_wide(bias):
            return None
        biases = [None if bias is None else (chooses, chooses._bias)]
        operands = Operands([asked, *parts], [first, *found], biases, around)
        shape = MixtureShape(
            ctypes.addressof(operands), experts=len(experts.parts), shared=len(names),
            gated=gate is not None,
        )  # fmt: skip
        shape.activations[: len(kinds)] = kinds
        return operands, shape, chooses, beside


def _are_wide(*arrays: mx.array | None) -> bool:
    """Whether all that are given are float32."""
    return all(array is None or array.dtype == mx.float32 for array in arrays)


def _asked(router: Any) -> Operand | None:
    """What a router's product is with; None where it is not to be taken so."""
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


class MixtureScored(Mixture):
    """By a router of its own, with experts for all tokens that have no gate."""

    _shared = "shared_experts"


class MixtureScoredOfExperts(MixtureScored):
    _experts = "experts"


class MixtureScoredOfNarrow(MixtureScored):
    """Whose experts may be given fewer numbers (Nemotron-H): then it is its parts."""

    def whole(self: Any, beside: Any = None) -> MixtureShape | None:
        return super().whole(beside) if self.moe_latent_size is None else None


class MixtureChosenOfPart(MixtureChosen):
    _router = "router"


class MixtureOfPart(Mixture):
    """By a router of its own, without experts for all tokens."""

    _router = "router"


class MixtureBiased(Mixture):
    """By sigmoids and a bias (LFM 2)."""

    _bias = "expert_bias"

    def choice(self: Any) -> Choice:
        own = vars(self)
        normed = NORMED * bool(own["norm_topk_prob"])
        factor = own["routed_scaling_factor"]
        return Choice(own["top_k"], SCORED | normed, factor=factor, eps=1e-6)


class MixtureBiasedAhead(Mixture):
    """By sigmoids and a bias, and shares that add up to 1 (MiniMax)."""

    _bias = "e_score_correction_bias"

    def choice(self: Any) -> Choice:
        return Choice(vars(self)["num_experts_per_tok"], AHEAD | SCORED | NORMED, eps=LEAST)


class MixtureOfActivation(Mixture):
    """By shares of all, or by sigmoids, as one of its modules has it (ERNIE 4.5)."""

    _shared = "shared_experts"

    def choice(self: Any) -> Choice:
        scored = SCORED * isinstance(self["gate_act"], nn.Sigmoid)
        return Choice(vars(self)["k"], AHEAD | NORMED | scored, eps=1e-12)


class MixtureOfWrapped(Mixture):
    """By a product that a module of its own has (Trinity)."""

    _router, _experts, _shared, _bias = "router", "experts", "shared_experts", "expert_bias"
    _within = "gate"

    def choice(self: Any) -> Choice:
        own = vars(self)
        return _in_groups(
            own["num_experts_per_tok"], AHEAD | SCORED * (own["score_func"] == "sigmoid"),
            own["route_norm"], own["n_group"], own["topk_group"], own["route_scale"],
        )  # fmt: skip


class MixtureInGroups(Mixture):
    """By scores of its own, in the best groups (Kimi Linear)."""

    _shared, _bias = "shared_experts", "e_score_correction_bias"

    def choice(self: Any) -> Choice:
        args = self.args
        return _in_groups(
            args.num_experts_per_token,
            AHEAD | SCORED * (args.moe_router_activation_func == "sigmoid"), args.moe_renormalize,
            args.num_expert_group, args.topk_group, args.routed_scaling_factor,
        )  # fmt: skip
