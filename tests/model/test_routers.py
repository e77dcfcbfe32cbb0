"""Which experts a token goes to: every architecture of the table is there and does as the table
says, and a model with another K is mlx_lm's with that K in its config.json."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models import switch_layers
from mlx_lm.models.cache import make_prompt_cache

from tests.model.checkpoints import SIZES, open_model, write_random
from tests.model.moe_checkpoints import NAMES, K, write_moe
from tests.model.published import write_published
from tests.model.reference import OLD_MLX_LM
from tests.model.test_transformers import write_recorded
from toastkit.engine.engine import Engine
from toastkit.errors import UsageError
from toastkit.experts.experts_options import ExpertsOptions, LittleK
from toastkit.experts.routers import K_OF
from toastkit.holdings.policy import NO_WISH
from toastkit.holdings.policy import PROMPT as PROMPT_WISH
from toastkit.model.supported import METAL_ONLY, UNSUPPORTED

MODELS = Path(switch_layers.__file__).parent
PROMPT = [(37 * n + 5) % 4096 for n in range(20)]
SWITCHES = (switch_layers.SwitchGLU, switch_layers.SwitchMLP)
# Those of the table of which tests/oracle has a checkpoint.
RECORDED = (
    "afmoe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe",
    "glm4_moe", "glm4_moe_lite", "gpt_oss", "granitemoe", "granitemoehybrid", "jamba", "laguna",
    "lfm2_moe", "mellum", "minimax_m2", "mixtral", "nemotron_h", "olmoe", "phimoe", "qwen2_moe",
    "qwen3_moe", "qwen3_next",
)  # fmt: skip


def opened(path: Path, options: ExpertsOptions | None = None) -> Engine:
    return open_model(path, device_name="cpu", experts=options)


# ------------------------------------------------------------------------------------- the table


def test_the_table_knows_every_mixture_of_mlx_lm() -> None:
    """By its text: whoever uses a switch layer has a line, or is not run here anyway."""
    users, declared = set(), {}
    for path in MODELS.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        if re.search(r"= Switch(GLU|MLP)\(", text) and path.name != "switch_layers.py":
            users.add(path.stem)
        declared |= {
            f"{path.stem}.{name}": text for name in re.findall(r"^class (\w+)", text, re.M)
        }
    known = {name.partition(".")[0] for name in K_OF}
    assert users - known == {*UNSUPPORTED, *METAL_ONLY} & users
    if not OLD_MLX_LM:
        assert set(K_OF) <= set(declared)
    for name, attribute in K_OF.items():
        *owners, k = attribute.split(".")
        text = k if owners[:1] == ["args"] or "config" in owners else f"self.{k} ="
        assert name not in declared or text in declared[name], name


@contextmanager
def routed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many experts each token went to, switch layer by switch layer."""
    seen: list[int] = []
    with monkeypatch.context() as patch:
        for cls in SWITCHES:

            def call(self, x, indices, _call=cls.__call__):
                seen.append(indices.shape[-1])
                return _call(self, x, indices)

            patch.setattr(cls, "__call__", call)
        yield seen


@pytest.mark.skipif(OLD_MLX_LM, reason="what is recorded holds for a newer mlx_lm")
@pytest.mark.parametrize("name", RECORDED)
def test_k_is_what_it_is_set_to(name: str, tmp_path: Path, monkeypatch) -> None:
    """In every block, on one model alone, and back again."""
    path = write_recorded(tmp_path / "m", name)
    engine, other = opened(path, ExpertsOptions("little")), opened(path)
    blocks = engine.experts.blocks
    assert {b.own_k for b in blocks} == {2} and engine.experts.little_k == 1
    assert [b.layer for b in blocks] == sorted({b.layer for b in blocks})
    for k, wish in ((2, PROMPT_WISH), (1, NO_WISH), (2, PROMPT_WISH)):
        with routed(monkeypatch) as seen:
            engine.experts.decide(wish)
            mx.eval(engine.step(5, engine.new_cache()))
            assert seen == [k] * len(blocks) and {b.k for b in blocks} == {k}
            if k == 1:
                mx.eval(other.step(5, other.new_cache()))
                assert seen[len(blocks) :] == [2] * len(blocks)


# ------------------------------------------------------------------------ as mlx_lm with that K


@pytest.mark.parametrize("name", NAMES)
def test_the_little_model_is_mlx_lms_with_that_k(name: str, tmp_path: Path) -> None:
    from mlx_lm.utils import load_model

    engine = opened(write_moe(tmp_path / "m", name), ExpertsOptions("little", prompt="little"))
    theirs, _ = load_model(write_moe(tmp_path / "theirs", name, K // 2))
    theirs.set_dtype(mx.float32)
    cache, own = make_prompt_cache(theirs), engine.new_cache()
    theirs(mx.array([PROMPT[:-1]]), cache=cache)
    expected = theirs(mx.array([PROMPT[-1:]]), cache=cache)[0, -1]
    found = engine.prefill(PROMPT, own)
    for _ in range(2):
        scale = mx.abs(expected).max().item()
        assert scale > 1 and mx.abs(found - expected).max().item() < 1e-4 * scale
        token = int(mx.argmax(expected).item())
        expected = theirs(mx.array([[token]]), cache=cache)[0, -1]
        found = engine.step(token, own)


# ------------------------------------------------------------------------------ what is refused


def test_a_model_without_experts(tmp_path: Path) -> None:
    path = write_published(tmp_path / "llama", "llama")
    with pytest.raises(UsageError, match=r"llama has no experts: llama is a dense model here$"):
        opened(path, ExpertsOptions("mobile"))


def test_a_router_that_is_not_known(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delitem(K_OF, "olmoe.OlmoeSparseMoeBlock")
    path = write_moe(tmp_path / "m", "olmoe")
    with pytest.raises(UsageError, match=r"how olmoe chooses its experts is not known here$"):
        opened(path, ExpertsOptions("little"))
    assert opened(path).experts is None


@pytest.mark.parametrize("k", [5, 9, 10**9])
def test_more_experts_than_the_model_has(tmp_path: Path, k: int) -> None:
    path = write_moe(tmp_path / "m", "olmoe")
    with pytest.raises(UsageError, match=rf"^--little-k {k} is more than the model's K of 4$"):
        opened(path, ExpertsOptions("little", little_k=LittleK(k)))
    assert opened(path, ExpertsOptions("little", little_k=LittleK(4))).experts.little_k == 4


@pytest.mark.parametrize(
    "options",
    [ExpertsOptions(mode) for mode in ("little", "mobile")] + [ExpertsOptions(prompt="little")],
)
def test_one_expert_a_token_cannot_be_fewer(tmp_path: Path, options: ExpertsOptions) -> None:
    path = write_moe(tmp_path / "m", "olmoe", k=1)
    with pytest.raises(UsageError, match="m has no little model: each token goes to one expert"):
        opened(path, options)
    opened(path, ExpertsOptions())


# Whose K is a setting that all layers share: none of these is among the recorded.
SHARED_SETTINGS = {
    "gemma4_text": {
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 32, "hidden_size_per_layer_input": 0, "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0,
        "global_head_dim": 16,
    },
    "kimi_linear": {
        "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 32,
        "num_shared_experts": 1, "kv_lora_rank": 32, "q_lora_rank": None, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4,
        "first_k_dense_replace": 1, "num_expert_group": 1, "topk_group": 1,
        "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1,
        "routed_scaling_factor": 1.0, "model_max_length": 512, "tie_word_embeddings": False,
        "linear_attn_config": {
            "kda_layers": [1], "full_attn_layers": [2], "num_heads": 4, "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
    },
}  # fmt: skip


@pytest.mark.skipif(OLD_MLX_LM, reason="these architectures are newer")
@pytest.mark.parametrize("name", SHARED_SETTINGS)
def test_a_k_among_settings_that_layers_share(name: str, tmp_path: Path, monkeypatch) -> None:
    path = write_random(tmp_path / "m", {"model_type": name, **SIZES, **SHARED_SETTINGS[name]})
    engine, other = opened(path, ExpertsOptions("little")), opened(path)
    count = len(engine.experts.blocks)
    engine.experts.decide(NO_WISH)
    with routed(monkeypatch) as seen:
        for one in (engine, other):
            mx.eval(one.step(5, one.new_cache()))
    assert seen == [1] * count + [2] * count and count > 0
    setting = engine.experts.blocks[0].k_name.rpartition(".")[2]
    assert getattr(engine.model.args, setting) == 2  # that of the model as a whole stays
