"""Prompts with a long common prefix that come at the same time: it is read once."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.model.service_driver import Asked, Driver, Engines, common, system, user
from toastkit.daemon import spill
from toastkit.daemon.scheduled_runs import MIN_APART
from toastkit.engine.engine import Engine
from toastkit.errors import DataError
from toastkit.store.ledger import CACHE, SESSIONS

pytestmark = pytest.mark.usefixtures("homes")
CHUNK = 50
BOOK = "The bear went to the river, and the owl sat in the old tree. " * 24
OTHER = "A little house stood by the water, and there lived a friend of the fox. " * 20
SAMPLINGS = ({}, {"temperature": 0.9, "seed": 5}, {"max_tokens": 3})
# Attention alone, a window that slides, recurrent layers beside attention, and alone.
NAMES = ("llama", "gemma3_text", "qwen3_next", "mamba2")


@pytest.fixture(params=NAMES)
def name(request) -> str:
    return request.param


def driver_of(engines: Engines, name: str, **settings: Any) -> Driver:
    return Driver(engines(name, max_position_embeddings=4096)[0], chunk=CHUNK, **settings)


def same(engines: Engines, name: str, asked: Asked, what: Any, **options: Any) -> None:
    """The answer is the one that it would be alone."""
    plain = engines(name, max_position_embeddings=4096)[1]
    assert asked.answer == plain.answer(what, **options)


def new(asked: Asked) -> int:
    """Tokens of the prompt that were read for it."""
    return asked.stats["prompt"] - asked.cached


def test_one_prompt_of_several(engines: Engines, name: str) -> None:
    driver, prompt = driver_of(engines, name), [user(BOOK)]
    asked = [driver.start(prompt, **sampling) for sampling in SAMPLINGS]
    driver.finish()
    for one, sampling in zip(asked, SAMPLINGS):
        same(engines, name, one, prompt, **sampling)
    assert new(asked[0]) == len(asked[0].prompt) > 6 * CHUNK
    assert all(new(one) < MIN_APART for one in asked[1:])
    done = [[x["done"] for x in one.channel.all_of("progress")] for one in asked]
    assert done[2][0] > 0 and all(counts == sorted(counts) for counts in done)
    assert driver.engine.ledger.of(CACHE) == 0
    assert driver.engine.ledger.of(SESSIONS) == sum(kept.nbytes for kept in driver.kept)


def test_one_document_and_several_questions(engines: Engines, name: str) -> None:
    """That come while it is read; its savepoint serves those that come later, too."""
    driver = driver_of(engines, name)
    prompts = [[system(BOOK), user(q)] for q in (OTHER, "Why? " + OTHER, "Who are you?", "Where?")]
    asked = [driver.start(prompts[0])]
    driver.turns_until(lambda: asked[0].read >= 2 * CHUNK)
    asked += [driver.start(prompt) for prompt in prompts[1:3]]
    driver.finish()
    asked.append(driver.ask(prompts[3]))
    apart = min(common(asked[0].prompt, one.prompt) for one in asked[1:])
    assert apart > 5 * CHUNK
    for one, prompt in zip(asked, prompts):
        same(engines, name, one, prompt)
        assert one is asked[0] or one.cached > apart - MIN_APART


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_texts_that_part_in_mid_message(engines: Engines, name: str) -> None:
    """At a position that is no turn's end a pass ends for them, where they have waited for it."""
    driver, prompts = driver_of(engines, name), [[user(BOOK + OTHER)], [user(BOOK * 2)]]
    first, second = (driver.start(prompt) for prompt in prompts)
    driver.finish()
    apart = common(first.prompt, second.prompt)
    assert apart - MIN_APART < second.cached <= apart < len(first.prompt) - CHUNK
    for one, prompt in zip((first, second), prompts):
        same(engines, name, one, prompt)


def test_who_is_waited_for_hangs_up(engines: Engines, name: str) -> None:
    """The others go on from what it has read; so does the third when the second leaves."""
    driver, prompt = driver_of(engines, name), [user(BOOK + OTHER)]
    asked = [driver.start(prompt) for _ in range(3)]
    driver.turns_until(lambda: asked[0].read >= 6 * CHUNK)
    assert not asked[1].read and not asked[2].read
    asked[0].channel.gone = True
    driver.turns_until(lambda: asked[1].read > 0)
    assert asked[1].conversation.runs.cached >= 6 * CHUNK
    asked[1].channel.gone = True
    driver.finish()
    same(engines, name, asked[2], prompt)
    assert asked[2].cached >= 6 * CHUNK


def test_who_is_waited_for_fails(engines: Engines, monkeypatch) -> None:
    driver, prompt = driver_of(engines, "llama"), [user(BOOK)]
    first, second = driver.start(prompt), driver.start(prompt)
    driver.turns_until(lambda: first.read >= 2 * CHUNK)
    run, failures = Engine._run, [DataError("its files have changed")]
    with monkeypatch.context() as patch:
        patch.setattr(
            Engine, "_run", lambda *a: run(*a) if not failures else _raised(failures.pop())
        )
        driver.finish()
    assert first.error is not None and second.error is None
    same(engines, "llama", second, prompt)


def _raised(error: Exception) -> None:
    raise error


def test_nothing_of_what_is_not_to_be_kept(engines: Engines) -> None:
    driver, prompt = driver_of(engines, "llama"), [user(BOOK)]
    asked = [driver.start(prompt, keep=False), driver.start(prompt), driver.start(prompt)]
    driver.finish()
    assert asked[0].cached == asked[1].cached == 0 and new(asked[2]) < MIN_APART
    for one in asked:
        same(engines, "llama", one, prompt)


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_others_get_their_turns(engines: Engines, name: str) -> None:
    """Three that read the same take three of four turns, and the other one the fourth."""
    driver = driver_of(engines, name)
    asked = [driver.start([user(BOOK)]) for _ in range(3)]
    other = driver.start([user(OTHER)])
    while all(one.conversation.reading for one in (asked[0], other)):
        before = other.read
        for _ in range(4):
            driver.service.turn()
        assert other.read > before
    driver.finish()
    same(engines, name, other, [user(OTHER)])


def test_one_of_more_importance_waits_for_one_of_less(engines: Engines) -> None:
    """Which reads in its place, before those of more than its own."""
    driver, prompt = driver_of(engines, "qwen3_next"), [user(BOOK)]
    low = driver.start(prompt, priority=-1)
    driver.service.turn()
    between = driver.start([user(OTHER)])
    driver.service.turn()
    held = between.read
    assert low.read and held
    high = driver.start(prompt, priority=1)
    driver.turns_until(lambda: high.read > 0)
    assert between.read == held and high.conversation.runs.cached > len(high.prompt) - MIN_APART
    driver.finish()
    assert low.answer == high.answer
    same(engines, "qwen3_next", high, prompt)


def test_who_knows_more_does_not_wait(engines: Engines, tmp_path) -> None:
    """Of a state that is kept, or of its own session, for one that is behind that."""
    driver, prompt = driver_of(engines, "llama", spill_bytes=0), [user(BOOK)]
    driver.ask(prompt, session=tmp_path / "own")
    for session in (None, tmp_path / "own"):
        reader = driver.start([user(BOOK + OTHER)])
        kept, driver.service.memory.kept = driver.kept, []
        driver.service.turn()
        assert 0 < reader.read <= CHUNK
        driver.service.memory.kept = kept if session is None else []
        asked = driver.start([*prompt, user("Why?")], session=session)
        driver.service.turn()
        assert asked.conversation.runs.cached > 4 * CHUNK
        for one in (reader, asked):
            one.channel.gone = True
        driver.finish()
        driver.service.memory.kept = kept


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_whoever_comes_and_goes(engines: Engines, monkeypatch, tmp_path, name, seed: int) -> None:
    """In whatever order: all who stay are answered, as if each were alone."""
    monkeypatch.setattr(spill, "SLICE_BYTES", 1 << 12)
    draw = random.Random(seed)
    cache_bytes = draw.choice([0, 200_000, 2 << 30])
    driver = driver_of(engines, name, cache_bytes=cache_bytes)
    texts = [BOOK[: 61 * n] + end for n in (6, 24) for end in ("", OTHER[:300])]
    asked: list[tuple[Asked, list]] = []
    for number in range(12):
        prompt = [system(BOOK[:610])] * draw.randrange(2) + [user(draw.choice(texts))]
        session = None if draw.random() < 0.8 else tmp_path / str(number)
        settings = {"keep": draw.random() < 0.8, "priority": draw.randrange(2), "session": session}
        asked.append((driver.start(prompt, **settings), prompt))
        for _ in range(draw.choice([0, 1, 8])):
            driver.service.turn()
        leaves = draw.choice(asked)[0]
        leaves.channel.gone |= not leaves.over and draw.random() < 0.35
    driver.finish()
    for one, prompt in asked:
        if not one.channel.gone:
            same(engines, name, one, prompt)
    assert driver.engine.ledger.of(CACHE) == 0 and not driver.said
