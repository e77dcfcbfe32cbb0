"""A request that names a session: what decode makes of it, and what is remembered beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.model.service_driver import Driver, Engines, assistant, user, words
from toastkit.errors import IOFailure
from toastkit.frames import Tokens, pack_ids
from toastkit.interrupts import Interrupt
from toastkit.sampling.sampling_options import SamplingOptions
from toastkit.session.directory import Session
from toastkit.stages.answer import AnswerOptions, answer
from toastkit.stages.run.one_process import LocalRuns
from toastkit.stages.run.settings import Outcome
from toastkit.stages.sample import DrawOptions
from toastkit.store.ledger import CACHE

pytestmark = pytest.mark.usefixtures("homes")
PROMPT = [1, 316, 201, *(300 + 7 * n % 900 for n in range(50)), 2, 201, 1, 317, 201]
MORE = [2, 201, 1, 316, 201, 445, 261, 552, 16, 2, 201, 1, 317, 201]
NAMES = ("llama", "qwen3_5")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a session that is not there yet."""
    return tmp_path / "named"


def decoded(driver: Driver, path: Path, ids: list[int], count: int = 8) -> None:
    """What toast-decode --session does, in another process, with one run of some tokens."""
    engine, preparer = driver.engine, driver.preparer
    draw = DrawOptions(SamplingOptions(), 0, count)
    frames = [preparer.head, Tokens(pack_ids(ids))]
    for _ in answer(
        iter(frames), preparer.tokenizer, lambda head: engine,
        LocalRuns(str(path), Interrupt()), AnswerOptions(draw=draw), Interrupt(), Outcome(),
    ):  # fmt: skip
        pass


def stored(engine, path: Path) -> list[int]:
    """The tokens of a session. Its state and its logits have to be those of its tokens."""
    with Session.open(path, None, create=False, write=False) as session:
        tokens = session.tokens
        state, count = engine.restore(session, tokens)
        assert count == len(tokens)
        cache = engine.new_cache()
        logits = engine.prefill(tokens, cache)
        for expected, found in (
            (logits, state.logits),
            (engine.step(9, cache), engine.step(9, state.cache)),
        ):
            expected, found = np.array(expected), np.array(found)
            assert np.abs(expected - found).max() < 1e-3 * np.abs(expected).max()
        return tokens


@pytest.mark.parametrize("name", NAMES)
def test_a_session_is_what_decode_makes_of_it(
    engines: Engines, name: str, path: Path, tmp_path: Path
) -> None:
    engine, plain = engines(name)
    driver = Driver(engine)
    first = driver.ask(PROMPT, session=path)
    assert first.answer == plain.answer(PROMPT) and first.cached == 0
    decoded(driver, tmp_path / "other", PROMPT)
    tokens = PROMPT + first.ids
    assert stored(engine, path) == stored(engine, tmp_path / "other") == tokens
    second = driver.ask([*tokens, *MORE], session=path)
    assert second.answer == plain.answer([*tokens, *MORE])
    assert second.cached == len(tokens) and second.why == "the rest is new"
    tokens += [*MORE, *second.ids]
    assert stored(engine, path) == tokens
    decoded(driver, path, [*tokens, *MORE], 3)  # and decode goes on with it
    assert len(stored(engine, path)) == len(tokens) + len(MORE) + 3


@pytest.mark.parametrize("name", NAMES)
def test_a_session_is_found_by_its_files(engines: Engines, name: str, path: Path) -> None:
    engine, plain = engines(name)
    driver = Driver(engine)
    decoded(driver, path, PROMPT)
    tokens = stored(engine, path)
    asked = driver.ask([*tokens, *MORE], session=path)
    assert asked.answer == plain.answer([*tokens, *MORE])
    assert asked.cached == len(tokens) and asked.why == f"session {path} holds no more of it"
    assert stored(engine, path) == [*tokens, *MORE, *asked.ids]
    # No copy of it among the daemon's own: its place is where the user wants it.
    driver.restart()
    assert not driver.kept
    last = [*stored(engine, path), *MORE]
    assert driver.ask(last, session=path).cached == len(last) - len(MORE)


@pytest.mark.parametrize("name", NAMES)
def test_a_chat_in_a_session_is_one_state(
    engines: Engines, name: str, path: Path, homes: Path
) -> None:
    engine, plain = engines(name)
    driver, messages, held = Driver(engine), [], 0
    for turn in range(4):
        messages.append(user(f"Question {turn}: where is the bear now?"))
        asked = driver.ask(messages, session=path if turn != 2 else None, **words(driver))
        assert asked.answer == plain.answer(messages, **words(driver))
        assert asked.cached == held
        messages.append(assistant(asked.text))
        held = len(driver.kept[0].tokens)
        assert len(driver.kept) == 1 and driver.kept[0].own == (turn != 2)
        assert len(list(homes.glob("*/*"))) == (turn == 2)  # on disk once
        assert turn == 2 or held == len(stored(engine, path))


@pytest.mark.parametrize("name", NAMES)
def test_what_another_process_commits_counts(engines: Engines, name: str, path: Path) -> None:
    """The memory holds the session as it was; the files hold more, or something else."""
    engine, plain = engines(name)
    driver = Driver(engine)
    tokens = PROMPT + driver.ask(PROMPT, session=path).ids
    decoded(driver, path, [*tokens, *MORE])
    longer = stored(engine, path)
    asked = driver.ask([*longer, *MORE], session=path)
    assert asked.answer == plain.answer([*longer, *MORE]) and asked.cached == len(longer)
    assert stored(engine, path) == [*longer, *MORE, *asked.ids]
    with Session.open(path, None) as session:
        state, _ = engine.restore(session, [])
        list(engine.reading(state, [5, 6, 7, 8]))
        state.session = session
        state.commit()  # another conversation altogether
    ids = [*longer, *MORE, *asked.ids, 9]
    again = driver.ask(ids, session=path)
    assert again.answer == plain.answer(ids)
    assert again.cached == len(ids) - 1  # that of the memory is as good as it was
    assert stored(engine, path) == ids + again.ids
    assert len(driver.kept) == 1


def test_a_session_that_leaves_the_device_is_forgotten(engines: Engines, path: Path) -> None:
    engine, _ = engines("llama")
    driver = Driver(engine, cache_bytes=0)
    asked = driver.ask(PROMPT, session=path)
    assert asked.error is None and not driver.kept
    ids = [*PROMPT, *asked.ids, *MORE]
    assert driver.ask(ids, session=path).cached == len(PROMPT) + 8
    assert stored(engine, path)[: len(ids)] == ids


def test_a_session_that_another_holds_is_busy(engines: Engines, path: Path) -> None:
    engine, plain = engines("llama")
    driver = Driver(engine)
    other = driver.start(PROMPT)
    with Session.open(path, driver.preparer.fingerprint):
        asked = driver.ask(PROMPT, session=path)
    assert asked.error["code"] == 75 and "in use by another writer" in asked.error["message"]
    assert asked.channel.one("end") is None and asked.channel.is_done
    assert other.answer == plain.answer(PROMPT)  # the others do not notice
    both = [driver.start(PROMPT, session=path) for _ in range(2)]
    driver.finish()
    refused, served = sorted(both, key=lambda asked: asked.error is None)
    assert refused.error["code"] == 75 and served.answer == other.answer
    assert driver.ask(PROMPT, session=path).answer == other.answer


def test_a_session_of_another_model_is_refused(engines: Engines, path: Path) -> None:
    Driver(engines("llama")[0]).ask(PROMPT, session=path)
    asked = Driver(engines("qwen3_5")[0]).ask(PROMPT, session=path)
    assert asked.error["code"] == 65 and "another model" in asked.error["message"]
    assert stored(engines("llama")[0], path)[: len(PROMPT)] == PROMPT


def test_a_session_that_cannot_be_written(engines: Engines, path: Path, monkeypatch) -> None:
    driver = Driver(engines("llama")[0])
    first = driver.ask(PROMPT, session=path)
    before = stored(driver.engine, path)

    def fails(*arguments, **settings):
        raise IOFailure("cannot save session x: no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Session, "commit", fails)
        asked = driver.ask([*before, *MORE], session=path)
    assert asked.error["code"] == 74 and asked.end is None and not driver.service.active
    assert driver.engine.ledger.of(CACHE) == 0  # nor do the frames that the error came through hold
    assert stored(driver.engine, path) == before
    again = driver.ask([*before, *MORE], session=path)
    assert again.error is None and again.cached == len(before) == len(PROMPT) + len(first.ids)


@pytest.mark.parametrize("name", NAMES)
def test_a_cancelled_answer_is_committed_as_far_as_it_got(
    engines: Engines, name: str, path: Path
) -> None:
    engine, plain = engines(name)
    driver = Driver(engine, chunk=20)
    asked = driver.start(PROMPT, session=path)
    driver.turns_until(lambda: asked.read >= 20)
    asked.channel.gone = True  # in the prompt: nothing is committed yet
    driver.finish()
    assert not (path / "session.msgpack").exists()
    asked = driver.start(PROMPT, session=path)
    driver.turns_until_told(asked, 4)
    asked.channel.gone = True
    driver.finish()
    tokens = stored(engine, path)
    expected = PROMPT + plain.answer(PROMPT)[0]
    assert len(PROMPT) + 4 <= len(tokens) < len(expected) and tokens == expected[: len(tokens)]
    again = driver.ask([*tokens, *MORE], session=path)
    assert again.cached == len(tokens)
    assert again.answer == plain.answer([*tokens, *MORE])
