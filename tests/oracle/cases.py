"""Which checkpoints the oracle has: small ones of every architecture that both mlx_lm and
transformers know, and of one or two more settings where the rotation has kinds."""

from __future__ import annotations

from typing import Any

VOCAB, LENGTH = 96, 40
# Positions whose log-probabilities are recorded: before, at and after a window of WINDOW tokens.
WINDOW = 16
POSITIONS = (3, WINDOW - 1, WINDOW, 26, LENGTH - 1)

# What every configuration is given of this that it has a name for.
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "shared_intermediate_size": 32,
    "n_shared_experts": 1, "num_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "num_expert_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "n_positions": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 96, "rotary_dim": 8,
    "state_size": 8, "time_step_rank": 8, "mamba_d_state": 8, "mamba_expand": 2,
    "mamba_dt_rank": 8, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128,
    "mamba_chunk_size": 16, "chunk_size": 16, "index_topk": 64, "index_n_heads": 2,
    "index_head_dim": 16,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "depth": 1,
    "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64, "image_size": 28,
    "patch_size": 14, "embed_dim": 32, "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16, "fullatt_block_indexes": [0], "vision_output_dim": 32,
    "projector_input_dim": 32, "projector_output_dim": 32,
}  # fmt: skip
THETA = 500000.0

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
SOME_SLIDE = {
    "num_hidden_layers": 4, "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
    "sliding_window": WINDOW,
}  # fmt: skip
LATENT = {"num_key_value_heads": 4, "head_dim": 8}
SPARSE = {"mlp_layer_types": ["dense", "sparse"]}
PER_LAYER = {
    "rope_parameters": {
        FULL: {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 0.5},
        SLIDING: {"rope_type": "default", "rope_theta": 20000.0, "partial_rotary_factor": 1.0},
    },
    "layer_types": [SLIDING, FULL], "sliding_window": WINDOW,
}  # fmt: skip


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": THETA, **settings, "rope_type": kind}}


LLAMA3 = rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64)
FACTORS = {
    "short_factor": [1.0 + 0.1 * n for n in range(8)],
    "long_factor": [2.0 + n / 4 for n in range(8)],
}
LONGROPE = rope("longrope", factor=4.0, original_max_position_embeddings=64, **FACTORS)
# Beyond its first context the long factors hold.
LONGROPE_LONG = rope("longrope", factor=8.0, original_max_position_embeddings=32, **FACTORS)
MELLUM = {"rope_parameters": {
    kind: {"rope_type": "default", "rope_theta": theta}
    for kind, theta in ((FULL, THETA), (SLIDING, 20000.0))
}}  # fmt: skip
GEMMA4 = {
    **SOME_SLIDE, "hidden_size_per_layer_input": 0, "rope_parameters": {
        FULL: {"rope_type": "proportional", "rope_theta": THETA, "partial_rotary_factor": 0.25},
        SLIDING: {"rope_type": "default", "rope_theta": 20000.0},
    },
}  # fmt: skip

# Architectures with nothing but SMALL.
PLAIN = (
    "cohere", "dots1", "ernie4_5", "ernie4_5_moe", "falcon_h1", "falcon_mamba",
    "gemma", "glm", "glm4", "glm4_moe", "gpt_bigcode", "granite", "granitemoe", "helium",
    "hunyuan_v1_dense", "internlm3", "iquestcoder", "llama", "llava", "mamba", "minimax_m2",
    "ministral3", "mistral3", "nemotron", "olmo2", "olmoe", "phi", "phi3", "qwen2", "qwen2_moe",
    "qwen3", "qwen3_moe", "qwen3_vl", "seed_oss", "solar_open", "stablelm", "starcoder2",
)  # fmt: skip
# Model types that mlx_lm and transformers both know, and why there is no checkpoint of them here.
LAYOUT = (
    "mlx_lm reads the tensors of the original checkpoint only, which transformers does not save"
)
LEFT_OUT = {
    "bailing_hybrid": "mlx_lm reads the fields of the original checkpoint only",
    "apertus": "its activation fails in this transformers",
    "bitnet": "not supported here",
    "dbrx": "its configuration fails in this transformers",
    "gemma3n": "transformers needs timm and Pillow for it",
    "gpt2": LAYOUT,
    "kimi_k25": LAYOUT,
    "kimi_linear": LAYOUT,
    "llama4": LAYOUT,
    "llama4_text": "mlx_lm has the dense model of that name, transformers the mixture of experts",
    "longcat_flash": LAYOUT,
    "mimo_v2_flash": "mlx_lm reads the fields of the original checkpoint only",
    "minimax": "mlx_lm has MiniMax-M2 under that name, transformers MiniMax-Text-01",
    "minimax_m3_vl": "its smallest is too large",
    "mistral4": "transformers has no small one that runs",
    "muse_glimmer": "its smallest is too large",
    "muse_spark": "not supported here",
    "nanochat": LAYOUT,
    "olmo": "not supported here",
    "olmo_hybrid": LAYOUT,
    "pixtral": "transformers has its vision alone",
    "qwen2_5_vl": "transformers has no small one that runs",
    "qwen2_vl": "transformers has no small one that runs",
    "qwen3_5_moe": LAYOUT,
    "qwen3_vl_moe": LAYOUT,
    "step3p5": "transformers has it as a part of step3p7",
}

# By name: model type, and what its configuration is given beside SMALL.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_linear": ("llama", rope("linear", factor=2.0)),
    "llama_dynamic": ("llama", rope("dynamic", factor=2.0)),
    "llama_llama3": ("llama", LLAMA3),
    "llama_yarn": ("llama", YARN),
    "llama_longrope": ("llama", LONGROPE),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama_partial": ("llama", rope("default", partial_rotary_factor=0.5)),
    "qwen2_yarn": ("qwen2", YARN),
    "qwen2_window": (
        "qwen2",
        {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": WINDOW},
    ),
    "qwen3_yarn": ("qwen3", YARN),
    "qwen3_window": (
        "qwen3",
        {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": WINDOW},
    ),
    "qwen3_moe_yarn": ("qwen3_moe", YARN),
    "phi3_longrope": ("phi3", {**LONGROPE, "original_max_position_embeddings": 64}),
    "phi3_longrope_long": ("phi3", {**LONGROPE_LONG, "original_max_position_embeddings": 32}),
    "phi3_partial": ("phi3", rope("default", partial_rotary_factor=0.5)),
    "phi3_window": ("phi3", {"sliding_window": WINDOW}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "mistral_whole": ("mistral", {"sliding_window": None}),
    "mixtral": ("mixtral", {"sliding_window": None}),
    "mixtral_window": ("mixtral", {"sliding_window": WINDOW}),
    "starcoder2_window": ("starcoder2", {"sliding_window": WINDOW}),
    "gemma2": ("gemma2", {"sliding_window": WINDOW}),
    "gemma3_text": ("gemma3_text", SOME_SLIDE),
    "gemma3_text_linear": (
        "gemma3_text",
        {
            **SOME_SLIDE,
            "rope_parameters": {
                FULL: {"rope_type": "linear", "rope_theta": THETA, "factor": 8.0},
                SLIDING: {"rope_type": "default", "rope_theta": 20000.0},
            },
        },
    ),
    "olmo3": ("olmo3", SOME_SLIDE),
    "cohere2": ("cohere2", SOME_SLIDE),
    "exaone4": ("exaone4", SOME_SLIDE),
    "afmoe": ("afmoe", SOME_SLIDE),
    "exaone_moe": ("exaone_moe", SOME_SLIDE),
    "gpt_oss": ("gpt_oss", {"sliding_window": WINDOW}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "glm4_moe_qk": ("glm4_moe", {"use_qk_norm": True}),
    "stablelm_qk": ("stablelm", {"qk_layernorm": True, "use_qkv_bias": True}),
    "qwen3_next": ("qwen3_next", {"num_hidden_layers": 4}),
    "deepseek_v2": ("deepseek_v2", {**LATENT}),
    "deepseek_v3": ("deepseek_v3", {**LATENT}),
    "deepseek_v3_yarn": (
        "deepseek_v3",
        {
            **LATENT,
            **rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=64,
                mscale=1.0,
                mscale_all_dim=1.0,
            ),
        },
    ),
    "deepseek_v32": ("deepseek_v32", {**LATENT, **SPARSE}),
    "glm4_moe_lite": ("glm4_moe_lite", {**LATENT, **SPARSE}),
    "glm_moe_dsa": ("glm_moe_dsa", {**LATENT, **SPARSE}),
    "minicpm3": ("minicpm3", LATENT),
    "llama_longrope_long": ("llama", LONGROPE_LONG),
    "llama_attention_factor": (
        "llama",
        rope("yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=1.5),
    ),
    "llama_yarn_truncate": (
        "llama",
        rope("yarn", factor=4.0, original_max_position_embeddings=64, truncate=False),
    ),
    "gptj": ("gptj", {"n_inner": None}),
    "gpt_neox": ("gpt_neox", {"intermediate_size": 256}),
    "jamba": (
        "jamba",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
        },
    ),
    "phimoe": ("phimoe", {"attention_bias": True, "lm_head_bias": True}),
    "recurrent_gemma": (
        "recurrent_gemma",
        {
            "num_hidden_layers": 3,
            **rope("default", rope_theta=10000.0, partial_rotary_factor=0.5),
            "num_key_value_heads": 1,
            "attention_window_size": WINDOW,
        },
    ),
    "minicpm3_untied": ("minicpm3", {**LATENT, "tie_word_embeddings": False}),
    "dots1_window": ("dots1", {"sliding_window": WINDOW, "max_window_layers": 1}),
    "gemma3": ("gemma3", {"text_config": SOME_SLIDE}),
    "gemma4": ("gemma4", {"text_config": GEMMA4}),
    "gemma4_text": ("gemma4_text", GEMMA4),
    "qwen3_5_text": ("qwen3_5_text", {"num_hidden_layers": 4}),
    "qwen3_5": ("qwen3_5", {"text_config": {"num_hidden_layers": 4}}),
    "gpt_neox_whole": (
        "gpt_neox",
        {"intermediate_size": 256, **rope("default", partial_rotary_factor=1.0)},
    ),
    "laguna": ("laguna", {**PER_LAYER, **SPARSE, "num_attention_heads_per_layer": [4, 4]}),
    "mellum": ("mellum", {**PER_LAYER, **MELLUM, "mlp_layer_types": ["sparse", "sparse"]}),
    "lfm2_moe": ("lfm2_moe", {"layer_types": ["conv", FULL], "num_dense_layers": 1}),
    "lfm2": ("lfm2", {"layer_types": ["conv", FULL]}),
    "mamba2": ("mamba2", {"num_heads": 8, "n_groups": 1}),
    "nemotron_h": (
        "nemotron_h",
        {
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 8,
            "layers_block_type": [LINEAR, "moe", FULL, "mlp"],
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {"layer_types": [LINEAR, FULL], "position_embedding_type": "rope"},
    ),
}
