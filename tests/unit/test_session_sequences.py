"""Savepoints under any sequence of reading, writing ahead, committing, restoring and closing."""

from __future__ import annotations

import shutil
import tempfile
from functools import partial
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from session_states import MODEL, WINDOW, commit, hybrid, nested, packed, plain, rows_of, windowed

from tests.conftest import examples
from toastkit.session.blocks import LayerSource
from toastkit.session.directory import Session
from toastkit.session.layout import Header
from toastkit.session.savepoints import Savepoint

counts = st.integers(1, 100)
MAKERS = {
    "hybrid": hybrid, "windowed": windowed, "nested": nested, "plain": plain, "packed": packed,
}  # fmt: skip


class Watched(Session):
    """A session that says when it is about to put a new header in place."""

    def _publish(self, header: Header, tokens: list[int]) -> None:
        self.publishing()
        super()._publish(header, tokens)

    def publishing(self) -> None:
        """Nobody has asked."""


class Sessions(RuleBasedStateMachine):
    """A writer that restores, reads on, commits and closes as it likes, beside a plain account of
    what must be there: the committed tokens, and for each savepoint whether it has copies."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="t"))
        self.session = Watched.open(self.folder / "s", MODEL, durable=False)
        self.live: list[int] | None = []  # what the caller's caches have read
        self.stored: list[int] = []
        self.held: dict[int, bool] = {}
        self.known = 0  # leading tokens that the session takes to be as stored

    def teardown(self) -> None:
        self.session.close()
        shutil.rmtree(self.folder)

    @initialize(name=st.sampled_from(sorted(MAKERS)))
    def choose(self, name: str) -> None:
        self.name, self.make = name, MAKERS[name]

    def cuts(self, count: int) -> bool:
        """Whether a state of that many tokens can be cut back."""
        recurs = self.name in ("hybrid", "nested")
        slides = self.name in ("windowed", "nested") and count >= WINDOW
        return not recurs and not slides

    def reachable(self, n: int) -> bool:
        past = [count for count, copied in self.held.items() if count >= n and copied]
        return (
            n == len(self.stored)
            or self.cuts(len(self.stored))
            or n in past
            or any(self.cuts(count) for count in past)
        )

    @rule(more=st.lists(st.integers(0, 1), min_size=1, max_size=4), times=counts)
    @precondition(lambda self: self.live is not None)
    def read(self, more: list[int], times: int) -> None:
        self.live = [*self.live, *more * times]

    @rule(data=st.data(), share=st.floats(0, 1), token=st.integers(4, 6), times=counts)
    @precondition(lambda self: self.live)
    def go_back(self, data: st.DataObject, share: float, token: int, times: int) -> None:
        """In memory: the caller has copies of its own."""
        self.live = [*self.live[: round(share * len(self.live))], *[token] * times]
        self.commit(data)

    @rule(share=st.floats(0, 1), more=st.lists(st.integers(2, 3), max_size=3))
    def restore(self, share: float, more: list[int]) -> None:
        prompt = [*self.stored[: round(share * len(self.stored))], *more]
        n = self.session.reusable(prompt)
        common = len(prompt) - len(more)
        if common and not more and common < len(self.stored):
            common -= 1
        ways = [n for n in (common, *self.held) if 0 < n <= common and self.reachable(n)]
        assert n == max(ways, default=0)
        if n:
            self.check(self.session, n)
            self.known = n
        self.live = prompt[:n]
        if not n:
            self.session.restore(0, list)
            self.known = 0

    @rule(data=st.data())
    @precondition(lambda self: self.live)
    def commit(self, data: st.DataObject) -> None:
        tokens, count = self.live, len(self.live)
        places = st.sets(st.integers(1, count - 1), max_size=3) if count > 1 else st.just(set())
        chosen = data.draw(places, "new") | {
            n for n in self.held if n < count and data.draw(st.booleans(), "again")
        }
        bare = {n for n in chosen if data.draw(st.booleans(), "bare")}
        nothing = [None] * len(self.make([]))
        points = [
            Savepoint(n, nothing) if n in bare else Savepoint(n, self.make(tokens[:n]))
            for n in chosen
        ]
        # Until then, that is: afterwards a file that has become much too long is cut.
        self.session.publishing = partial(self.check_bytes, self.owned())
        commit(self.session, tokens, *self.make(tokens), savepoints=points)
        same = next(
            (i for i, (a, b) in enumerate(zip(self.stored, tokens)) if a != b),
            min(len(self.stored), count),
        )
        shared = min(self.known, same)
        copied = {
            n: self.name not in ("plain", "packed")
            and (n not in bare or (n <= shared and self.held.get(n, False)))
            for n in chosen
        }
        self.held = {n: copied[n] for n in chosen if copied[n] or self.cuts(count)}
        self.stored, self.known = list(tokens), count

    @rule(room=st.integers(0, 700))
    @precondition(lambda self: self.live)
    def write_ahead(self, room: int) -> None:
        before = self.owned()
        make = partial(self.make, self.live)
        self.session.write_layers_ahead(self.live, make, len(self.live) + room)
        self.check_bytes(before)

    def check_bytes(self, before: list[tuple[int, bytes]]) -> None:
        """That the file still has these, which `owned` gave."""
        if before:
            data = (self.folder / "s" / "cache.bin").read_bytes()
            assert all(data[offset : offset + len(part)] == part for offset, part in before)

    def owned(self) -> list[tuple[int, bytes]]:
        """The bytes that the last commit owns, by offset."""
        if not self.stored:
            return []
        data = (self.folder / "s" / "cache.bin").read_bytes()
        ranges = [r for t in self.session.header.all_tensors() for r in t.ranges]
        return [(r.offset, data[r.offset : r.offset + r.length]) for r in ranges]

    @rule(keep=st.booleans(), share=st.floats(0, 1))
    def reopen(self, keep: bool, share: float) -> None:
        generation = self.session.generation
        self.session.close()
        self.session = Watched.open(self.folder / "s", MODEL, durable=False)
        assert self.session.tokens == self.stored
        self.known, self.live = 0, None
        if keep:
            n = round(share * len(self.stored))
            assert self.session.continues(n, generation)
            self.known, self.live = n, self.stored[:n]

    @invariant()
    def all_is_there(self) -> None:
        assert self.session.savepoints == sorted(self.held)
        if self.stored:
            with Session.open(self.folder / "s", MODEL, write=False) as reader:
                for n in (*self.held, len(self.stored)):
                    self.check(reader, n)

    def check(self, session: Session, n: int) -> None:
        """What is restored after n tokens is a state that has read just these."""
        leaves = [leaf for source in self.make(self.stored[:n]) for leaf in parts_of(source)]
        found = rows_of(session, n)
        expected = [
            bytes(t.read(0, t.shape[2] if t.axis else 1)) for x in leaves for t in x.tensors
        ]
        assert len(found) == len(expected)
        for mine, other in zip(found, expected):
            assert mine[: len(other)] == other


def parts_of(source: LayerSource) -> list[LayerSource]:
    return [leaf for part in source.parts for leaf in parts_of(part)] or [source]


TestSessions = Sessions.TestCase
TestSessions.settings = settings(max_examples=examples(40), stateful_step_count=16, deadline=None)
