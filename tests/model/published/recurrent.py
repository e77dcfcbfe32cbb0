"""Recurrent and hybrid architectures: qwen3_next, qwen3_5, qwen3_5_moe, mamba2, falcon_h1."""

from __future__ import annotations

import math

from .dense import SIZES, WIDTH
from .experts import EXPERT_WIDTH, EXPERTS, sparse_and_shared
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

HEADS, KV_HEADS, HEAD = 2, 1, 32
# Of the gated delta rule: heads of keys and of values, width of each, positions of the convolution.
KEY_HEADS, VALUE_HEADS, DELTA_HEAD, KERNEL = 2, 4, 16, 4
KEYS, VALUES = KEY_HEADS * DELTA_HEAD, VALUE_HEADS * DELTA_HEAD
DELTA_SIZES = {
    "linear_num_key_heads": KEY_HEADS, "linear_num_value_heads": VALUE_HEADS,
    "linear_key_head_dim": DELTA_HEAD, "linear_value_head_dim": DELTA_HEAD,
    "linear_conv_kernel_dim": KERNEL, "full_attention_interval": 2, "num_hidden_layers": 3,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "partial_rotary_factor": 0.25, "attention_bias": False,
}  # fmt: skip
MOE_SIZES = {
    "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": EXPERT_WIDTH,
    "shared_expert_intermediate_size": EXPERT_WIDTH, "norm_topk_prob": True,
}  # fmt: skip


def full_attention(prefix: str) -> Shapes:
    """A layer of the Qwen3-Next family with gated attention, without its feed-forward part."""
    shapes = attention(f"{prefix}.self_attn", HEADS, KV_HEADS, HEAD, gate=2)
    shapes |= norms(f"{prefix}.self_attn", "q_norm", "k_norm", size=HEAD)
    return shapes | norms(prefix, "input_layernorm", "post_attention_layernorm")


def delta_layer(prefix: str, **projections: tuple[int, int]) -> Shapes:
    """A layer of the same family with the gated delta rule, without its feed-forward part.
    projections: how this architecture splits the input matrices. The convolution is torch's:
    (channels, 1, positions)."""
    inner = f"{prefix}.linear_attn"
    shapes = matrices(inner, **projections, out_proj=(HIDDEN, VALUES))
    shapes[f"{inner}.conv1d.weight"] = (2 * KEYS + VALUES, 1, KERNEL)
    shapes[f"{inner}.A_log"] = shapes[f"{inner}.dt_bias"] = (VALUE_HEADS,)
    shapes |= norms(inner, "norm", size=DELTA_HEAD)
    return shapes | norms(prefix, "input_layernorm", "post_attention_layernorm")


def next_token_head(feed: Shapes) -> Shapes:
    """The further head (multi-token prediction) that the family publishes and nothing here runs."""
    shapes = matrices("mtp", fc=(HIDDEN, 2 * HIDDEN))
    shapes |= norms("mtp", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    return shapes | full_attention("mtp.layers.0") | feed


def qwen3_next() -> Checkpoint:
    """Two linear layers and one of attention, each with experts; `mtp.*` beside them."""
    config = {
        **SIZES, **DELTA_SIZES, **MOE_SIZES, "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next", "decoder_sparse_step": 1, "mlp_only_layers": [],
        "rope_scaling": None, "tie_word_embeddings": False,
    }  # fmt: skip
    shapes = outside(head=True)
    for n in range(3):
        prefix = f"model.layers.{n}"
        if n % 2:
            shapes |= full_attention(prefix)
        else:
            qkvz, ba = 2 * KEYS + 2 * VALUES, 2 * VALUE_HEADS
            shapes |= delta_layer(prefix, in_proj_qkvz=(qkvz, HIDDEN), in_proj_ba=(ba, HIDDEN))
        shapes |= sparse_and_shared(f"{prefix}.mlp")
    shapes |= next_token_head(sparse_and_shared("mtp.layers.0.mlp"))
    return Checkpoint(config, shapes, dtype="BF16", shards=3, norms_around_zero=True)


# ------------------------------------------------------------------------- with a vision tower


def vision_tower() -> Shapes:
    """`model.visual.*`: what of it matters here is that it is there, and large."""
    shapes = {
        "model.visual.patch_embed.proj.weight": (HIDDEN, 3, 2, 4, 4),
        "model.visual.patch_embed.proj.bias": (HIDDEN,),
        "model.visual.pos_embed.weight": (16, HIDDEN),
    }
    for prefix in ("model.visual.blocks.0", "model.visual.merger"):
        shapes |= norms(prefix, "norm", "norm1")
        shapes |= matrices(prefix, linear_fc1=(WIDTH, HIDDEN), linear_fc2=(HIDDEN, WIDTH))
    return shapes


def multimodal(model_type: str, architecture: str, text: dict) -> dict:
    """config.json of a model that sees: the text model's settings are nested."""
    rope = {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
        "mrope_interleaved": True, "mrope_section": [2, 1, 1],
    }  # fmt: skip
    settings = {**SIZES, **DELTA_SIZES, **text}
    del settings["rope_theta"], settings["partial_rotary_factor"]
    return {
        "architectures": [architecture], "model_type": model_type, "image_token_id": 4000,
        "tie_word_embeddings": settings["tie_word_embeddings"],
        "text_config": {
            **settings, "model_type": f"{model_type}_text", "rope_parameters": rope,
            "mtp_num_hidden_layers": 1,
        },
        "vision_config": {"model_type": model_type, "depth": 1, "hidden_size": HIDDEN},
    }  # fmt: skip


def seeing_layers() -> Shapes:
    """The three layers of a qwen3_5, without their feed-forward parts."""
    shapes: Shapes = {}
    for n in range(3):
        prefix = f"model.language_model.layers.{n}"
        if n % 2:
            shapes |= full_attention(prefix)
            continue
        shapes |= delta_layer(
            prefix, in_proj_qkv=(2 * KEYS + VALUES, HIDDEN), in_proj_z=(VALUES, HIDDEN),
            in_proj_a=(VALUE_HEADS, HIDDEN), in_proj_b=(VALUE_HEADS, HIDDEN),
        )  # fmt: skip
    return shapes


def qwen3_5() -> Checkpoint:
    """The dense one, tied, with its vision tower."""
    text = {"tie_word_embeddings": True}
    config = multimodal("qwen3_5", "Qwen3_5ForConditionalGeneration", text)
    shapes = outside("model.language_model", head=False) | seeing_layers()
    for n in range(3):
        shapes |= feed_forward(f"model.language_model.layers.{n}.mlp", WIDTH)
    shapes |= vision_tower() | next_token_head(feed_forward("mtp.layers.0.mlp", WIDTH))
    return Checkpoint(config, shapes, dtype="BF16", shards=2, norms_around_zero=True)


def stacked_experts(prefix: str) -> Shapes:
    """All experts of a layer in two tensors, gate above up."""
    shapes = {
        f"{prefix}.experts.gate_up_proj": (EXPERTS, 2 * EXPERT_WIDTH, HIDDEN),
        f"{prefix}.experts.down_proj": (EXPERTS, HIDDEN, EXPERT_WIDTH),
    }
    shapes |= matrices(prefix, gate=(EXPERTS, HIDDEN), shared_expert_gate=(1, HIDDEN))
    return shapes | feed_forward(f"{prefix}.shared_expert", EXPERT_WIDTH)


def qwen3_5_moe() -> Checkpoint:
    """The sibling with experts, stacked in the files, and its vision tower."""
    text = {**MOE_SIZES, "tie_word_embeddings": False}
    config = multimodal("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", text)
    shapes = outside("model.language_model", head=True) | seeing_layers()
    for n in range(3):
        shapes |= stacked_experts(f"model.language_model.layers.{n}.mlp")
    shapes |= vision_tower() | next_token_head(stacked_experts("mtp.layers.0.mlp"))
    return Checkpoint(config, shapes, dtype="BF16", shards=2, norms_around_zero=True)


# ------------------------------------------------------------------------------- state space models


def mixer(prefix: str, width: int, heads: int, groups: int, state: int) -> Shapes:
    """A Mamba 2 block. width: of the inner sequence. state: numbers a channel keeps."""
    channels = width + 2 * groups * state
    shapes = matrices(prefix, in_proj=(width + channels + heads, HIDDEN), out_proj=(HIDDEN, width))
    shapes[f"{prefix}.conv1d.weight"] = (channels, 1, KERNEL)
    shapes[f"{prefix}.conv1d.bias"] = (channels,)
    return shapes | {f"{prefix}.{name}": (heads,) for name in ("A_log", "D", "dt_bias")}


def mamba2() -> Checkpoint:
    """No attention at all, no context, and a limit that is infinite."""
    heads, head, groups, state, layers = 8, 16, 2, 16, 2
    config = {
        "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "vocab_size": VOCAB,
        "hidden_size": HIDDEN, "intermediate_size": heads * head, "num_hidden_layers": layers,
        "num_heads": heads, "head_dim": head, "n_groups": groups, "state_size": state,
        "conv_kernel": KERNEL, "expand": 2, "chunk_size": 16, "layer_norm_epsilon": 1e-5,
        "use_bias": False, "use_conv_bias": True, "rms_norm": True, "time_step_rank": "auto",
        "time_step_limit": [0.0, math.inf], "tie_word_embeddings": False,
    }  # fmt: skip
    shapes = norms("backbone", "norm_f")
    shapes["backbone.embeddings.weight"] = shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for n in range(layers):
        prefix = f"backbone.layers.{n}"
        shapes |= mixer(f"{prefix}.mixer", heads * head, heads, groups, state)
        shapes |= norms(prefix, "mixer.norm", size=heads * head) | norms(prefix, "norm")
    return Checkpoint(config, shapes, dtype="BF16")


def falcon_h1() -> Checkpoint:
    """Attention and a Mamba 2 block side by side in each layer; multipliers that `sanitize` folds
    into the weights."""
    heads, head, groups, state, layers = 4, 16, 1, 16, 2
    config = {
        **SIZES, "architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1",
        "num_hidden_layers": layers, "head_dim": 16, "num_attention_heads": 4,
        "num_key_value_heads": 2, "mamba_chunk_size": 16, "mamba_conv_bias": True,
        "mamba_d_conv": KERNEL, "mamba_d_head": head, "mamba_d_ssm": heads * head,
        "mamba_d_state": state, "mamba_expand": 2, "mamba_n_groups": groups,
        "mamba_n_heads": heads, "mamba_norm_before_gate": False, "mamba_proj_bias": False,
        "mamba_rms_norm": False, "mamba_use_mlp": True, "mlp_bias": False,
        "projectors_bias": False, "attention_bias": False, "rope_scaling": None,
        "attention_in_multiplier": 0.9, "attention_out_multiplier": 0.9375,
        "embedding_multiplier": 2.0, "key_multiplier": 0.7, "lm_head_multiplier": 0.5,
        "mlp_multipliers": [0.9, 0.6], "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.5,
        "ssm_multipliers": [0.7, 0.5, 0.7, 0.9, 0.8], "tie_word_embeddings": False,
    }  # fmt: skip
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN),
        "model.final_layernorm.weight": (HIDDEN,),
    }  # fmt: skip
    for n in range(layers):
        prefix = f"model.layers.{n}"
        shapes |= mixer(f"{prefix}.mamba", heads * head, heads, groups, state)
        shapes |= attention(f"{prefix}.self_attn", 4, 2, 16)
        shapes |= feed_forward(f"{prefix}.feed_forward", WIDTH)
        shapes |= norms(prefix, "input_layernorm", "pre_ff_layernorm")
    return Checkpoint(config, shapes, dtype="BF16", shards=2)
