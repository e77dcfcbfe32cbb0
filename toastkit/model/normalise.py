"""Converts a configuration to what the class of its architecture reads: the one place between
config.json and mlx_lm's ModelArgs.

    fitted = fit(config, where)
    ModelArgs.from_dict(fitted.config)

Both generations of names become those that the class has fields for. A meaningful field that the
class does not read is refused, or reported as a caution.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, NamedTuple

from toastkit.errors import DataError
from toastkit.model import rotation
from toastkit.model.config import ModelConfig
from toastkit.model.source import Source, source_of
from toastkit.model.supported import CAUTIONS, module_name

# Synonyms: a class that reads one of them is given it from any other. EXPERTS: per layer; CHOSEN:
# per token (top-k).
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
SYNONYMS = (
    EXPERTS,
    CHOSEN,
    ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    ("n_group", "num_expert_group"),
    ("norm_topk_prob", "moe_renormalize"),
    ("max_position_embeddings", "model_max_length", "n_positions", "n_ctx"),
    ("hidden_size", "n_embd", "block_dim"),
    ("head_dim", "linear_head_dim"),
    ("rms_norm_eps", "norm_eps", "layernorm_epsilon", "layer_norm_epsilon", "layer_norm_eps"),
    ("layer_types", "layers_block_type"),
)  # fmt: skip
# Synonyms for a kind of layer, of which a class knows one.
LAYERS = (("full_attention", "attention"), ("linear_attention", "mamba"))
# Fields that transformers no longer writes, because they have only one value.
CONSTANTS: dict[str, dict[str, Any]] = {
    "longcat_flash": {
        "attention_method": "MLA", "zero_expert_type": "identity", "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "glm_moe_dsa": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
    "solar_open": {
        "first_k_dense_replace": 0, "intermediate_size": 0, "partial_rotary_factor": 1.0,
    },
    "kimi_linear": {"rope_theta": 10000.0},
    "qwen3_vl_moe": {"norm_topk_prob": True},
    "minimax": {"shared_intermediate_size": 0},
}  # fmt: skip
# What transformers leaves out of a `text_config`, by its model type: values that are its defaults.
# (Other text classes of mlx_lm have these defaults themselves.)
_SIZES = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
OMITTED: dict[str, dict[str, Any]] = {
    "llama": {
        **_SIZES, "intermediate_size": 11008, "rms_norm_eps": 1e-6, "vocab_size": 32000,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        **_SIZES, "intermediate_size": 14336, "rms_norm_eps": 1e-6, "vocab_size": 32000,
        "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096,
    },
}  # fmt: skip
# Classes whose default for it is that of one checkpoint.
HEAD_DIM_DERIVED = ("falcon_h1",)
# Fields that change the computation, with the values that change nothing.
NEUTRAL: dict[str, tuple] = {
    "attn_logit_softcapping": (None, 0), "final_logit_softcapping": (None, 0),
    "logits_soft_cap": (None, 0), "clip_qkv": (None,), "rope_interleave": (None, True),
    "use_bidirectional_attention": (None, False, "vision"), "alibi": (None, False),
    "scale_attn_by_inverse_layer_idx": (None, False), "scale_attn_weights": (None, True),
    "norm_topk_prob": (None, False), "decoder_sparse_step": (None, 1),
    "swiglu_limit": (None, 7.0), "swiglu_alpha": (None, 1.702),
    "embedding_multiplier": (None, 1), "residual_multiplier": (None, 1),
    "attention_multiplier": (None, 1), "logits_scaling": (None, 1), "logit_scale": (None, 1),
    "moe_layer_freq": (None, 1),
}  # fmt: skip
# Architectures that weigh the chosen experts against each other whatever `norm_topk_prob` says, as
# their originals do: Ling 3.0's configuration has the field.
NORMALISED = (
    "bailing_moe_v3", "ernie4_5_moe", "gemma4_text", "gpt_oss", "granitemoe", "granitemoehybrid",
    "laguna", "minimax", "minimax_m3_vl", "mixtral",
)  # fmt: skip
# (field, value, what the architecture gets wrong then).
ONE_TOKEN = "shifts the tokens of a convolution that is one token wide"  # its state is all of them
REFUSED = {
    "minicpm3": (("tie_word_embeddings", True, "does not scale the logits of a tied head"),),
    "jamba": (("mamba_d_conv", 1, ONE_TOKEN),), "lfm2": (("conv_L_cache", 1, ONE_TOKEN),),
    "lfm2_moe": (("conv_L_cache", 1, ONE_TOKEN),), "mamba": (("conv_kernel", 1, ONE_TOKEN),),
    "plamo2": (("mamba_d_conv", 1, ONE_TOKEN),),
}  # fmt: skip
WINDOWS = ("sliding_window", "sliding_window_size", "attention_window_size")
# Architectures that transformers too computes without a window, whatever the configuration says.
WITHOUT_WINDOW = ("llama",)
# Without `layer_types` these, and what is built on them, have no window in any layer.
LISTED = ("llama", "ministral3")
# The first that is set counts.
ACTIVATIONS = ("hidden_activation", "hidden_act", "activation_function", "mlp_hidden_act")
# By family, the code in a class that computes them.
FAMILIES = {
    "silu": ("silu", "swiglu", "SiLU", "SwiGLU", "SwitchGLU"),
    "gelu": ("gelu", "GELU", "geglu", "SwitchMLP"), "relu": ("relu",), "relu2": ("relu",),
    "sqrelu": ("relu2",), "xielu": ("XIELU", "XieLU", "xielu"), "swigluoai": ("swiglu_alpha",),
}  # fmt: skip
# By the code, too, that GELU is approximated by tanh: the experts of SwitchMLP have it by default.
TANH = ("gelu_approx", "precise", "SwitchMLP")


class Fitted(NamedTuple):
    """config: for ModelArgs.from_dict. yarn: a scaling to set on the RoPEs afterwards, see
    rotation.unrounded_yarn. cautions: how the architecture differs from what the configuration asks
    for, each the rest of a sentence that begins with the architecture. window: tokens past which it
    attends further back than it should, None for never. module: its file in mlx_lm/models."""

    config: dict[str, Any]
    yarn: dict[str, Any] | None
    cautions: tuple[str, ...]
    window: int | None
    module: str

    def warnings(self, where: str) -> list[str]:
        """Format the cautions as lines. where: names the checkpoint."""
        return [f"warning: {where}: {self.module} of mlx_lm {one}" for one in self.cautions]


def fit(config: ModelConfig, where: str) -> Fitted:
    """Return the configuration for the class of its architecture. where: names the checkpoint in
    messages. Raises DataError for what the architecture does not compute."""
    module = module_name(config.model_type, config.raw.get("architectures"))
    try:
        return _fit(config, where, module)
    except (TypeError, ValueError, ArithmeticError, AttributeError, KeyError) as error:
        raise DataError(f"{where}: config.json does not describe a model: {error}") from error


def _fit(config: ModelConfig, where: str, module: str) -> Fitted:
    source = source_of(module)
    fitted, windows = deepcopy(config.raw), []
    found_cautions = [CAUTIONS[module]] if module in CAUTIONS else []
    levels = [(fitted, source)]
    if isinstance(fitted.get("text_config"), dict):
        given = fitted["text_config"]
        text = fitted["text_config"] = {**OMITTED.get(str(given.get("model_type")), {}), **given}
        if "vocab_size" in text and "vocab_size" in source.fields:
            fitted.setdefault("vocab_size", text["vocab_size"])
        if "tie_word_embeddings" in fitted:
            text["tie_word_embeddings"] = fitted["tie_word_embeddings"]
        levels.append((text, _text_source(text, source)))
    for level, of in levels:
        _rename(level, of)
        rotation.rename_rotation(level, of, where)
        _check(level, of, where)
        found_cautions += [*rotation.cautions(level, of), *_activation_cautions(level, of)]
        found_cautions += _length_cautions(level, of)
        windows.append(_ignored_window(level, of))
    window = min((w for w in windows if w is not None), default=None)
    yarn = next((y for level, _ in levels if (y := rotation.unrounded_yarn(level))), None)
    return Fitted(fitted, yarn, tuple(dict.fromkeys(found_cautions)), window, module)


def _text_source(text: dict, source: Source) -> Source:
    """Return the class for `text_config`, if its model type identifies one; an architecture that
    has a class of its own for it reads that (Kimi K3, whose text is called a kimi_linear)."""
    model_type = text.get("model_type")
    if not isinstance(model_type, str) or source.has_text_class:
        return source
    try:
        name = module_name(model_type)
    except DataError:
        return source
    return source_of(name) if name in source.parts else source


# ------------------------------------------------------------------------------------------ names


def _rename(config: dict[str, Any], source: Source) -> None:
    """Fill in a class's fields that the configuration names differently or implies."""
    fields = source.fields
    for names in SYNONYMS:
        present = [name for name in names if config.get(name) is not None]
        read = any(name in fields for name in present)
        for name in names if present else ():
            wanted = source.requires(name) or (name in fields and not read)
            if wanted and config.get(name) is None:
                config[name] = config[present[0]]
    for name, value in CONSTANTS.get(source.module, {}).items():
        config.setdefault(name, value)
    for name, value in _implied(config, source):
        other = isinstance(value, str) and isinstance(config.get(name), int)
        if name in fields and (config.get(name) is None or other):
            config[name] = value
    for name in ("layer_types", "layers_block_type"):
        if isinstance(config.get(name), list):
            config[name] = [_layer_word(word, source) for word in config[name]]


def _layer_word(word: object, source: Source) -> object:
    for words in LAYERS:
        if word in words and not source.has_word(str(word)):
            return next((other for other in words if source.has_word(other)), word)
    return word


def _implied(config: dict[str, Any], source: Source) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of fields that follow from others."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    derived = source.requires("head_dim") or source.module in HEAD_DIM_DERIVED
    if derived and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        yield "head_dim", hidden // heads
    if isinstance(hidden, int) and isinstance(config.get("expand"), int):
        yield "intermediate_size", hidden * config["expand"]
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list):
        yield "is_moe_layer", [kind == "sparse" for kind in kinds]
        dense = next((n for n, kind in enumerate(kinds) if kind != "dense"), len(kinds))
        if "dense" not in kinds[dense:]:
            yield "first_k_dense_replace", dense
    layers = config.get("layer_types")
    if isinstance(layers, list) and rotation.FULL in layers and not source.reads("layer_types"):
        letters = "".join("G" if kind == rotation.FULL else "L" for kind in layers)
        if not source.has_word("L"):
            yield "sliding_window_pattern", letters.index("G") + 1
        elif "L" in letters or config.get("sliding_window"):  # else all layers rotate
            yield "sliding_window_pattern", letters
    if isinstance(layers, list) and isinstance(config.get("linear_num_heads"), int):
        full = [n for n, kind in enumerate(layers, 1) if kind == rotation.FULL]
        yield "linear_attn_config", {
            "kda_layers": [n for n in range(1, len(layers) + 1) if n not in full],
            "full_attn_layers": full,
            "num_heads": config["linear_num_heads"], "head_dim": config.get("linear_head_dim"),
            "short_conv_kernel_size": config.get("linear_conv_kernel_dim"),
        }  # fmt: skip


# ----------------------------------------------------------------------------------------- checks


def _check(config: dict[str, Any], source: Source, where: str) -> None:
    """Raise DataError for a meaningful field that the class does not read."""
    rotation.check_rotation(config, source, where)
    for name, wrong, reason in REFUSED.get(source.module, ()):
        if config.get(name) == wrong:
            raise DataError(f"{where}: {source.module} of mlx_lm {reason}")
    for name, neutral in NEUTRAL.items():
        value: Any = config.get(name)
        fixed = isinstance(value, float) and f"{value:g}" in source.text
        fixed |= name == "norm_topk_prob" and value is True and source.module in NORMALISED
        if not (any(value == one for one in neutral) or fixed or _reads(source, name)):
            raise DataError(f"{where}: {source.module} of mlx_lm does not compute {name} {value}")
    score = config.get("scoring_func")
    if isinstance(score, str) and not source.reads("scoring_func") and score not in source.text:
        raise DataError(f"{where}: {source.module} of mlx_lm does not score experts by {score}")
    _check_experts(config, source, where)
    _check_pattern(config, source, where)
    word = _activation(config, source)
    family = "silu" if word == "swish" else "gelu" if "gelu" in word else word
    if word and not any(code in source.text for code in FAMILIES.get(family, (family,))):
        raise DataError(f"{where}: {source.module} of mlx_lm does not compute hidden_act {word}")


def _reads(source: Source, name: str) -> bool:
    """True if the class uses a field, or a synonym, which `_rename` filled in."""
    names = next((names for names in SYNONYMS if name in names), (name,))
    return any(source.reads(one) for one in names)


def _check_experts(config: dict[str, Any], source: Source, where: str) -> None:
    """Check that a token goes to at least one expert, and to no more than there are."""
    counts = [config[name] for name in EXPERTS if type(config.get(name)) is int]
    idle = config.get("zero_expert_num")  # identity experts
    most = max(counts, default=0)
    for name in CHOSEN if most > 1 else ():
        chosen = config.get(name)
        if chosen is None or isinstance(chosen, list) or not source.reads(name):
            continue
        if type(chosen) is not int or not 1 <= chosen <= most + (idle if type(idle) is int else 0):
            raise DataError(
                f"{where}: config.json has {name} {json.dumps(chosen)[:40]} of {most} experts"
            )


def _activation(config: dict[str, Any], source: Source) -> str:
    """Return the activation function asked for that the class does not read, or ""."""
    name = next((name for name in ACTIVATIONS if isinstance(config.get(name), str)), None)
    return "" if name is None or source.reads(name) else config[name]


def _activation_cautions(config: dict[str, Any], source: Source) -> Iterator[str]:
    """Yield cautions about GELU, whose tanh approximation moves log-probabilities."""
    word = _activation(config, source)
    if "gelu" not in word:
        return
    approximate = any(code in source.text for code in TANH)
    exact = re.search(r"nn\.gelu\(|nn\.GELU\(\)", source.text) is not None
    if word == "gelu" and not exact:
        yield "approximates GELU by tanh, which moves log-probabilities by up to 0.01"
    elif word != "gelu" and not approximate:
        yield "computes GELU exactly, not by tanh, which moves log-probabilities by up to 0.01"


def _length_cautions(config: dict[str, Any], source: Source) -> Iterator[str]:
    """Yield cautions about what counts only past some length: what Qwen 1 does past that of its
    training, and the choice of keys that layers of GLM 5.2 share."""
    trained, longest = config.get("seq_length"), config.get("max_position_embeddings")
    asked = [name for name in ("use_dynamic_ntk", "use_logn_attn") if config.get(name) is True]
    past = isinstance(trained, int) and isinstance(longest, int) and trained < longest
    if past and any(not source.reads(name) for name in asked):
        yield f"does not compute {' and '.join(asked)} past {trained:,} tokens"
    chosen = config.get("index_topk")
    shared = config.get("index_topk_freq") not in (None, 1) and not source.reads("index_topk_freq")
    if shared and isinstance(chosen, int):
        yield f"has each layer choose its own keys past {chosen:,} tokens"


def _check_pattern(config: dict[str, Any], source: Source, where: str) -> None:
    """If the class has a period instead of a list of layers, check that the list has that
    period."""
    layers, period = config.get("layer_types"), config.get("sliding_window_pattern")
    if not isinstance(layers, list) or source.reads("layer_types") or type(period) is not int:
        return
    if "sliding_window_pattern" in source.fields and period > 0:
        for n, kind in enumerate(layers):
            if (kind == rotation.FULL) != ((n + 1) % period == 0):
                raise DataError(
                    f"{where}: {source.module} of mlx_lm has one layer in {period} look back "
                    f"without a window; layer {n + 1} of layer_types is otherwise"
                )


# ---------------------------------------------------------------------------------------- windows


def _ignored_window(config: dict[str, Any], source: Source) -> int | None:
    """Return the tokens past which the architecture attends further back than its configuration
    allows, None if it does not.

    config: one level of it, in the names that the class reads.
    """
    window = next((config[name] for name in WINDOWS if config.get(name)), None)
    if type(window) is not int or window < 1 or not _slides(config):
        return None
    if config.get("model_type") in WITHOUT_WINDOW or _keeps(config, source):
        return None
    return window


def _slides(config: dict[str, Any]) -> bool:
    """True if any layer has the window."""
    if config.get("use_sliding_window") is False:
        return False
    layers = config.get("layer_types")
    if isinstance(layers, list):
        return any("sliding" in str(kind) for kind in layers)
    first, count = config.get("max_window_layers"), config.get("num_hidden_layers")
    return not (isinstance(first, int) and isinstance(count, int) and first >= count)


def _keeps(config: dict[str, Any], source: Source) -> bool:
    """True if the class has a window where the configuration has one. Some have it only in the
    layers that `layer_types` names."""
    if not any(source.reads(name) for name in WINDOWS):
        return False
    listed = any(part in LISTED for part in source.parts)
    by_name = "layer_types" in source.fields and source.has_word("full_attention")
    return not by_name or isinstance(config.get("layer_types"), list) or not listed
