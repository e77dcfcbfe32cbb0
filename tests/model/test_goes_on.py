"""A daemon goes on: what fails ends one conversation, with an answer, and no other."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.model.checkpoints import open_model
from tests.model.service_driver import Driver, Engines, Plain
from tests.model.test_scheduler import LONG_CONTEXT, PROMPTS, SEEDED, joined, same
from tests.model.worker_driver import PROMPT, answer_of, done
from tests.unit.daemon_front import eventually
from toastkit.daemon import stepper as stepper_module
from toastkit.daemon import worker
from toastkit.daemon.prepare import Preparer
from toastkit.daemon.service import Service
from toastkit.daemon.spill import CachedState, Spill
from toastkit.engine.batch import Batch, can_batch
from toastkit.engine.engine import Engine
from toastkit.engine.policy_options import PolicyOptions
from toastkit.model.config import fingerprint
from toastkit.model.locate import locate
from toastkit.residency.residency_options import ResidencyOptions
from toastkit.store.ledger import CACHE

pytestmark = pytest.mark.usefixtures("homes")


@pytest.fixture
def llama(engines: Engines) -> tuple[Any, Plain]:
    return engines("llama", **LONG_CONTEXT)


# ---------------------------------------------------------------------------------- the service


def steps_fail(patch: pytest.MonkeyPatch, engine: Any, when: Callable[[int], bool]) -> list[int]:
    """Has steps of batches fail in their middle, with the caches changed, where when(n) says so of
    the n-th; which did."""
    failed: list[int] = []
    count, step_rows = itertools.count(1), engine.step_rows

    def fails(ids: Any, cache: list) -> Any:
        logits = step_rows(ids, cache)
        if len(ids) > 1 and when(n := next(count)):
            failed.append(n)
            raise RuntimeError("no memory left")
        return logits

    patch.setattr(engine, "step_rows", fails)
    return failed


@pytest.mark.parametrize("sampling", [{}, SEEDED], ids=["greedy", "seeded"])
def test_a_batch_that_fails_costs_nobody_an_answer(llama, monkeypatch, sampling: dict) -> None:
    engine, plain = llama
    together = can_batch(engine)
    monkeypatch.setattr(stepper_module, "FIRST_ROUNDS", 2)
    driver = Driver(engine)
    failed = steps_fail(monkeypatch, engine, lambda n: n in (6, 9))
    asked = [driver.start(prompt, max_tokens=20, **sampling) for prompt in PROMPTS[:3]]
    driver.turns_until(lambda: len(failed) == (2 if together else 0))
    sizes = set()
    while not all(one.over for one in asked):
        driver.service.turn()
        sizes |= set(joined(driver))
    assert not together or 3 in sizes  # they try again
    monkeypatch.undo()
    driver.finish()
    for one, prompt in zip(asked, PROMPTS):
        same(one, plain, prompt, max_tokens=20, **sampling)
    same(driver.ask(PROMPTS[1], **sampling), plain, PROMPTS[1], **sampling)
    assert engine.ledger.of(CACHE) == 0 and not joined(driver) and not driver.said


@pytest.mark.parametrize("batch", [8, 1])
def test_a_step_that_fails_ends_its_conversation(llama, monkeypatch, batch: int) -> None:
    """In a batch, where it takes the others' with it, they are each tried alone."""
    engine, plain = llama
    driver = Driver(engine, batch=batch)
    asked = [driver.start(prompt, max_tokens=9) for prompt in PROMPTS[:3]]
    driver.turns_until(lambda: len(asked[2].ids) == 3)
    bad, consume = asked[1].conversation.runs.state, Engine.consume

    def fails(engine: Engine, state: Any, *arguments: Any) -> None:
        if state is bad:
            raise RuntimeError("no such row")
        consume(engine, state, *arguments)

    monkeypatch.setattr(Engine, "consume", fails)
    steps_fail(monkeypatch, engine, lambda n: True)
    driver.finish()
    assert asked[1].error["message"] == "bug: RuntimeError: no such row"
    for n in (0, 2):
        same(asked[n], plain, PROMPTS[n], max_tokens=9)
    assert driver.said == ["bug: RuntimeError: no such row"]
    assert engine.ledger.of(CACHE) == 0 and not joined(driver) and not driver.service.active


def test_one_that_leaves_a_broken_batch(llama, monkeypatch) -> None:
    engine, plain = llama
    driver = Driver(engine)
    counts = (12, 5, 9)
    asked = [driver.start("Why?", max_tokens=n) for n in counts]
    driver.turns_until(lambda: len(asked[2].ids) == 3)

    def fails(batch: Batch, states: Any) -> None:
        for state in states:
            state.cache = [None]
        raise RuntimeError("no such row")

    monkeypatch.setattr(Batch, "leave", fails)
    driver.finish()
    for one, count in zip(asked, counts):
        same(one, plain, "Why?", max_tokens=count)
    assert all(None not in kept.cache for kept in driver.kept)


def test_batching_is_tried_again_after_a_failure(llama, monkeypatch) -> None:
    engine, plain = llama
    if not can_batch(engine):
        pytest.skip("an old mlx_lm")
    verdicts, tried = iter([None, None, True]), []

    def tries(engine: Engine, apart: bool = False) -> bool | None:
        tried.append(len(asked[0].ids))
        return next(verdicts)

    monkeypatch.setattr(stepper_module, "can_batch", tries)
    monkeypatch.setattr(stepper_module, "FIRST_ROUNDS", 2)
    driver = Driver(engine)
    asked = [driver.start(prompt, max_tokens=14) for prompt in PROMPTS[:2]]
    driver.turns_until(lambda: bool(joined(driver)))
    assert [after - before for before, after in zip(tried, tried[1:])] == [2 + 1, 4 + 1]
    driver.finish()
    for one, prompt in zip(asked, PROMPTS):
        same(one, plain, prompt, max_tokens=14)


def test_a_round_that_fails_ends_those_in_it(llama, monkeypatch) -> None:
    engine, plain = llama
    driver = Driver(engine)
    asked = [driver.start(prompt) for prompt in PROMPTS[:2]]

    def fails(service: Service) -> None:
        raise RuntimeError("no such round")

    with monkeypatch.context() as patch:
        patch.setattr(Service, "_read", lambda service, readers: fails(service))
        driver.finish()
    assert [one.error["message"] for one in asked] == ["bug: RuntimeError: no such round"] * 2
    same(driver.ask(PROMPTS[0]), plain, PROMPTS[0])


# ----------------------------------------------------------------------------------- the worker


class Panic(BaseException):
    """As pyo3's: of no class that is expected."""


@pytest.mark.parametrize("where", ["prepare", "begin", "probe", "reload"])
def test_what_fails_unexpectedly_is_answered(start, plain: Plain, monkeypatch, where: str) -> None:
    """Nobody waits for ever, no place is lost, and the others go on."""
    running = start(max_queue=2)
    kind = Panic if where == "prepare" else RuntimeError

    def fails(*arguments: Any) -> None:
        raise kind("a surprise")

    owner = {"prepare": Preparer, "reload": worker}.get(where, Service)
    with monkeypatch.context() as patch:
        patch.setattr(owner, "current_model" if where == "reload" else where, fails)
        if where == "reload":
            running.worker.reload()
            eventually(lambda: running.said)
            assert running.said == [f"cannot reload: bug: {kind.__name__}: a surprise"]
        for _ in range(3 * (where != "reload")):
            channel = running.submit(op="health") if where == "probe" else running.ask()
            done(channel)
            assert channel.one("error")["message"] == f"bug: {kind.__name__}: a surprise"
    assert running.answer() == plain.answer(PROMPT)
    running.worker.drain()
    eventually(running.worker.idle)


def test_a_panic_of_the_tokenizer_is_answered(start, model: Path) -> None:
    document = json.loads((model / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}
    steps = [{**split, "invert": False}, document["pre_tokenizer"]]
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    (model / "tokenizer.json").write_text(json.dumps(document))
    running = start()
    channel = running.ask("a" * 38 + "b")
    done(channel)
    error = channel.one("error")
    assert error["code"] == 65 and "Regex search error" in error["message"]
    done(running.ask("ab"))
    running.worker.drain()
    eventually(running.worker.idle)


def test_a_long_prompt_holds_nobody_up(start) -> None:
    """The other's answer comes first, and what cannot fit is refused unread."""
    running = start()
    long = running.ask("y\n" * 3_000_000)
    done(long, running.ask(), running.submit(op="health"))
    assert "characters" in long.one("error")["message"]


def test_a_thread_that_dies_saves_what_it_can(start, monkeypatch, plain: Plain) -> None:
    running = start()
    writes: list[CachedState] = []

    def full(spill: Spill, kept: CachedState) -> Generator[None, None, bool]:
        writes.append(kept)
        return False
        yield

    monkeypatch.setattr(Spill, "write", full)
    running.answer()
    eventually(lambda: writes)
    tried = len(writes)

    def fails(service: Service) -> None:
        raise RuntimeError("the device has gone")

    monkeypatch.setattr(Service, "turn", fails)
    running.ask()
    eventually(lambda: running.worker.failure is not None and len(writes) > tried)


# ------------------------------------------------------------------------------ what has changed


def test_a_model_that_becomes_another_while_it_rests(start, model: Path) -> None:
    """It is taken as it is now, its fingerprint and what is remembered with it."""
    running = start(idle_unload=0.05)
    running.answer()
    eventually(lambda: not running.worker.status()["loaded"])
    path = model / "model-00001-of-00002.safetensors"
    weights = mx.load(str(path))
    turned = {name: -w if name.endswith("down_proj.weight") else w for name, w in weights.items()}
    mx.save_safetensors(str(model / "new.safetensors"), turned)
    os.replace(model / "new.safetensors", path)
    channel = running.ask()
    done(channel)
    expected = Plain(open_model(model)).answer(PROMPT)
    assert answer_of(channel) == expected and channel.one("stats")["cached"] == 0
    assert running.worker.status()["fingerprint"] == fingerprint(locate(str(model)))
    assert running.said == []


def test_files_that_are_others_with_the_same_bytes(start, model: Path) -> None:
    """Layers that are read from them are taken from where they lie now. Who goes on is not told
    what the bytes were."""
    running = start(policies=PolicyOptions(residency=ResidencyOptions("layers", 0)))
    answer = running.answer()
    long = running.ask(max_tokens=200, ignore_eos=True)
    eventually(lambda: long.all_of("token"))
    for path in model.glob("*.safetensors"):
        path.touch()
    done(long)
    assert "have changed" in long.one("error")["message"]
    assert running.answer() == answer and running.said[-1] == f"reloaded {model}"


def test_a_session_of_which_nothing_is_to_be_kept(start, tmp_path: Path) -> None:
    """It goes on in its files alone; what was kept of it before is of no use any more."""
    running = start()
    for keep, kept in ((True, 1), (False, 0)):
        session = {"session": str(tmp_path / "session"), "keep": keep}
        channel = running.submit(prompt=PROMPT, options={"max_tokens": 8}, **session)
        done(channel)
        assert "end" in channel.replies[-1]
        eventually(lambda n=kept: running.worker.status()["conversations"]["kept"] == n)


def test_who_was_there_and_got_nothing_is_in_the_audit(start) -> None:
    running = start(parallel=1)
    first = running.hold(50)
    waits, leaves = running.ask(), running.ask()
    eventually(lambda: not running.worker.preparing)
    leaves.gone = True
    running.worker.drain()
    for channel in (waits, leaves, first):
        done(channel)
    eventually(lambda: len(running.audit.records) == 3)
    told = [record.get("error") for record, _ in running.audit.records]
    assert told == ["the daemon is shutting down"] * 2 + [None]


def test_what_attaches_is_in_the_audit_once(start) -> None:
    running = start()
    wanted = {"fingerprint": running.worker.status()["fingerprint"], "device": "cpu",
              "dtype": "float32", "kv_bits": None}  # fmt: skip
    attached = running.submit(op="attach", **wanted)
    done(attached, running.submit(op="commit"))
    assert attached.one("error") is None
    assert [record["op"] for record, _ in running.audit.records] == ["attach"]
