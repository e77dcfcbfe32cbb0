"""Session: a model state in a directory, opened, reused, restored, committed, closed.

    with Session.open(path, fingerprint) as session:
        n = session.reusable(ids)               # tokens that need not be run again
        cache = session.restore(n, make_cache)
        ...                                     # run ids[n:]
        session.commit(ids, cache, logits)

A state that cannot be cut back, such as a recurrent one, can be resumed at its end and at the
savepoints that it was committed with (savepoints.py).

One process writes at a time; it holds the lock from open to close or hands it on (handover.py).
Any number may read the last commit meanwhile. The layout on disk is in layout.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from toastkit.errors import DataError, from_os_error
from toastkit.prefix import common_prefix
from toastkit.private_files import DataFiles
from toastkit.session import commit as writing
from toastkit.session import reading
from toastkit.session.blocks import LayerSource, Stored
from toastkit.session.header import encode_header
from toastkit.session.layout import Damaged, Header, Layer, NewerSchema
from toastkit.session.lock import WriterLock
from toastkit.session.names import HEADER_FILE, display_name, is_ephemeral
from toastkit.session.savepoints import Savepoint, can_cut, layers_at, stored_layers
from toastkit.session.upkeep import (
    CACHE_FILE,
    gone,
    make_ephemeral,
    prepare,
    remove_tree,
    remove_unborn,
)

if TYPE_CHECKING:
    import numpy as np

Result = TypeVar("Result")


class Session:
    """One session directory.

    path: the directory. fingerprint: of the model, hex. tokens: ids that the last commit has read.
    ephemeral: it vanishes when closed. lock: the writer's lock, or None when only reading. header:
    of the last commit; it is not to be changed.
    """

    def __init__(
        self, path: Path, fingerprint: str | None, lock: WriterLock | None, durable: bool = True
    ):
        self.path = path
        self.ephemeral = is_ephemeral(path)
        self.lock = lock
        self.tokens: list[int] = []
        self._syncs = durable and not self.ephemeral
        self._expected = fingerprint
        self.header = Header(fingerprint or "")
        self._shared = 0  # leading tokens for which the caller's caches have the rows on disk
        self._stale = False  # a commit broke off while its header was being put in place
        self._files = DataFiles(path, writes=lock is not None)

    # ------------------------------------------------------------------------- opening and closing

    @classmethod
    def create_ephemeral(cls, fingerprint: str) -> Session:
        """A new session under the sessions' root that vanishes when closed; what earlier ones left
        behind after a kill is swept away. Raises CannotCreateError, IOFailure."""
        path = make_ephemeral()
        return cls.adopt(path, fingerprint, WriterLock.acquire(path))

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
        """Opens a session, at its last commit.

        fingerprint: of the model that is to use it; None takes any (tools that run no model).
        create: make one if there is none. write: take the writer's lock; without it only reading
        is possible, and nothing is created. durable: commits outlive a power failure; without it
        they still outlive any kill, and cost no wait for the disk.
        Raises NoInputError if there is no such session, BusyError if another process writes it,
        DataError if it is damaged or another model's, CannotCreateError, IOFailure.
        """
        path = Path(path)
        if not write:
            return cls(path, fingerprint, None)._opened()
        prepare(path, create)
        return cls.adopt(path, fingerprint, WriterLock.acquire(path), durable=durable)

    @classmethod
    def adopt(
        cls,
        path: Path | str,
        fingerprint: str | None,
        lock: WriterLock,
        *,
        durable: bool = True,
    ) -> Session:
        """Opens a session whose lock this process holds already, as after a hand-over. The lock is
        the session's from now on, and released if this raises (as open does)."""
        return cls(Path(path), fingerprint, lock, durable)._opened()

    def _opened(self) -> Session:
        try:
            self._guarded(lambda: None, load=True)
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Releases the lock; removes an ephemeral session and one that nothing was ever committed
        to, unless the lock was handed on. May be called again."""
        self._files.close()
        if self.lock is not None and self.lock.held:
            if self.ephemeral:
                remove_tree(self.path)
            elif self.generation == 0:
                remove_unborn(self.path)
            self.lock.release()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --------------------------------------------------------------------------------- properties

    @property
    def name(self) -> str:
        """How messages call it."""
        return display_name(self.path)

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
    def can_cut(self) -> bool:
        """Whether every layer of the last commit can be cut back to any earlier position, so that
        savepoints are of no use. (A window that has not begun to slide may do so later.)"""
        layers, count = self.header.layers or (), self.header.count
        return all(can_cut(layer, count, 0) for layer in layers)

    # -------------------------------------------------------------------------------------- reading

    def reusable(self, ids: Sequence[int]) -> int:
        """How many leading tokens of ids can be taken from here, so that running the rest gives
        the logits after the last: all that is stored if ids begin with it, otherwise the common
        part if every layer can be had as it was there, otherwise up to the last savepoint within
        the common part, or 0.

        That is less than len(ids) unless ids are what is stored and its logits are too.
        """
        ids = list(ids)
        n = common_prefix(self.tokens, ids)
        if n == len(ids) and not (n == self.n_past and self.header.logits is not None):
            n -= 1  # the last token is run again: there are no logits without
        if n <= 0:
            return 0
        earlier = (count for count in reversed(self.savepoints) if count < n)
        ways = (count for count in (n, *earlier) if layers_at(self.header, count) is not None)
        return next(ways, 0)

    def restore(self, n: int, make_cache: Callable[[], list]) -> list:
        """Caches that have read the first n tokens, n as reusable gave it; new ones for n = 0.

        make_cache: gives fresh caches of the model, a list of mlx_lm cache objects; classes and
        sizes are held against it. The caches that a later commit gets must be these or none.
        Raises DataError: damaged, other caches than the model's, or changed by a writer meanwhile.
        """
        if n <= 0:
            self._shared = 0
            return make_cache()
        from toastkit.session import caches

        return self.restore_layers(n, lambda layers, load: caches.fill(make_cache(), layers, load))

    def restore_layers(self, n: int, rebuild: Callable[[list[Layer], Stored], Result]) -> Result:
        """What restore does, for a caller with its own idea of a cache: rebuild(layers, load) gets
        the stored layers as they were after n tokens, and load(tensor) -> bytearray."""

        def rebuilt() -> Result:
            layers = layers_at(self.header, n)
            if layers is None:
                raise Damaged("it was changed while it was being read")
            stored = self._stored(in_place=True)
            result = rebuild(layers, stored)
            if stored.held and self.lock is None:
                self._check_last()  # from now on what is held stays
            return result

        result = self._unless_changed(n, rebuilt)
        self._shared = n
        return result

    def restore_savepoints(self, n: int, make_cache: Callable[[], list]) -> list[Savepoint]:
        """The savepoints before position n, n as reusable gave it: a state that is restored there
        hands them on to its next commit. In each, caches are None where the end is cut back.
        make_cache, errors: as for restore."""
        if n <= 0 or not self.savepoints:
            return []
        from toastkit.session import caches

        def rebuilt() -> list[Savepoint]:
            return [
                Savepoint(count, caches.fill(make_cache(), layers, self._stored()))
                for count, layers in stored_layers(self.header, n)
            ]

        return self._unless_changed(n, rebuilt)

    def _unless_changed(self, n: int, rebuilt: Callable[[], Result]) -> Result:
        """Runs a reading action, twice if a writer comes between. What is stored by then must begin
        with the same n tokens."""
        wanted = self.tokens[:n]

        def attempt() -> Result:
            if self.tokens[:n] != wanted:
                raise Damaged("it was changed while it was being read")
            if self.header.layers is None:
                raise Damaged("it holds tokens but no caches")
            return rebuilt()

        return self._guarded(attempt)

    def logits(self) -> np.ndarray | None:
        """float32 (vocab,) after the last committed token, or None if there are none.
        Raises DataError if they are damaged."""
        wanted = self.tokens

        def attempt() -> bytearray | None:
            if self.tokens != wanted:
                raise Damaged("it was changed while it was being read")
            record = self.header.logits
            return None if record is None else reading.read_logits(self._files, record)

        buffer = self._guarded(attempt)
        if buffer is None:
            return None
        import numpy as np

        return np.frombuffer(buffer, np.dtype("<f4"))

    def _stored(self, in_place: bool = False) -> Stored:
        """What cache.bin has. in_place: where it lies, if nobody has written to it since."""
        fd, seal = self._files.fd(CACHE_FILE), self.header.seal
        whole = in_place and seal is not None and seal == reading.seal(fd)
        return Stored(fd, partial(self._files.again, CACHE_FILE) if whole else None)

    def _check_last(self) -> None:
        """Raises Damaged if there has been another commit since the header was read."""
        header, _ = reading.read_commit(self.name, self._files, self._expected)
        if header.generation != self.generation:
            raise Damaged("it was changed while it was being read")

    # -------------------------------------------------------------------------------------- writing

    def continues(self, n: int, generation: int) -> bool:
        """Says that the caller's caches hold the first n tokens as commit `generation` of this
        session left them, in place of restoring them: for one who closed the session and has kept
        the caches. Returns whether that is the last commit; if not, nothing is taken for granted.
        """
        same = self.generation == generation and 0 <= n <= self.n_past
        if same:
            self._shared = n
        return same

    def commit(
        self,
        tokens: Sequence[int],
        cache: list | None,
        logits: Any,
        savepoints: Sequence[Savepoint] = (),
    ) -> None:
        """Makes this the session's state, all of it or (on any failure) nothing.

        tokens: ALL ids that the caches have read. cache: a list of mlx_lm cache objects, or None
        where there are none to keep. logits: float32 (vocab,) after the last token, or None.
        savepoints: ALL that the session is to hold from now on; `savepoints` says which it does,
        since one that is left without a way back (see commit.write_savepoints) is dropped.
        Only what changed is written: rows of tokens that this session restored or committed before
        are taken to be as they were, and so are its savepoints among them.
        Raises IOFailure if the disk is full, DataError for a cache of a class it does not know,
        ValueError for savepoints that are not the state's.
        """
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
    ) -> None:
        """What commit does, for layers that are described already, those of savepoints too."""
        if self.lock is None or not self.lock.held:
            raise ValueError("the session is open for reading only")
        state = writing.State(
            list(tokens),
            sources,
            None if logits is None else writing.logits_bytes(logits),
            writing.in_order(savepoints, sources, len(tokens)),
        )
        try:
            if self._stale:
                self._load()
            header = writing.write_data(self._files, self.header, self.tokens, state, self._shared)
            if self._syncs:
                self._files.sync()
            self._publish(header, state.tokens)
        except Damaged as error:
            raise self._damaged(error) from error
        except OSError as error:
            raise from_os_error(error, f"cannot save session {self.name}", creating=True) from error

    def _publish(self, header: Header, tokens: list[int]) -> None:
        """Puts the header in place: the moment at which the commit happens."""
        self._stale = True
        if header.layers is not None:
            header.seal = reading.seal(self._files.fd(CACHE_FILE))
        self._files.replace(HEADER_FILE, encode_header(header), self._syncs)
        self.header, self.tokens, self._shared = header, tokens, len(tokens)
        self._stale = False
        if self._syncs:
            self._files.sync_directory()
        if header.layers is not None:
            end = max((offset + size for offset, size in header.extents()), default=0)
            writing.trim_file(self._files.fd(CACHE_FILE), end)

    # ---------------------------------------------------------------------------- header and files

    def _guarded(self, action: Callable[[], Result], load: bool = False) -> Result:
        """Runs a reading action; damage becomes DataError, an OSError its ToastError. A reader
        beside a writer may find that a header's extents were used again by a later commit: it reads
        the header anew, once. load: read the header before the first attempt too."""
        try:
            try:
                if load:
                    self._load()
                return action()
            except Damaged:
                if self.lock is not None:
                    raise
                self._load()
                return action()
        except Damaged as error:
            raise self._damaged(error) from error
        except OSError as error:
            raise from_os_error(error, f"cannot read session {self.name}") from error

    def _damaged(self, error: Damaged) -> DataError:
        hint = "a newer toastkit wrote it" if isinstance(error, NewerSchema) else None
        return DataError(f"cannot read session {self.name}: {error}", hint)

    def _load(self) -> None:
        """Reads header and tokens of the last commit. Raises Damaged, DataError for another model,
        NoInputError if a reader finds no session, OSError."""
        try:
            header, tokens = reading.read_commit(self.name, self._files, self._expected)
        except FileNotFoundError:
            if self.lock is not None:
                return  # created, and not yet committed to
            raise gone(self.path) from None
        self.header, self.tokens, self._stale, self._shared = header, tokens, False, 0
