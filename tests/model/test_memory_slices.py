"""A state that is written to disk in slices, between which others take their steps."""

from __future__ import annotations

import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ChunkedKVCache, KVCache, RotatingKVCache

from tests.model.service_driver import Driver, Engines, user, words
from tests.model.test_memory_disk import BOOK, HYBRID, LONG, Chat, directories
from toastkit.daemon import spill
from toastkit.session.blocks import PIECE_BYTES
from toastkit.session.directory import Session
from toastkit.session.savepoints import Savepoint

pytestmark = pytest.mark.usefixtures("homes")
NAMES = ("llama", "gemma3_text", "falcon_h1", HYBRID)


@pytest.fixture(params=NAMES)
def name(request, monkeypatch) -> str:
    monkeypatch.setattr(spill, "SLICE_BYTES", 1 << 10)
    return request.param


def test_what_is_written_at_once(tmp_path: Path) -> None:
    """Every kind of layer and of savepoint is committed in pieces, a window as one, and comes back
    as if there had been none; a commit that is given up changes nothing."""
    caches = [KVCache(), ChunkedKVCache(3000), RotatingKVCache(700)]
    for layer in caches:
        layer.update_and_fetch(*mx.random.normal((2, 1, 8, 1999, 64)))
        layer.update_and_fetch(*mx.random.normal((2, 1, 8, 1, 64)))
    tokens, points = list(range(2000)), [Savepoint(1990, [None, None, caches[2]])]
    with Session.open(tmp_path / "session", "f") as session:
        given_up = session.commit_in_pieces(tokens, caches, None, points)
        assert next(given_up) <= PIECE_BYTES
        given_up.close()
        assert session.generation == 0
        pieces = list(session.commit_in_pieces(tokens, caches, None, points))
        assert max(pieces) <= PIECE_BYTES and len(pieces) == 2 * (2 + 2 + 1 + 1)
        assert session.savepoints == [1990]
        fresh = [KVCache(), ChunkedKVCache(3000), RotatingKVCache(700)]
        for old, new in zip(caches, session.restore(2000, lambda: fresh)):
            for a, b in zip(old.state, new.state):
                assert mx.array_equal(a, b)


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


def test_a_directory_that_another_process_removes_meanwhile(
    engines: Engines, homes: Path, name: str
) -> None:
    """As another daemon does whose budget is spent. It is no failure: there is another place."""
    driver, chat = Driver(engines(name)[0]), Chat(engines, name, LONG)
    chat.ask(driver)
    (path,) = directories(homes)
    written(driver, chat, LONG)
    shutil.rmtree(path)
    driver.finish()
    (kept,) = driver.kept
    assert not driver.said and kept.saved and [kept.path] == directories(homes)
    with Session.open(kept.path, None, create=False, write=False) as session:
        assert session.tokens == kept.tokens.tolist()


def test_what_waits_behind_it_is_held_no_longer_than_it_is_kept(
    engines: Engines, monkeypatch, name: str
) -> None:
    """A turn that the next one replaces leaves the queue too: its caches are in nobody's budget."""
    driver, chat = Driver(engines(name)[0]), Chat(engines, name, "Hi.")
    written(driver, Chat(engines, name, BOOK))
    memory = driver.service.memory
    with monkeypatch.context() as patch:
        patch.setattr(memory, "write_some", lambda: None)  # it takes long
        for question in (None, "Why?", "And then?"):
            if question is not None:
                chat.messages.append(user(question))
            asked = driver.start(chat.messages, max_tokens=1, **words(driver))
            driver.finish(asked)
            chat.messages.append({"role": "assistant", "content": asked.text})
            assert writing(driver) and len(memory.kept) == 2
            assert list(memory.unsaved) == memory.kept
    driver.finish()
    assert all(kept.saved for kept in driver.kept)


def test_a_named_session_waits_for_nothing(
    engines: Engines, monkeypatch, name: str, tmp_path: Path
) -> None:
    """It is on disk already, and its caches go when it does."""
    driver = Driver(engines(name)[0])
    written(driver, Chat(engines, name, BOOK))
    monkeypatch.setattr(driver.service.memory, "write_some", lambda: None)
    driver.finish(driver.start([user("Hi.")], session=tmp_path / "own", max_tokens=1))
    assert len(driver.kept) == 2
    assert [kept.own for kept in driver.service.memory.unsaved] == [False]
