"""Configurations reach an architecture in the names that it reads, and nothing in them that means
something is lost on the way."""

from __future__ import annotations

import importlib.util
import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

if importlib.util.find_spec("mlx_lm") is None:
    pytest.skip("mlx_lm is not installed", allow_module_level=True)

from tests.conftest import examples
from tests.oracle.old_names import old_names
from toastkit.errors import DataError
from toastkit.model.config import ModelConfig
from toastkit.model.normalise import Fitted, fit
from toastkit.model.source import source_of
from toastkit.model.supported import NO_WINDOW, supported

ROWS = supported()
RECORDED = sorted((Path(__file__).parents[1] / "oracle" / "recorded").glob("*.json"))
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "hidden_act": "silu",
    "max_position_embeddings": 256, "vocab_size": 96, "num_hidden_layers": 4,
}  # fmt: skip


def fitted(config: dict[str, Any]) -> Fitted:
    return fit(ModelConfig(config["model_type"], 96, None, config), "m")


def changed(**fields: Any) -> Fitted:
    return fitted({**LLAMA, **fields})


@pytest.mark.parametrize("chosen", [0, -1, 9, 2.0, "2", True])
def test_a_token_goes_to_some_of_the_experts(chosen: object) -> None:
    moe = {**LLAMA, "model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 8}
    assert fitted(moe)
    said = f"^m: config.json has num_experts_per_tok {json.dumps(chosen)} of 8 experts$"
    with pytest.raises(DataError, match=said):
        fitted({**moe, "num_experts_per_tok": chosen})
    assert fitted({**moe, "num_experts": 0, "num_experts_per_tok": chosen})  # it has none


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_both_generations_of_names_are_one(path: Path) -> None:
    """To the fields that the class has; what is refused is refused in both."""
    new = json.loads(path.read_text())["config"]
    found = []
    for config in (new, old_names(new)):
        before = json.dumps(config)
        try:
            made = fitted(config)
        except DataError as error:
            found.append(str(error))
            continue
        assert json.dumps(config) == before  # the configuration itself is left as it was
        found.append((read(made), made.cautions, made.window))
    assert found[0] == found[1]


def read(made: Fitted) -> list[dict[str, Any]]:
    """The levels of a configuration in the fields that some class of the architecture has, but for
    `rope_parameters`, which may hold more than is read."""
    fields = source_of(made.module).fields
    levels = [made.config, made.config.get("text_config") or {}]
    found = []
    for level in levels:
        others = ("text_config", "dtype", "rope_parameters")
        one = {k: v for k, v in level.items() if k in fields and k not in others}
        if isinstance(one.get("rope_scaling"), dict):
            one["rope_scaling"] = {k: v for k, v in one["rope_scaling"].items() if v is not None}
        found.append(one)
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.model_type}-{row.module}")
def test_every_architecture_has_fields(row) -> None:
    source = source_of(row.module)
    assert source.fields and source.parts[0] == row.module


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4}},
    ],
    ids=["new", "old"],
)
def test_one_scaling_in_two_spellings(fields: dict[str, Any]) -> None:
    made = changed(**fields).config
    assert made["rope_theta"] == 5e5
    scaling = made["rope_scaling"]
    assert scaling["type"] == scaling["rope_type"] == "yarn" and scaling["factor"] == 4.0
    assert scaling["original_max_position_embeddings"] == 256  # as transformers has it


@pytest.mark.parametrize("whole", [None, 0, 0.5, 1.0])
@pytest.mark.parametrize(
    ("model_type", "read"),
    [("llama", "rope_scaling"), ("deepseek_v3", "rope_scaling"), ("ministral3", "rope_parameters"),
     ("mistral4", "rope_parameters"), ("qwen3_5_text", "rope_parameters"),
     ("laguna", "by layer"), ("mellum", "by layer")],
)  # fmt: skip
def test_what_turned_heads_are_multiplied_by(model_type: str, read: str, whole: Any) -> None:
    """Is what mlx_lm makes of two fields, of which the second scales scores besides; in the map
    that the architecture reads. A context that is implied and a whole factor are made good there
    too."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4, "attention_factor": 1.5}
    if whole is not None:
        rope |= {"mscale": 1.0, "mscale_all_dim": whole}
    given: dict[str, Any] = {"full_attention": rope, "sliding_attention": dict(LOCAL)}
    read_whole = read != "by layer"
    made = changed(model_type=model_type, rope_parameters=rope if read_whole else given).config
    made = made[read] if read_whole else made["rope_parameters"]["full_attention"]
    log = 0.1 * math.log(4)
    ratio = (log * made["mscale"] + 1) / (log * made["mscale_all_dim"] + 1)
    assert ratio == pytest.approx(1.5) and made["mscale_all_dim"] == (whole or 0)
    assert made["original_max_position_embeddings"] == 256 and type(made["factor"]) is float


LOCAL = {"rope_type": "default", "rope_theta": 1e4}
FAR = {"rope_type": "default", "rope_theta": 1e6}
LATENT = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 64}
FAR_QWEN = {"seq_length": 8192, "use_dynamic_ntk": True, "use_logn_attn": True}
SCALED = {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rope_theta": None}, "no usable rope_theta"),
        ({"rope_theta": "10000"}, "no usable rope_theta"),
        ({"rope_theta": 10**400}, "no usable rope_theta"),
        ({"rope_theta": [1e4, 1e4]}, "no usable rope_theta"),
        ({"model_type": "step3p5", "rope_theta": [1e4, None]}, "no usable rope_theta"),
        ({"rope_parameters": {"rope_theta": None, "rope_type": "default"}}, "rope_theta"),
        ({"rope_scaling": {"type": "linear", "factor": None}}, "no usable factor"),
        ({"rope_scaling": {"type": "longrope", "attention_factor": 3.0}}, "attention_factor"),
        ({"rope_parameters": {"full_attention": FAR, "sliding_attention": LOCAL}},
         "no rotation of its own for sliding_attention"),
        ({"model_type": "gemma3_text", "hidden_act": "gelu_pytorch_tanh",
          "rope_parameters": {"full_attention": FAR, "sliding_attention": SCALED}},
         "no rotation of its own for sliding_attention"),
        ({"model_type": "mixtral", "rope_scaling": {"type": "linear", "factor": 2.0}},
         "knows no rope scaling of type linear"),
        ({"model_type": "mellum", "rope_parameters": {"full_attention": SCALED,
          "sliding_attention": LOCAL}}, "knows no rope scaling of type linear"),
        ({"model_type": "mellum", "rope_parameters": {"full_attention": FAR,
          "sliding_attention": SCALED}}, "knows no rope scaling of type linear"),
        ({"model_type": "phi3", "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4,
          "factor": 2.0}}, "knows no rope scaling of type yarn"),
        ({"model_type": "starcoder2", "hidden_act": "gelu", "partial_rotary_factor": 0.5},
         "rotates 100% of each head, not 50%"),
        ({"model_type": "recurrent_gemma", "hidden_activation": "gelu_pytorch_tanh",
          "rope_theta": 5e5}, "does not read rope_theta"),
        ({"model_type": "plamo2", "rope_theta": 1e4, "rope_local_theta": 1e6},
         "does not read rope_local_theta"),
        ({"model_type": "plamo2", "rope_local_theta": 1e6}, "does not read rope_local_theta"),
        ({**LATENT, "model_type": "mistral4", "partial_rotary_factor": 0.25},
         "rotates 100% of each head, not 25%"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "does not compute clip_qkv 8.0"),
        ({"final_logit_softcapping": 30.0}, "does not compute final_logit_softcapping 30.0"),
        ({"model_type": "qwen2_moe", "norm_topk_prob": True}, "does not compute norm_topk_prob"),
        ({"hidden_act": "relu"}, "does not compute hidden_act relu"),
        ({"model_type": "mamba", "conv_kernel": 1}, "mamba of mlx_lm shifts the tokens"),
        ({"model_type": "falcon_mamba", "conv_kernel": 1}, "shifts the tokens of a convolution"),
        ({"model_type": "lfm2", "conv_L_cache": 1}, "shifts the tokens of a convolution"),
        ({"model_type": "lfm2_moe", "conv_L_cache": 1}, "shifts the tokens of a convolution"),
        ({"model_type": "jamba", "mamba_d_conv": 1}, "shifts the tokens of a convolution"),
        ({"model_type": "plamo2", "mamba_d_conv": 1}, "shifts the tokens of a convolution"),
        ({"model_type": "gemma3_text", "hidden_act": "gelu_pytorch_tanh", "sliding_window": 16,
          "sliding_window_pattern": 2, "layer_types": ["sliding_attention", "full_attention",
          "full_attention", "full_attention"]}, "one layer in 2"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_what_means_something_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        changed(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": None}, {"rope_scaling": {"type": "default"}}, {"hidden_act": "swish"},
        {"final_logit_softcapping": None, "clip_qkv": None, "norm_topk_prob": False},
        {"partial_rotary_factor": 0.5},  # transformers ignores it as well
        {"model_type": "granitemoehybrid", "position_embedding_type": "nope", "rope_theta": None},
        {"model_type": "olmo_hybrid", "rope_parameters": {"rope_theta": None}},  # as published
        {"model_type": "mamba2", "num_attention_heads": None},
        {"model_type": "bailing_hybrid", "architectures": ["BailingMoeV3ForCausalLM"],
         "norm_topk_prob": True, "partial_rotary_factor": 0.5, "head_dim": 128,
         **LATENT, "qk_nope_head_dim": 128},  # as in Ling 3.0
        {"model_type": "step3p5", "rope_theta": [5e6, 1e4, 1e4, 1e4]},  # one for each layer
        {"model_type": "minimax_m3_vl", "norm_topk_prob": True, "hidden_act": "swigluoai"},
        {**LATENT, "model_type": "mistral4", "partial_rotary_factor": 0.5},  # of both parts
        {**LATENT, "model_type": "mistral4", "partial_rotary_factor": 1.0},
        {"model_type": "mixtral", "partial_rotary_factor": None},
        {"model_type": "phi-msft", "activation_function": "gelu_new", "hidden_act": None},
        {"model_type": "rwkv7", "hidden_act": "sqrelu"},
        {"model_type": "plamo2", "rope_theta": 1e4, "rope_local_theta": 1e4},
        {"model_type": "qwen", **FAR_QWEN, "max_position_embeddings": 8192},
        {"model_type": "glm_moe_dsa", "index_topk": 2048, "index_topk_freq": 1},
    ],
    ids=str,
)  # fmt: skip
def test_what_means_nothing_is_not(fields: dict[str, Any]) -> None:
    assert changed(**fields).cautions == ()


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"model_type": "qwen", **FAR_QWEN, "max_position_embeddings": 32768},
         "does not compute use_dynamic_ntk and use_logn_attn past 8,192 tokens"),
        ({"model_type": "glm_moe_dsa", "index_topk": 2048, "index_topk_freq": 4},
         "has each layer choose its own keys past 2,048 tokens"),  # GLM 5.2
    ],
    ids=["qwen", "glm_moe_dsa"],
)  # fmt: skip
def test_what_is_not_computed_past_a_length_is_told(fields: dict[str, Any], told: str) -> None:
    assert changed(**fields).cautions == (told,)


@pytest.mark.parametrize("normed", [False, True])
def test_a_class_that_reads_a_synonym_computes_the_field(normed: bool) -> None:
    """Kimi's name for norm_topk_prob."""
    made = changed(model_type="kimi_linear", rope_theta=1e4, norm_topk_prob=normed)
    assert made.config["moe_renormalize"] is normed


def test_a_class_of_lettered_layers_is_told_of_none_where_none_slides() -> None:
    """EXAONE 4.0 1.2B: with a pattern its class looks for the sliding ones, and rotates in them
    only."""
    layers = {"model_type": "exaone4", "layer_types": ["full_attention"] * 4}
    bare = {"sliding_window": None, "sliding_window_pattern": None}
    assert changed(**layers, **bare).config["sliding_window_pattern"] is None
    layers["layer_types"] = ["sliding_attention", "full_attention"] * 2
    assert changed(**layers, sliding_window=16).config["sliding_window_pattern"] == "LGLG"


def test_a_text_class_of_its_own_is_what_reads_the_text() -> None:
    """Kimi K3's is called a kimi_linear, which knows neither this activation nor its parameters."""
    text = {
        **LLAMA, "model_type": "kimi_linear", "hidden_act": "situ", "activation_situ_beta": 4.0,
        "num_experts": 8, "num_experts_per_token": 2, "moe_renormalize": True,
    }  # fmt: skip
    made = fitted({"model_type": "kimi_k3", "text_config": text})
    assert text.items() <= made.config["text_config"].items() and made.cautions == ()


JUNK = st.recursive(
    st.sampled_from([None, True, 0, -1, 10**400, 0.5, float("nan"), "", "yarn", "full_attention"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["rope_type", "type", "rope_theta", "factor", "full_attention",
                         "attention_factor", "partial_rotary_factor", "sliding_attention"]),
        inner, max_size=4,
    ),
    max_leaves=6,
)  # fmt: skip
NAMES = (
    "rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "layer_types",
    "sliding_window", "mlp_layer_types", "hidden_act", "num_attention_heads", "text_config",
    "max_position_embeddings", "sliding_window_pattern", "clip_qkv", "expand", "linear_num_heads",
)  # fmt: skip


@settings(max_examples=examples(50), deadline=None)
@given(
    st.sampled_from(["llama", "phi3", "gemma3_text", "exaone4", "minimax", "mistral3", "mellum"]),
    st.dictionaries(st.sampled_from(NAMES), JUNK, max_size=4),
)
def test_junk_is_fitted_or_refused(model_type: str, fields: dict[str, Any]) -> None:
    with suppress(DataError):
        changed(model_type=model_type, **fields)


SLIDES = {"sliding_window": 16}


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        (SLIDES, None),  # transformers ignores it as well
        ({"model_type": "mistral", **SLIDES}, 16),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "qwen2", **SLIDES}, 16),
        ({"model_type": "qwen2", **SLIDES, "use_sliding_window": False}, None),
        ({"model_type": "qwen2", **SLIDES, "max_window_layers": 4}, None),
        ({"model_type": "qwen2", **SLIDES, "max_window_layers": 3}, 16),
        ({"model_type": "qwen2", **SLIDES, "layer_types": ["full_attention"] * 4}, None),
        ({"model_type": "gemma3_text", "hidden_act": "gelu_pytorch_tanh", **SLIDES}, None),
        ({"model_type": "ministral3", **SLIDES}, 16),
        ({"model_type": "ministral3", **SLIDES,
          "layer_types": ["sliding_attention", "full_attention"] * 2}, None),
    ],
    ids=str,
)  # fmt: skip
def test_windows_that_are_not_kept_to(fields: dict[str, Any], window: int | None) -> None:
    assert changed(**fields).window == window


@pytest.mark.parametrize("model_type", NO_WINDOW)
def test_what_has_no_window_says_so(model_type: str) -> None:
    (row,) = [row for row in ROWS if row.model_type == model_type]
    assert "without a sliding window" in row.note
    act = "gelu_pytorch_tanh" if model_type in ("gemma2", "starcoder2") else "silu"
    made = changed(model_type=model_type, **SLIDES, use_sliding_window=True, hidden_act=act)
    assert made.window == 16


def test_the_language_model_of_one_that_sees() -> None:
    text = {**LLAMA, "model_type": "mistral", "rope_parameters": FAR, "sliding_window": 16}
    made = fitted({"model_type": "mistral3", "tie_word_embeddings": False, "text_config": text})
    assert made.config["text_config"]["rope_theta"] == 1e6 and made.window == 16
    assert made.config["text_config"]["tie_word_embeddings"] is False


def test_what_transformers_leaves_out_of_a_text_config_is_its_default() -> None:
    """As in llava-1.5-7b-hf, and Pixtral 12B's."""
    text = {"model_type": "llama", "rms_norm_eps": 1e-5, "vocab_size": 32064}
    made = fitted({"model_type": "llava", "text_config": text}).config["text_config"]
    assert (made["num_attention_heads"], made["intermediate_size"]) == (32, 11008)
    assert (made["rms_norm_eps"], made["vocab_size"]) == (1e-5, 32064)
    text = {"model_type": "mistral", "num_hidden_layers": 40, "sliding_window": None}
    pixtral = fitted({"model_type": "llava", "text_config": text})
    made = pixtral.config["text_config"]
    assert (made["num_attention_heads"], made["num_hidden_layers"]) == (32, 40)
    assert made["num_key_value_heads"] == 8 and pixtral.window is None
