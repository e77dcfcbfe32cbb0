"""Classes of mlx_lm that are known by their source, and what computes in their place."""

from __future__ import annotations

import hashlib
import inspect
from functools import cache

import mlx.nn as nn

from toastkit.native.decoder import Decoder
from toastkit.native.functions import definition_of
from toastkit.native.layers import (
    FourProjections,
    Mixture,
    MixtureAhead,
    MixtureChosen,
    MixtureRouted,
    TwoProjections,
)

# By module and name, with the digests of the sources of the methods that they stand for.
LAYERS: dict[tuple[str, str], tuple[type, frozenset[str]]] = {
    ("mlx_lm.models.qwen3_next", "Qwen3NextGatedDeltaNet"): (TwoProjections, frozenset({
        "2a2aee87b09300db",  # 0.32
    })),
    ("mlx_lm.models.qwen3_next", "Qwen3NextDecoderLayer"): (Decoder, frozenset({
        "f10022c1d06a8172",
    })),
    ("mlx_lm.models.qwen3_5", "DecoderLayer"): (Decoder, frozenset({
        "f10022c1d06a8172",
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
    ("mlx_lm.models.olmoe", "OlmoeSparseMoeBlock"): (MixtureAhead, frozenset({
        "e6ea43ca188f32b3",
    })),
    ("mlx_lm.models.qwen2_moe", "Qwen2MoeSparseMoeBlock"): (MixtureAhead, frozenset({
        "7d404b0385a9ff7e",
    })),
    ("mlx_lm.models.mixtral", "MixtralSparseMoeBlock"): (MixtureChosen, frozenset({
        "95e4c55589ec0085",
    })),
    ("mlx_lm.models.gpt_oss", "MLPBlock"): (MixtureRouted, frozenset({
        "7c6ef1cd838840ed",
    })),
    ("mlx_lm.models.qwen3_5", "GatedDeltaNet"): (FourProjections, frozenset({
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
