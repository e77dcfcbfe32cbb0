"""Whole models of recurrences that mlx_lm steps through in Python: Mamba, Jamba, RWKV-7, Griffin,
Ling's linear attention; and of short convolutions, LFM 2's."""

from __future__ import annotations

import gc
import json
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map_with_path

from tests.model.checkpoints import open_model, write_random
from tests.model.published import write_published
from tests.model.reference import OLD_MLX_LM, held_by
from tests.model.test_native_operations import alike, library
from tests.native_library import built, cache, needed, operations_of, watched
from toastkit.engine.state import ModelState
from toastkit.errors import DataError
from toastkit.holdings.streams import arrays_in
from toastkit.native import replacing
from toastkit.native.layers import decoder, linear_attention, mixer, time_mixing
from toastkit.native.modules import recurrent

__all__ = ["built", "cache", "library"]
pytestmark = needed

SIZES: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "max_position_embeddings": 100, "tie_word_embeddings": False,
}  # fmt: skip
MAMBA = {
    "state_size": 5, "conv_kernel": 4, "use_bias": True, "use_conv_bias": True, "time_step_rank": 3,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "mamba": MAMBA, "falcon_mamba": {**MAMBA, "state_size": 16, "use_bias": False},
    "jamba": {
        "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "mamba_expand": 2,
        "expert_layer_period": 2, "mamba_d_conv": 4, "mamba_d_state": 16, "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "rwkv7": {
        "norm_eps": 1e-5, "head_dim": 16, "a_low_rank_dim": 8, "v_low_rank_dim": 4,
        "gate_low_rank_dim": 8, "decay_low_rank_dim": 8,
    },
    "recurrent_gemma": {
        "attention_bias": False, "conv1d_width": 4, "logits_soft_cap": 30.0,
        "attention_window_size": 30, "block_types": ["recurrent", "attention"],
    },
    "bailing_moe_linear": {
        "moe_intermediate_size": 16, "num_experts": 6, "num_experts_per_tok": 2, "n_group": 3,
        "num_shared_experts": 1, "norm_topk_prob": True, "first_k_dense_replace": 1,
        "layer_group_size": 2, "group_norm_size": 2, "topk_group": 2, "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True, "use_qk_norm": True, "num_key_value_heads": 2,
    },
    "lfm2": {
        "norm_eps": 1e-5, "conv_bias": True, "conv_L_cache": 3, "block_dim": 32, "block_ff_dim": 64,
        "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True,
        "full_attn_idxs": [1],
    },
    "lfm2_moe": {
        "norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3, "full_attn_idxs": [2],
        "moe_intermediate_size": 16, "num_experts": 6, "num_experts_per_tok": 2,
        "num_dense_layers": 1, "norm_topk_prob": True, "use_expert_bias": True,
        "num_hidden_layers": 3,
    },
    "mamba2": {
        "num_heads": 4, "head_dim": 16, "state_size": 8, "conv_kernel": 4, "n_groups": 2,
        "use_bias": False, "use_conv_bias": True, "layer_norm_epsilon": 1e-5, "expand": 2,
        "time_step_limit": [0.01, 0.5], "time_step_rank": 4,
    },
    "nemotron_h": {
        "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "conv_kernel": 4,
        "n_groups": 2, "mamba_proj_bias": False, "use_bias": False, "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5, "mlp_bias": False, "attention_bias": False, "head_dim": 16,
        "hybrid_override_pattern": ["M", "*", "-", "M"], "num_hidden_layers": 4,
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention", "attention"], "num_hidden_layers": 3,
        "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_d_conv": 3,
        "mamba_n_groups": 1, "mamba_proj_bias": True, "mamba_conv_bias": False,
        "embedding_multiplier": 2.0, "attention_multiplier": 0.25, "logits_scaling": 2.0,
        "residual_multiplier": 0.5, "attention_bias": False, "position_embedding_type": "nope",
    },
    "falcon_h1": {
        "head_dim": 16, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
        "mamba_d_conv": 4, "mamba_n_groups": 2, "mamba_d_ssm": 64, "mamba_expand": 2,
        "mamba_chunk_size": 16, "mamba_conv_bias": True, "mamba_proj_bias": False,
        "mamba_rms_norm": False, "mamba_norm_before_gate": True, "mamba_use_mlp": True,
        "attention_bias": False, "mlp_bias": False, "projectors_bias": False,
        "ssm_multipliers": [1.0] * 5, "mlp_multipliers": [1.0, 1.0], "ssm_in_multiplier": 1.0,
        "ssm_out_multiplier": 1.0, "attention_in_multiplier": 1.0, "key_multiplier": 1.0,
        "attention_out_multiplier": 1.0, "lm_head_multiplier": 1.0, "embedding_multiplier": 1.0,
        "attn_layer_indices": None,
    },
}  # fmt: skip
MIXERS = ("mamba2", "nemotron_h", "granitemoehybrid", "falcon_h1")
OURS = {
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba"), "ToastSelective"),
    "rwkv7": "ToastTimeMixing", "recurrent_gemma": "ToastLinear",
    "bailing_moe_linear": "ToastLinearAttention",
    "lfm2": "ToastShortConv", "lfm2_moe": "ToastShortConv",
    **dict.fromkeys(MIXERS, "ToastMixer"),
    **dict.fromkeys(("mamba2", "nemotron_h", "granitemoehybrid"), "ToastMixerLayer"),
}  # fmt: skip
LEFT = {"falcon_mamba"} if OLD_MLX_LM else set()  # which normalises twice there
# MLX has experts on the CPU in float32 alone.
DENSE = {
    "jamba": {"num_experts": 1}, "bailing_moe_linear": {"first_k_dense_replace": 2},
    "lfm2_moe": {"num_dense_layers": 3},
}  # fmt: skip
models = pytest.mark.parametrize("name", MODELS)


def made(name: str, dtype: mx.Dtype, **more: Any) -> tuple[Any, Any]:
    """mlx_lm's and ours, with the same random weights."""
    module = import_module(f"mlx_lm.models.{name.replace('falcon_mamba', 'mamba')}")
    args = module.ModelArgs.from_dict({**SIZES, "model_type": name, **MODELS[name], **more})
    mx.random.seed(7)
    theirs, ours = module.Model(args), module.Model(args)

    def random(path: str, old: mx.array) -> mx.array:
        some = mx.random.normal(old.shape) / (2 if old.ndim > 1 else 4)
        return (some + 1 if "norm" in path and "weight" in path else some).astype(dtype)

    theirs.update(tree_map_with_path(random, theirs.parameters()))
    ours.update(theirs.parameters())
    replacing.use_native(ours.modules())
    return theirs, ours


def quantise(model: Any, bits: int) -> None:
    """What of a native model can be packed in groups of 32."""

    def fits(_: str, module: Any) -> bool:
        return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0

    nn.quantize(model, 32, bits, class_predicate=fits)
    replacing.use_native(model.modules())


def read(model: Any, parts: list[int]) -> tuple[mx.array, list[mx.array]]:
    """Logits of prompts of 23 tokens, read in such parts, and what the caches hold then."""
    ids = mx.array([[(37 * n + 5 * row) % 50 for n in range(23)] for row in range(2)])
    layers, found = model.make_cache(), []
    for first, end in zip([0, *parts], [*parts, 23]):
        found.append(model(ids[:, first:end], cache=layers))
        mx.eval(found)
    caches = [one for layer in layers for one in getattr(layer, "caches", [layer])]
    kept = [array for one in caches for array in held_by(one) if isinstance(array, mx.array)]
    return mx.concatenate(found, 1), kept


@models
def test_they_give_what_mlx_lm_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any parts of a prompt; and states are those of the whole, to the bit where all operations
    are ours. Without the library it is mlx_lm that computes."""
    theirs, ours = made(name, mx.float32)
    with_graph = ours(mx.zeros((1, 3), mx.uint32), cache=ours.make_cache())
    assert (OURS[name] in operations_of(with_graph)) is (name not in LEFT)
    states = []
    for parts in ([], [1, 2, 20], [19]):
        (logits, kept), (wanted, theirs_kept) = read(ours, parts), read(theirs, parts)
        assert alike(logits, wanted, 1e-3)
        assert all(alike(a, b, 1e-3) for a, b in zip(kept, theirs_kept, strict=True))
        states.append(kept)
    if name not in LEFT:
        exact = name in ("mamba", "falcon_mamba", "rwkv7")
        pairs = zip(*states[:2], strict=True)
        assert all(mx.array_equal(a, b) if exact else alike(a, b, 1e-4) for a, b in pairs)
    monkeypatch.setattr("toastkit.native.library._in_use", None)
    assert alike(read(ours, [19])[0], wanted, 1e-5)


# The layer's class, its part that is no attention, and the norm before that.
ONE_NODE: dict[str, tuple[type, str, str]] = {
    **dict.fromkeys(("lfm2", "lfm2_moe"), (decoder.ConvolutionLayer, "conv", "operator_norm")),
    **dict.fromkeys(("mamba", "falcon_mamba"), (mixer.MambaLayer, "mixer", "norm")),
    "jamba": (mixer.SelectiveLayer, "mamba", "input_layernorm"),
    "rwkv7": (time_mixing.TimeMixingLayer, "attn", "attn_norm"),
    "bailing_moe_linear": (
        linear_attention.LinearAttentionLayer, "attention", "input_layernorm",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(ONE_NODE.keys() - LEFT))
@pytest.mark.parametrize("bits", [0, 4])
def test_layers_in_one_node(name: str, bits: int) -> None:
    """To the bit what their parts give, in any parts of a prompt, and with somebody before one; of
    RWKV-7, whose parts MLX adds up, up to rounding."""
    kind, part, norm = ONE_NODE[name]
    _, ours = made(name, mx.float32)
    if bits:
        quantise(ours, bits)
    parts = [1, 2, 3, 5, 20]
    (logits, kept), (whole, _) = read(ours, parts), read(ours, [])
    with patch.object(kind, "natively", lambda *_: None):
        theirs, theirs_kept = read(ours, parts)
    pairs = [(logits, theirs), *zip(kept, theirs_kept, strict=True)]
    near = (lambda a, b: alike(a, b, 1e-4)) if name == "rwkv7" else mx.array_equal
    assert all(near(a, b) for a, b in pairs) and alike(logits, whole, 1e-4)
    layers = ours.make_cache()
    mx.eval(ours(mx.array([[3, 4, 5]]), cache=layers))
    found = operations_of(ours(mx.array([[6]]), cache=layers))
    assert not {"ToastMixture", "ToastScan", "ToastAttention"} & {*found}
    seen = watched(ours.layers[0][part])
    assert near(read(ours, parts)[0], logits) and len(seen) == len(parts) + 1
    ours.layers[0][norm].weight = ours.layers[0][norm].weight * 2
    assert not mx.array_equal(read(ours, parts)[0], logits)


@models
def test_sixteen_bits(name: str) -> None:
    """States stay in the dtype that mlx_lm has them in."""
    theirs, ours = made(name, mx.bfloat16, **DENSE.get(name, {}))
    (logits, kept), (wanted, theirs_kept) = read(ours, [22]), read(theirs, [22])
    assert [a.dtype for a in kept] == [a.dtype for a in theirs_kept]
    assert logits.dtype == wanted.dtype
    near = mx.abs(logits.astype(mx.float32) - wanted.astype(mx.float32)).mean()
    assert (near < 0.15 * mx.abs(wanted.astype(mx.float32)).mean()).item()


def test_other_decays_are_left_to_mlx_lm() -> None:
    """Of each head alone, or of each number."""
    q = mx.ones((1, 2, 3, 4))
    theirs = import_module("mlx_lm.models.bailing_moe_linear").recurrent_gla
    for g in (-mx.ones((2,)), -mx.ones((1,))):
        for ours, wanted in zip(recurrent.recurrent_gla(q, q, q, g, 0.5), theirs(q, q, q, g, 0.5)):
            assert alike(ours, wanted)


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "falcon_mamba"])
def test_states_hold_no_other_positions(name: str, native: str, tmp_path: Path) -> None:
    """Of a pass, from which mlx_lm slices them: a view would keep it all in memory."""
    config = {**SIZES, "model_type": name, **MODELS[name], "max_position_embeddings": 1000}
    engine = open_model(write_random(tmp_path / name, config), native=native)
    engine.load()
    gc.collect()  # engines of other tests
    before, state = mx.get_active_memory(), ModelState(engine.new_cache())
    next(engine.reading(state, [7] * 900, lambda: 900))
    state.logits = None
    spared = 1 << 14  # bytes that mx.contiguous does not copy an array for
    held, arrays = mx.get_active_memory() - before, arrays_in(state.cache)
    assert 0 < held < sum(array.nbytes for array in arrays) + spared * len(arrays)


@pytest.mark.parametrize("limits", [[0.0], [], [0.0, 1.0, 2.0]])
def test_limits_that_are_no_pair_are_for_mlx_to_judge(tmp_path: Path, limits: list[float]) -> None:
    """Natively they would be arguments of a function in C."""
    path = write_published(tmp_path / "m", "mamba2")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "time_step_limit": limits}))
    said = []
    for native in ("off", "require"):
        try:
            engine = open_model(path, native=native)
            said.append(engine.prefill([5, 6, 7], engine.new_cache()) is None)
        except DataError as error:
            said.append(error.message)
    assert said[0] == said[1] and (len(limits) > 1 or "list index out of range" in said[0])
