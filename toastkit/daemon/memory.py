"""The state cache: the state after each finished turn, so that no history is prefilled twice.

A state is found by the conversation's hash (history.py) or, failing that, by its tokens. Either way
it is used only as far as its tokens equal the new prompt's: to its end, or to an earlier position
that every layer can be rolled back to. One chat keeps one state, because a continuation evicts its
parent; two branches of one keep both. States leave the device in LRU order when the budget is
spent; those on disk stay there (spill.py).
"""

from __future__ import annotations

import itertools
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toastkit.daemon.spill import CachedState, Spill
from toastkit.engine.savepoints import can_cut, copy_caches, drop_room, resumable, resume_at
from toastkit.errors import DataError, ToastError
from toastkit.prefix import common_prefix
from toastkit.session.directory import Session
from toastkit.session.savepoints import Savepoint
from toastkit.store.ledger import SESSIONS, Ledger

# Common tokens from which an explanation is given why they were not reused: a template's first
# words are common to all prompts.
WORTH_A_WORD = 16


@dataclass(frozen=True)
class Match:
    """The reusable prefix of a prompt. kept: its state, None if there is none. count: tokens. why:
    one line, why not more."""

    kept: CachedState | None
    count: int
    why: str


class Memory:
    """The cached states of one model.

    new_cache: makes empty KV caches. budget: bytes on the device, entered in the ledger as
    `sessions`. spill: the disk store, None for none.
    """

    def __init__(
        self, new_cache: Callable[[], list], budget: int, ledger: Ledger, spill: Spill | None
    ):
        self._new_cache = new_cache
        self._budget = budget
        self._spill = spill
        self._clock = itertools.count(1)
        self.kept: list[CachedState] = []
        self.unsaved: deque[CachedState] = deque()  # still to be written, the first one by now
        self._writing: Generator[None, None, None] | None = None  # the slices of that one
        ledger.measure(SESSIONS, lambda: sum(kept.nbytes for kept in list(self.kept)))
        for stored in spill.scan() if spill is not None else ():
            stored.used = next(self._clock)
            self.kept.append(stored)

    # ------------------------------------------------------------------------------------- looking

    def find(
        self,
        key: int,
        ids: Sequence[int],
        path: Path | None = None,
        others: Sequence[CachedState] = (),
    ) -> Match:
        """The longest reusable prefix of a prompt.

        key: hash of the prompt's history, all but its last message. ids: the prompt's tokens; at
        least one is left to prefill, to have logits. path: of the named session of the request,
        preferred among equals. others: states that are not kept (yet), to be looked at too.
        """
        wanted = array("I", ids)
        why = "no conversation that begins like this is kept" if self.kept else "nothing is kept"
        best, best_rank = Match(None, 0, why), (0, False, 0)
        for kept, common in self._candidates(key, wanted, others):
            most = min(common, len(ids) - 1)
            if most < best.count:
                continue
            count = self._usable(kept, most)
            match = Match(kept if count else None, count, _why(kept, common, count, len(ids)))
            if kept.key == key and count == len(kept.tokens):
                return match  # the previous turn, complete
            rank = (count, path is not None and kept.path == path, kept.used)
            if count and rank > best_rank:
                best, best_rank = match, rank
            elif best.kept is None and common >= WORTH_A_WORD:
                best = match
        return best

    def _candidates(
        self, key: int, wanted: array, more: Sequence[CachedState]
    ) -> Iterator[tuple[CachedState, int]]:
        """The states with the length of the prefix that they share with a prompt: first those of
        the hash, then the others, longest prefix first."""
        yield from ((k, common_prefix(k.tokens, wanted)) for k in self.kept if k.key == key)
        others = [(k, common_prefix(k.tokens, wanted)) for k in self.kept if k.key != key]
        others += [(k, common_prefix(k.tokens, wanted)) for k in more]
        yield from sorted(others, key=lambda pair: -pair[1])

    def _usable(self, kept: CachedState, most: int) -> int:
        """Tokens of a state that can be reused, at most `most`."""
        held = len(kept.tokens)
        if kept.cache is not None:
            return resumable(kept.cache, held, most, kept.savepoints)
        if most >= held:
            return held
        return most if kept.cuts else max((n for n in kept.points if n <= most), default=0)

    def resume(self, match: Match) -> tuple[list, list[Savepoint]] | None:
        """Caches after the match's tokens, and the savepoints before them. None if reading the disk
        failed; the state is forgotten then, and removed if it is damaged."""
        kept, count = match.kept, match.count
        assert kept is not None
        kept.used = next(self._clock)
        if kept.cache is not None:
            caches = resume_at(kept.cache, len(kept.tokens), count, kept.savepoints)
            assert caches is not None  # or find would not have returned it
            if count < len(kept.tokens):
                drop_room(caches)
            points = [
                Savepoint(p.count, copy_caches(p.layers))
                for p in kept.savepoints
                if p.count < count
            ]
            if count == len(kept.tokens) and kept.saved and not kept.own:
                # The next turn replaces it. Two holders of the KV arrays would make the first token
                # copy them all (copy on write); a later return to this turn finds it on disk.
                self._drop(kept)
            return caches, points
        try:
            return self._load(kept, count)
        except ToastError as error:
            self._forget(kept, on_disk=isinstance(error, DataError))
            return None

    def _load(self, kept: CachedState, count: int) -> tuple[list, list[Savepoint]]:
        assert kept.path is not None  # what is not in memory is on disk
        with Session.open(kept.path, None, create=False, write=False) as session:
            if session.tokens[:count] != kept.tokens[:count].tolist():
                raise ToastError("it was changed by another process")
            points = session.restore_savepoints(count, self._new_cache)
            return session.restore(count, self._new_cache), points

    # -------------------------------------------------------------------------------------- keeping

    def keep(
        self,
        key: int,
        tokens: Sequence[int],
        cache: list,
        savepoints: Sequence[Savepoint],
        parent: CachedState | None,
        history: int | None = None,
        session: Session | None = None,
    ) -> CachedState:
        """Cache a state. parent: the one it was resumed from, evicted unless the new one branched
        off before its end. history: hash of the conversation that the new one continues; its states
        are evicted too: their text goes on in the new one, if not every token (answers come back
        tokenised differently, or without their reasoning). session: the user's, if its last commit
        is this state. Takes ownership of the caches."""
        ids = array("I", tokens)
        points = [Savepoint(p.count, list(p.layers)) for p in savepoints if p.count < len(ids)]
        new = CachedState(key, ids, list(cache), points, used=next(self._clock))
        if session is not None:
            self.has_moved_on(session.path)
            new.path, new.generation = session.path, session.generation
            new.own = new.saved = True
        for old in list(self.kept):
            alike = old is parent or old.key == key
            goes_on = alike and common_prefix(old.tokens, new.tokens) == len(old.tokens)
            if old.key == history or goes_on:
                self._replace(old, new)
        self.kept.append(new)
        if not new.saved:
            self.unsaved.append(new)
        self._shrink()
        return new

    def has_moved_on(self, path: Path) -> None:
        """Forget the cached state of a user's session that has since changed."""
        self.kept = [old for old in self.kept if old.path != path]

    def _replace(self, old: CachedState, new: CachedState) -> None:
        """Evict a state that the new one continues, which takes its place on disk."""
        self._abandon(old)
        self.kept.remove(old)
        if old.own:
            return
        if new.path is None:
            new.path, new.generation = old.path, old.generation
        elif old.path is not None and self._spill is not None:
            self._spill.remove(old.path)

    def write_some(self) -> None:
        """Write the next slice of the states that are not on disk yet."""
        if self._writing is None:
            self._writing = self._write(self.unsaved[0])
        for _ in self._writing:
            return
        self._writing = None
        self.unsaved.popleft()

    def _write_now(self, kept: CachedState) -> None:
        """Write a state to disk, and before it the one that is being written."""
        while self._writing is not None:
            self.write_some()
        for _ in self._write(kept):
            pass

    def _abandon(self, kept: CachedState) -> None:
        """Have a state not be written, if it still is to be. What is on disk of one that is half
        written is of no use; one that waits would hold caches that are in no budget any more."""
        if self._writing is not None and self.unsaved[0] is kept:
            self._writing.close()
            self._writing = None
        if kept in self.unsaved:
            self.unsaved.remove(kept)

    def _write(self, kept: CachedState) -> Generator[None, None, None]:
        """Write a state to disk, as far as it is not there yet; yield after each slice."""
        if self._spill is None or kept.cache is None or kept.saved or kept not in self.kept:
            return
        if not (yield from self._spill.write(kept)):
            kept.path, kept.generation, kept.saved, kept.refused = None, 0, False, True
            return
        gone = set(self._spill.prune(keep=kept.path))
        for other in [k for k in self.kept if k.path in gone]:
            other.path, other.generation, other.saved = None, 0, False
            if other.cache is None:
                self.kept.remove(other)

    def unload(self) -> None:
        """Remove every state from the device; those not on disk are lost."""
        for kept in list(self.kept):
            self._drop(kept)

    def _shrink(self) -> None:
        """Evict from the device in LRU order until the budget holds."""
        by_age = sorted((k for k in self.kept if k.cache is not None), key=lambda k: k.used)
        total = sum(kept.nbytes for kept in by_age)
        for kept in by_age:
            if total <= self._budget:
                break
            total -= kept.nbytes
            if not kept.saved:
                self._write_now(kept)
            self._drop(kept)

    def _drop(self, kept: CachedState) -> None:
        """Evict one from the device. A user's session may change behind our back: only its copy on
        the device can be trusted."""
        if not kept.saved or kept.own:
            self._forget(kept)
            return
        kept.points = [point.count for point in kept.savepoints]
        kept.cuts = kept.cache is None or can_cut(kept.cache, len(kept.tokens))
        kept.cache, kept.savepoints = None, []

    def _forget(self, kept: CachedState, on_disk: bool = True) -> None:
        self._abandon(kept)
        if kept in self.kept:
            self.kept.remove(kept)
        if on_disk and kept.path is not None and not kept.own and self._spill is not None:
            self._spill.remove(kept.path)

    def summary(self) -> dict[str, Any]:
        """Numbers for the status."""
        inside = [kept for kept in self.kept if kept.cache is not None]
        return {
            "kept": len(self.kept),
            "in_memory": len(inside),
            "bytes": sum(kept.nbytes for kept in inside),
            "budget": self._budget,
            "on_disk": sum(kept.path is not None for kept in self.kept),
        }


def _why(kept: CachedState, common: int, count: int, total: int) -> str:
    """Explain why no more of the prompt was reused from a state."""
    if count == len(kept.tokens):
        return "the rest is new"
    if count == total - 1:
        return "all of it is kept; the last token is run for its logits"
    if count == common:
        return f"from token {count} on it is another conversation"
    if common == len(kept.tokens) or common >= total - 1:
        reason = "it was read further than this prompt goes"
    else:
        reason = f"it differs from token {common} on"
    which = "a recurrent state or a full sliding window"
    return f"{reason}, and {which} can be resumed only where one was kept"
