"""States that step together: their logits are those that each has alone, whoever comes and goes."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest

from tests.model.checkpoints import SIZES, open_model, read, write_random
from tests.model.published import NAMES, write_published
from tests.model.reference import OLD_MLX_LM
from toastkit.engine.batch import Batch, can_batch, can_be_apart
from toastkit.engine.savepoints import copy_caches
from toastkit.engine.state import ModelState
from toastkit.holdings.streams import arrays_in
from toastkit.store.ledger import CACHE

CLOSE = 1e-3  # of the largest logit
LENGTHS = (3, 20, 45)  # the window of those that have one is 32
# One for each kind of cache and each way to use it: attention, windows, recurrence, both in turns
# and side by side, experts. That all others can be batched is seen by can_batch, and in short.
KINDS = ("llama", "gemma3_text", "gpt_oss", "qwen3_moe", "qwen3_next", "mamba2", "falcon_h1")


class Made(NamedTuple):
    name: str
    engine: Any


@pytest.fixture(scope="module", params=NAMES)
def made(request, tmp_path_factory: pytest.TempPathFactory, mlx_started) -> Made:
    """Each checkpoint once."""
    path = write_published(tmp_path_factory.mktemp("published") / request.param, request.param)
    return Made(request.param, open_model(path, native="auto"))


@pytest.fixture
def batched(made: Made) -> Made:
    if OLD_MLX_LM:
        pytest.skip("the old mlx_lm has other batched caches")
    return made


APART = (False, True)  # merged, as by mlx_lm, or each with its own keys and values


def batch_of(engine: Any, apart: bool) -> Batch:
    if apart and not can_be_apart(engine):
        pytest.skip("it keeps no keys and values, or others than mlx_lm's KVCache")
    return Batch(engine, apart)


def prompt(count: int, first: int = 5) -> list[int]:
    return [(37 * n + first) % 4096 for n in range(count)]


class Pair:
    """The same state twice: one goes through a batch, the other stays alone."""

    def __init__(self, engine: Any, count: int, first: int = 5):
        self.engine = engine
        self.twin, self.alone = (read(engine, prompt(count, first), None) for _ in range(2))

    def step_alone(self, token: int) -> None:
        self.engine.consume(self.alone, token)

    def check(self) -> None:
        found, expected = np.array(self.twin.logits), np.array(self.alone.logits)
        assert found.shape == expected.shape
        scale = np.abs(expected).max()
        assert scale > 1 and np.abs(found - expected).max() < CLOSE * scale

    def check_cache(self) -> None:
        """What came out of the batch is what the other one has, layer by layer."""
        for found, expected in zip(self.twin.cache, self.alone.cache, strict=True):
            assert type(found) is type(expected)
            assert found.is_trimmable() == expected.is_trimmable()
            parts = (getattr(layer, "caches", [layer]) for layer in (found, expected))
            for mine, theirs in zip(*parts, strict=True):
                for name in ("offset", "max_size", "keep"):
                    assert getattr(mine, name, None) == getattr(theirs, name, None)
                for name in ("lengths", "left_padding"):
                    assert getattr(mine, name, None) is None


def steps(batch: Batch, pairs: list[Pair], count: int, seed: int) -> None:
    """Steps of a batch of these pairs, and of each alone; the logits of all are held against each
    other after every step."""
    assert len(batch.members) == len(pairs)
    pairs = [next(p for p in pairs if p.twin is member) for member in batch.members]
    for n in range(count):
        tokens = [(seed + 97 * n + 11 * row) % 4096 for row in range(len(pairs))]
        batch.step(tokens)
        for pair, token in zip(pairs, tokens):
            pair.twin.tokens.append(token)
            pair.step_alone(token)
            pair.check()


def leave(batch: Batch, pair: Pair) -> None:
    batch.leave([pair.twin])
    pair.check_cache()


def test_all_that_are_tested_can_be_batched(made: Made) -> None:
    """(With the mlx_lm of today. One that cannot is to be found out, not to be trusted.)"""
    engine = made.engine
    assert can_batch(engine) or OLD_MLX_LM
    assert not can_be_apart(engine) or can_batch(engine, apart=True)


class Odd:
    """An engine with something wrong. Every attribute that is not given is the real one's."""

    def __init__(self, engine: Any, **changed: Any):
        self._engine = engine
        vars(self).update(changed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def refuse(error: type[Exception]) -> Any:
    def step_rows(*arguments: Any) -> Any:
        raise error("[broadcast_shapes] they do not fit")

    return step_rows


@pytest.mark.skipif(OLD_MLX_LM, reason="the old mlx_lm has other batched caches")
def test_what_cannot_be_batched_is_found_out(tmp_path: Path, mlx_started: None) -> None:
    """Caches without a way into a batch; a model that fails on one; one that looks at the padding;
    one that gives nonsense anyway."""
    from mlx_lm.models.cache import ConcatenateKVCache

    path = write_published(tmp_path / "llama", "llama")
    engine = open_model(path)

    def of_all(ids: Any, cache: list) -> Any:
        logits = engine.step_rows(ids, cache)
        return logits if len(ids) == 1 else logits + 0.1 * logits.mean(axis=0)

    def of_the_padded(ids: Any, cache: list) -> Any:
        """What an architecture gives that takes the padding for positions where it keeps nothing:
        the caches are right."""
        logits = engine.step_rows(ids, cache)
        return logits if len(ids) == 1 else mx.stack([1.1 * logits[0], logits[1]])

    def coarse(ids: Any, cache: list) -> Any:
        return (1 + 1e-2 * (len(ids) > 1)) * engine.step_rows(ids, cache)

    caches = lambda: [ConcatenateKVCache() for _ in engine.new_cache()]  # noqa: E731
    nothing = lambda ids, cache: mx.full((len(ids), engine.vocab), mx.nan)  # noqa: E731
    assert can_batch(Odd(engine))
    assert not can_batch(Odd(engine, new_cache=caches))
    assert can_batch(Odd(engine, step_rows=refuse(ValueError))) is False
    assert can_batch(Odd(engine, step_rows=refuse(RuntimeError))) is None  # it may pass
    assert not can_batch(Odd(engine, step_rows=of_all))
    assert not can_batch(Odd(engine, step_rows=of_the_padded))
    assert not can_batch(Odd(engine, step_rows=nothing))
    assert can_batch(Odd(engine, step_rows=coarse, dtype="bfloat16"))
    assert not can_batch(Odd(engine, step_rows=coarse))


@pytest.mark.parametrize("apart", APART)
@pytest.mark.parametrize("made", KINDS, indirect=True)
def test_they_come_and_go(batched: Made, apart: bool) -> None:
    engine = batched.engine
    short, middle, long = (Pair(engine, count) for count in LENGTHS)
    batch = batch_of(engine, apart)
    batch.join([short.twin, middle.twin])
    steps(batch, [short, middle], 2, 100)
    batch.join([long.twin])  # one that is longer than those that are there
    steps(batch, [short, middle, long], 3, 200)
    assert engine.ledger.of(CACHE) > 0 and short.twin.cache == []
    leave(batch, middle)
    steps(batch, [short, long], 2, 300)
    for token in (7, 8, 9):  # it goes on alone
        engine.consume(middle.twin, token)
        middle.step_alone(token)
        middle.check()
    newcomer = Pair(engine, 1, first=77)
    batch.join([middle.twin, newcomer.twin])
    steps(batch, [short, long, middle, newcomer], 3, 400)
    leave(batch, long)  # the longest: less padding from now on
    steps(batch, [short, middle, newcomer], 3, 500)
    batch.leave([short.twin, newcomer.twin])
    steps(batch, [middle], 1, 600)
    leave(batch, middle)
    assert batch.members == []
    for pair in (short, middle, newcomer, long):
        pair.check_cache()
        list(engine.reading(pair.twin, [*pair.twin.tokens, *prompt(40, 9)]))  # another turn
        list(engine.reading(pair.alone, [*pair.alone.tokens, *prompt(40, 9)]))
        pair.check()
    batch.join([short.twin, long.twin])  # an empty batch can be used again
    steps(batch, [short, long], 2, 700)


@pytest.mark.parametrize("apart", APART)
@pytest.mark.parametrize("made", ["llama", "gemma3_text", "gpt_oss"], indirect=True)
def test_the_window_slides_in_the_batch(batched: Made, apart: bool) -> None:
    """From 28 tokens, one by one, past the windows of 32; one joins when it has slid round."""
    engine = batched.engine
    one, two = Pair(engine, 28), Pair(engine, 2, first=9)
    batch = batch_of(engine, apart)
    batch.join([one.twin, two.twin])
    steps(batch, [one, two], 9, 100)
    third = Pair(engine, 5, first=11)
    batch.join([third.twin])
    steps(batch, [one, two, third], 3, 200)
    leave(batch, one)
    steps(batch, [two, third], 2, 300)
    leave(batch, third)
    for pair in (one, third):
        for token in (5, 6, 7):
            engine.consume(pair.twin, token)
            pair.step_alone(token)
            pair.check()


@pytest.mark.parametrize("apart", APART)
@pytest.mark.parametrize("made", ["gemma3_text", "qwen3_next"], indirect=True)
def test_the_same_conversation_three_times(batched: Made, apart: bool) -> None:
    """Each has looked ahead, which is taken back."""
    engine = batched.engine
    pairs = [Pair(engine, 6) for _ in range(3)]
    for pair in pairs:
        engine.look_ahead(pair.twin)
    batch = batch_of(engine, apart)
    batch.join([pair.twin for pair in pairs])
    batch.leave([pairs[1].twin])
    assert [state is pair.twin for state, pair in zip(batch.members, pairs[::2])] == [True, True]
    batch.step([mx.array(5, mx.uint32), 5])  # a token may still be on the device
    for pair in pairs[::2]:
        pair.step_alone(5)
        pair.check()
    steps(batch, pairs[::2], 2, 100)


def test_who_leaves_holds_no_rows_of_others(batched: Made) -> None:
    """mlx_lm's slice of a recurrent state would keep those of the whole batch in memory."""
    ready = Pair(batched.engine, 3).alone
    gc.collect()  # engines of other tests
    before, kept = mx.get_active_memory(), []
    for _ in range(3):
        states = [ModelState(copy_caches(ready.cache), list(ready.tokens)) for _ in range(32)]
        batch = Batch(batched.engine)
        batch.join(states)
        batch.leave(states)
        kept += arrays_in(states[0].cache)
    del states, batch
    spared = 1 << 14  # bytes that mx.contiguous does not copy an array for
    own = sum(array.nbytes for array in kept)
    assert 0 < mx.get_active_memory() - before < own + spared * len(kept)


def test_some_rows_are_run_again(batched: Made) -> None:
    """With other tokens: those rows are as if the first pass had not been, the other one stays."""
    engine = batched.engine
    pairs = [Pair(engine, count) for count in LENGTHS]
    batch = Batch(engine)
    batch.join([pair.twin for pair in pairs])
    for rows in ([0, 2], [1], [0, 1, 2]):
        before = batch.before_a_step()
        logits = list(engine.step_rows(mx.array([[9], [10], [11]], mx.uint32), batch.caches))
        again = batch.run_again(mx.array([[5], [6], [7]], mx.uint32), before, rows)
        for row, own in zip(rows, again):
            logits[row] = own
        for row, pair in enumerate(pairs):
            pair.twin.logits = logits[row]
            pair.step_alone((5 if row in rows else 9) + row)
            pair.check()
    steps(batch, pairs, 2, 100)
    for pair in pairs:
        leave(batch, pair)


def test_blocks_that_are_chosen_by_their_place(tmp_path: Path) -> None:
    """A batch would pad the shorter ones, and their blocks would be others, which a trial of some
    forty tokens cannot show where all blocks of 64 are seen."""
    sparse = {
        "sparse_num_index_heads": 2, "sparse_index_dim": 32, "sparse_block_size": 16,
        "sparse_topk_blocks": 4, "sparse_local_block": 1, "sparse_attention_freq": [0, 1],
    }  # fmt: skip
    text = {
        **SIZES, "model_type": "minimax_m3", "dense_intermediate_size": 64, "rotary_dim": None,
        "shared_intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2,
        "moe_layer_freq": [0, 1], "partial_rotary_factor": 0.5, "use_qk_norm": True,
        "sparse_attention_config": sparse,
    }  # fmt: skip
    engine = open_model(
        write_random(tmp_path / "m", {"model_type": "minimax_m3_vl", "text_config": text})
    )
    assert not can_batch(engine)
