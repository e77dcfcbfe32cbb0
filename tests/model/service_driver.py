"""A Service driven turn by turn, without threads or sockets: what is asked, what came of it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.model.checkpoints import open_model
from tests.model.published import write_published
from tests.native_library import own_cache
from toastkit.daemon.conversation import Conversation
from toastkit.daemon.prepare import Preparer
from toastkit.daemon.requests import make_request
from toastkit.daemon.service import Service
from toastkit.daemon.service_settings import ServiceSettings
from toastkit.daemon.spill import CachedState
from toastkit.model.files import ModelFiles
from toastkit.store.ledger import Ledger
from toastkit.text.tokenizer import Tokenizer
from toastkit.wire import Peer

MAX_TURNS = 5000  # of a service, until which every conversation has to be over

# A template as thinking models have them: earlier answers lose what was thought, the new one is
# opened with the tag.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{{ m['content'].split('</think>')[-1] if m['role'] == 'assistant' else m['content'] }}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
# One that says at the top what may be called.
OFFERING = (
    "{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}"
)
# One that writes something else at the top with every turn, as one with the time of day does.
COUNTING = (
    "{{ '<|im_start|>system\nTurn ' + (messages | length) | string + '.<|im_end|>\n' }}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def private_homes(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """A test's own directories for sessions, caches and settings; where conversations lie."""
    for name in ("STATE_HOME", "CACHE_HOME", "CONFIG_HOME", "RUNTIME_DIR"):
        home = folder / name.lower()
        own_cache(home) if name == "CACHE_HOME" else home.mkdir(mode=0o700, exist_ok=True)
        patch.setenv(f"XDG_{name}", str(home))
    return folder / "cache_home" / "toastkit" / "conversations"


def published_engine(
    folder: Path, name: str, template: str | None = None, native: str = "auto", **config: Any
):
    """An Engine for a published checkpoint in a new directory. template: the chat template, where
    it is to be another. native: "auto" for one that computes as a daemon's does, "off" for MLX's
    own operations. config: fields of config.json that are to be others."""

    path = write_published(folder / name, name)
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    if config:
        fields = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**fields, **config}))
    return open_model(path, native=native)


@lru_cache(maxsize=16)
def preparer_of(files: ModelFiles) -> Preparer:
    """Reads the requests for a model; tests share it, for it takes longer to make than to use."""
    return Preparer(ServiceSettings(files.name))


class FakeChannel:
    """The way back to one who asks. gone: set by a test, when nobody is to read any more."""

    def __init__(self) -> None:
        self.connection = SimpleNamespace(peer=Peer(1000, 4321), store={}, on_close=[])
        self.gone = False
        self.is_done = False
        self.replies: list[dict] = []

    def reply(self, message: dict) -> None:
        assert not self.is_done, "a reply after the last one"
        json.dumps(message)  # it is to go through a socket
        self.replies.append(message)

    def done(self) -> None:
        assert not self.is_done, "done twice"
        self.is_done = True

    def all_of(self, name: str) -> list:
        """The replies of one kind."""
        return [message[name] for message in self.replies if name in message]

    def one(self, name: str) -> Any:
        """The one reply of a kind, None where there is none."""
        found = self.all_of(name)
        assert len(found) < 2
        return found[0] if found else None


@dataclass
class Asked:
    """A request under way, or answered. prompt: its token ids. points: where a savepoint would be
    of use."""

    channel: FakeChannel
    conversation: Conversation

    @property
    def over(self) -> bool:
        return self.conversation.want is None

    @property
    def prompt(self) -> list[int]:
        return self.conversation.prepared.ids

    @property
    def points(self) -> list[int]:
        return self.conversation.prepared.points

    @property
    def read(self) -> int:
        """Tokens that its state has read so far."""
        state = self.conversation.runs.state
        return 0 if state is None else len(state.tokens)

    @property
    def text(self) -> str:
        return self.conversation.text

    @property
    def ids(self) -> list[int]:
        """Of the answer; only where token replies were asked for."""
        return [token["id"] for token in self.channel.all_of("token")]

    @property
    def stats(self) -> dict:
        return self.channel.one("stats")

    @property
    def cached(self) -> int:
        return self.stats["cached"]

    @property
    def why(self) -> str:
        return self.stats["why"]

    @property
    def end(self) -> dict | None:
        return self.channel.one("end")

    @property
    def error(self) -> dict | None:
        return self.channel.one("error")

    @property
    def answer(self) -> tuple:
        """All that must not depend on what was cached or on who else asked."""
        assert self.over and self.error is None, self.error
        end = self.end
        return (self.ids, self.text, end["reason"], end["n"], end["text"])


class Driver:
    """A Service over an engine, and what is said to people (said). settings: of the Service."""

    def __init__(self, engine: Any, **settings: Any):
        self.engine = engine
        self.said: list[str] = []
        self.preparer = preparer_of(engine.files)
        self._settings = ServiceSettings(say=self.said.append, **settings)
        self.restart()

    def restart(self) -> None:
        """Another Service over the same directories, as after a restart of the daemon."""
        self.service = Service(self.engine, self.preparer, self._settings, self._finished)

    def _finished(self, conversation: Conversation) -> None:
        for message in conversation.last_replies():
            conversation.channel.reply(message)
        conversation.channel.done()

    @property
    def kept(self) -> list[CachedState]:
        return self.service.memory.kept

    def start(
        self,
        what: list | str,
        *,
        session: Path | str | None = None,
        priority: int = 0,
        channel: FakeChannel | None = None,
        tools: list | None = None,
        keep: bool = True,
        **options: Any,
    ) -> Asked:
        """Gives a request its place. what: messages, token ids, or a prompt. options: those of a
        request; 8 tokens and token replies where nothing else is said."""
        options = {"max_tokens": 8, "tokens": True, **options}
        document: dict[str, Any] = {"options": options, "priority": priority, "keep": keep}
        if isinstance(what, str):
            document["prompt"] = what
        else:
            document["tokens" if isinstance(what[0], int) else "messages"] = what
        if session is not None:
            document["session"] = str(session)
        if tools is not None:
            document["tools"] = tools
        channel = channel or FakeChannel()
        prepared = self.preparer.prepare(make_request(document))
        return Asked(channel, self.service.begin(prepared, channel))

    def finish(self, *asked: Asked) -> None:
        """Takes turns until these are over; all, with what is written afterwards, for none."""
        for _ in range(MAX_TURNS):
            if asked and all(one.over for one in asked):
                return
            if not self.service.busy:
                assert all(one.over for one in asked)
                return
            self.service.turn()
        raise AssertionError("it does not come to an end")

    def ask(self, what: list | str, **settings: Any) -> Asked:
        """Asks, and waits for the end and for what is to be kept to be on disk."""
        asked = self.start(what, **settings)
        self.finish()
        return asked

    def turns_until_told(self, asked: Asked, count: int) -> None:
        """Takes turns until token replies have told so many ids of an answer."""
        self.turns_until(lambda: len(asked.ids) >= count)

    def turns_until(self, condition: Callable[[], bool]) -> int:
        """Takes turns until something is so; how many."""
        for count in range(MAX_TURNS):
            if condition():
                return count
            self.service.turn()
        raise AssertionError("it never came about")


class Plain:
    """The same answers without any cache: a fresh service for each; what was asked before is
    remembered here, for the test's sake."""

    def __init__(self, engine: Any, **settings: Any):
        twin = copy.copy(engine)
        twin.ledger = Ledger()  # the other one is looked at
        self._driver = Driver(twin, cache_bytes=0, spill_bytes=0, **settings)
        self._known: dict[str, tuple] = {}

    def answer(self, what: list | str, **options: Any) -> tuple:
        """As Asked.answer."""
        name = json.dumps([what, options])
        if name not in self._known:
            self._driver.restart()
            asked = self._driver.ask(what, **options)
            assert asked.cached == 0 and not self._driver.kept
            self._known[name] = asked.answer
        return self._known[name]


class Engines:
    """engines(name, ...): the engine of that checkpoint, "crumb" or a published one, and its
    answers without a cache; each is made once. crumb: its engine."""

    def __init__(self, folder: Path, crumb: Any):
        self._folder = folder
        self._made = {} if crumb is None else {"crumb": (crumb, Plain(crumb))}

    def __call__(self, name: str, template: str | None = None, **config: Any) -> tuple[Any, Plain]:
        key = name if template is None and not config else json.dumps([name, template, config])
        if key not in self._made:
            folder = self._folder / str(len(self._made))
            folder.mkdir()
            engine = published_engine(folder, name, template, **config)
            self._made[key] = (engine, Plain(engine))
        return self._made[key]


def words(driver: Driver) -> dict[str, Any]:
    """Options that make a model with random weights answer in words: such an answer comes back as
    the tokens that were drawn."""
    return {"logit_bias": dict.fromkeys(map(str, word_tokens(driver.preparer.tokenizer)), 1000)}


@lru_cache(maxsize=16)
def word_tokens(tokenizer: Tokenizer) -> list[int]:
    """Tokens that are a word with a blank before it."""
    words = ("bear", "river", "tree", "water", "little", "house", "friend", "apple")
    found = [tokenizer.encode(f" {word}", add_special=False) for word in words]
    alone = [ids[0] for ids in found if len(ids) == 1]
    assert len(alone) > 4
    return alone


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict:
    return {"role": "system", "content": text}


def common(a: Any, b: Any) -> int:
    """Length of the common beginning of two sequences of ids."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def usable(kept: CachedState, prompt: list[int]) -> int:
    """How many tokens of a prompt a state in memory has read: all that are common where every layer
    can be cut back, else up to its end or a savepoint. One token is always left to run."""
    most = min(common(kept.tokens.tolist(), prompt), len(prompt) - 1)
    if most == len(kept.tokens) or all(layer.is_trimmable() for layer in kept.cache):
        return most
    return max((point.count for point in kept.savepoints if point.count <= most), default=0)
