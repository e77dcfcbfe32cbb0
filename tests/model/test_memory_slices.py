"""A state that is written to disk in slices, between which others take their steps."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ChunkedKVCache, KVCache

from tests.model.service_driver import Driver, Engines, user, words
from tests.model.test_memory_disk import BOOK, HYBRID, LONG, Chat, directories
from toastkit.daemon import spill
from toastkit.session.caches import describe, first_rows, in_slices
from toastkit.session.directory import Session

pytestmark = pytest.mark.usefixtures("homes")
NAMES = ("llama", "gemma3_text", "falcon_h1", HYBRID)


@pytest.fixture(params=NAMES)
def name(request, monkeypatch) -> str:
    monkeypatch.setattr(spill, "SLICE_BYTES", 1 << 10)
    return request.param


def test_only_what_can_be_cut_back_is_written_in_slices() -> None:
    caches = [KVCache(), ChunkedKVCache(64)]
    for layer in caches:
        layer.update_and_fetch(*mx.zeros((2, 1, 2, 40, 8)))
    kv, chunks = describe(caches)
    assert list(in_slices([kv], 40, 1280)) == [10, 20, 30]
    assert first_rows(kv, 10).settings["offset"] == 10
    assert not list(in_slices([kv, chunks], 40, 1280)) and not list(in_slices([kv], 41, 1280))


def writing(driver: Driver) -> bool:
    """Whether a state is half on disk."""
    return driver.service.memory._writing is not None


def written(driver: Driver, chat: Chat, question: str | None = None) -> None:
    """Asks, and returns in the midst of writing the answer's state."""
    if question is not None:
        chat.messages.append(user(question))
    asked = driver.start(chat.messages, max_tokens=4)
    driver.finish(asked)
    for _ in range(3):
        driver.service.turn()
    assert writing(driver)
    if question is not None:
        chat.messages.pop()


def test_others_step_between_two_slices(engines: Engines, name: str) -> None:
    driver, chat = Driver(engines(name)[0]), Chat(engines, name, LONG)
    other = driver.start("Why?", max_tokens=100, ignore_eos=True)
    driver.turns_until_told(other, 2)
    asked = driver.start(chat.messages, max_tokens=4)
    driver.turns_until(lambda: writing(driver))
    slices = 0
    while writing(driver):
        told = len(other.ids)
        driver.service.turn()
        slices += 1
        assert len(other.ids) == told + 1
    assert slices > 3 and asked.over
    other.channel.gone = True
    driver.finish()
    driver.restart()
    (kept,) = (kept for kept in driver.kept if len(kept.tokens) > 40)
    assert kept.saved and kept.tokens.tolist()[: len(asked.prompt)] == asked.prompt
    chat.messages.append({"role": "assistant", "content": asked.text})
    again = driver.ask([*chat.messages, user("Bye.")], max_tokens=4)
    assert again.cached >= asked.points[-1] if asked.points else again.cached > 40
    assert again.answer == chat.plain.answer([*chat.messages, user("Bye.")], max_tokens=4)


def test_a_daemon_that_dies_meanwhile_leaves_the_last_turn(engines: Engines, name: str) -> None:
    driver, chat = Driver(engines(name)[0]), Chat(engines, name, LONG)
    chat.ask(driver)
    written(driver, chat, LONG)
    driver.service.memory._writing = None  # the system unlocks what a dead process has locked
    driver.restart()
    chat.goes_on(driver)
    driver.restart()
    chat.goes_on(driver)


def test_a_turn_that_comes_meanwhile_is_what_is_kept(
    engines: Engines, homes: Path, name: str
) -> None:
    """Nothing is left of what was given up; and no write meets another's lock."""
    for cache_bytes in (2 << 30, 0):
        driver, chat = Driver(engines(name)[0], cache_bytes=cache_bytes), Chat(engines, name, LONG)
        chat.messages[0]["content"] += str(cache_bytes)
        asked = driver.start(chat.messages, max_tokens=4, **words(driver))
        driver.finish(asked)
        if cache_bytes:
            driver.service.turn()
            driver.service.turn()
        assert writing(driver) == bool(cache_bytes)
        chat.messages.append({"role": "assistant", "content": asked.text})
        chat.ask(driver, LONG)
        kept = driver.kept[-1]
        assert kept.saved and not driver.said
        driver.restart()
        chat.goes_on(driver)
    assert len(directories(homes)) == len(driver.kept) == 2


def test_the_end_of_the_daemon_waits_for_it(engines: Engines, name: str, homes: Path) -> None:
    driver, chat = Driver(engines(name)[0]), Chat(engines, name, BOOK)
    written(driver, chat)
    assert not [path for path in directories(homes) if (path / "session.msgpack").exists()]
    driver.service.save_all()
    (path,) = directories(homes)
    with Session.open(path, None, create=False, write=False) as session:
        assert session.tokens == driver.kept[0].tokens.tolist()


def test_a_disk_that_is_full_by_then(engines: Engines, monkeypatch, name: str) -> None:
    """Is told as ever, once the slices are through, and leaves nothing behind."""
    driver, chat = Driver(engines(name)[0]), Chat(engines, name, LONG)
    written(driver, chat)

    def full(*arguments, **settings):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("toastkit.session.blocks.pwrite_all", full)
        driver.finish()
    (line,) = driver.said
    assert "no space left on device" in line and not driver.kept[0].saved
    driver.service.save_all()
    assert driver.kept[0].saved
