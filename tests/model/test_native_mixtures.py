"""Mixtures of experts in one native operation: to the bit what their parts give one by one, which
they do wherever somebody stands before one of them."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_map
from mlx_lm.models import (
    afmoe,
    bailing_moe,
    bailing_moe_linear,
    deepseek,
    deepseek_v2,
    deepseek_v3,
    dots1,
    ernie4_5_moe,
    glm4_moe_lite,
    gpt_oss,
    granitemoe,
    hunyuan,
    jamba,
    kimi_linear,
    lfm2_moe,
    minimax,
    mixtral,
    nemotron_h,
    olmoe,
    phimoe,
    qwen2_moe,
    qwen3_moe,
    qwen3_next,
)

from tests.conftest import examples
from tests.model.checkpoints import open_model
from tests.model.moe_checkpoints import write_moe
from tests.model.reference import OLD_MLX_LM
from tests.model.test_expert_slots import slots
from tests.model.test_native_operations import alike, library, numbers
from tests.model.test_recurrent_layers import read
from tests.native_library import built, cache, needed, watched
from toastkit.model.locate import locate
from toastkit.native import known, replacing
from toastkit.native.library import Library
from toastkit.native.modules import mixtures

__all__ = ["built", "cache", "library"]
pytestmark = needed

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_experts": 6, "num_local_experts": 6, "moe_intermediate_size": 64,
    "intermediate_size": 64, "shared_expert_intermediate_size": 96, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 50,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "head_dim": 16, "rope_theta": 1e4,
    "tie_word_embeddings": True, "max_position_embeddings": 100, "partial_rotary_factor": 0.5,
    "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "sliding_window": 50,
    "n_routed_experts": 6, "n_shared_experts": 1, "n_group": 3, "topk_group": 2,
    "routed_scaling_factor": 2.5, "topk_method": "noaux_tc", "moe_layer_freq": 1,
    "first_k_dense_replace": 0, "embedding_multiplier": 1.0, "attention_multiplier": 1.0,
    "logits_scaling": 1.0, "residual_multiplier": 1.0, "use_expert_bias": True,
    "num_dense_layers": 0, "norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3,
    "full_attn_idxs": [0], "shared_intermediate_size": 64, "attn_type_list": [1],
    "rotary_dim": 8, "use_qk_norm": False, "attention_bias": False, "num_expert_group": 3,
    "num_shared_experts": 1, "linear_attn_config": {}, "model_max_length": 100,
    "kv_lora_rank": 16, "moe_router_enable_expert_bias": True, "score_function": "sigmoid",
    "layer_group_size": 2, "group_norm_size": 1, "attn_layer_offset": 0, "attn_layer_period": 2,
    "expert_layer_offset": 0, "expert_layer_period": 2, "mamba_d_conv": 4, "mamba_d_state": 4,
    "mamba_expand": 2, "use_bias": False, "moe_num_experts": 6, "moe_num_shared_experts": 1,
    "moe_gate_act": "sigmoid", "mamba_num_heads": 2, "mamba_head_dim": 16, "ssm_state_size": 8,
    "conv_kernel": 4, "n_groups": 1, "mamba_proj_bias": False, "mlp_bias": False,
    "layer_norm_epsilon": 1e-5, "use_conv_bias": True, "hybrid_override_pattern": ["E"],
    "moe_shared_expert_intermediate_size": 96, "layer_types": ["full_attention"],
    "num_shared_expert": 1, "use_mixed_mlp_moe": True, "use_cla": False, "cla_share_factor": 2,
    "router_jitter_noise": 0.2,
}  # fmt: skip
BLOCKS = [
    (qwen3_next, "Qwen3NextSparseMoeBlock"), (qwen3_moe, "Qwen3MoeSparseMoeBlock"),
    (olmoe, "OlmoeSparseMoeBlock"), (mixtral, "MixtralSparseMoeBlock"),
    (qwen2_moe, "Qwen2MoeSparseMoeBlock"), (deepseek_v3, "DeepseekV3MoE"),
    (glm4_moe_lite, "Glm4MoeLiteMoE"), (deepseek_v2, "DeepseekV2MoE"), (deepseek, "DeepseekMoE"),
    (granitemoe, "GraniteMoeMoE"), (kimi_linear, "KimiSparseMoE"),
    (minimax, "MiniMaxSparseMoeBlock"), (bailing_moe, "BailingMoeSparseMoeBlock"),
    (bailing_moe_linear, "SparseMoeBlock"), (dots1, "Dots1MoE"),
    (ernie4_5_moe, "Ernie4_5_MoeMLP"), (jamba, "JambaSparseMoeBlock"),
    (nemotron_h, "NemotronHMoE"), (afmoe, "AfmoeMoE"), (hunyuan, "MoeBlock"),
]  # fmt: skip
if not OLD_MLX_LM:  # whose experts have another activation, and other scores
    BLOCKS += [(gpt_oss, "MLPBlock"), (lfm2_moe, "Lfm2MoeSparseMoeBlock")]
    BLOCKS.append((phimoe, "PhiMoESparseMoeBlock"))
blocks = pytest.mark.parametrize("kind", BLOCKS, ids=[name for _, name in BLOCKS])


def made(kind: tuple, seed: int, k: int = 2, normed: bool = True, bits: int = 0) -> tuple[Any, Any]:
    """mlx_lm's and ours, with the same random weights."""
    module, name = kind
    sizes = {"num_experts_per_tok": k, "norm_topk_prob": normed, **SIZES}
    sizes |= {"num_experts_per_token": k, "moe_k": k, "moe_renormalize": normed, "moe_topk": k}
    if module is deepseek_v2:
        sizes["topk_method"] = "group_limited_greedy"
    args = module.ModelArgs.from_dict(sizes | {"model_type": module.__name__.rpartition(".")[2]})
    mx.random.seed(seed)
    theirs = getattr(module, name)(args)
    theirs.update(tree_map(lambda a: mx.random.normal(a.shape) / 4, theirs.parameters()))
    if bits:
        nn.quantize(theirs, 32, bits, class_predicate=lambda _, m: hasattr(m, "to_quantized"))
    ours = getattr(module, name)(args)
    if bits:
        nn.quantize(ours, 32, bits, class_predicate=lambda _, m: hasattr(m, "to_quantized"))
    ours.update(theirs.parameters())
    for part in ours.modules():
        part.set_dtype(mx.float32)
    replacing.use_native(ours.modules())
    assert isinstance(ours, mixtures.Mixture)
    return theirs, ours


def one_by_one(block: Any, x: mx.array) -> mx.array:
    with patch.object(mixtures.Mixture, "as_shape", lambda *_: None):
        return block(x)


@blocks
@settings(max_examples=examples(6))
@given(st.integers(0, 1 << 20), st.integers(1, 4), st.integers(1, 6), st.booleans(),
       st.sampled_from([0, 4]))  # fmt: skip
def test_one_node_is_its_parts(
    kind: tuple, seed: int, length: int, k: int, normed: bool, bits: int
) -> None:
    theirs, ours = made(kind, seed, k, normed, bits)
    x = numbers(seed, (2, length, 32), mx.float32)
    with patch.object(mixtures, "_mixed", wraps=mixtures._mixed) as mixed:
        y = ours(x)
    assert mixed.call_count == 1 and mx.array_equal(y, one_by_one(ours, x))
    assert alike(y, theirs(x), 3e-2 if bits else 1e-4)


@blocks
def test_who_stands_before_a_part_is_called(kind: tuple) -> None:
    """And sees what the router chose."""
    _, ours = made(kind, 5)
    x = numbers(1, (1, 3, 32), mx.float32)
    whole = ours(x)
    seen = watched(ours[ours._experts])
    assert mx.array_equal(ours(x), whole) and seen[-1][1].shape == (1, 3, 2)
    if ours._shared in ours:
        _, ours = made(kind, 5)
        ours(x)
        seen = watched(ours[ours._shared])
        assert mx.array_equal(ours(x), whole) and len(seen) == 1


@blocks
def test_what_changes_is_seen(kind: tuple) -> None:
    """Weights that others take the place of, and what they are; and they are not kept."""
    _, ours = made(kind, 6)
    x, experts = numbers(2, (1, 3, 32), mx.float32), ours[ours._experts]
    up, down = (experts[name] for name in experts.form().parts[-2:])
    before = ours(x)
    mx.eval(before)
    gone = weakref.ref(down.weight)
    down.weight = 2 * down.weight
    mx.eval(experts.parameters())
    assert gone() is None
    after = ours(x)
    assert mx.array_equal(after, one_by_one(ours, x)) and not mx.array_equal(after, before)
    up.bias = mx.ones((6, 64))
    assert mx.array_equal(ours(x), one_by_one(ours, x)) and not mx.array_equal(ours(x), after)
    up.bias = mx.ones((6, 64), mx.float16)
    with patch.object(mixtures, "_mixed") as mixed:
        ours(x)
        router = ours[ours._router]
        router = router.get(getattr(router, "_part", None) or ours._projection, router)
        router.weight = router.weight.astype(mx.float16)
        ours(x.astype(mx.float16))
    assert not mixed.called


@pytest.mark.parametrize(
    "kind", [(deepseek_v3, "DeepseekV3MoE"), (minimax, "MiniMaxSparseMoeBlock")]
)
def test_a_bias_chooses_and_weighs_nothing(kind: tuple) -> None:
    theirs, ours = made(kind, 9)
    x, found = numbers(3, (1, 3, 32), mx.float32), []
    for bias in (mx.zeros(6), mx.array([9.0, 0, 0, 9, 0, 0]), mx.array([9.0, 0, 0, 9, 0, 0]) / 3):
        for block in (theirs, ours):
            owner = block if ours._bias else block.gate
            owner.e_score_correction_bias = bias
        found.append(ours(x))
        assert alike(found[-1], theirs(x), 1e-4)
    assert mx.array_equal(found[1], found[2]) and not mx.array_equal(found[0], found[1])
    for block in (theirs, ours):
        owner = block if ours._bias else block.gate
        owner.e_score_correction_bias = mx.array([9.0, 0, 0, 9, 0, 0], mx.float16)
    assert alike(ours(x), found[1], 1e-5)
    owner.e_score_correction_bias = mx.zeros(5)
    with pytest.raises(ValueError):
        ours(x)


def test_how_many_experts_there_are_is_asked_each_time() -> None:
    """A model sets it from pass to pass."""
    _, ours = made(BLOCKS[0], 7, k=4)
    x = numbers(3, (1, 3, 32), mx.float32)
    found = []
    for k in (4, 2, 4):
        ours.top_k = k
        found.append(ours(x))
        assert mx.array_equal(found[-1], one_by_one(ours, x))
    assert mx.array_equal(found[0], found[2]) and not mx.array_equal(found[0], found[1])


@pytest.mark.parametrize("name", ["qwen2_moe", "mixtral", "qwen3_next", "deepseek_v3"])
def test_models_use_it(tmp_path: Path, name: str) -> None:
    """And give the bits of its parts; with slots the parts are called."""
    write_moe(tmp_path / name, name)
    path = locate(str(tmp_path / name))
    engine = open_model(path, native="require")
    with patch.object(mixtures, "_mixed", wraps=mixtures._mixed) as mixed:
        whole = read(engine)
        assert mixed.called
        with patch.object(mixtures.Mixture, "as_shape", lambda *_: None):
            assert all(map(mx.array_equal, read(engine), whole))
        some = open_model(path, native="require", expert_slots=slots(6))
        mixed.reset_mock()
        assert all(map(mx.array_equal, read(some), whole)) and not mixed.called


def test_layers_that_are_known() -> None:
    """Those of the mlx_lm that is installed; and no other version's."""
    for module, name in BLOCKS:
        cls = getattr(module, name)
        mixin = known.layer_of(cls)
        assert mixin is not None and issubclass(replacing.native(cls), mixin)
        other = type(name, (cls,), {"__module__": cls.__module__, "__call__": read})
        assert known.layer_of(other) is None


def test_what_does_not_fit_together(library: Library) -> None:
    _, ours = made(BLOCKS[0], 8)
    mixture, x = ours.as_shape(), numbers(4, (1, 3, 32), mx.float32)
    for y, mixture.choice.chosen in ((x, 0), (x, 7), (x[..., :31], 2), (x.astype(mx.float16), 2)):
        with pytest.raises(ValueError):
            mixtures._mixed(library, y, mixture)
    for mixture.choice.groups, mixture.choice.kept in ((4, 2), (3, 4), (3, -1)):
        with pytest.raises(ValueError):
            mixtures._mixed(library, x, mixture)
    mixture.choice.groups = 0
    mixture.shared = 1
    with pytest.raises(ValueError):
        mixtures._mixed(library, x, mixture)
    ours.switch_mlp.up_proj.weight = mx.zeros((5, 64, 32))
    with pytest.raises(ValueError):
        ours(x)
