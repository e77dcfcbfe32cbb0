"""Random models in 4 bits for the benchmarks of native products, for MLX and for llama.cpp."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
from experts_models import COMMON, OWN, SHAPES, write
from load import LLAMA

HERE = Path(__file__).parent
LARGE = {
    **LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_hidden_layers": 8, "head_dim": 128,
}  # fmt: skip
# small: 160 MB. large: 1 GB, layers as those of Llama 3 8B. large-2: the same with two heads of
# keys, as GLM-4 and Qwen3.5 have. olmoe: 1.9 GB, of which a token reads a fifth. qwen3-moe: 4.3 GB,
# a quarter of Qwen3-30B-A3B's layers, of which a token reads a tenth; qwen3-30b: all of them,
# 17 GB. next: 500 MB, with layers as those of Qwen3-Next, but for 20 experts in place of 512.
MODELS: dict[str, dict[str, Any]] = {
    "small": {**LLAMA, "num_hidden_layers": 6, "num_attention_heads": 16, "head_dim": 128},
    "large": LARGE,
    "large-2": {**LARGE, "num_key_value_heads": 2},
    "olmoe": {**SHAPES["olmoe"], "num_hidden_layers": 8, "vocab_size": 25152},
    "qwen3-moe": {
        **COMMON, "model_type": "qwen3_moe", "num_hidden_layers": 12, "vocab_size": 25152,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "norm_topk_prob": True, "intermediate_size": 6144, "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "next": {
        **COMMON, "model_type": "qwen3_next", "num_hidden_layers": 8, "vocab_size": 25152,
        "head_dim": 256, "num_key_value_heads": 2, "partial_rotary_factor": 0.25,
        "full_attention_interval": 4, "linear_num_value_heads": 32, "linear_num_key_heads": 16,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "num_experts": 20, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "intermediate_size": 5632,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
}  # fmt: skip
MODELS["qwen3-30b"] = {**MODELS["qwen3-moe"], "num_hidden_layers": 48}
# And, of 150 to 220 MB, layers of other architectures.
DENSE = {
    "vocab_size": 25152, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    "tie_word_embeddings": False, "hidden_act": "silu", "hidden_size": 1024,
    "intermediate_size": 4096, "num_hidden_layers": 14, "num_attention_heads": 16,
    "num_key_value_heads": 8, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS |= {
    "gemma3": {
        **DENSE, "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912,
        "num_hidden_layers": 12, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 512,
        "sliding_window_pattern": 6, "rope_local_base_freq": 1e4,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "phi3": {
        **DENSE, "model_type": "phi3", "hidden_size": 1536, "num_hidden_layers": 10,
        "num_attention_heads": 12, "num_key_value_heads": 12,
    },
    "granite": {
        **DENSE, "model_type": "granite", "logits_scaling": 8.0, "attention_multiplier": 0.0156,
        "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_bias": False,
        "mlp_bias": False,
    },
    "glm4": {
        **DENSE, "model_type": "glm4", "num_key_value_heads": 2, "head_dim": 64,
        "attention_bias": True, "partial_rotary_factor": 0.5,
    },
    "olmo2": {**DENSE, "model_type": "olmo2"},
    "ministral3": {
        **DENSE, "model_type": "ministral3", "head_dim": 64,
        "rope_parameters": {
            "rope_theta": 1e6, "rope_type": "yarn", "factor": 16.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16384,
        },
    },
    "gpt-oss": {
        **DENSE, "model_type": "gpt_oss", "hidden_size": 1536, "intermediate_size": 1536,
        "num_hidden_layers": 8, "num_attention_heads": 32, "head_dim": 64,
        "num_local_experts": 16, "num_experts_per_tok": 4, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
    },
    "gemma2": {
        **DENSE, "model_type": "gemma2", "hidden_size": 1152, "intermediate_size": 6912,
        "num_hidden_layers": 12, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 256, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh",
    },
}  # fmt: skip
MODELS["gemma2"].pop("hidden_act")  # which it has not
# Mixtures that are scored, latent attention, and Mamba-2: 240 to 520 MB, of which a token reads
# some 100.
EXPERTS = {
    **DENSE, "num_hidden_layers": 8, "num_key_value_heads": 4, "head_dim": 64,
    "moe_intermediate_size": 704, "n_routed_experts": 32, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 8, "norm_topk_prob": True, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0, "rope_scaling": None, "attention_bias": True,
    "num_experts": 32,
}  # fmt: skip
MODELS |= {
    "glm4-moe": {
        **EXPERTS, "model_type": "glm4_moe", "use_qk_norm": True, "partial_rotary_factor": 0.5,
    },
    "latent": {
        **EXPERTS, "model_type": "glm4_moe_lite", "num_key_value_heads": 16,
        "attention_bias": False, "num_experts_per_tok": 4, "kv_lora_rank": 512, "q_lora_rank": 768,
    },
    "nemotron-h": {
        **DENSE, "model_type": "nemotron_h", "num_hidden_layers": 20, "num_key_value_heads": 4,
        "head_dim": 64, "attention_bias": False, "mamba_num_heads": 32, "mamba_head_dim": 64,
        "mamba_proj_bias": False, "ssm_state_size": 128, "conv_kernel": 4, "n_groups": 8,
        "mlp_bias": False, "layer_norm_epsilon": 1e-5, "use_bias": False, "use_conv_bias": True,
        "hybrid_override_pattern": [*"M-M-M-*-M-M-M-*-M-M-"],
    },
}  # fmt: skip
# Recurrences that mlx_lm steps through in Python, short convolutions, and norms behind layers, of
# which some do not turn heads: 70 to 160 MB.
MODELS |= {
    "mamba": {
        **DENSE, "model_type": "mamba", "num_hidden_layers": 12, "intermediate_size": 2048,
        "state_size": 16, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True,
        "time_step_rank": 64,
    },
    "mamba2": {
        **DENSE, "model_type": "mamba2", "num_hidden_layers": 12, "num_heads": 32, "head_dim": 64,
        "state_size": 128, "conv_kernel": 4, "n_groups": 1, "use_bias": False,
        "use_conv_bias": True, "layer_norm_epsilon": 1e-5, "expand": 2, "chunk_size": 256,
        "time_step_limit": [0.0, float("inf")], "time_step_rank": 64,
    },
    "jamba": {
        **DENSE, "model_type": "jamba", "num_key_value_heads": 4, "attn_layer_offset": 4,
        "attn_layer_period": 8, "expert_layer_offset": 1, "expert_layer_period": 2,
        "mamba_expand": 2, "mamba_d_conv": 4, "mamba_d_state": 16, "num_experts": 1,
        "num_experts_per_tok": 1, "mamba_dt_rank": 64,
    },
    "rwkv7": {
        **DENSE, "model_type": "rwkv7", "num_hidden_layers": 8, "norm_eps": 1e-5, "head_dim": 64,
        "a_low_rank_dim": 64, "v_low_rank_dim": 64, "gate_low_rank_dim": 128,
        "decay_low_rank_dim": 64,
    },
    "lfm2": {
        **DENSE, "model_type": "lfm2", "intermediate_size": 6656, "block_ff_dim": 6656,
        "block_dim": 1024, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True, "num_key_value_heads": 8, "norm_eps": 1e-5,
        "conv_bias": False, "conv_L_cache": 3, "full_attn_idxs": [2, 5, 8, 10, 12],
    },
    "exaone4": {
        **DENSE, "model_type": "exaone4", "num_key_value_heads": 4, "head_dim": 64,
        "sliding_window": 4096, "sliding_window_pattern": "LLLG", "rope_scaling": None,
    },
}  # fmt: skip
MODELS["rwkv7"].pop("hidden_act")
# Queries, keys and values in one matrix head by head, layer norms, attention within a module,
# and other routers: 100 to 270 MB.
MODELS |= {
    "internlm2": {**DENSE, "model_type": "internlm2", "bias": False},
    "gpt-neox": {
        **DENSE, "model_type": "gpt_neox", "layer_norm_eps": 1e-5, "rotary_emb_base": 10000,
        "rotary_pct": 0.25, "use_parallel_residual": True, "hidden_act": "gelu",
    },
    "exaone": {
        **DENSE, "model_type": "exaone", "num_layers": 14, "layer_norm_epsilon": 1e-5,
    },
    "stablelm": {
        **DENSE, "model_type": "stablelm", "num_key_value_heads": 16, "use_qkv_bias": True,
        "partial_rotary_factor": 0.25, "layer_norm_eps": 1e-5,
    },
    "phimoe": {
        **EXPERTS, "model_type": "phimoe", "num_local_experts": 16, "num_experts": 16,
        "num_experts_per_tok": 2, "intermediate_size": 1024, "norm_topk_prob": False,
    },
    "minimax": {
        **EXPERTS, "model_type": "minimax", "num_local_experts": 32, "intermediate_size": 704,
        "shared_intermediate_size": 0, "rotary_dim": 32, "use_qk_norm": True,
        "norm_topk_prob": False,
    },
    "ling": {
        **EXPERTS, "model_type": "bailing_moe_linear", "num_shared_experts": 1, "use_bias": False,
        "layer_group_size": 4, "group_norm_size": 4, "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True, "use_qk_norm": True, "use_qkv_bias": False,
        "partial_rotary_factor": 0.5, "num_key_value_heads": 4,
    },
    "hunyuan": {
        **EXPERTS, "model_type": "hunyuan", "moe_topk": 8, "num_shared_expert": 1,
        "use_mixed_mlp_moe": True, "use_qk_norm": True, "use_cla": False, "cla_share_factor": 2,
        "norm_topk_prob": False,
        "intermediate_size": 704, "attention_bias": False, "tie_word_embeddings": True,
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
    },
}  # fmt: skip
# Gemma 4's: inputs of their own at each layer, of which the last attend to what others have kept;
# and experts beside a network, whose keys are values where a layer sees all.
GEMMA4 = {
    **DENSE, "model_type": "gemma4_text", "num_hidden_layers": 10, "hidden_size": 1536,
    "head_dim": 256, "global_head_dim": 512, "num_attention_heads": 8, "num_key_value_heads": 1,
    "intermediate_size": 6144, "num_kv_shared_layers": 4, "sliding_window": 512,
    "sliding_window_pattern": 5, "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": DENSE["vocab_size"], "tie_word_embeddings": True,
}  # fmt: skip
MODELS |= {
    "gemma4": GEMMA4,
    "gemma4-moe": {
        **GEMMA4, "num_hidden_layers": 6, "num_attention_heads": 16, "num_key_value_heads": 8,
        "num_global_key_value_heads": 2, "intermediate_size": 2112, "num_kv_shared_layers": 0,
        "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "use_double_wide_mlp": False,
        "enable_moe_block": True, "num_experts": 32, "top_k_experts": 8,
        "num_experts_per_tok": 8, "moe_intermediate_size": 704, "sliding_window_pattern": 3,
    },
}  # fmt: skip
BITS, GROUP = 4, 64


def checkpoint(folder: Path, name: str) -> Path:
    """The checkpoint of a model, made if it is not there: as mlx_lm quantises, in 4 bits in groups
    of 64, scales in bfloat16."""
    path = folder / name
    if path.exists():
        return path
    config = MODELS[name] | {"quantization": {"group_size": GROUP, "bits": BITS}}
    return write(path, config, BITS, {"embed_tokens": OWN.get(name, 1.0)})


def gguf(folder: Path, name: str, python: str) -> Path | None:
    """The same shape for llama.cpp in Q4_0, which has a scale for 32 numbers, made if it is not
    there; None where the interpreter has no `gguf` and `llama_cpp`."""
    path, part = folder / f"{name}.gguf", folder / f"{name}.gguf.part"
    has = [python, "-c", "import gguf, llama_cpp"]
    if subprocess.run(has, stderr=subprocess.DEVNULL).returncode:
        return None
    if not path.exists():
        command = [python, str(HERE / "native_llama.py"), "make", str(part)]
        subprocess.run(command, input=json.dumps(MODELS[name]).encode(), check=True)
        part.rename(path)
    return path


def bytes_read(weights: dict[str, mx.array], config: dict[str, Any]) -> int:
    """By a token: of experts those that it goes to, of an embedding that is not the head next to
    nothing."""
    share = config.get("num_experts_per_tok", 1) / config.get("num_experts", 1)
    looked_up = "embed_tokens_per_layer" if config["tie_word_embeddings"] else "embed_tokens"
    total = 0.0
    for name, array in weights.items():
        if looked_up not in name:
            total += array.nbytes * (share if "switch_" in name else 1)
    return int(total)
