"""A Worker with a thread of its own, asked from the test's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.model.service_driver import FakeChannel
from tests.unit.daemon_front import eventually
from toastkit.daemon.requests import make_request
from toastkit.daemon.service_settings import ServiceSettings
from toastkit.daemon.worker import Worker

PROMPT = "Who are you?"


class Audit:
    """Keeps what is written: (record, texts)."""

    def __init__(self) -> None:
        self.records: list[tuple[dict, dict]] = []

    def write(self, record: dict, texts: dict) -> None:
        self.records.append((record, texts))


class Running:
    """A worker and its requests."""

    def __init__(self, model: Path, **settings: Any):
        self.said: list[str] = []
        self.audit = Audit()
        settings = {"dtype": "float32", "audit": self.audit, **settings}
        self.worker = Worker(ServiceSettings(model=str(model), say=self.said.append, **settings))

    def submit(self, **request: Any) -> FakeChannel:
        channel = FakeChannel()
        self.worker.submit(make_request(request), channel)
        return channel

    def ask(self, prompt: str = PROMPT, priority: int = 0, **options: Any) -> FakeChannel:
        options = {"max_tokens": 8, "tokens": True, **options}
        return self.submit(prompt=prompt, options=options, priority=priority)

    def answer(self, prompt: str = PROMPT, **options: Any) -> tuple:
        channel = self.ask(prompt, **options)
        done(channel)
        return answer_of(channel)

    def hold(self, tokens: int = 400) -> FakeChannel:
        """A long answer that is under way."""
        channel = self.ask(max_tokens=tokens, ignore_eos=True)
        eventually(lambda: len(channel.all_of("token")) > 1)
        return channel


def done(*channels: FakeChannel) -> None:
    eventually(lambda: all(channel.is_done for channel in channels))


def answer_of(channel: FakeChannel) -> tuple:
    """As Asked.answer."""
    assert channel.one("error") is None, channel.one("error")
    end, ids = channel.one("end"), [token["id"] for token in channel.all_of("token")]
    return (ids, "".join(channel.all_of("text")), end["reason"], end["n"], end["text"])
