"""Finished conversations on disk, one session directory each, found again after a restart.

$XDG_CACHE_HOME/toastkit/conversations/FINGERPRINT-VARIANT/HASH/

They are written after every turn, in slices, between which the device is free for others, and
without fsync: a commit survives the death of the process, and one torn by a power failure is
detected by its checksums and dropped. The oldest of a model and variant are removed when these
together exceed the budget, and others, whose budget may be another, once they are long unused.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from toastkit.base_directories import own_directory
from toastkit.errors import BusyError, DataError, NoInputError, ToastError, from_os_error
from toastkit.prefix import common_prefix
from toastkit.private_files import make_private_directories
from toastkit.session.directory import Session
from toastkit.session.savepoints import Savepoint
from toastkit.session.upkeep import STALE_SECONDS

FINGERPRINT_DIGITS = 16
SLICE_BYTES = 4 << 20  # written between two steps of others, in some 15 ms
UNUSED_SECONDS = 30 * 86400.0  # after which those of other models and variants are removed
LOOK_SECONDS = 60.0  # between two looks at all of them: other daemons may write there too
_FOLDER = re.compile(f"[0-9a-f]{{{FINGERPRINT_DIGITS}}}-")


@dataclass(eq=False)
class CachedState:
    """A cached state. key: hash of its conversation. tokens: uint32, the ids it has read. cache,
    savepoints: on the device; cache is None if it is on disk only. path, generation: its place on
    disk. points, cuts: positions of its savepoints; whether it can be trimmed to any position.
    saved: complete on disk. used: LRU counter. own: the path is a user's named session, not one of
    ours. refused: writing it to disk has failed."""

    key: int
    tokens: array
    cache: list | None
    savepoints: list[Savepoint] = field(default_factory=list)
    path: Path | None = None
    generation: int = 0
    points: list[int] = field(default_factory=list)
    cuts: bool = False
    saved: bool = False
    used: int = 0
    own: bool = False
    refused: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        layers = [*(self.cache or ()), *(x for point in self.savepoints for x in point.layers)]
        return sum(layer.nbytes for layer in layers if layer is not None)


def conversations_root() -> Path:
    """The directory of all models' conversations."""
    return Path(own_directory("CACHE", "conversations"))


class Spill:
    """The conversations of one model on disk. variant: what else states depend on: dtypes and
    policies. budget: bytes of disk. say: called once, with what fails."""

    def __init__(
        self, fingerprint: str, variant: str, budget: int, say: Callable[[str], None] | None = None
    ):
        self.fingerprint = fingerprint
        self.root = conversations_root() / f"{fingerprint[:FINGERPRINT_DIGITS]}-{variant}"
        self.budget = budget
        self._say = say
        self._sizes: dict[Path, int] = {}  # least recently used first
        self._look_at = 0.0

    def scan(self) -> list[CachedState]:
        """List what is there, least recently used first. Removes damaged ones, what another process
        began to create and never finished, and what other models and variants have left."""
        _remove_unused(besides=self.root)
        found = []
        for path in _by_age(self.root):
            try:
                found.append(self._stored(path))
            except NoInputError:
                if _age(path) > STALE_SECONDS:
                    self.remove(path)
            except (DataError, ValueError):
                self.remove(path)
            except (ToastError, OSError):
                continue  # not readable now
        return found

    def _stored(self, path: Path) -> CachedState:
        with Session.open(path, self.fingerprint, create=False, write=False) as session:
            return CachedState(
                int(path.name.partition("-")[0], 16), array("I", session.tokens), None,
                path=path, generation=session.generation, points=session.savepoints,
                cuts=session.can_trim, saved=True,
            )  # fmt: skip

    def write(self, kept: CachedState) -> Generator[None, None, bool]:
        """Write a conversation in memory, only the changes if an earlier turn is on disk, and note
        its place; return True on success. Yields after each slice, for others to use the device: it
        is committed after the last, and abandoned if the generator is closed before."""
        assert kept.cache is not None  # or there is nothing to write
        name, tokens = f"{kept.key:016x}", kept.tokens.tolist()
        try:
            make_private_directories(self.root)
            path = kept.path
            if path is None or not path.is_dir():
                path = self._free_name(name)
            with Session.open(path, self.fingerprint, durable=False) as session:
                shared = common_prefix(session.tokens, tokens)
                session.continues(shared, kept.generation)
                pieces = session.commit_in_pieces(tokens, kept.cache, None, kept.savepoints)
                yield from _in_slices(pieces)
                generation = session.generation
                if not path.name.startswith(name):
                    # Keeps its lock, which is on the file and not on the name.
                    self._sizes.pop(path, None)
                    path = path.rename(self._free_name(name))
        except BusyError:  # another process is writing it, as one that is asked the same
            return False
        except Exception as error:  # whatever it is, the conversation is still in memory
            if kept.path is not None and not os.path.isdir(kept.path):  # another removed it
                kept.path, kept.generation = None, 0
                return (yield from self.write(kept))
            if self._say is not None:
                if isinstance(error, OSError):
                    error = from_os_error(error, f"cannot write in {self.root}", creating=True)
                self._say(f"conversations are not kept on disk: {error}")
                self._say = None
            return False
        kept.path, kept.generation, kept.saved = path, generation, True
        return True

    def _free_name(self, name: str) -> Path:
        path, count = self.root / name, 1
        while os.path.lexists(path):
            count += 1
            path = self.root / f"{name}-{count}"
        return path

    def prune(self, keep: Path | None = None) -> list[Path]:
        """Remove the least recently used until the budget holds; return them. keep: spared, unless
        it alone exceeds the budget."""
        removed: list[Path] = []
        if keep is not None and time.monotonic() < self._look_at:
            self._sizes.pop(keep, None)
            self._sizes[keep] = _size(keep)
        else:
            self._sizes = {path: _size(path) for path in _by_age(self.root)}
            self._look_at = time.monotonic() + LOOK_SECONDS
        sizes = dict(self._sizes)
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
        """Remove one conversation, if it is one of these."""
        self._sizes.pop(path, None)
        if path.parent == self.root:
            shutil.rmtree(path, ignore_errors=True)


def _in_slices(pieces: Iterable[int]) -> Iterator[None]:
    """Yield after every SLICE_BYTES of a commit's pieces."""
    since = 0
    for nbytes in pieces:
        since += nbytes
        if since >= SLICE_BYTES:
            yield
            since = 0


def last_used(fingerprint: str) -> Iterator[list[int]]:
    """Yield the token ids of a model's conversations, of all variants, most recently used first.
    Skips unreadable ones."""
    roots = conversations_root().glob(f"{fingerprint[:FINGERPRINT_DIGITS]}-*")
    paths = [path for root in roots for path in _by_age(root)]
    for path in sorted(paths, key=_age):
        with suppress(ToastError, ValueError, OSError):
            with Session.open(path, fingerprint, create=False, write=False) as session:
                ids = session.tokens
            yield ids


def _remove_unused(besides: Path) -> None:
    """Remove the folders of other models and variants in which nothing was written for long."""
    for root in _by_age(conversations_root()):
        if root == besides or not _FOLDER.match(root.name):
            continue
        if all(_age(path) > UNUSED_SECONDS for path in (root, *_by_age(root))):
            shutil.rmtree(root, ignore_errors=True)


def _by_age(root: Path) -> list[Path]:
    """The directories in a folder, least recently used first."""
    try:
        with os.scandir(root) as entries:
            ours = (e for e in entries if e.is_dir(follow_symlinks=False))
            folders = [(e.stat().st_mtime, Path(e.path)) for e in ours]
    except OSError:
        return []
    return [path for _, path in sorted(folders)]


def _age(path: Path) -> float:
    """Seconds since a directory was written to, 0 if it has just gone."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def _size(path: Path) -> int:
    """Bytes on disk of the files in a directory."""
    total = 0
    with suppress(OSError), os.scandir(path) as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False):
                total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total
