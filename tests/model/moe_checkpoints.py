"""Random mixtures of experts in their published layout, with more experts a token than those of
tests/model/published have, so that there is a little model of each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.model.published import checkpoint, write_published
from tests.model.published.dense import HEADS, SIZES
from tests.model.published.experts import EXPERT_WIDTH, EXPERTS, sparse
from tests.model.published.writing import (
    HIDDEN,
    Checkpoint,
    feed_forward,
    matrices,
    norms,
    outside,
    write_checkpoint,
)

K = 4
NAMES = (
    "qwen2_moe", "olmoe", "qwen3_moe", "qwen3_moe_quantised", "qwen3_next", "mixtral", "gpt_oss",
    "deepseek_v3",
)  # fmt: skip
ROPE, NOPE, RANK = 8, 16, 32  # of DeepSeek's attention: widths of a head, and of what is kept


def deepseek_v3() -> Checkpoint:
    """A dense layer, then sigmoid routers with a bias, two of four groups, shared experts."""
    config = {
        **SIZES, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
        "num_hidden_layers": 3, "num_key_value_heads": HEADS, "first_k_dense_replace": 1,
        "n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": K,
        "moe_intermediate_size": EXPERT_WIDTH, "moe_layer_freq": 1, "n_group": 4,
        "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "q_lora_rank": 24,
        "kv_lora_rank": RANK, "qk_rope_head_dim": ROPE, "qk_nope_head_dim": NOPE,
        "v_head_dim": NOPE, "attention_bias": False, "rope_scaling": None,
        "tie_word_embeddings": False,
    }  # fmt: skip
    shapes = outside(head=True)
    for n in range(3):
        prefix = f"model.layers.{n}"
        shapes |= norms(prefix, "input_layernorm", "post_attention_layernorm")
        attention = f"{prefix}.self_attn"
        shapes |= matrices(
            attention, q_a_proj=(24, HIDDEN), q_b_proj=(HEADS * (NOPE + ROPE), 24),
            kv_a_proj_with_mqa=(RANK + ROPE, HIDDEN), kv_b_proj=(HEADS * 2 * NOPE, RANK),
            o_proj=(HIDDEN, HEADS * NOPE),
        )  # fmt: skip
        shapes |= norms(attention, "q_a_layernorm", size=24)
        shapes |= norms(attention, "kv_a_layernorm", size=RANK)
        if n == 0:
            shapes |= feed_forward(f"{prefix}.mlp", SIZES["intermediate_size"])
        else:
            shapes |= sparse(f"{prefix}.mlp")
            shapes |= feed_forward(f"{prefix}.mlp.shared_experts", EXPERT_WIDTH)
            shapes[f"{prefix}.mlp.gate.e_score_correction_bias"] = (EXPERTS,)
    return Checkpoint(config, shapes)


def written(folder: Path, name: str) -> Path:
    """A published checkpoint, or deepseek_v3, in a folder where it is made once."""
    path = folder / name
    if not path.exists():
        (write_moe if name == "deepseek_v3" else write_published)(path, name)
    return path


def write_moe(path: Path, name: str, k: int = K) -> Path:
    """A new directory with the checkpoint of that name, one of NAMES, whose config.json says so
    many experts a token. The weights are the same for any."""
    made = deepseek_v3() if name == "deepseek_v3" else checkpoint(name)
    return write_checkpoint(path, replace(made, config={**made.config, "num_experts_per_tok": k}))
