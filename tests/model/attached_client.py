"""A connection of an attached program, as the daemon's worker sees it: ops without a socket."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.model.service_driver import Driver, FakeChannel
from toastkit.daemon.attached import KEY, serve
from toastkit.daemon.requests import make_request
from toastkit.session.directory import Session
from toastkit.store.ledger import CACHE

PROMPT = list(range(100, 110))


class Client:
    """One connection, with a channel for all of its ops. jobs: what the worker is to do later."""

    def __init__(self, service: Any, preparer: Any):
        self.service = service
        self.preparer = preparer
        self.channel = FakeChannel()
        self.jobs: list[Callable[[], None]] = []
        self.loaded = 0

    def op(self, op: str, fds: tuple[int, ...] = (), **fields: Any) -> dict:
        """Does one op as the worker would; what its reply holds."""
        request = make_request({"op": op, **fields}, fds)
        try:
            serve(self._load, self.preparer, request, self.channel, self.jobs.append)
        finally:
            for fd in request.fds:
                os.close(fd)
        (reply,) = self.channel.replies.pop().values()
        return reply

    def _load(self) -> Any:
        self.loaded += 1
        return self.service

    def attach(self, **fields: Any) -> dict:
        wanted = {
            "fingerprint": self.preparer.fingerprint, "device": "cpu", "dtype": "float32",
            "kv_bits": None,
        }  # fmt: skip
        return self.op("attach", **{**wanted, **fields})

    def restore(self, ids: list[int], session: Session | None = None, **fields: Any) -> dict:
        """Begins a run, with the session's lock lent."""
        path = None if session is None else str(session.path)
        fds = () if session is None or session.lock is None else (os.dup(session.lock.fileno()),)
        return self.op("restore", fds, **{"session": path, "source": None, "ids": ids, **fields})

    def read(self, ids: list[int], size: int = 1000) -> dict:
        """Reads a prompt, slice by slice; the last reply."""
        held = len(self.channel.connection.store[KEY].state.tokens)
        while True:
            reply = self.op("read", ids=ids[held : held + size])
            held = reply["held"]
            if held == len(ids):
                return reply

    def hang_up(self) -> None:
        """The connection ends: first what the front does, later what the worker does."""
        self.channel.gone = True
        for told in self.channel.connection.on_close:
            told()


@contextmanager
def connected(engine: Any) -> Iterator[Client]:
    """A connection that has attached, and lets go of everything at the end."""
    service = Driver(engine, cache_bytes=0, spill_bytes=0).service
    made = Client(service, service.preparer)
    made.attach()
    yield made
    made.hang_up()
    for job in made.jobs:
        job()
    assert service.attached == [] and service.engine.ledger.of(CACHE) == 0
