"""What is remembered under budgets and across restarts: nothing wrong ever comes back from disk."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.model.service_driver import (
    THINKING,
    Asked,
    Driver,
    Engines,
    assistant,
    system,
    usable,
    user,
    words,
)
from toastkit.daemon import spill
from toastkit.daemon.conversation import WORTH_KEEPING
from toastkit.engine.engine import Engine
from toastkit.session.directory import Session
from toastkit.store.ledger import CACHE, SESSIONS

pytestmark = pytest.mark.usefixtures("homes")
LONG = "The bear went to the river, and the owl sat in the old tree. " * 3 + "What then?"
BOOK = "Once there was a bear. He lived in a house by the river, and he had a little friend. " * 20
NAMES = ("llama", "gemma3_text", "mamba2", "falcon_h1")  # and HYBRID
HYBRID = "qwen3_5"
MODEL = "0123456789abcdef" * 4  # a fingerprint


class Chat:
    """A conversation in words. Every answer is compared with the one without a cache."""

    def __init__(self, engines: Engines, name: str, first: str):
        self.plain = engines(name)[1]
        self.messages = [system("You are a bear."), user(first)]
        self.held = 0  # tokens that were kept of it last

    def ask(self, driver: Driver, question: str | None = None, **settings):
        """Answers the last message; question: one more of them."""
        if question is not None:
            self.messages.append(user(question))
        options = {"max_tokens": 4, **words(driver)}
        asked = driver.ask(self.messages, **options, **settings)
        assert asked.answer == self.plain.answer(self.messages, **options)
        self.messages.append(assistant(asked.text))
        self.held = len(asked.prompt) + len(asked.ids) - 1  # the last one was not run
        return asked

    def goes_on(self, driver: Driver, question: str | None = "Why?") -> Asked:
        """Asks, and all that was kept of it last is used."""
        held = self.held
        asked = self.ask(driver, question)
        assert asked.cached == held
        return asked


def directories(homes: Path) -> list[Path]:
    """Those of all conversations on disk."""
    return sorted(path for path in homes.glob("*/*") if path.is_dir())


# ----------------------------------------------------------------------------------------- budgets


@pytest.mark.parametrize("name", ["llama", HYBRID])
def test_the_longest_unused_leaves_and_comes_back(engines: Engines, name: str) -> None:
    engine, _ = engines(name)
    chats = [Chat(engines, name, f"{n} {LONG}") for n in range(3)]
    driver = Driver(engine)
    chats[0].ask(driver)
    size = engine.ledger.of(SESSIONS)
    driver = Driver(engine, cache_bytes=int(2.5 * size))
    chats[0].messages.pop()
    for chat in chats:
        chat.ask(driver)
        assert 0 < engine.ledger.of(SESSIONS) <= 2.5 * size
    assert [kept.cache is None for kept in driver.kept] == [True, False, False]
    assert all(kept.nbytes == 0 for kept in driver.kept if kept.cache is None)
    asked = chats[1].goes_on(driver)  # now the third is the longest unused
    assert engine.ledger.of(SESSIONS) <= 2.5 * size
    asked = chats[0].goes_on(driver)
    assert asked.why == "the rest is new"
    summary = driver.service.memory.summary()
    assert (summary["kept"], summary["in_memory"], summary["on_disk"]) == (3, 2, 3)
    assert [kept.cache is None for kept in driver.kept] == [True, False, False]
    chats[2].goes_on(driver)


def test_what_was_branched_off_is_not_the_longest_unused(engines: Engines) -> None:
    engine, _ = engines("llama")
    first, other, branch = (Chat(engines, "llama", f"{n} {LONG}") for n in (0, 1, "0"))
    branch.messages[-1] = user(f"0 {LONG} Why?")
    driver = Driver(engine)
    first.ask(driver)
    size = engine.ledger.of(SESSIONS)
    driver = Driver(engine, cache_bytes=int(2.5 * size))
    first.messages.pop()
    for chat in (first, other, branch):
        asked = chat.ask(driver)
    assert asked.cached > 40
    assert [kept.cache is None for kept in driver.kept] == [False, True, False]


@pytest.mark.parametrize("name", ["llama", HYBRID])
def test_a_turn_takes_the_memory_of_the_one_before(engines: Engines, name: str) -> None:
    """Two that held the same keys and values would copy them all. Who gives up loses nothing, and
    what is on no disk stays where it is."""
    for spill_bytes in (8 << 30, 0):
        chat, driver = Chat(engines, name, LONG), Driver(engines(name)[0], spill_bytes=spill_bytes)
        chat.ask(driver)
        (kept,), held = driver.kept, chat.held
        asked = driver.start([*chat.messages, user("Why?")])
        driver.turns_until(lambda asked=asked, held=held: asked.read > held)
        assert (kept.cache is None) == bool(spill_bytes)
        assert (driver.engine.ledger.of(SESSIONS) == 0) == bool(spill_bytes)
        asked.channel.gone = True
        driver.finish()
        assert driver.kept == [kept]
        chat.goes_on(driver)


def test_without_memory_the_disk_remembers(engines: Engines) -> None:
    driver, chat = Driver(engines(HYBRID)[0], cache_bytes=0), Chat(engines, HYBRID, LONG)
    for turn in range(3):
        chat.goes_on(driver, "Why?" if turn else None)
        assert driver.engine.ledger.of(SESSIONS) == 0
    (kept,) = driver.kept
    assert kept.cache is None and kept.saved and kept.points


def test_without_a_disk_what_leaves_the_device_is_lost(engines: Engines, homes: Path) -> None:
    engine, _ = engines(HYBRID)
    one, two = Chat(engines, HYBRID, LONG), Chat(engines, HYBRID, "Hello. " + LONG)
    driver = Driver(engine, spill_bytes=0)
    one.ask(driver)
    size = engine.ledger.of(SESSIONS)
    driver = Driver(engine, spill_bytes=0, cache_bytes=int(1.5 * size))
    one.messages.pop()
    one.ask(driver)
    two.ask(driver)
    assert len(driver.kept) == 1 and engine.ledger.of(SESSIONS) <= 1.5 * size
    lost = one.ask(driver, "Why?")
    assert lost.cached == 0 and lost.why == "no conversation that begins like this is kept"
    assert not directories(homes)
    driver = Driver(engine, spill_bytes=0, cache_bytes=0)
    two.ask(driver, "Why?")
    again = two.ask(driver, "Bye.")
    assert again.cached == 0 and again.why == "nothing is kept" and not driver.kept


def test_the_oldest_leave_the_disk(engines: Engines, homes: Path) -> None:
    engine, _ = engines("llama")
    driver, chats = Driver(engine), [Chat(engines, "llama", f"{n} {LONG}") for n in range(4)]
    chats[0].ask(driver)
    (first,) = directories(homes)
    size = sum(file.stat().st_blocks * 512 for file in first.iterdir())
    driver = Driver(engine, cache_bytes=0, spill_bytes=int(2.5 * size))
    for chat in chats[1:]:
        chat.ask(driver)
    assert first not in directories(homes) and len(directories(homes)) == len(driver.kept) == 2
    assert chats[0].ask(driver, "Why?").cached < 40
    chats[3].goes_on(driver)
    assert len(directories(homes)) == len(driver.kept) == 2


def test_a_turn_is_weighed_without_a_look_at_all_others(engines: Engines, monkeypatch) -> None:
    """There may be thousands, and nobody gets a token meanwhile; another daemon's are seen late."""
    weighed: list[Path] = []
    size = spill._size
    monkeypatch.setattr(spill, "_size", lambda path: weighed.append(path) or size(path))
    driver, chats = Driver(engines("llama")[0]), [Chat(engines, "llama", f"{n}?") for n in range(4)]
    for chat in chats:
        chat.ask(driver)
    assert len(weighed) == len(set(weighed)) == 4
    monkeypatch.setattr(driver.service.memory._spill, "_look_at", 0)
    chats[0].goes_on(driver)
    assert len(weighed) == 8


def test_what_other_models_left_leaves_the_disk_after_a_month(homes: Path) -> None:
    def conversation(folder: str, days: float) -> Path:
        path = homes / folder / f"{1:016x}"
        path.mkdir(parents=True)
        for each in (path, path.parent):
            os.utime(each, (time.time() - days * 86400,) * 2)
        return path

    old, recent = conversation("a" * 16 + "-own", 31), conversation("b" * 16 + "-own", 29)
    other, own = conversation("kept-by-someone", 31), conversation(MODEL[:16] + "-float32", 31)
    os.utime(conversation("c" * 16 + "-own", 31).parent)  # one has just left it
    spill.Spill(MODEL, "float32", 1 << 20).scan()
    assert not old.parent.exists()
    assert recent.exists() and other.exists() and own.parent.exists()
    assert (homes / ("c" * 16 + "-own")).exists()


def test_one_over_the_budget_of_the_disk_does_not_empty_it(engines: Engines, homes: Path) -> None:
    engine, _ = engines("llama")
    driver, chat = Driver(engine), Chat(engines, "llama", "Hello.")
    chat.ask(driver)
    (small,) = directories(homes)
    size = sum(file.stat().st_blocks * 512 for file in small.iterdir())
    driver = Driver(engine, spill_bytes=size + 4096)
    held, book = chat.held, Chat(engines, "llama", BOOK)
    book.ask(driver)
    assert directories(homes) == [small]
    assert [kept.path for kept in driver.kept] == [small, None]
    assert chat.ask(driver, "Why?").cached == held
    book.goes_on(driver)  # of the device


# --------------------------------------------------------------------------------- restarts, damage


@pytest.mark.parametrize("name", NAMES)
def test_a_restart_finds_all(engines: Engines, name: str, homes: Path) -> None:
    driver = Driver(engines(name)[0])
    chats = [Chat(engines, name, text + LONG) for text in ("", "Hello. ")]
    for question in (None, LONG):
        for chat in chats:
            chat.ask(driver, question)
    before = {kept.key: kept for kept in driver.kept}
    driver.restart()
    assert sorted(kept.key for kept in driver.kept) == sorted(before)
    for kept in driver.kept:
        old = before[kept.key]
        assert kept.tokens.tolist() == old.tokens.tolist() and kept.cache is None
        assert kept.points == [point.count for point in old.savepoints]
        assert kept.saved and int(kept.path.name, 16) == kept.key
    for chat in chats:
        branch = [*chat.messages[:3], user("Who are you?")]
        asked = driver.ask(branch)
        expected = max(usable(kept, asked.prompt) for kept in before.values())
        assert asked.cached == expected > 20  # where it leaves the kept one
        assert asked.answer == chat.plain.answer(branch)
        asked = chat.goes_on(driver, "Bye.")
        assert asked.why == "the rest is new"
    assert len(directories(homes)) == len(driver.kept) == 4


def test_another_model_finds_nothing(engines: Engines, homes: Path) -> None:
    chat, other = Chat(engines, HYBRID, LONG), engines(HYBRID, THINKING)[0]
    chat.ask(Driver(engines(HYBRID)[0]))
    driver = Driver(other)
    assert not driver.kept
    asked = driver.ask(chat.messages[:2])
    assert asked.cached == 0 and asked.why == "nothing is kept"
    assert len(list(homes.iterdir())) == 2
    chat.goes_on(Driver(engines(HYBRID)[0]))


def test_a_daemon_killed_in_mid_answer_has_the_prompt(engines: Engines) -> None:
    """Nothing is closed or told: another service looks at the same directories."""
    driver = Driver(engines("llama")[0])
    prompt = [7 + n % 1000 for n in range(WORTH_KEEPING + 40)]
    asked = driver.start(prompt)
    driver.turns_until_told(asked, 3)
    late = Driver(engines("llama")[0])
    again = late.ask(prompt)
    assert again.cached == len(prompt) - 1
    driver.finish(asked)
    assert again.answer == asked.answer == engines("llama")[1].answer(prompt)
    driver.finish()
    assert len(driver.kept) == 1 and len(driver.kept[0].tokens) > len(prompt)


def damage(how: str, path: Path, engine: Engine) -> None:
    file = path / ("session.msgpack" if how == "a torn header" else "cache.bin")
    data = file.read_bytes()
    if how == "other bytes":
        file.write_bytes(data.translate(bytes(byte ^ 0x55 for byte in range(256))))
    elif how == "no file":
        file.unlink()
    elif how == "another's":
        with Session.open(path, None) as session:
            session.commit([4, 3, 2, *session.tokens[3:]], None, None)
    elif how == "other tokens":
        with Session.open(path, None) as session:
            cache = session.restore(session.n_past, engine.new_cache)
            session.commit([*session.tokens[:-1], 3], cache, None)
    elif how == "no directory":
        for each in path.iterdir():
            each.unlink()
        path.rmdir()
    else:
        file.write_bytes(data[: len(data) // 3])


@pytest.mark.parametrize(
    ("how", "running"),
    [("a torn header", False), ("a short file", False), ("other bytes", False), ("no file", False),
     ("no directory", False), ("another's", False), ("a torn header", True), ("other bytes", True),
     ("no directory", True), ("other tokens", True)],
)  # fmt: skip
def test_damage_costs_time_only(engines: Engines, homes: Path, how: str, running: bool) -> None:
    driver, chat = Driver(engines("falcon_h1")[0], cache_bytes=0), Chat(engines, "falcon_h1", LONG)
    other = Chat(engines, "falcon_h1", "Hello. " + LONG)
    chat.ask(driver)
    (path,) = directories(homes)
    other.ask(driver)
    damage(how, path, driver.engine)
    if not running:
        driver.restart()
    asked = chat.ask(driver, "Why?")
    assert asked.cached == 0 and not driver.said
    assert len([kept for kept in driver.kept if kept.tokens[0] == 1]) == 2
    chat.goes_on(driver, "Bye.")
    other.goes_on(driver, "Bye.")


@pytest.mark.parametrize("cache", [0, 2 << 30])
def test_two_daemons_in_one_place(engines: Engines, homes: Path, cache: int) -> None:
    """Each finds what the other has left at its start, and is not led astray by what it does."""
    engine, _ = engines(HYBRID)
    here, chat = Driver(engine, cache_bytes=cache), Chat(engines, HYBRID, LONG)
    chat.ask(here)
    there, branch = Driver(engine, cache_bytes=cache), Chat(engines, HYBRID, LONG)
    branch.messages, branch.held = list(chat.messages), chat.held
    branch.goes_on(there, "Who are you?")  # and takes its directory over
    for turn in range(2):
        held = chat.held
        asked = chat.ask(here, f"{turn}. Why?")
        assert asked.cached == (held if turn or cache else 0)
        branch.goes_on(there, f"{turn}. And then?")
    assert not here.said and not there.said
    here.restart()
    for one in (chat, branch):
        one.goes_on(here, "Bye.")


def test_what_is_no_conversation_is_not_taken_for_one(engines: Engines, homes: Path) -> None:
    driver, chat = Driver(engines("llama")[0]), Chat(engines, "llama", LONG)
    chat.ask(driver)
    (path,) = directories(homes)
    (path.parent / "notes").mkdir()
    (unborn := path.parent / "ffffffffffffffff").mkdir()  # as another process begins one
    (stale := path.parent / "eeeeeeeeeeeeeeee").mkdir()
    os.utime(stale, (0, 0))
    (path.parent / "file").write_text("x")
    driver.restart()
    assert [kept.path for kept in driver.kept] == [path]
    assert unborn.exists() and not stale.exists()
    chat.goes_on(driver)


@pytest.mark.parametrize("name", ["llama", HYBRID])
def test_a_cancelled_prompt_is_partly_reused(engines: Engines, name: str) -> None:
    driver = Driver(engines(name)[0], chunk=50)
    messages = [user(BOOK)]
    asked = driver.start(messages)
    driver.turns_until(lambda: asked.read >= WORTH_KEEPING)
    read = asked.read
    assert read < len(asked.prompt)
    asked.channel.gone = True
    driver.finish()
    assert asked.over and not driver.service.active and asked.ids == []
    assert driver.engine.ledger.of(CACHE) == 0
    again = driver.ask(messages)
    assert again.cached == read and again.why == "the rest is new"
    assert again.answer == engines(name)[1].answer(messages)
    assert len(driver.kept) == 1


@pytest.mark.parametrize("name", ["llama", HYBRID])
def test_a_cancelled_answer_leaves_no_trace(engines: Engines, name: str) -> None:
    """A short one is not kept; the chat goes on from where it was."""
    driver, chat = Driver(engines(name)[0]), Chat(engines, name, LONG)
    chat.ask(driver)
    for count in (0, 1, 4):
        asked = driver.start([*chat.messages, user("Why?")])
        driver.turns_until_told(asked, count)
        asked.channel.gone = True
        driver.finish()
        assert asked.over and len(driver.kept) == 1
        assert driver.engine.ledger.of(CACHE) == 0
    chat.goes_on(driver)
