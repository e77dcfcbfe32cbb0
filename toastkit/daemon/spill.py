"""Finished conversations on disk: a session directory each, found again after a restart.

    $XDG_CACHE_HOME/toastkit/conversations/FINGERPRINT-VARIANT/HASH/

They are written after every turn, without waiting for the disk: a commit survives the death of the
process, and what a power failure tears is found out by its checksums and dropped. The oldest go
when all of them together are over the budget.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from toastkit.base_directories import own_directory
from toastkit.errors import NoInputError, ToastError
from toastkit.prefix import common_prefix
from toastkit.private_files import make_private_directories
from toastkit.session.directory import Session
from toastkit.session.savepoints import Savepoint
from toastkit.session.upkeep import STALE_SECONDS

FINGERPRINT_DIGITS = 16


@dataclass
class Stored:
    """A conversation found on disk. key: its hash. tokens: ids it has read. points: positions of
    its savepoints. cuts: it can be resumed at any position. generation: of its last commit."""

    path: Path
    key: int
    tokens: list[int]
    points: list[int]
    cuts: bool
    generation: int


def conversations_root() -> Path:
    """Where conversations of all models lie."""
    return Path(own_directory("CACHE", "conversations"))


class Spill:
    """The conversations of one model. variant: what else its states depend on: dtype and policies.
    budget: bytes of disk. say: is told, once, what fails."""

    def __init__(
        self,
        fingerprint: str,
        variant: str,
        budget: int,
        say: Callable[[str], None] | None = None,
    ):
        self.fingerprint = fingerprint
        self.root = conversations_root() / f"{fingerprint[:FINGERPRINT_DIGITS]}-{variant}"
        self.budget = budget
        self._say = say

    def scan(self) -> list[Stored]:
        """What is there, the longest unused first. Damaged ones are removed, and what another
        process began to make and never finished."""
        found = []
        for path in self._by_age():
            try:
                found.append(self._stored(path))
            except NoInputError:
                if _age(path) > STALE_SECONDS:
                    self.remove(path)
            except (ToastError, ValueError):
                self.remove(path)
            except OSError:
                continue  # not to be read now
        return found

    def _by_age(self) -> list[Path]:
        try:
            with os.scandir(self.root) as entries:
                ours = (e for e in entries if e.is_dir(follow_symlinks=False))
                folders = [(e.stat().st_mtime, Path(e.path)) for e in ours]
        except OSError:
            return []
        return [path for _, path in sorted(folders)]

    def _stored(self, path: Path) -> Stored:
        session = Session.open(path, self.fingerprint, create=False, write=False)
        try:
            key = int(path.name.partition("-")[0], 16)
            points, cuts = session.savepoints, session.can_cut
            return Stored(path, key, session.tokens, points, cuts, session.generation)
        finally:
            session.close()

    def write(
        self,
        path: Path | None,
        generation: int,
        key: int,
        tokens: Sequence[int],
        cache: list,
        savepoints: Sequence[Savepoint],
    ) -> tuple[Path, int] | None:
        """Stores a conversation; its directory and generation, or None where that failed.

        path, generation: where an earlier turn of it lies, of which only the change is written.
        """
        try:
            make_private_directories(self.root)
            path = path if path is not None and path.is_dir() else self._free_name(key)
            with Session.open(path, self.fingerprint, durable=False) as session:
                session.continues(common_prefix(session.tokens, tokens), generation)
                session.commit(tokens, cache, None, savepoints)
                generation = session.generation
                if not path.name.startswith(f"{key:016x}"):
                    named = self._free_name(key)
                    os.rename(
                        path, named
                    )  # with its lock, which is of the file and not of the name
                    path = named
            os.utime(path)
            return path, generation
        except Exception as error:  # whatever it is: the conversation is still in memory
            if self._say is not None:
                self._say(f"conversations are not kept on disk: {error}")
                self._say = None
            return None

    def _free_name(self, key: int) -> Path:
        name = f"{key:016x}"
        path, count = self.root / name, 1
        while os.path.lexists(path):
            count += 1
            path = self.root / f"{name}-{count}"
        return path

    def prune(self, keep: Path | None = None) -> list[Path]:
        """Removes the longest unused until the budget holds; which ones. keep: not this one, unless
        it alone is over the budget."""
        removed: list[Path] = []
        sizes = {path: _size(path) for path in self._by_age()}
        total = sum(sizes.values())
        hopeless = [path for path, size in sizes.items() if size > self.budget]
        for path in dict.fromkeys([*hopeless, *sizes]):
            size = sizes[path]
            if total <= self.budget:
                break
            if path != keep or path in hopeless:
                self.remove(path)
                removed.append(path)
                total -= size
        return removed

    def remove(self, path: Path) -> None:
        """Removes one conversation, if it is one of these."""
        if path.parent == self.root:
            shutil.rmtree(path, ignore_errors=True)


def _age(path: Path) -> float:
    """Seconds since a directory was written to; none where it has just gone."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def _size(path: Path) -> int:
    """Bytes on disk of the files in a directory."""
    total = 0
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
    except OSError:
        pass
    return total
