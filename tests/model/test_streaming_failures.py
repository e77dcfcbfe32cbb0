"""Streamed layers that cannot be read: the state is as it was, the error says what it is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.model.checkpoints import read
from tests.model.published import write_published
from tests.model.test_streaming import MODEL, NEXT, PROMPT, alike, answer, layer_bytes, streaming
from toastkit.engine.engine import Engine
from toastkit.engine.state import ModelState
from toastkit.errors import DataError, IOFailure, NoInputError
from toastkit.gears.gear_options import GearOptions
from toastkit.holdings import holdings
from toastkit.session.directory import Session
from toastkit.store.raw import RawTensors


class Disk:
    """Every read of a checkpoint. left: how many more go well, None for all; reads: so far."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.left: int | None = None
        self.reads = 0
        fill = RawTensors.fill

        def counted(raw: RawTensors, *asked: Any) -> int:
            self.reads += 1
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    raise IOFailure("cannot read it: the disk is broken")
            return fill(raw, *asked)

        monkeypatch.setattr(RawTensors, "fill", counted)


def in_turn(engine: Engine, state: ModelState, token: int, disk: Disk) -> int:
    """Runs a token with nothing read ahead of it; how many reads that took."""
    engine.holdings.streams.forget_ahead()
    before = disk.reads
    engine.consume(state, token)
    engine.holdings.streams.forget_ahead()
    return disk.reads - before


@pytest.mark.parametrize("name", ["llama_tied", "gemma3_text", "falcon_h1", "gpt_oss"])
def test_a_pass_that_fails_leaves_the_state_as_it_was(
    name: str, tmp_path: Path, disk: Disk
) -> None:
    """At its first layer, and half way: every kind of cache is restored, and the same token then
    gives what it would have given."""
    engine = streaming(path=write_published(tmp_path / name, name))
    wanted = answer(engine)
    state = read(engine, PROMPT)
    found = [state.logits]
    reads = in_turn(engine, read(engine, PROMPT), NEXT[0], disk)
    for token in NEXT:
        for left in (0, reads // 2):
            engine.holdings.streams.forget_ahead()
            disk.left = left
            with pytest.raises(IOFailure):
                engine.consume(state, token)
            disk.left = None
            assert not any(layer_bytes(engine, i) for i in range(engine.residency.layers))
        engine.consume(state, token)
        found.append(state.logits)
    assert alike(found, wanted)
    engine.close()


def test_a_prompt_that_fails_half_way_can_be_read_on(disk: Disk) -> None:
    engine = streaming()
    wanted = answer(engine)
    reads = in_turn(engine, read(engine, PROMPT), NEXT[0], disk)
    state = ModelState(engine.new_cache())
    passes = engine.reading(state, PROMPT, lambda: 16)
    next(passes)
    engine.holdings.streams.forget_ahead()
    disk.left = reads // 2
    with pytest.raises(IOFailure):
        next(passes)
    disk.left = None
    assert len(state.tokens) == 16
    for _ in engine.reading(state, PROMPT, lambda: 16):
        pass
    assert mx.array_equal(state.logits, wanted[0]).item()
    engine.close()


def test_a_shift_that_fails_can_be_made_again(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """What left to make room is streamed in the old gear; then all is as if nothing had been."""
    monkeypatch.setattr(holdings, "FEW_TENSORS", 0)  # or MLX reads so small a model
    sizes = streaming().residency.sizes
    size = sizes.outside + sum(sizes.layers) + 2**22
    options = GearOptions("low", "all", path="dequant")  # so a step takes more than a prompt
    engine = streaming("bytes", size, gears=options)
    read(engine, PROMPT)
    in_prompts = len(engine.residency.resident)
    wanted, count = answer(engine), len(engine.residency.resident)
    assert 0 < count < 8 and count < in_prompts
    disk.left = 0
    with pytest.raises(IOFailure):
        read(engine, PROMPT)
    assert engine.gears.gear == "low" and not engine.residency.resident
    disk.left = None
    read(engine, PROMPT)
    assert len(engine.residency.resident) == in_prompts
    assert alike(answer(engine), wanted)
    assert len(engine.residency.resident) == count
    assert engine.ledger.total() <= size
    engine.close()


@pytest.mark.parametrize(
    "harm, kind, words",
    [
        (lambda path: path.unlink(), NoInputError, "no such file"),
        (lambda path: os.truncate(path, path.stat().st_size // 2), DataError, "changed"),
        (lambda path: path.write_bytes(path.read_bytes()), DataError, "changed"),
    ],
    ids=["removed", "truncated", "replaced"],
)
def test_files_that_change_in_mid_run(
    tmp_path: Path, harm: Callable[[Path], Any], kind: type, words: str
) -> None:
    """A clear error; what was read before it can be kept."""
    path = write_published(tmp_path / "llama", "llama")
    engine = streaming(path=path)
    session = Session.open(tmp_path / "session", MODEL)
    state = read(engine, PROMPT)
    harm(next(path.glob("*.safetensors")))
    with pytest.raises(kind, match=words):
        for token in NEXT:
            engine.consume(state, token)
    assert state.tokens[: len(PROMPT)] == PROMPT
    state.session = session
    state.commit()
    state.close()
    engine.close()
