"""A prompt's last token in the pass of those before it: the bits of a step by itself, its logits
alone, one reading of streamed layers; and as before where it would not be the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from tests.model.checkpoints import SIZES, open_model, write_random
from tests.model.moe_checkpoints import written
from tests.model.reference import OLD_MLX_LM, needs_new_mlx_lm
from tests.native_library import built, cache, library, needed, operations_of
from toastkit.engine import last_token
from toastkit.engine.engine import Engine
from toastkit.engine.last_token import LastToken
from toastkit.engine.state import ModelState
from toastkit.experts.experts_options import ExpertsOptions
from toastkit.gears.gear_options import GearOptions
from toastkit.native.library import Library
from toastkit.native.replacing import last_position_only
from toastkit.residency.residency_options import ResidencyOptions

__all__ = ["built", "cache", "library"]
pytestmark = needed
PROMPT = [(37 * n + 5) % 4096 for n in range(90)]
WINDOW = 32  # of those fixtures that have one
# Products, unpacking or a gate are MLX's there.
STEPS = {"qwen3_moe_quantised", "deepseek_v3", *(["gpt_oss"] if OLD_MLX_LM else [])}


def opened(folder: Path, name: str, **rest) -> Engine:
    return open_model(written(folder, name), **{"native": "require", **rest})


def passes(engine: Engine, count: int, chunk: int | None = None) -> tuple[list[int], list]:
    """Where passes over a prompt end; logits after it, and after two more tokens."""
    state = ModelState(engine.new_cache())
    ends = [*engine.reading(state, PROMPT[:count], lambda: chunk)]
    found = [state.logits, *(engine.step(token, state.cache) for token in (7, 11))]
    mx.eval(found)
    return ends, found


def by_steps(engine: Engine) -> Callable[[], None]:
    """Takes the last token by itself from here on; what is returned takes it along again."""
    own, engine.last_token = engine.last_token, LastToken()
    return lambda: setattr(engine, "last_token", own)


def check_same(engine: Engine, count: int, chunk: int | None = None) -> list[int]:
    """Where passes end that give, to the bit, what they give with a step at the end."""
    ends, found = passes(engine, count, chunk)
    back = by_steps(engine)
    before, expected = passes(engine, count, chunk)
    back()
    assert before[-2:] == [count - 1, count]
    for a, b in zip(found, expected):
        assert a.dtype == mx.float32 and a.shape == (engine.vocab,)
        assert mx.array_equal(a, b).item()
    return ends


# By how attention, experts and recurrent layers are computed.
@pytest.mark.parametrize(
    "name",
    ["llama", "gemma3_text", "phi3", "qwen2_moe", "qwen3_moe_quantised", "gpt_oss", "mixtral",
     "qwen3_5_moe", "qwen3_next", "mamba2", "falcon_h1", "deepseek_v3"],
)  # fmt: skip
def test_the_bits_are_those_of_a_step(tmp_path: Path, name: str) -> None:
    engine = opened(tmp_path, name)
    lone = name in STEPS
    assert check_same(engine, 2) == ([1, 2] if lone else [2])
    assert check_same(engine, 24, 16) == ([16, 23, 24] if lone else [16, 24])
    # A ring goes round with one token, and not with several.
    window = name in ("gemma3_text", "gpt_oss")
    assert check_same(engine, 70) == ([69, 70] if lone or window else [70])
    if window and not lone:
        assert check_same(engine, WINDOW) == [WINDOW]
        assert check_same(engine, WINDOW + 1) == [WINDOW, WINDOW + 1]


@needs_new_mlx_lm
def test_layers_that_are_run_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last is not told that its last position is wanted alone: the first reads all of them."""
    from mlx_lm.models import llama, nanbeige

    monkeypatch.setattr(nanbeige, "TransformerBlock", llama.TransformerBlock)  # of a known form
    monkeypatch.setattr(nanbeige.ModelArgs, "rope_traditional", False, raising=False)
    config = {**SIZES, "model_type": "nanbeige", "num_loops": 2, "vocab_size": 4096}
    path = write_random(tmp_path / "m", config)
    engine = open_model(path, native="require")
    assert check_same(engine, 24, 16) == [16, 24]
    assert len(engine.new_cache()) == 2 * len(engine.model.layers)
    told = {id(module) for module in engine.last_token._heads}
    assert told and told.isdisjoint(map(id, engine.model.layers))
    # Had it been told, it would have been seen, too.
    monkeypatch.setattr(last_token, "_last_layers", lambda own: own.store.model.layers[-1:])
    again = open_model(path, native="require")
    assert check_same(again, 24, 16) == [16, 23, 24] and not again.last_token.possible


def test_a_matrix_with_a_row_for_each_word_that_is_no_head(tmp_path: Path) -> None:
    """That of Gemma's inputs of each layer: two layers of 2048 numbers, and 4096 words."""
    config = {
        **SIZES, "model_type": "gemma4_text", "hidden_size_per_layer_input": 2048,
        "vocab_size_per_layer_input": 4096, "tie_word_embeddings": True, "layer_types": None,
        "num_kv_shared_layers": 0, "global_head_dim": 16,
    }  # fmt: skip
    engine = open_model(write_random(tmp_path / "m", config), native="require")
    assert engine.model.model.per_layer_model_projection["weight"].shape[0] == engine.vocab
    assert check_same(engine, 24) == [24]


@pytest.mark.parametrize("rest", [{"dtype": "bfloat16"}, {"dtype": "float16"}, {"kv_bits": 16}])
@pytest.mark.parametrize("name", ["llama_tied", "qwen3_5", "mamba2"])
def test_in_other_numbers(tmp_path: Path, name: str, rest: dict) -> None:
    engine = opened(tmp_path, name, **rest)
    assert check_same(engine, 33) == [33]


def test_one_token_more_than_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is no pass of its own, unless somebody has said how many a pass may have."""
    monkeypatch.setattr("toastkit.engine.engine.CHUNK", {"cpu": 20})
    engine = opened(tmp_path, "llama")
    assert [passes(engine, count)[0] for count in (1, 20, 21, 22, 41)] == [
        [1], [20], [21], [20, 22], [20, 41],
    ]  # fmt: skip
    assert [passes(engine, count, 10)[0] for count in (10, 11, 12)] == [[10], [10, 11], [10, 12]]
    assert passes(engine, 3, 1)[0] == [1, 2, 3]
    check_same(engine, 41)


def test_logits_of_the_last_position_alone(tmp_path: Path) -> None:
    for name in ("llama", "llama_tied"):
        engine = opened(tmp_path, name)
        heads = engine.last_token._heads
        ids = mx.array([PROMPT[:9]], mx.uint32)
        engine.load()
        whole = engine.model(ids, cache=engine.new_cache())
        with last_position_only(heads):
            alone = engine.model(ids, cache=engine.new_cache())
        again = engine.model(ids, cache=engine.new_cache())
        assert whole.shape == again.shape == (1, 9, engine.vocab)
        assert mx.array_equal(alone, whole[:, -1:]).item()


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_streamed_layers_are_read_once(tmp_path: Path, name: str) -> None:
    engine = opened(tmp_path, name, residency=ResidencyOptions("layers", 0))
    ran: list[int] = []
    engine.load()
    engine.holdings.streams.watch = lambda index, done: ran.append(index) if done else None
    layers = [*range(len(engine.model.layers))]
    state = ModelState(engine.new_cache())
    assert [*engine.reading(state, PROMPT[:24])] == [24]
    assert ran == layers
    stays = opened(tmp_path, name)
    by_steps(stays)
    assert mx.array_equal(state.logits, passes(stays, 24)[1][0]).item()
    engine.close()


@pytest.mark.parametrize(
    "policy", [{"gear_options": GearOptions("high")}, {"experts": ExpertsOptions("big")}]
)
def test_policies_that_tell_steps_from_prompts(tmp_path: Path, policy: dict) -> None:
    engine = opened(tmp_path, "olmoe", **policy)
    assert passes(engine, 12)[0] == [11, 12]


def test_mlx_takes_it_by_itself(tmp_path: Path) -> None:
    assert passes(opened(tmp_path, "llama", native="off"), 12)[0] == [11, 12]


def test_operations_are_counted_as_mlx_prints_them(library: Library) -> None:
    """Those of several arrays: once where they are shared, or have several outputs. None of what is
    computed."""
    cache, new = mx.random.normal((1, 2, 8, 4)), mx.ones((1, 2, 1, 4))
    keys, _, seen, _ = library.append([cache, cache], [new, new], 5)
    arrays = [mx.tanh(keys) + mx.tanh(seen).sum(), mx.split(keys * 2, 2, 1)[1], keys]
    assert library.operations(arrays) == Counter(operations_of(*arrays))
    assert library.operations(arrays)["ToastAppend"] == 1
    mx.eval(arrays)
    assert not library.operations(arrays)
