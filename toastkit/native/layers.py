"""Whole layers of few nodes: of architectures whose forward is one that was read, and is known by
its source. Their products stay modules, and leave and come back as ever. What a layer's own node
has not goes to the architecture's forward, made of native operations as far as there are any."""

from __future__ import annotations

import ctypes
import hashlib
import inspect
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from toastkit.native.functions import Native, definition_of
from toastkit.native.library import ACTIVATIONS, Library, in_use
from toastkit.native.modules import FeedForward, Linear, Operands, SwitchGLU, gate_of
from toastkit.native.operations import weighted_sum
from toastkit.native.recurrent import MOST_KERNEL

AHEAD, CHOSEN = 2, 4  # see toast_route


class _DeltaLayer(Native):
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


class _FourProjections(_DeltaLayer):
    _parts = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")


class _TwoProjections(_DeltaLayer):
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

    _k: the attribute that holds how many. _normed: that says whether their shares add up to 1.
    _how: see kernels/rows.h."""

    _k, _normed, _how = "top_k", "norm_topk_prob", 0

    def __call__(self: Any, x: mx.array) -> mx.array:
        library, alone = in_use(), vars(self).get("sharding_group") is None
        if library is None or not alone or x.dtype != mx.float32:
            return super().__call__(x)  # type: ignore[misc]
        k, how = getattr(self, self._k), self._how | bool(vars(self).get(self._normed))
        if (parts := self.parts()) is not None:
            return _mixed(library, x, parts, k, how)
        logits = self["gate"](x)
        if logits.dtype != mx.float32:
            return super().__call__(x)  # type: ignore[misc]
        which, shares = library.route(logits, k, how)
        y = self["switch_mlp"](x, which)
        if "shared_expert" not in self:
            return weighted_sum(y, shares)
        more, gate = self["shared_expert"](x), self["shared_expert_gate"](x)
        if not all(part.dtype == mx.float32 for part in (y, more, gate)):
            return (y * shares[..., None]).sum(axis=-2) + mx.sigmoid(gate) * more
        return library.blend(y, shares, more, gate)

    def parts(self: Any) -> MixtureParts | None:
        """As the library takes them; None where they are to be called one by one."""
        kept = vars(self).get("_kept")
        if kept is None or not kept.operands.hold():
            kept = vars(self)["_kept"] = self._found()
        return kept

    def _found(self: Any) -> MixtureParts | None:
        switch, shared = self["switch_mlp"], self.get("shared_expert")
        if type(switch).__call__ is not SwitchGLU.__call__:
            return None
        own = [self["gate"], *(switch[name] for name in ("gate_proj", "up_proj", "down_proj"))]
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
        if (operands := Operands.of(own, around)) is None:
            return None
        return MixtureParts(operands, len(names), *[*map(ACTIVATIONS.index, kinds), 0][:2])


class MixtureParts(NamedTuple):
    """operands: of the router, the experts, and the one that all tokens go through with its gate,
    which has so many parts (shared). Its activation, and that of the others."""

    operands: Operands
    shared: int
    activation: int
    shared_activation: int


def _mixed(library: Library, x: mx.array, parts: MixtureParts, k: int, how: int) -> mx.array:
    own, shared, *activations = parts
    own.were_used()
    out = mx.array(0)
    wrong = _function(library)(
        out, x, own.objects, own.packing, shared, k, how, *activations, own.exact
    )
    if wrong is not None:
        raise ValueError(wrong.decode())
    return out


@cache
def _function(library: Library) -> Any:
    array, place, whole = ctypes.py_object, ctypes.c_void_p, ctypes.c_int
    return library.function("mixture", array, array, place, place, *[whole] * 6)


class _Ahead(Mixture):
    _how = AHEAD


class _Chosen(Mixture):
    _k, _how = "num_experts_per_tok", AHEAD | CHOSEN


# By module and name, with the digests of the sources of the methods that they stand for.
LAYERS: dict[tuple[str, str], tuple[type, frozenset[str]]] = {
    ("mlx_lm.models.qwen3_next", "Qwen3NextGatedDeltaNet"): (_TwoProjections, frozenset({
        "2a2aee87b09300db",  # 0.32
    })),
    ("mlx_lm.models.qwen3_next", "Qwen3NextSparseMoeBlock"): (Mixture, frozenset({
        "9bc3562e7dd962b2",  # 0.31
        "9c28cc63a2f1d683",
    })),
    ("mlx_lm.models.qwen3_moe", "Qwen3MoeSparseMoeBlock"): (Mixture, frozenset({
        "fffa3169fdc28428",  # 0.31
        "5d2e8164fcb6ebfc",
    })),
    ("mlx_lm.models.mellum", "MellumSparseMoeBlock"): (Mixture, frozenset({
        "5b2f6b4b2d4d7c4c",
    })),
    ("mlx_lm.models.olmoe", "OlmoeSparseMoeBlock"): (_Ahead, frozenset({
        "e6ea43ca188f32b3",
    })),
    ("mlx_lm.models.qwen2_moe", "Qwen2MoeSparseMoeBlock"): (_Ahead, frozenset({
        "7d404b0385a9ff7e",
    })),
    ("mlx_lm.models.mixtral", "MixtralSparseMoeBlock"): (_Chosen, frozenset({
        "95e4c55589ec0085",
    })),
    ("mlx_lm.models.qwen3_5", "GatedDeltaNet"): (_FourProjections, frozenset({
        "730a07e14645d4b9",
    })),
}  # fmt: skip


@cache
def layer_of(cls: type[nn.Module]) -> type | None:
    """What computes a whole layer of a class of an architecture, as a mixin; None for a class, or a
    version of it, that is not known."""
    mixin, known = LAYERS.get((cls.__module__, cls.__name__), (None, frozenset()))
    return mixin if mixin is not None and digest(cls) in known else None


def digest(cls: type) -> str | None:
    """Of the source of a class's own methods but the one that makes it; None where there is no
    source."""
    methods = [f for name, f in sorted(vars(cls).items()) if inspect.isfunction(f)]
    found = [definition_of(f.__code__) for f in methods if f.__name__ != "__init__"]
    text = "".join(definition.text for definition in found if definition is not None)
    return None if None in found else hashlib.sha256(text.encode()).hexdigest()[:16]
