"""What is remembered of chunked attention, which forgets the chunks before the last."""

from __future__ import annotations

import mlx.core as mx
import pytest

from tests.model.checkpoints import SIZES, logits_after, open_model, read, write_random
from tests.model.reference import OLD_MLX_LM
from toastkit.daemon.memory import Memory
from toastkit.daemon.spill import Spill
from toastkit.engine.engine import Engine
from toastkit.engine.state import ModelState

pytestmark = [
    pytest.mark.usefixtures("homes"),
    pytest.mark.skipif(OLD_MLX_LM, reason="this mlx_lm's ChunkedKVCache fails past its chunk"),
]
CHUNK, HELD = 50, 120
FIRST = HELD // CHUNK * CHUNK  # position of the last chunk
LLAMA4 = {
    "model_type": "llama4_text", "attention_chunk_size": CHUNK, "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 64, "num_experts_per_tok": 1, "num_local_experts": 4,
    "attention_bias": False, "use_qk_norm": True, "tie_word_embeddings": False,
    "rope_scaling": None, **SIZES, "num_hidden_layers": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = tmp_path_factory.mktemp("model") / "llama4"
    return open_model(
        write_random(path, {"model_type": "llama4", "text_config": LLAMA4}), native="off"
    )


@pytest.mark.parametrize("on_disk", [False, True], ids=["in memory", "on disk"])
@pytest.mark.parametrize("n", [45, 70, 99, 103, 119])
def test_a_branch_sees_all_of_its_chunk(engine: Engine, on_disk: bool, n: int) -> None:
    ids, other = [7 + 11 * i % 4000 for i in range(HELD)], [3, 900, 14, 77]
    state = read(engine, ids, 16)
    spill = Spill("ab" * 32, "float32", 1 << 30) if on_disk else None
    memory = Memory(engine.new_cache, 0 if on_disk else 1 << 30, engine.ledger, spill)
    kept = memory.keep(1, state.tokens, state.cache, state.savepoints, None)
    assert (kept.cache is None) == on_disk
    match = memory.find(2, [*ids[:n], *other])
    if n > FIRST and not on_disk:
        assert match.count == n
    resumed = memory.resume(match) if match.count else (engine.new_cache(), [])
    assert resumed is not None and kept in memory.kept
    branch = ModelState(resumed[0], ids[: match.count])
    for _ in engine.reading(branch, [*ids[:n], *other]):
        pass
    whole = read(engine, [*ids[:n], *other], None)
    for found, expected in zip(*(logits_after(engine, s, [5, 6]) for s in (branch, whole))):
        assert mx.abs(found - expected).max().item() < 1e-3 * mx.abs(expected).max().item()
