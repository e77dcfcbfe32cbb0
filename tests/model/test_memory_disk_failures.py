"""Disks that fail, and what another process holds: nothing that was kept is lost for it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.model.service_driver import Driver, Engines
from tests.model.test_memory_disk import HYBRID, LONG, Chat, directories
from toastkit.errors import IOFailure
from toastkit.session.directory import Session

pytestmark = pytest.mark.usefixtures("homes")


def test_a_full_disk_is_told_of_once(engines: Engines, homes: Path, monkeypatch) -> None:
    driver, chat = Driver(engines(HYBRID)[0]), Chat(engines, HYBRID, LONG)
    commit = Session.commit_in_pieces

    def fails(*arguments, **settings):
        raise IOFailure("cannot save session x: no space left on device")

    monkeypatch.setattr(Session, "commit_in_pieces", fails)
    for turn in range(3):
        chat.goes_on(driver, "Why?" if turn else None)
    assert driver.said == [
        "conversations are not kept on disk: cannot save session x: no space left on device"
    ]
    assert not directories(homes) and not any(kept.saved for kept in driver.kept)
    monkeypatch.setattr(Session, "commit_in_pieces", commit)
    chat.ask(driver, "And then?")  # there is room again
    driver.restart()
    chat.goes_on(driver, "Bye.")
    assert len(driver.said) == 1


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("no such layer"), "no such layer"),
        (PermissionError(13, "Denied", "x"), r"cannot write in /\S+: denied"),
    ],
)
def test_a_write_that_fails_costs_nothing_else(
    engines: Engines, homes: Path, monkeypatch, error: Exception, told: str
) -> None:
    """The conversation stays in memory, and the end of the daemon tries once more."""
    driver, chat = Driver(engines("llama")[0]), Chat(engines, "llama", LONG)

    def fails(*arguments, **settings):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Session, "open", fails)
        chat.ask(driver)
    (line,) = driver.said
    assert re.fullmatch(f"conversations are not kept on disk: {told}", line)
    assert not directories(homes)
    driver.service.save_all()
    assert len(directories(homes)) == 1
    driver.restart()
    chat.goes_on(driver)


# ----------------------------------------------------------------------------------- interruptions


def test_a_directory_that_another_process_writes_is_left_to_it(
    engines: Engines, homes: Path
) -> None:
    """As one that is asked the same at the same time: nobody is told, and it is tried again."""
    driver, chat = Driver(engines("llama")[0]), Chat(engines, "llama", LONG)
    chat.ask(driver)
    (path,) = directories(homes)
    with Session.open(path, None, create=False):
        chat.goes_on(driver)
        assert not driver.said and not driver.kept[-1].saved
    driver.service.save_all()
    assert driver.kept[-1].saved


def test_what_cannot_be_read_now_is_not_removed(engines: Engines, homes: Path, monkeypatch) -> None:
    driver, chat = Driver(engines("llama")[0], cache_bytes=0), Chat(engines, "llama", LONG)
    chat.ask(driver)
    (path,) = directories(homes)

    def fails(*arguments, **settings):
        raise IOFailure("session x: cannot allocate memory")

    for action in (lambda: chat.ask(driver, "Why?"), driver.restart):
        with monkeypatch.context() as patch:
            patch.setattr(Session, "open", fails)
            action()
        assert path in directories(homes)
    driver.restart()
    assert path in [kept.path for kept in driver.kept]
