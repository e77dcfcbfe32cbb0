"""Which matrices change gear: by the names of twelve published layouts, in real architectures."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import pytest

from tests.model.checkpoints import SIZES, model_of, open_store
from tests.model.published import NAMES, write_published
from toastkit.gears.discovery import container, discover, layer_of
from toastkit.store.quantising import leaf_modules

LAYERS = 11  # so that an order by words, 10 before 9, would show

QKVO = "q_proj k_proj v_proj o_proj"
GATED = "mlp.gate_proj mlp.up_proj mlp.down_proj"
NORMS = "input_layernorm! post_attention_layernorm!"
LLAMA_OUTSIDE = "model.embed_tokens? model.norm! lm_head"
BLOOM_LAYER = "mlp.dense_h_to_4h mlp.dense_4h_to_h input_layernorm! post_attention_layernorm!"


class Layout(NamedTuple):
    """Names as a published checkpoint has them; `?` marks an embedding, `!` a norm, the others are
    matrices. blocks: (layer, attention in it, names in that, names beside it)."""

    outside: str
    blocks: list[tuple[str, str, str, str]]


LAYOUTS = {
    "Llama": Layout(  # Mistral and StableLM, too
        LLAMA_OUTSIDE, [("model.layers.{}", "self_attn", QKVO, f"{GATED} {NORMS}")]
    ),
    "Phi": Layout(
        "model.embed_tokens? model.final_layernorm! lm_head",
        [("model.layers.{}", "self_attn", "q_proj k_proj v_proj dense",
          "mlp.fc1 mlp.fc2 input_layernorm!")],
    ),
    "Qwen": Layout(
        LLAMA_OUTSIDE,
        [("model.layers.{}", "self_attn", f"{QKVO} q_norm! k_norm!", f"{GATED} {NORMS}")],
    ),
    "Gemma": Layout(
        "model.embed_tokens? model.norm!",
        [("model.layers.{}", "self_attn", f"{QKVO} q_norm! k_norm!",
          f"{GATED} {NORMS} pre_feedforward_layernorm! post_feedforward_layernorm!")],
    ),
    "OPT": Layout(
        "model.decoder.embed_tokens? model.decoder.embed_positions? lm_head "
        "model.decoder.final_layer_norm!",
        [("model.decoder.layers.{}", "self_attn", "k_proj v_proj q_proj out_proj",
          "self_attn_layer_norm! fc1 fc2 final_layer_norm!")],
    ),
    "GPT-NeoX": Layout(
        "gpt_neox.embed_in? gpt_neox.final_layer_norm! embed_out",
        [("gpt_neox.layers.{}", "attention", "query_key_value dense", BLOOM_LAYER)],
    ),
    "Bloom": Layout(
        "transformer.word_embeddings? transformer.word_embeddings_layernorm! transformer.ln_f! "
        "lm_head",
        [("transformer.h.{}", "self_attention", "query_key_value dense", BLOOM_LAYER)],
    ),
    "Falcon": Layout(
        "transformer.word_embeddings? transformer.ln_f! lm_head",
        [("transformer.h.{}", "self_attention", "query_key_value dense",
          "mlp.dense_h_to_4h mlp.dense_4h_to_h ln_attn! ln_mlp!")],
    ),
    "MPT": Layout(
        "transformer.wte? transformer.norm_f!",
        [("transformer.blocks.{}", "attn", "Wqkv out_proj",
          "norm_1! norm_2! ffn.up_proj ffn.down_proj")],
    ),
    "T5": Layout(
        "shared? encoder.final_layer_norm! decoder.final_layer_norm! lm_head",
        [("encoder.block.{}.layer.0", "SelfAttention", "q k v o relative_attention_bias?",
          "layer_norm!"),
         ("encoder.block.{}.layer.1", "", "", "DenseReluDense.wi DenseReluDense.wo layer_norm!"),
         ("decoder.block.{}.layer.0", "SelfAttention", "q k v o relative_attention_bias?",
          "layer_norm!"),
         ("decoder.block.{}.layer.1", "EncDecAttention", "q k v o", "layer_norm!"),
         ("decoder.block.{}.layer.2", "", "", "DenseReluDense.wi DenseReluDense.wo layer_norm!")],
    ),
}  # fmt: skip


def prefixes(managed: list) -> list[str]:
    """The containers of attention that matrices are in, each once."""
    found = (container(one.path) for one in managed)
    return list(dict.fromkeys(path for path in found if path is not None))


def module_tree(names: list[str]) -> nn.Module:
    """Modules under dotted names; numbers make lists."""
    tree: dict[str, Any] = {}
    for name in names:
        *parents, last = name.split(".")
        node = tree
        for word in parents:
            node = node.setdefault(word, {})
        node[last] = name
    return built(tree)


def built(node: dict[str, Any]) -> Any:
    if all(word.isdecimal() for word in node):
        return [built(node[word]) for word in sorted(node, key=int)]
    module = nn.Module()
    for word, value in node.items():
        if isinstance(value, dict):
            module[word] = built(value)
        elif value.endswith("?"):
            module[word.rstrip("?")] = nn.Embedding(4, 2)
        elif value.endswith("!"):
            module[word.rstrip("!")] = nn.LayerNorm(2)
        else:
            module[word] = nn.Linear(2, 2)
    return module


def names_in(layer: int, block: tuple[str, str, str, str]) -> tuple[list[str], list[str]]:
    """Full names in a block's attention, and beside it."""
    where, attention, inside, beside = block
    prefix = where.format(layer)
    within = [f"{prefix}.{attention}.{name}" for name in inside.split()]
    return within, [f"{prefix}.{name}" for name in beside.split()]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_published_layout(name: str) -> None:
    layout = LAYOUTS[name]
    everything, attention, matrices, containers = layout.outside.split(), [], [], []
    for layer in range(LAYERS):
        for block in layout.blocks:
            within, beside = names_in(layer, block)
            everything += within + beside
            attention += [path for path in within if path[-1] not in "?!"]
            matrices += [path for path in within + beside if path[-1] not in "?!"]
            containers += [f"{block[0].format(layer)}.{block[1]}"] if within else []
    model = module_tree(everything)
    found = discover(model, "attention")
    assert [one.path for one in found] == attention
    assert [one.layer for one in found] == [layer_of(path) for path in attention]
    assert sorted({one.layer for one in found}) == list(range(LAYERS))
    assert prefixes(found) == containers
    for one in found:
        assert type(one.module) is nn.Linear
        assert one.module is dict(model.named_modules())[one.path]
    assert [one.path for one in discover(model, "all")] == matrices
    assert prefixes(discover(model, "all")) == containers


IN_ATTENTION = (
    "model.layers.0.self_attn.q_proj", "model.layers.0.linear_attn.in_proj_qkvz",
    "model.layers.0.self_attn.indexer.wq_b", "transformer.h.3.SelfAttention.q",
    "layers.0.Self_Attention.q", "blocks.0.norm_attn_norm.attn.Wqkv",
)  # fmt: skip
ELSEWHERE = (
    "model.layers.0.self_attn", "attention", "model.layers.0.mlp.attn",
    "model.layers.0.attn_norm.weight", "model.layers.0.post_attention_layernorm.weight",
    "model.layers.0.mlp.gate_proj", "attentive.layers.0.w", "",
)  # fmt: skip


def test_names_of_attention() -> None:
    assert all(container(path) is not None for path in IN_ATTENTION)
    assert [path for path in ELSEWHERE if container(path) is not None] == []


def test_layers_are_the_first_numbers() -> None:
    assert layer_of("model.layers.7.mlp.experts.3.w1") == 7
    assert layer_of("lm_head") is None


def test_attention_outside_of_layers_comes_first() -> None:
    model = module_tree(["model.layers.0.attn.q", "shared.attn.q", "lm_head"])
    found = discover(model, "attention")
    paths = ["shared.attn.q", "model.layers.0.attn.q"]
    assert [(one.path, one.layer) for one in found] == list(zip(paths, [None, 0]))
    assert [one.path for one in discover(model, "all")] == paths[1:]


def test_what_is_quantised_already_is_left_alone() -> None:
    model = module_tree(["layers.0.attn.q", "layers.0.attn.k", "layers.1.attn.q"])
    for one in discover(model, "all"):
        one.module.weight = mx.zeros((2, 64))
    nn.quantize(model, class_predicate=lambda path, module: path.startswith("layers.0"))
    assert [one.path for one in discover(model, "attention")] == ["layers.1.attn.q"]
    nn.quantize(model, class_predicate=lambda path, module: path == "layers.1.attn.q")
    assert discover(model, "all") == []


def test_a_shared_block_is_named_once_and_a_shared_matrix_wherever_it_hangs() -> None:
    model = module_tree(["layers.0.attn.q", "layers.1.norm!", "layers.2.attn.k"])
    model.layers[1].attn = model.layers[0].attn
    model.layers[2].attn.q = model.layers[0].attn.q
    found = discover(model, "attention")
    assert [one.path for one in found] == [
        "layers.0.attn.q", "layers.2.attn.k", "layers.2.attn.q",
    ]  # fmt: skip
    assert found[0].module is found[2].module


def test_what_modules_hide_is_no_part_of_the_model() -> None:
    model = module_tree(["layers.0.attn.q"])
    model.layers[0].attn["_original"] = nn.Linear(2, 2)
    assert [one.path for one in discover(model, "all")] == ["layers.0.attn.q"]


# ---------------------------------------------------------------------------- real architectures


@pytest.mark.parametrize("name", NAMES)
def test_an_architecture(name: str, tmp_path) -> None:
    store = open_store(write_published(tmp_path / name, name))
    attention, everything = discover(store.model, "attention"), discover(store.model, "all")
    if name == "qwen3_moe_quantised":
        assert (attention, [one.path for one in everything]) == ([], ["model.layers.2.mlp.gate"])
        return
    layers = {one.layer for one in attention}
    assert layers == (set() if name == "mamba2" else set(range(store.layer_count)))
    paths = [one.path for one in everything]
    assert [one.path for one in attention] == [path for path in paths if container(path)]
    assert set(paths) == {
        path
        for path, module in leaf_modules(store.model)
        if hasattr(module, "to_quantized") and store.layer_of(f"{path}.") is not None
    }
    for one in everything:
        assert one.layer == store.layer_of(f"{one.path}.")
        assert f"{one.path}.weight" in store.names
    kinds = {type(one.module).__name__ for one in everything}
    stacked = "SwitchLinear" in kinds
    assert stacked == (name != "gpt_oss" and any(w in name for w in ("moe", "mixtral", "next")))


def test_the_embedded_model() -> None:
    model = open_store("crumb").model
    attention = discover(model, "attention")
    kinds = [prefix.rpartition(".")[2] for prefix in prefixes(attention)]
    assert kinds == ["linear_attn", "linear_attn", "linear_attn", "self_attn"] * 2
    assert len(attention) == 6 * 3 + 2 * 4
    assert sum(one.module.weight.size for one in attention) == 1_582_080
    everything = discover(model, "all")
    assert len(everything) == 26 + 8 * (1 + 3 + 3 + 1)  # router, experts, shared expert, its gate
    assert sum(one.module.weight.size for one in everything) == 6_916_608


def test_what_an_architecture_reads_itself_stays() -> None:
    """Gemma 3n clips two matrices of its layers at each pass, as numbers."""
    sizes = {
        **SIZES, "model_type": "gemma3n_text", "num_kv_shared_layers": 0, "sliding_window": 8,
        "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 32, "laurel_rank": 32,
        "rope_local_base_freq": 1e4, "final_logit_softcapping": 30.0, "altup_num_inputs": 3,
        "layer_types": ["sliding_attention", "full_attention"], "altup_coef_clip": 120.0,
        "activation_sparsity_pattern": [0.0] * 2, "altup_correct_scale": True,
        "altup_active_idx": 0, "intermediate_size": [64] * 2,
    }  # fmt: skip
    found = discover(model_of({"model_type": "gemma3n", "text_config": sizes}), "all")
    names = {one.path.rpartition(".")[2] for one in found if ".altup." in one.path}
    assert names == {"modality_router"} and len({one.layer for one in found}) == 2


def test_matrices_that_are_packed_otherwise_stay() -> None:
    """AFM 7 fuses some into a class of its own, whose packed form needs the places of its parts."""
    config = {
        "model_type": "afm7", "vocab_size": 64, "hidden_dim": 64, "num_layers": 3,
        "num_kv_reuse_layers": 1, "num_heads": 4, "num_kv_heads": 2,
    }  # fmt: skip
    model = model_of(config)
    own = {path for path, module in model.named_modules() if type(module).__name__ == "FusedLinear"}
    found = {one.path for one in discover(model, "all")}
    assert own and found and not own & found
