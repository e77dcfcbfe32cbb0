"""Session: a model state in a directory, opened, reused, restored, committed, closed.

with Session.open(path, fingerprint) as session:
    n = session.reusable(ids)               # tokens that need not be run again
    cache = session.restore(n, make_cache)
    ...                                     # run ids[n:]
    session.commit(ids, cache, logits)

A state that cannot be cut back, such as a recurrent one, can be resumed at its end and at the
savepoints it was committed with (savepoints.py).

One process writes at a time; it holds the lock from open to close or hands it over (handover.py).
Any number may read the last commit meanwhile. The layout on disk is in layout.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from toastkit.errors import DataError, ToastError, from_os_error
from toastkit.prefix import common_prefix
from toastkit.session import commit as writing
from toastkit.session import reading
from toastkit.session.blocks import LayerSource, Pieces, Stored, written
from toastkit.session.header import encode_header
from toastkit.session.layout import Damaged, Header, Layer
from toastkit.session.lock import WriterLock
from toastkit.session.names import HEADER_FILE, is_ephemeral
from toastkit.session.reading import LastCommit, Result
from toastkit.session.savepoints import Savepoint, can_trim, layers_at, stored_layers
from toastkit.session.upkeep import (
    CACHE_FILE,
    lock_prepared,
    make_ephemeral,
    remove_tree,
    remove_unborn,
)


class Session(LastCommit):
    """One session directory.

    fingerprint: of the model, hex. ephemeral: deleted on close. made: its directory was created
    for it. The rest as in LastCommit.
    """

    def __init__(
        self,
        path: Path,
        fingerprint: str | None,
        lock: WriterLock | None,
        durable: bool = True,
        made: bool = True,
    ):
        super().__init__(path, fingerprint, lock)
        self.ephemeral = is_ephemeral(path)
        self._made = made
        self._syncs = durable and not self.ephemeral
        self._assume_shared(0)

    # ------------------------------------------------------------------------- opening and closing

    @classmethod
    def create_ephemeral(cls, fingerprint: str) -> Session:
        """Create a session under the sessions' root that is deleted on close; sweep away what
        killed processes have left of earlier ones. Raises CannotCreateError, IOFailure."""
        path, lock = make_ephemeral()
        return cls.adopt(path, fingerprint, lock)

    @classmethod
    def open(
        cls,
        path: Path | str,
        fingerprint: str | None,
        *,
        create: bool = True,
        write: bool = True,
        durable: bool = True,
    ) -> Session:
        """Open a session at its last commit.

        fingerprint: of the model that is to use it; None accepts any (tools that run no model).
        create: create it if it does not exist. write: take the writer's lock; without it only
        reading is possible, and nothing is created. durable: commits outlive a power failure;
        otherwise they still outlive any kill, and do not wait for the disk.
        Raises NoInputError if there is no such session, BusyError if another process writes it,
        DataError if it is damaged or another model's, CannotCreateError, IOFailure.
        """
        path = Path(path)
        if not write:
            return cls(path, fingerprint, None)._opened()
        lock, made = lock_prepared(path, create)
        return cls(path, fingerprint, lock, durable, made)._opened()

    @classmethod
    def adopt(cls, path: Path | str, fingerprint: str | None, lock: WriterLock) -> Session:
        """Open a session whose lock this process holds already, as after a hand-over. Takes
        ownership of the lock, and releases it if this raises (as open does)."""
        return cls(Path(path), fingerprint, lock)._opened()

    def _opened(self) -> Session:
        try:
            self._guarded(lambda: None, load=True)
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Release the lock; unless it was handed over, remove an ephemeral session, and one that
        nothing was ever committed to. Idempotent."""
        self._files.close()
        if self.lock is not None and self.lock.held:
            if self.ephemeral:
                remove_tree(self.path)
            elif self.generation == 0:
                remove_unborn(self.path, self._made)
            self.lock.release()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --------------------------------------------------------------------------------- properties

    @property
    def n_past(self) -> int:
        """Number of tokens that the committed state has read."""
        return len(self.tokens)

    @property
    def generation(self) -> int:
        """Number of commits so far."""
        return self.header.generation

    @property
    def savepoints(self) -> list[int]:
        """Positions of the savepoints that the last commit holds, ascending."""
        return [point.count for point in self.header.savepoints]

    @property
    def can_trim(self) -> bool:
        """True if every layer of the last commit can be cut back to any earlier position, so that
        savepoints are useless. (A window may yet begin to slide.)"""
        layers, count = self.header.layers or (), self.header.count
        return all(can_trim(layer, count, 0) for layer in layers)

    # -------------------------------------------------------------------------------------- reading

    def reusable(self, ids: Sequence[int]) -> int:
        """How many leading tokens of ids can be reused, so that running the rest gives the logits
        after the last: all that are stored if ids begin with them; otherwise the common prefix if
        every layer can be cut back to it; otherwise up to the last savepoint within it, or 0.

        Less than len(ids) unless ids are exactly what is stored and its logits are stored too.
        """
        ids = list(ids)
        n = common_prefix(self.tokens, ids)
        if n == len(ids) and not (n == self.n_past and self.header.logits is not None):
            n -= 1  # no logits are stored for the last token: run it again
        if n <= 0:
            return 0
        earlier = (count for count in reversed(self.savepoints) if count < n)
        ways = (count for count in (n, *earlier) if layers_at(self.header, count) is not None)
        return next(ways, 0)

    def restore(self, n: int, make_cache: Callable[[], list]) -> list:
        """Caches that have read the first n tokens, with n from reusable; new ones for n = 0.

        make_cache: gives fresh caches of the model, a list of mlx_lm cache objects, whose classes
        and sizes must match. A later commit must be given these caches or none.
        Raises DataError: damaged, other caches than the model's, or changed by a writer meanwhile.
        """
        if n <= 0:
            self._assume_shared(0)
            return make_cache()
        from toastkit.session import caches

        return self.restore_layers(n, lambda layers, load: caches.fill(make_cache(), layers, load))

    def restore_layers(self, n: int, rebuild: Callable[[list[Layer], Stored], Result]) -> Result:
        """As restore, for callers with their own kind of cache: rebuild(layers, load) gets the
        stored layers as they were after n tokens, and load(tensor) -> bytearray."""

        def rebuilt() -> Result:
            layers = layers_at(self.header, n)
            if layers is None:
                raise Damaged("it was changed while it was being read")
            stored = self._stored()
            result = rebuild(layers, stored)
            self._check_held(stored)
            return result

        result = self._unless_changed(n, rebuilt)
        self._assume_shared(n)
        return result

    def restore_savepoints(self, n: int, make_cache: Callable[[], list]) -> list[Savepoint]:
        """The savepoints before position n, with n from reusable: a state that is restored there
        passes them to its next commit. Caches in them are None if the end can be cut back.
        make_cache, errors: as for restore."""
        if n <= 0 or not self.savepoints:
            return []
        from toastkit.session import caches

        def rebuilt() -> list[Savepoint]:
            stored = self._stored()
            found = [
                Savepoint(count, caches.fill(make_cache(), layers, stored))
                for count, layers in stored_layers(self.header, n)
            ]
            self._check_held(stored)
            return found

        return self._unless_changed(n, rebuilt)

    def _check_held(self, stored: Stored) -> None:
        """Raise Damaged if a writer may have reused what is read in place."""
        if stored.held and self.lock is None:
            self._check_last()  # what is held from now on is safe

    # -------------------------------------------------------------------------------------- writing

    def continues(self, n: int, generation: int) -> bool:
        """Declare that the caller's caches hold the first n tokens as commit `generation` of this
        session left them, instead of restoring them: for callers that closed the session and kept
        the caches. Return whether that is the last commit; if not, nothing is assumed."""
        same = self.generation == generation and 0 <= n <= self.n_past
        if same:
            self._assume_shared(n)
        return same

    def _assume_shared(self, n: int) -> None:
        """Record that the caller's caches hold the rows of the first n tokens as on disk. Discards
        rows written ahead, which belonged to others."""
        self._shared = n
        self._ahead: writing.Ahead | None = None
        self._origin: tuple[Path, int, int, int] | None = None
        self._writes_ahead = True

    def _load(self) -> None:
        super()._load()
        self._assume_shared(0)

    def write_ahead(self, tokens: Sequence[int], cache: list, room: int) -> None:
        """Write rows of the next commit in advance, to shorten it: the growing parts of an
        unfinished state whose tokens will be committed first. Failures are left to the commit to
        report.

        tokens, cache: as for `commit`. room: tokens that the state is about to have.
        """
        from toastkit.session.caches import describe

        self.write_layers_ahead(tokens, partial(describe, cache), room)

    def write_layers_ahead(
        self, tokens: Sequence[int], describe: Callable[[], Sequence[LayerSource]], room: int
    ) -> None:
        """As write_ahead, for callers who describe the layers."""
        if not self._writes_ahead or self.lock is None or not self.lock.held:
            return
        try:
            if self._stale:
                self._load()
            self._copy_ahead()
            fd = self._files.fd(CACHE_FILE)
            ahead = self._ahead or writing.as_committed(
                fd, self.header, self.tokens, self._shared, room
            )
            self._ahead = writing.write_ahead(fd, ahead, list(tokens), describe())
            if self._syncs:
                self._files.sync_ahead(CACHE_FILE)
        except (Damaged, DataError, OSError):
            self._give_back()
            self._writes_ahead = False

    def goes_on_from(self, source: Session, n: int, room: int) -> None:
        """Record that the state has the first n tokens of another session's, just restored from it:
        before the first rows are written, the system copies those to where `write_ahead` would have
        written them. room: as in write_ahead."""
        self._origin = source.path, source.generation, n, room

    def _copy_ahead(self) -> None:
        """Copy the rows of `goes_on_from`, which is cheaper than writing them, and on some file
        systems free. What cannot be copied, or is not known to be as committed, is left to the
        commit."""
        if self._origin is None or self.generation or self._ahead is not None:
            return
        (path, generation, n, room), self._origin = self._origin, None
        with (
            suppress(ToastError, Damaged, OSError),
            Session.open(path, self._expected, create=False, write=False) as source,
        ):
            layers, lent = layers_at(source.header, n), source._stored()
            if source.generation != generation or not layers or not lent.reopen:
                return
            fd = self._files.fd(CACHE_FILE)
            ahead = writing.as_committed(fd, self.header, self.tokens, 0, room)
            ahead = writing.copy_ahead(fd, ahead, source.tokens[:n], layers, lent.fd)
            source._check_last()  # or a writer may have reused what was copied
            self._ahead = ahead

    def commit(
        self,
        tokens: Sequence[int],
        cache: list | None,
        logits: Any,
        savepoints: Sequence[Savepoint] = (),
    ) -> None:
        """Make this the session's state atomically: on any failure nothing changes.

        tokens: ALL ids that the caches have read. cache: a list of mlx_lm cache objects, or None to
        keep none. logits: float32 (vocab,) after the last token, or None. savepoints: ALL that the
        session is to hold from now on; the property `savepoints` tells which it does, since one
        that can no longer be resumed (see commit.write_savepoints) is dropped. Only changes are
        written: rows of tokens that this session restored or committed before are assumed
        unchanged, and so are its savepoints among them.
        Raises IOFailure if the disk is full, DataError for a cache of an unknown class, ValueError
        for savepoints that are not the state's.
        """
        written(self.commit_in_pieces(tokens, cache, logits, savepoints))

    def commit_in_pieces(
        self,
        tokens: Sequence[int],
        cache: list | None,
        logits: Any,
        savepoints: Sequence[Savepoint] = (),
    ) -> Pieces[None]:
        """As commit, in pieces of some MiB, whose bytes are yielded once each is written: what the
        caches held at first is committed after the last, nothing if this is closed before."""
        if cache is None:
            return self.commit_layers(tokens, None, logits, savepoints)
        from toastkit.session.caches import describe, describe_one

        points = [
            Savepoint(count, [None if x is None else describe_one(x) for x in layers])
            for count, layers in savepoints
        ]
        return self.commit_layers(tokens, describe(cache), logits, points)

    def commit_layers(
        self,
        tokens: Sequence[int],
        sources: Sequence[LayerSource] | None,
        logits: Any,
        savepoints: Sequence[Savepoint] = (),
    ) -> Pieces[None]:
        """As commit_in_pieces, for layers that are described already, those of savepoints too."""
        if self.lock is None or not self.lock.held:
            raise ValueError("the session is open for reading only")
        after = None if logits is None else writing.logits_bytes(logits)
        points = writing.in_order(savepoints, sources, len(tokens))
        state = writing.State(list(tokens), sources, after, points)
        try:
            if self._stale:
                self._load()
            if sources is not None:
                self._copy_ahead()
            header = yield from writing.write_data(
                self._files, self.header, self.tokens, state, self._shared, self._ahead
            )
            if self._syncs:
                self._files.sync()
            self._publish(header, state.tokens)
        except Damaged as error:
            raise self._damaged(error) from error
        except OSError as error:
            self._give_back()
            raise from_os_error(error, f"cannot save session {self.name}", creating=True) from error

    def _give_back(self) -> None:
        """Give the disk back what a failed commit has taken behind the end of the last one, and of
        the one before where it is not known which will be found after a crash."""
        self._ahead, known = None, self.header
        with suppress(ToastError, Damaged, OSError):
            if self._stale:
                self._load()
            end = max(map(writing.end_of, (known, self.header)))
            writing.trim_file(self._files.fd(CACHE_FILE), end, sooner=True)

    def _publish(self, header: Header, tokens: list[int]) -> None:
        """Put the header in place: the moment of the commit."""
        self._stale = True
        if header.layers is not None:
            header.seal = reading.seal(self._files.fd(CACHE_FILE))
        self._files.replace(HEADER_FILE, encode_header(header), self._syncs)
        self.header, self.tokens, self._stale = header, tokens, False
        self._assume_shared(len(tokens))
        if self._syncs:
            self._files.sync_directory()
        if header.layers is not None:
            writing.trim_file(self._files.fd(CACHE_FILE), writing.end_of(header))
