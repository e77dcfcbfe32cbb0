"""Experts in slots: the results of a model that is whole, to the bit; each expert read as often as
it was not there; the account agrees; gears, streamed layers and batches go with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from tests.model.checkpoints import (
    baked,
    logits_after,
    open_model,
    open_store,
    read,
    write_random,
)
from tests.model.moe_checkpoints import write_moe
from tests.model.published import write_published
from tests.model.test_streaming import NEXT, alike
from toastkit.engine.batch import Batch
from toastkit.engine.engine import Engine
from toastkit.engine.room import room_for_experts
from toastkit.engine.state import ModelState
from toastkit.errors import UsageError
from toastkit.experts.experts_options import SlotOptions
from toastkit.experts.slot_policy import SlotPolicy
from toastkit.gears.gear_options import GearOptions
from toastkit.holdings import slot_memory
from toastkit.holdings.forms import ORIGINAL
from toastkit.holdings.policy import NO_WISH, Wish
from toastkit.residency.residency_options import ResidencyOptions
from toastkit.store import reader
from toastkit.store.sanitizing import Sanitizing

PROMPT = [5 + 7 * n % 300 for n in range(24)]
EXPERTS, CHOSEN = 8, 2  # of the random checkpoints


def slots(amount: int | str, prefetch: str = "off") -> SlotOptions:
    if isinstance(amount, str):
        return SlotOptions("auto", 0, prefetch)
    return SlotOptions("slots" if amount < 1 << 10 else "bytes", amount, prefetch)


def opened(path: Path | str, amount: int | str | None = None, **rest) -> Engine:
    """An engine with so many slots a layer, or bytes of them; None for a whole model."""
    options = None if amount is None else slots(amount, rest.pop("prefetch", "off"))
    return open_model(path, expert_slots=options, **rest)


def answer(engine: Engine, chunk: int = 16, wish: Wish = NO_WISH) -> list[mx.array]:
    """Logits after the prompt, read in chunks, and after each token that follows."""
    return logits_after(engine, read(engine, PROMPT, chunk), NEXT, lambda n: wish)


def deepseek(path: Path) -> Path:
    """A sigmoid router with groups, shared experts, a dense layer first."""
    return write_moe(path, "deepseek_v3", CHOSEN)


class Lazily(dict):
    """Makes what it is asked for, once."""

    def __init__(self, make: Callable[[str], Any]):
        self._make = make

    def __missing__(self, name: str) -> Any:
        self[name] = self._make(name)
        return self[name]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints by name."""
    folder = tmp_path_factory.mktemp("experts")
    return Lazily(
        lambda n: deepseek(folder / n) if n == "deepseek" else write_published(folder / n, n)
    )


@pytest.fixture(scope="module")
def expected(models) -> dict[str, list[mx.array]]:
    return Lazily(lambda name: answer(opened(models[name])))


# `make modes` has the others.
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe_quantised", "qwen3_next", "deepseek"])
def test_results_are_those_of_a_whole_model(models, expected, name: str) -> None:
    for count in (CHOSEN, 7):
        engine = opened(models[name], count)
        assert alike(answer(engine), expected[name])
        report = engine.run_report()["slots"]
        assert report["slots"] == count and 0 < report["hit"] < report["wanted"]


@settings(max_examples=examples(5), deadline=None)
@given(count=st.integers(CHOSEN, EXPERTS), chunk=st.integers(1, 24), ahead=st.booleans())
def test_whatever_the_chunks(models, count: int, chunk: int, ahead: bool) -> None:
    path = models["qwen2_moe"]
    engine = opened(path, count, prefetch="2" if ahead else "off")
    assert alike(answer(engine, chunk), answer(opened(path), chunk))


@pytest.mark.parametrize("name", ["olmoe", "gpt_oss", "qwen3_5_moe"])
def test_each_expert_is_read_as_often_as_it_is_not_there(models, expected, name: str) -> None:
    """And no other, also where it is computed of what is stored, or read before it is wanted."""
    engine = opened(models[name], 5)
    store, before = engine.holdings.store, engine.holdings.store.reader.bytes_read
    assert alike(answer(engine), expected[name])
    report = engine.run_report()["slots"]
    stored = {n: e.nbytes for header in store.files.headers for n, e in header.entries.items()}
    last = f".layers.{store.layer_count - 1}.mlp.experts."
    size = sum(stored[n] for n in stored if last in n and n.startswith("model")) // EXPERTS
    assert engine.holdings.slots.layers[-1].memory.read_bytes == size
    assert report["read"] == (report["wanted"] - report["hit"]) * size
    assert store.reader.bytes_read - before == report["read"]
    ahead = opened(models[name], 5, prefetch="1")
    assert alike(answer(ahead), expected[name])
    assert ahead.run_report()["slots"]["ahead"]


def test_layers_are_read_where_no_expert_is_known_to_be_alone(
    models, expected, monkeypatch
) -> None:
    """With a warning; one whose experts can be read alone has none."""
    told: list[str] = []
    assert alike(answer(opened(models["gpt_oss"], 5, notify=told.append)), expected["gpt_oss"])
    assert not told
    monkeypatch.setattr(Sanitizing, "by_row", lambda self, name: None)
    engine = opened(models["gpt_oss"], 5, prefetch="1", notify=told.append)
    assert alike(answer(engine), expected["gpt_oss"])
    (line,) = told
    assert line.startswith("warning: ") and "with all others of its layer" in line
    layer, report = engine.holdings.slots.layers[0], engine.run_report()["slots"]
    assert not report["ahead"] and layer.memory.read_bytes > 7 * layer.memory.expert_bytes // 2


def test_one_read_for_all_that_a_layer_misses(models, monkeypatch) -> None:
    """The threads are told once, however many experts are missing."""
    engine = opened(models["olmoe"], 5)
    answer(engine)
    told: list[int] = []
    request = reader.Reader.request
    monkeypatch.setattr(
        reader.Reader,
        "request",
        lambda self, jobs, *rest, **more: (
            told.append(len(jobs)) or request(self, jobs, *rest, **more)
        ),
    )
    state = ModelState(engine.new_cache())
    engine.consume(state, PROMPT[0])
    engine.consume(state, PROMPT[1])
    counted = engine.run_report()["slots"]
    assert told and len(told) <= 2 * len(engine.holdings.slots.layers) and counted["hit"]


def test_the_account_has_the_slots_and_nothing_else(models) -> None:
    whole, engine = opened(models["qwen2_moe"]), opened(models["qwen2_moe"], 3)
    layers = engine.holdings.slots.layers
    for made in (engine, whole):
        answer(made)
    of_experts = sum(layer.memory.expert_bytes for layer in layers)
    assert engine.ledger.of("experts") == 3 * of_experts and whole.ledger.of("experts") == 0
    assert whole.ledger.total() - engine.ledger.total() == (EXPERTS - 3) * of_experts
    stacks = [array for layer in layers for h in layer.switch.stacks for array in h.module.values()]
    assert sum(array.nbytes for array in stacks) == engine.ledger.of("experts")
    paths = [holding.path for layer in layers for holding in layer.switch.stacks]
    engine.holdings.change(dict.fromkeys(paths, ORIGINAL))
    assert engine.ledger.by_owner() == whole.ledger.by_owner() | {
        name: engine.ledger.of(name) for name in ("cache", "reading") if engine.ledger.of(name)
    }
    assert alike(answer(engine), answer(whole)) and not engine.holdings.slots.layers
    engine.holdings.change(dict.fromkeys(paths, ORIGINAL._replace(slots=4)))
    assert engine.ledger.of("experts") == 4 * of_experts
    assert alike(answer(engine), answer(whole))


def test_sizes_and_auto(models) -> None:
    path = models["qwen2_moe"]
    engine = opened(path, 3)
    size = sum(layer.memory.expert_bytes for layer in engine.holdings.slots.layers)
    assert opened(path, 4 * size).ledger.of("experts") == 4 * size
    assert opened(path, 5 * size - 1).ledger.of("experts") == 4 * size
    assert opened(path, EXPERTS * size).run_report()["slots"]["slots"] == EXPERTS
    whole = opened(path, "auto")  # there is room for all: none has to be fetched
    assert whole.ledger.of("experts") == 0 and not whole.holdings.slots.layers
    assert opened(path, 99).holdings.slots.layers == []
    store = open_store(path)
    for left, count in ((0, CHOSEN), (1 << 40, EXPERTS)):
        made = Engine(
            store, [SlotPolicy(SlotOptions(), room_for_experts(None, lambda left=left: left))],
            dtype="float32",
        )  # fmt: skip
        made.load()
        assert made.run_report()["slots"]["slots"] == count
        made.holdings.change(dict.fromkeys(made.holdings.modules, ORIGINAL))


def test_refusals(models, tmp_path: Path) -> None:
    for amount, message in (
        (1, "--expert-slots 1: .* needs 2 slots a layer at least"),
        (0, "--expert-slots 0: .* needs 2 slots a layer at least"),
        (1 << 10, "--expert-slots 1K: .* needs 1M at least"),
    ):
        with pytest.raises(UsageError, match=message):
            opened(models["qwen2_moe"], amount)
    with pytest.raises(UsageError, match="is a dense model: it has no experts"):
        opened(write_published(tmp_path / "llama", "llama"), 4)
    lists = {
        "model_type": "dbrx", "vocab_size": 4096, "d_model": 64, "n_layers": 1, "n_heads": 4,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    }  # fmt: skip
    with pytest.raises(UsageError, match="dbrx holds its experts otherwise than slots do"):
        opened(write_random(tmp_path / "dbrx", lists), 4)


def test_streamed_layers_keep_their_slots(models, expected) -> None:
    """A layer's attention comes and goes, its experts stay (L10)."""
    for options in (ResidencyOptions("layers", 0), ResidencyOptions("percent", 50)):
        engine = opened(models["qwen3_next"], 5, residency=options)
        assert alike(answer(engine), expected["qwen3_next"])
        layers = engine.holdings.slots.layers
        size = 5 * sum(layer.memory.expert_bytes for layer in layers)
        assert engine.ledger.of("experts") == size
        assert all(not h.form.away for layer in layers for h in layer.switch.stacks)
        assert engine.holdings.streams.layers and not engine.ledger.of("layer.1")
    policy = engine.residency
    assert policy is not None
    assert sum(policy.sizes.layers) + policy.sizes.outside == sum(
        engine.holdings.loaded.module_bytes(path) for path in engine.holdings.modules
    )


def test_a_budget_holds_layers_and_slots(models, expected) -> None:
    path = models["qwen3_next"]
    budget = opened(path, CHOSEN, residency=ResidencyOptions("layers", 0))
    assert budget.residency is not None
    size = budget.residency.least + (64 << 10)
    engine = opened(path, "auto", residency=ResidencyOptions("bytes", size))
    assert alike(answer(engine), expected["qwen3_next"])
    assert engine.ledger.total() <= size


@pytest.mark.parametrize(("gear", "by"), [("low", "dequant"), ("mid", "fused")])
def test_slots_hold_experts_in_a_gear(models, gear: str, by: str, tmp_path: Path) -> None:
    """Made as they are fetched, or as they were baked: then less is read."""
    path, options = models["qwen2_moe"], GearOptions(gear, "all", path=by)
    plain = answer(opened(path, gear_options=options), wish=Wish(gear))
    made = opened(path, 5, gear_options=options)
    assert alike(answer(made, wish=Wish(gear)), plain)
    file = baked(path, tmp_path / "baked.toast", gears=(gear,))
    stored = opened(file, 5, gear_options=options)
    assert alike(answer(stored, wish=Wish(gear)), plain)
    a, b, high = (
        engine.holdings.slots.layers[0].memory for engine in (made, stored, opened(path, 5))
    )
    assert not a.reads_all and not b.reads_all and a.expert_bytes == b.expert_bytes
    assert b.read_bytes < high.read_bytes * (0.4 if gear == "low" else 0.7)


def test_a_shift_empties_the_slots(models) -> None:
    options = GearOptions("auto", "all")
    engine = opened(models["olmoe"], 6, gear_options=options)
    whole = opened(models["olmoe"], gear_options=options)
    for gear in ("low", "high", "low"):
        assert alike(answer(engine, wish=Wish(gear)), answer(whole, wish=Wish(gear)))
        assert {layer.table.slots for layer in engine.holdings.slots.layers} == {6}


def test_more_slots_of_as_many_bytes_in_a_low_gear(models) -> None:
    path = models["qwen2_moe"]
    layers = opened(path, 2).holdings.slots.layers
    size = 2 * sum(layer.memory.expert_bytes for layer in layers)
    engine = opened(path, size, gear_options=GearOptions("low", "all"))
    before = engine.holdings.slots.layers[0].table.slots
    engine.shift("low")
    layers = engine.holdings.slots.layers
    assert before == 2 and (not layers or layers[0].table.slots > 4)
    assert engine.ledger.of("experts") <= size


def test_rows_of_a_batch(models) -> None:
    engine, whole = opened(models["qwen2_moe"], 3), opened(models["qwen2_moe"])
    found = []
    for made in (engine, whole):
        states, batch = [read(made, PROMPT[:n]) for n in (6, 9, 12)], Batch(made)
        batch.join(states)
        for token in (3, 4):
            batch.step([token, token + 1, token + 2])
        found.append([state.logits for state in states])
    assert alike(*found)


def test_a_device_whose_memory_is_its_own(models, expected, monkeypatch) -> None:
    """Experts are read into the host's memory, and from there into their slots."""
    for module in (slot_memory, reader):
        monkeypatch.setattr(module, "host_writes", lambda: False)
    for name in ("qwen3_moe_quantised", "gpt_oss"):
        assert alike(answer(opened(models[name], 3)), expected[name])


def test_steps_say_what_they_wanted(models) -> None:
    """And not what prompts did before them: their own, or another's."""
    engine = opened(models["olmoe"], 3)
    state = ModelState(engine.new_cache())
    engine.consume(state, 5)
    wanted = len(engine.holdings.slots.layers) * CHOSEN
    assert state.experts == {"wanted": wanted, "hit": 0}
    engine.consume(state, 5)
    assert state.experts["wanted"] == wanted and state.experts["hit"] > 0
    batch = Batch(engine)
    batch.join([state, read(engine, PROMPT)])
    batch.step([5, 5])  # of the same token, in which both may want the same
    assert wanted <= batch.members[0].experts["wanted"] <= 2 * wanted
    state = read(engine, PROMPT)
    engine.consume(state, 5)
    assert state.experts["wanted"] == wanted
    whole = opened(models["olmoe"])
    state = ModelState(whole.new_cache())
    whole.consume(state, 5)
    assert state.experts is None


def test_two_states_in_turn(models, expected) -> None:
    """What one has computed of slots, and nobody evaluated, is not spoilt by the other's."""
    engine = opened(models["qwen2_moe"], CHOSEN)
    states = [read(engine, PROMPT) for _ in range(2)]
    found: list[list] = [[state.logits] for state in states]
    for a, b in zip(NEXT, reversed(NEXT)):
        for state, token, told in zip(states, (a, b), found):
            engine.consume(state, token)
            told.append(state.logits)
    assert alike(found[0], expected["qwen2_moe"])
