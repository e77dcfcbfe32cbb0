"""Whole layers of few nodes: of architectures whose forward is one that was read, and is known by
its source. Their products stay modules, and leave and come back as ever. What a layer's own node
has not goes to the architecture's forward, made of native operations as far as there are any."""

from __future__ import annotations

import hashlib
import inspect
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from toastkit.native.functions import Native, definition_of
from toastkit.native.library import in_use
from toastkit.native.recurrent import MOST_KERNEL


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


class _SparseMoe(Native):
    """Experts, and one that all tokens go through, which has a gate."""

    def __call__(self: Any, x: mx.array) -> mx.array:
        library, gates = in_use(), self["gate"](x)
        if library is None or self.sharding_group is not None or gates.dtype != mx.float32:
            return super().__call__(x)  # type: ignore[misc]
        which, shares = library.route(gates, self.top_k, self.norm_topk_prob)
        y, more = self["switch_mlp"](x, which), self["shared_expert"](x)
        gate = self["shared_expert_gate"](x)
        if not all(part.dtype == mx.float32 for part in (y, more, gate)):
            return (y * shares[..., None]).sum(axis=-2) + mx.sigmoid(gate) * more
        return library.blend(y, shares, more, gate)


# By module and name, with the digests of the sources of the methods that they stand for.
LAYERS: dict[tuple[str, str], tuple[type, frozenset[str]]] = {
    ("mlx_lm.models.qwen3_next", "Qwen3NextGatedDeltaNet"): (_TwoProjections, frozenset({
        "2a2aee87b09300db",  # 0.32
    })),
    ("mlx_lm.models.qwen3_next", "Qwen3NextSparseMoeBlock"): (_SparseMoe, frozenset({
        "9c28cc63a2f1d683",
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
