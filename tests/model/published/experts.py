"""Mixtures of experts over attention: qwen3_moe, qwen2_moe, olmoe, mixtral, gpt_oss."""

from __future__ import annotations

from tests.model.reference import OLD_MLX_LM

from .dense import HEAD, HEADS, KV_HEADS, SIZES, layer
from .writing import HIDDEN, Checkpoint, Shapes, attention, feed_forward, matrices, norms, outside

EXPERTS, EXPERT_WIDTH = 8, 64


def sparse(prefix: str) -> Shapes:
    """A router, and the experts one by one, as the Qwen family publishes them."""
    shapes = matrices(prefix, gate=(EXPERTS, HIDDEN))
    for e in range(EXPERTS):
        shapes |= feed_forward(f"{prefix}.experts.{e}", EXPERT_WIDTH)
    return shapes


def sparse_and_shared(prefix: str) -> Shapes:
    """The same with an expert that every token runs, behind a gate."""
    shapes = sparse(prefix) | feed_forward(f"{prefix}.shared_expert", EXPERT_WIDTH)
    return shapes | matrices(prefix, shared_expert_gate=(1, HIDDEN))


def without_feed_forward(prefix: str, **settings) -> Shapes:
    """A decoder layer of dense.py that still lacks its feed-forward part."""
    return {name: shape for name, shape in layer(prefix, **settings).items() if ".mlp" not in name}


def qwen3_moe() -> Checkpoint:
    """The first layer is dense, where mlx_lm can load that."""
    dense = [] if OLD_MLX_LM else [0]
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "num_hidden_layers": 3, "head_dim": 32, "num_experts": EXPERTS, "num_experts_per_tok": 2,
        "moe_intermediate_size": EXPERT_WIDTH, "decoder_sparse_step": 1, "mlp_only_layers": dense,
        "norm_topk_prob": True, "attention_bias": False, "rope_scaling": None,
        "tie_word_embeddings": False, **SIZES,
    }  # fmt: skip
    shapes = outside(head=True)
    for n in range(3):
        prefix = f"model.layers.{n}"
        if n in dense:
            shapes |= layer(prefix, qk_norms=True, head=32)
        else:
            shapes |= without_feed_forward(prefix, qk_norms=True, head=32)
            shapes |= sparse(f"{prefix}.mlp")
    return Checkpoint(config, shapes, dtype="BF16", shards=3)


def qwen2_moe() -> Checkpoint:
    """A shared expert; biases on query, key and value."""
    config = {
        "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe",
        "num_hidden_layers": 2, "num_experts": EXPERTS, "num_experts_per_tok": 2,
        "moe_intermediate_size": EXPERT_WIDTH, "shared_expert_intermediate_size": EXPERT_WIDTH,
        "decoder_sparse_step": 1, "norm_topk_prob": False, "tie_word_embeddings": False, **SIZES,
    }  # fmt: skip
    shapes = outside(head=True)
    for n in range(2):
        shapes |= without_feed_forward(f"model.layers.{n}", bias="qkv")
        shapes |= sparse_and_shared(f"model.layers.{n}.mlp")
    return Checkpoint(config, shapes, dtype="BF16", shards=2)


def olmoe() -> Checkpoint:
    """Norms over all queries and all keys at once."""
    config = {
        **SIZES, "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe",
        "num_hidden_layers": 2, "num_key_value_heads": HEADS, "num_experts": EXPERTS,
        "num_experts_per_tok": 2, "intermediate_size": EXPERT_WIDTH, "norm_topk_prob": False,
        "clip_qkv": None, "attention_bias": False, "rope_scaling": None,
        "tie_word_embeddings": False,
    }  # fmt: skip
    shapes = outside(head=True)
    for n in range(2):
        prefix = f"model.layers.{n}"
        shapes |= attention(f"{prefix}.self_attn", HEADS, HEADS, HEAD)
        shapes |= norms(f"{prefix}.self_attn", "q_norm", "k_norm", size=HEADS * HEAD)
        shapes |= norms(prefix, "input_layernorm", "post_attention_layernorm")
        shapes |= sparse(f"{prefix}.mlp")
    return Checkpoint(config, shapes, dtype="F16")


def mixtral() -> Checkpoint:
    """w1, w2 and w3 for gate, down and up."""
    config = {
        **SIZES, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
        "num_hidden_layers": 2, "intermediate_size": EXPERT_WIDTH, "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2, "sliding_window": None, "output_router_logits": False,
        "tie_word_embeddings": False,
    }  # fmt: skip
    shapes = outside(head=True)
    for n in range(2):
        prefix = f"model.layers.{n}"
        shapes |= without_feed_forward(prefix)
        shapes |= matrices(f"{prefix}.block_sparse_moe", gate=(EXPERTS, HIDDEN))
        wide, narrow = (EXPERT_WIDTH, HIDDEN), (HIDDEN, EXPERT_WIDTH)
        for e in range(EXPERTS):
            expert = f"{prefix}.block_sparse_moe.experts.{e}"
            shapes |= matrices(expert, w1=wide, w2=narrow, w3=wide)
    return Checkpoint(config, shapes, dtype="F16", shards=2)


def gpt_oss() -> Checkpoint:
    """Experts in mxfp4, packed as OpenAI publishes them: 16 bytes of blocks and a byte of scale for
    32 numbers, gate and up in turn. Attention with sinks, and with a window in every other layer.
    (`truncate` is false there, which mlx_lm does not know: tests/oracle.)"""
    layers = 4
    scaling = {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    kept = ["self_attn", "mlp.router", "embed_tokens", "lm_head"]
    kept[:2] = [f"model.layers.*.{name}" for name in kept[:2]]
    config = {
        **SIZES, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss",
        "num_hidden_layers": layers, "head_dim": HEAD, "intermediate_size": EXPERT_WIDTH,
        "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "rope_theta": 150000, "rope_scaling": scaling, "attention_bias": True,
        "swiglu_limit": 7.0, "tie_word_embeddings": False,
        "quantization_config": {"modules_to_not_convert": kept, "quant_method": "mxfp4"},
    }  # fmt: skip
    shapes = outside(head=True)
    for n in range(layers):
        prefix = f"model.layers.{n}"
        shapes |= attention(f"{prefix}.self_attn", HEADS, KV_HEADS, HEAD, bias="qkvo")
        shapes[f"{prefix}.self_attn.sinks"] = (HEADS,)
        shapes |= norms(prefix, "input_layernorm", "post_attention_layernorm")
        shapes[f"{prefix}.mlp.router.weight"] = (EXPERTS, HIDDEN)
        shapes[f"{prefix}.mlp.router.bias"] = (EXPERTS,)
        rows = {"gate_up_proj": (2 * EXPERT_WIDTH, HIDDEN), "down_proj": (HIDDEN, EXPERT_WIDTH)}
        for name, (outputs, inputs) in rows.items():
            name = f"{prefix}.mlp.experts.{name}"
            shapes[f"{name}_blocks"] = (EXPERTS, outputs, inputs // 32, 16)
            shapes[f"{name}_scales"] = (EXPERTS, outputs, inputs // 32)
            shapes[f"{name}_bias"] = (EXPERTS, outputs)
    return Checkpoint(config, shapes, dtype="BF16", shards=2)
