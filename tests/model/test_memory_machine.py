"""Whatever is asked in whatever order: the answer is the one without a cache."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from tests.conftest import examples
from tests.model.service_driver import (
    Asked,
    Driver,
    Engines,
    Plain,
    assistant,
    private_homes,
    system,
    user,
)
from toastkit.store.ledger import CACHE, SESSIONS

QUESTIONS = st.sampled_from(
    [
        "Why?",
        "Who are you?",
        "Tell me of the bear who lost his hat, and of the owl who found it in the old tree.",
        "The bear went to the river, and the owl sat in the old tree. What happened then to them?",
    ]
)
SYSTEMS = st.sampled_from(
    ["Be brief.", "You are a kind fox who tells long stories to children about the wood." * 2]
)
BUDGETS = st.sampled_from([0, 300_000, 2 << 30])  # the second: about two states


class Machine(RuleBasedStateMachine):
    """chats: tuples of messages that end with an answer."""

    chats = Bundle("chats")

    def __init__(self, engine: Any, plain: Plain, patch: pytest.MonkeyPatch):
        super().__init__()
        self._folder = Path(tempfile.mkdtemp(prefix="t"))
        private_homes(self._folder, patch)
        self._plain = plain
        self._engine = engine

    @initialize(cache=BUDGETS, spill=st.sampled_from([0, 400_000, 8 << 30]))
    def start(self, cache: int, spill: int) -> None:
        self.driver = Driver(self._engine, cache_bytes=cache, spill_bytes=spill)

    def teardown(self) -> None:
        shutil.rmtree(self._folder)

    # ------------------------------------------------------------------------------------- rules

    def begin(self, messages: list, seed: int) -> Asked:
        options = {"max_tokens": 4, "temperature": 1, "seed": seed}
        asked = self.driver.start(messages, **options)
        asked.expected = self._plain.answer(messages, **options)
        return asked

    def end(self, asked: Asked, messages: list) -> tuple:
        assert asked.answer == asked.expected
        assert 0 <= asked.cached < len(asked.prompt)
        assert asked.why
        return (*messages, assistant(asked.text))

    @rule(target=chats, first=SYSTEMS, question=QUESTIONS, seed=st.integers(1, 2))
    def another(self, first: str, question: str, seed: int) -> tuple:
        messages = [system(first), user(question)]
        asked = self.begin(messages, seed)
        self.driver.finish()
        return self.end(asked, messages)

    @rule(target=chats, chat=chats, question=QUESTIONS)
    def go_on(self, chat: tuple, question: str) -> tuple:
        """Also a branch, where the chat has gone on already."""
        messages = [*chat[:9], user(question)]
        asked = self.begin(messages, 1)
        self.driver.finish()
        return self.end(asked, messages)

    @rule(target=chats, chat=chats, seed=st.integers(1, 3))
    def ask_again(self, chat: tuple, seed: int) -> tuple:
        asked = self.begin(list(chat[:-1]), seed)
        self.driver.finish()
        return self.end(asked, list(chat[:-1]))

    @rule(target=chats, chat=chats, how=st.sampled_from(["strip", "edit"]))
    def change_the_answer(self, chat: tuple, how: str) -> tuple:
        text = chat[-1]["content"]
        return (*chat[:-1], assistant(text.strip() if how == "strip" else "No. " + text))

    @rule(target=chats, one=chats, two=chats, question=QUESTIONS, turns=st.integers(0, 4))
    def at_once(self, one: tuple, two: tuple, question: str, turns: int):
        """Two at the device together, the second some turns later."""
        left, right = [*one[:9], user(question)], [*two[:9], user("And then?")]
        first = self.begin(left, 1)
        for _ in range(turns):
            self.driver.service.turn()
        second = self.begin(right, 2)
        self.driver.finish()
        return multiple(self.end(first, left), self.end(second, right))

    @rule(chat=chats, turns=st.integers(0, 6))
    def cancel(self, chat: tuple, turns: int) -> None:
        asked = self.begin([*chat[:9], user("Forget it.")], 1)
        for _ in range(turns):
            self.driver.service.turn()
        asked.channel.gone = True
        self.driver.finish()
        assert asked.over

    @rule()
    def restart(self) -> None:
        before = {kept.tokens.tobytes() for kept in self.driver.kept if kept.saved}
        self.driver.restart()
        assert {kept.tokens.tobytes() for kept in self.driver.kept} == before

    # -------------------------------------------------------------------------------- invariants

    @invariant()
    def what_is_kept_is_in_order(self) -> None:
        if not hasattr(self, "driver"):
            return
        driver = self.driver
        kept = driver.kept
        assert len({one.tokens.tobytes() for one in kept}) == len(kept)
        assert not driver.service.active and not driver.said
        ledger, inside = driver.engine.ledger, [one for one in kept if one.cache is not None]
        assert ledger.of(CACHE) == 0
        budget = driver.service.settings.cache_bytes
        assert ledger.of(SESSIONS) == sum(one.nbytes for one in inside) <= budget
        for one in kept:
            assert one.cache is not None or one.saved
            assert [p.count for p in one.savepoints] == sorted({p.count for p in one.savepoints})
        paths = [one.path for one in kept if one.path is not None]
        assert len(set(paths)) == len(paths) and all(path.is_dir() for path in paths)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, crumb) -> Engines:
    return Engines(tmp_path_factory.mktemp("memory"), crumb)


@pytest.mark.parametrize("name", ["llama_tied", "mamba2", "gemma3_text"])
def test_any_order(engines: Engines, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, plain = engines(name)
    run_state_machine_as_test(
        lambda: Machine(engine, plain, monkeypatch),
        settings=settings(max_examples=examples(6), stateful_step_count=12),
    )
