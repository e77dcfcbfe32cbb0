"""Experts that cannot be fetched: the state is as it was, the error says what it is, and what is in
the slots is never another expert."""

from __future__ import annotations

import os
import time
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from tests.model.checkpoints import read
from tests.model.published import write_published
from tests.model.test_expert_slots import PROMPT, answer, opened
from tests.model.test_streaming import alike
from tests.model.test_streaming_failures import Disk
from toastkit.engine.engine import Engine
from toastkit.engine.state import ModelState
from toastkit.errors import DataError, IOFailure, NoInputError


@pytest.fixture(scope="module")
def olmoe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_published(tmp_path_factory.mktemp("failing") / "olmoe", "olmoe")


def contents(engine: Engine) -> bool:
    """Whether all slots hold the expert that their table says."""
    for layer in engine.holdings.slots.layers:
        for holding in layer.switch.stacks:
            name = holding.names[0]
            whole = engine.holdings.store.tensor(name).astype(mx.float32)
            for expert in layer.table.held:
                row = holding.module["weight"][int(layer.table.of[expert])]
                if not mx.array_equal(row, whole[expert]).item():
                    return False
    return True


@pytest.mark.parametrize("name", ["olmoe", "qwen3_next"])
def test_a_step_that_fails_leaves_all_as_it_was(name: str, tmp_path: Path, disk: Disk) -> None:
    path = write_published(tmp_path / name, name)
    engine, whole = opened(path, 2), opened(path)
    state, other = read(engine, PROMPT), read(whole, PROMPT)
    failed = 0
    for token in (9, 17, 33, 65):
        held = list(state.tokens)
        for left in range(3):
            disk.left = left
            try:
                engine.consume(state, token)
            except IOFailure:
                failed += 1
                assert state.tokens == held
            else:
                state.tokens.pop()
                break
            finally:
                disk.left = None
            assert contents(engine)
        else:
            engine.consume(state, token)
            state.tokens.pop()
        state.tokens.append(token)
        whole.consume(other, token)
        assert mx.array_equal(state.logits, other.logits).item()
    assert failed > 4


def test_a_prompt_that_fails_is_read_again(olmoe: Path, disk: Disk) -> None:
    engine, plain = opened(olmoe, 3), answer(opened(olmoe))
    state = ModelState(engine.new_cache())
    for left in (0, 3, 8):
        disk.left = left
        with pytest.raises(IOFailure, match="the disk is broken"):
            for _ in engine.reading(state, PROMPT, lambda: 16):
                pass
        disk.left = None
        assert contents(engine)
    for _ in engine.reading(state, PROMPT, lambda: 16):
        pass
    assert alike([state.logits], plain[:1])


def test_a_file_that_became_shorter(tmp_path: Path) -> None:
    path = write_published(tmp_path / "olmoe", "olmoe")
    engine = opened(path, 2)
    state = read(engine, PROMPT)
    file = next(path.glob("*.safetensors"))
    before = engine.ledger.by_owner()
    os.truncate(file, 4096)
    with pytest.raises(DataError) as caught:
        for token in range(40, 60):
            engine.consume(state, token)
    assert "shorter than it was" in str(caught.value) or "have changed" in str(caught.value)
    assert engine.ledger.by_owner().get("experts") == before["experts"]


def test_a_file_that_was_written_to(tmp_path: Path) -> None:
    """Nothing that was read of it is used: not in this pass, and not in the next."""
    path = write_published(tmp_path / "olmoe", "olmoe")
    engine = opened(path, 2)
    state = read(engine, PROMPT)
    file = next(path.glob("*.safetensors"))
    data, about = file.read_bytes(), file.stat()
    file.write_bytes(data[:-65536] + bytes(65536))
    held = len(state.tokens)
    with pytest.raises(DataError, match="have changed since the model was loaded"):
        for token in range(40, 60):
            engine.consume(state, token)
            held += 1
    assert len(state.tokens) == held
    file.write_bytes(data)
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert contents(engine)
    engine.consume(state, 41)


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    path = write_published(tmp_path / "olmoe", "olmoe")
    engine = opened(path, 2)
    state = read(engine, PROMPT)
    next(path.glob("*.safetensors")).unlink()
    with pytest.raises(NoInputError):
        for token in range(40, 60):
            engine.consume(state, token)


def _settle(engine: Engine) -> None:
    """Waits until nothing is being read ahead."""
    deadline = time.monotonic() + 60
    while engine.holdings.slots.is_reading:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@settings(max_examples=examples(6), deadline=None)
@given(data=st.data())
def test_reading_ahead_that_fails_is_tried_again(olmoe: Path, data: st.DataObject) -> None:
    """Whatever was foreseen, and however much of it could not be read."""
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch)
        engine, whole = opened(olmoe, 4), opened(olmoe)
        state, other = read(engine, PROMPT), read(whole, PROMPT)
        for token in data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=4)):
            disk.left = data.draw(st.one_of(st.none(), st.integers(0, 4)))
            for layer in engine.holdings.slots.layers:
                experts = st.lists(st.integers(0, 7), max_size=4, unique=True)
                engine.holdings.slots.prefetch(layer, data.draw(experts))
            _settle(engine)
            disk.left = None
            engine.consume(state, token)
            whole.consume(other, token)
            assert mx.array_equal(state.logits, other.logits).item()
        engine.holdings.slots.forget_ahead()
        assert contents(engine)
        counts = engine.holdings.slots.counts
        assert counts.right <= counts.ahead and counts.hit <= counts.wanted


def test_a_closed_engine_says_so(olmoe: Path) -> None:
    engine = opened(olmoe, 2)
    state = read(engine, PROMPT)
    engine.close()
    engine.close()
    with pytest.raises(BaseException, match="closed"):
        for token in range(40, 60):
            engine.consume(state, token)


def test_a_config_that_cannot_run(tmp_path: Path) -> None:
    """Which shows as the experts that a token chooses are counted."""
    config = write_published(tmp_path / "olmoe", "olmoe") / "config.json"
    config.write_text(config.read_text().replace('_per_tok": 2', '_per_tok": null'))
    with pytest.raises(DataError, match="cannot run a model with this config.json"):
        opened(config.parent, 2)
