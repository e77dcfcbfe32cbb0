"""Classes of mlx_lm that are known by their source, and what computes in their place."""

from __future__ import annotations

import hashlib
import inspect
from functools import cache

import mlx.nn as nn

from toastkit.native.decoder import Decoder, FourProjections, TwoProjections
from toastkit.native.functions import definition_of, functions_of
from toastkit.native.latent_attention import LatentAttention
from toastkit.native.mixtures import (
    Mixture,
    MixtureAhead,
    MixtureBiased,
    MixtureBiasedAhead,
    MixtureChosen,
    MixtureOfPart,
    MixtureRouted,
    MixtureScored,
    RouterAhead,
    RouterInGroups,
    RouterOfPart,
    RouterScored,
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
        "2964963bff3086a2",
    })),
    ("mlx_lm.models.qwen3_5", "GatedDeltaNet"): (FourProjections, frozenset({
        "730a07e14645d4b9",
    })),
    ("mlx_lm.models.deepseek_v3", "DeepseekV3MoE"): (MixtureScored, frozenset({
        "5c396b22d20c5274",
    })),
    ("mlx_lm.models.deepseek_v3", "MoEGate"): (RouterScored, frozenset({
        "b570948493299a05",  # 0.31
        "477b6059456d1d80",
    })),
    ("mlx_lm.models.deepseek_v3", "DeepseekV3Attention"): (LatentAttention, frozenset({
        "410c4c4877a47726",
    })),
    ("mlx_lm.models.glm4_moe_lite", "Glm4MoeLiteAttention"): (LatentAttention, frozenset({
        "5012a87eb0a3b345",
    })),
    ("mlx_lm.models.deepseek_v32", "DeepseekV32MoE"): (MixtureScored, frozenset({
        "5c396b22d20c5274",
    })),
    ("mlx_lm.models.deepseek_v32", "MoEGate"): (RouterScored, frozenset({
        "b570948493299a05",  # 0.31
        "477b6059456d1d80",
    })),
    ("mlx_lm.models.glm4_moe", "MoE"): (MixtureScored, frozenset({
        "5c396b22d20c5274",
    })),
    ("mlx_lm.models.glm4_moe", "MoEGate"): (RouterScored, frozenset({
        "b570948493299a05",  # 0.31
        "477b6059456d1d80",
    })),
    ("mlx_lm.models.glm4_moe_lite", "Glm4MoeLiteMoE"): (MixtureScored, frozenset({
        "5c396b22d20c5274",
    })),
    ("mlx_lm.models.glm4_moe_lite", "MoEGate"): (RouterScored, frozenset({
        "d9b3fd8a390c1951",  # 0.31
        "4de9a63870602938",
    })),
    ("mlx_lm.models.exaone_moe", "MoE"): (MixtureScored, frozenset({
        "f9d36ec94f848a11",
    })),
    ("mlx_lm.models.exaone_moe", "MoEGate"): (RouterScored, frozenset({
        "fd0ea3ff3473b164",  # 0.31
        "13ebe26c5d34352e",
    })),
    ("mlx_lm.models.mimo_v2_flash", "MoE"): (MixtureScored, frozenset({
        "d9271ce472f8236e",
    })),
    ("mlx_lm.models.mimo_v2_flash", "MoEGate"): (RouterScored, frozenset({
        "a8e37b8810cc0da9",  # 0.31
        "6a1872dc0c8310c7",
    })),
    ("mlx_lm.models.deepseek_v2", "DeepseekV2MoE"): (MixtureScored, frozenset({
        "0372173aa0078ec7",
    })),
    ("mlx_lm.models.deepseek_v2", "MoEGate"): (RouterInGroups, frozenset({
        "2573fb5e1dad4958",  # 0.31
        "7ffd4990c703fa63",
    })),
    ("mlx_lm.models.deepseek", "DeepseekMoE"): (MixtureScored, frozenset({
        "69bae7a13837b1c3",
    })),
    ("mlx_lm.models.deepseek", "MoEGate"): (RouterAhead, frozenset({
        "ab29305390820608",
    })),
    ("mlx_lm.models.granitemoe", "GraniteMoeMoE"): (MixtureOfPart, frozenset({
        "5f3548f3637349a4",
    })),
    ("mlx_lm.models.granitemoe", "GraniteMoeTopKGating"): (RouterOfPart, frozenset({
        "ec8e74c20a57f1e6",  # 0.31
        "f04eadb945648a09",
    })),
    ("mlx_lm.models.granitemoehybrid", "GraniteMoeHybridMoE"): (MixtureOfPart, frozenset({
        "eec89ab94adc358a",
    })),
    ("mlx_lm.models.granitemoehybrid", "GraniteMoeHybridTopKGating"): (RouterOfPart, frozenset({
        "2fb8919b4567cd72",  # 0.31
        "a7ef0ab13c8edcd5",
    })),
    ("mlx_lm.models.lfm2_moe", "Lfm2MoeSparseMoeBlock"): (MixtureBiased, frozenset({
        "ef564026ddc3ce64",
    })),
    ("mlx_lm.models.minimax", "MiniMaxSparseMoeBlock"): (MixtureBiasedAhead, frozenset({
        "f95a6d46996d86bb",  # 0.31
        "8d15d094b115016c",
    })),
}  # fmt: skip


@cache
def layer_of(cls: type[nn.Module]) -> type | None:
    """What computes a whole layer of a class of an architecture, as a mixin; None for a class, or a
    version of it, that is not known."""
    mixin, known = LAYERS.get((cls.__module__, cls.__name__), (None, frozenset()))
    return mixin if mixin is not None and digest(cls) in known else None


def digest(cls: type) -> str | None:
    """Of the source of a class's own methods but the one that makes it, and of the functions of its
    module that they call; None where there is no source."""
    methods = [f for name, f in sorted(vars(cls).items()) if inspect.isfunction(f)]
    methods = [f for f in methods if f.__name__ != "__init__"]
    found = [definition_of(f.__code__) for f in (*methods, *functions_of(methods))]
    text = "".join(definition.text for definition in found if definition is not None)
    return None if None in found else hashlib.sha256(text.encode()).hexdigest()[:16]
