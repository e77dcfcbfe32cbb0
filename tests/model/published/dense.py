"""Transformers without experts: llama, qwen2, qwen3, gemma3_text, phi3."""

from __future__ import annotations

from .writing import (
    HIDDEN,
    VOCAB,
    Checkpoint,
    Shapes,
    attention,
    feed_forward,
    matrices,
    norms,
    outside,
)

WIDTH, HEADS, KV_HEADS, HEAD = 128, 4, 2, 16
SIZES = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": WIDTH,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "max_position_embeddings": 512, "rope_theta": 10000.0,
    "bos_token_id": 1, "eos_token_id": 2, "use_cache": True, "torch_dtype": "bfloat16",
}  # fmt: skip


def layer(prefix: str, *, bias: str = "", qk_norms: bool = False, head: int = HEAD) -> Shapes:
    """A decoder layer as in llama; bias as in `attention`; qk_norms: one a head, as in qwen3."""
    shapes = attention(f"{prefix}.self_attn", HEADS, KV_HEADS, head, bias=bias)
    if qk_norms:
        shapes |= norms(f"{prefix}.self_attn", "q_norm", "k_norm", size=head)
    shapes |= feed_forward(f"{prefix}.mlp", WIDTH)
    return shapes | norms(prefix, "input_layernorm", "post_attention_layernorm")


def llama() -> Checkpoint:
    """Llama 3.1's rotary scaling; the precomputed frequencies that older files carry."""
    scaling = {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64, "rope_type": "llama3",
    }  # fmt: skip
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 3,
        "rope_scaling": scaling, "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": False, **SIZES,
    }  # fmt: skip
    shapes = outside(head=True)
    for n in range(3):
        shapes |= layer(f"model.layers.{n}")
        shapes[f"model.layers.{n}.self_attn.rotary_emb.inv_freq"] = (HEAD // 2,)
    return Checkpoint(config, shapes, dtype="F16", shards=2)


def tied_llama() -> Checkpoint:
    """The embedding is the output matrix; the file has a copy of that, which counts for nothing."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2,
        "rope_scaling": None, "head_dim": HEAD, "tie_word_embeddings": True, **SIZES,
    }  # fmt: skip
    shapes = outside(head=True) | layer("model.layers.0") | layer("model.layers.1")
    return Checkpoint(config, shapes, dtype="BF16")


def qwen2() -> Checkpoint:
    """Biases on query, key and value; tied."""
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 2,
        "tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 512, **SIZES,
    }  # fmt: skip
    shapes = outside(head=False)
    for n in range(2):
        shapes |= layer(f"model.layers.{n}", bias="qkv")
    return Checkpoint(config, shapes, dtype="F32")


def qwen3() -> Checkpoint:
    """Norms on queries and keys; heads wider than hidden_size over their number."""
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 3,
        "head_dim": 32, "attention_bias": False, "rope_scaling": None, "sliding_window": None,
        "tie_word_embeddings": False, **SIZES,
    }  # fmt: skip
    shapes = outside(head=True)
    for n in range(3):
        shapes |= layer(f"model.layers.{n}", qk_norms=True, head=32)
    return Checkpoint(config, shapes, dtype="BF16", shards=2)


def gemma3_text() -> Checkpoint:
    """Sliding windows of 32 in two layers of three; four norms a layer, all around zero; tied
    without saying so."""
    config = {
        **SIZES, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
        "num_hidden_layers": 3, "head_dim": 32, "num_key_value_heads": 1, "sliding_window": 32,
        "sliding_window_pattern": 3, "query_pre_attn_scalar": 32, "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0, "rope_scaling": None, "attn_logit_softcapping": None,
        "hidden_activation": "gelu_pytorch_tanh",
    }  # fmt: skip
    shapes = outside(head=False)
    for n in range(3):
        prefix = f"model.layers.{n}"
        shapes |= attention(f"{prefix}.self_attn", HEADS, 1, 32)
        shapes |= norms(f"{prefix}.self_attn", "q_norm", "k_norm", size=32)
        shapes |= feed_forward(f"{prefix}.mlp", WIDTH)
        shapes |= norms(prefix, "input_layernorm", "post_attention_layernorm")
        shapes |= norms(prefix, "pre_feedforward_layernorm", "post_feedforward_layernorm")
    return Checkpoint(config, shapes, dtype="BF16", shards=2, norms_around_zero=True)


def phi3() -> Checkpoint:
    """One matrix for query, key and value, one for gate and up; longrope."""
    factors = [1.0 + 0.1 * n for n in range(HEAD // 2)]
    scaling = {"type": "longrope", "short_factor": factors, "long_factor": factors[::-1]}
    config = {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "num_hidden_layers": 2,
        "original_max_position_embeddings": 64, "rope_scaling": scaling,
        "attention_bias": False, "sliding_window": 512, "tie_word_embeddings": False, **SIZES,
    }  # fmt: skip
    shapes = outside(head=True)
    for n in range(2):
        prefix = f"model.layers.{n}"
        rows = (HEADS + 2 * KV_HEADS) * HEAD
        shapes |= matrices(
            f"{prefix}.self_attn", qkv_proj=(rows, HIDDEN), o_proj=(HIDDEN, HEADS * HEAD)
        )
        shapes |= matrices(
            f"{prefix}.mlp", gate_up_proj=(2 * WIDTH, HIDDEN), down_proj=(HIDDEN, WIDTH)
        )
        shapes |= norms(prefix, "input_layernorm", "post_attention_layernorm")
    return Checkpoint(config, shapes, dtype="BF16")
