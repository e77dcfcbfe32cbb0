"""Session: a model state in a directory, opened, reused, restored, committed, closed.

    with Session.open(path, fingerprint) as session:
        n = session.reusable(ids)               # tokens that need not be run again
        cache = session.restore(n, make_cache)
        ...                                     # run ids[n:]
        session.commit(ids, cache, logits)

One process writes at a time; it holds the lock from open to close or hands it on (handover.py).
Any number may read the last commit meanwhile. The layout on disk is in layout.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from toastkit.errors import DataError, NoInputError, from_os_error
from toastkit.frames import unpack_ids
from toastkit.session import commit as writing
from toastkit.session import files
from toastkit.session.blocks import LayerSource, load_tensor
from toastkit.session.header import MAX_HEADER_BYTES, decode_header, encode_header
from toastkit.session.layout import Damaged, Header, Layer, NewerSchema, Tensor, can_cut
from toastkit.session.lock import WriterLock
from toastkit.session.names import HEADER_FILE, display_name, is_ephemeral
from toastkit.session.upkeep import (
    CACHE_FILE,
    LOGITS_FILE,
    TOKENS_FILE,
    make_ephemeral,
    prepare,
    remove_tree,
    remove_unborn,
)

if TYPE_CHECKING:
    import numpy as np

Result = TypeVar("Result")
Load = Callable[[Tensor, int], bytearray]


class Session:
    """One session directory.

    path: the directory. fingerprint: of the model, hex. tokens: ids that the last commit has read.
    ephemeral: it vanishes when closed. lock: the writer's lock, or None when only reading.
    """

    def __init__(self, path: Path, fingerprint: str | None, lock: WriterLock | None):
        self.path = path
        self.ephemeral = is_ephemeral(path)
        self.lock = lock
        self.tokens: list[int] = []
        self._expected = fingerprint
        self._header = Header(fingerprint or "")
        self._shared = 0  # leading tokens for which the caller's caches have the rows on disk
        self._stale = False  # a commit broke off while its header was being put in place
        self._files = files.DataFiles(path, writes=lock is not None)

    # ------------------------------------------------------------------------- opening and closing

    @classmethod
    def create_ephemeral(cls, fingerprint: str) -> Session:
        """A new session under the sessions' root that vanishes when closed; what earlier ones left
        behind after a kill is swept away. Raises CannotCreateError, IOFailure."""
        path = make_ephemeral()
        return cls.adopt(path, fingerprint, WriterLock.acquire(path))

    @classmethod
    def open(
        cls, path: Path | str, fingerprint: str | None, *, create: bool = True, write: bool = True
    ) -> Session:
        """Opens a session, at its last commit.

        fingerprint: of the model that is to use it; None takes any (tools that run no model).
        create: make one if there is none. write: take the writer's lock; without it only reading
        is possible, and nothing is created.
        Raises NoInputError if there is no such session, BusyError if another process writes it,
        DataError if it is damaged or another model's, CannotCreateError, IOFailure.
        """
        path = Path(path)
        if not write:
            return cls(path, fingerprint, None)._opened()
        prepare(path, create)
        return cls.adopt(path, fingerprint, WriterLock.acquire(path))

    @classmethod
    def adopt(cls, path: Path | str, fingerprint: str | None, lock: WriterLock) -> Session:
        """Opens a session whose lock this process holds already, as after a hand-over. The lock is
        the session's from now on, and released if this raises (as open does)."""
        return cls(Path(path), fingerprint, lock)._opened()

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # --------------------------------------------------------------------------------- properties

    @property
    def name(self) -> str:
        """How messages call it."""
        return display_name(self.path)

    @property
    def fingerprint(self) -> str:
        return self._header.fingerprint

    @property
    def n_past(self) -> int:
        """Number of tokens that the committed state has read."""
        return len(self.tokens)

    @property
    def generation(self) -> int:
        """Number of commits so far."""
        return self._header.generation

    # -------------------------------------------------------------------------------------- reading

    def reusable(self, ids: Sequence[int]) -> int:
        """How many leading tokens of ids can be taken from here, so that running the rest gives
        the logits after the last: all that is stored if ids begin with it, otherwise the common
        part if every layer can be cut back to it, otherwise 0.

        That is less than len(ids) unless ids are what is stored and its logits are too.
        """
        ids = list(ids)
        n = writing.common_prefix(self.tokens, ids)
        if n == len(ids) and not (n == self.n_past and self._header.logits is not None):
            n -= 1  # the last token is run again: there are no logits without
        return n if n > 0 and self._can_cut(n) else 0

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

        def rebuild(layers: list[Layer], load: Load) -> list:
            fresh = make_cache()
            caches.fill(fresh, layers, self.n_past, n, load)
            return fresh

        return self.restore_layers(n, rebuild)

    def restore_layers(self, n: int, rebuild: Callable[[list[Layer], Load], Result]) -> Result:
        """What restore does, for a caller with its own idea of a cache: rebuild(layers, load) gets
        the stored layers and load(tensor, rows) -> bytearray (see blocks.load_tensor)."""
        wanted = self.tokens[:n]

        def attempt() -> Result:
            if self.tokens[:n] != wanted or not self._can_cut(n):
                raise Damaged("it was changed while it was being read")
            if self._header.layers is None:
                raise Damaged("it holds tokens but no caches")
            return rebuild(self._header.layers, self._load_tensor)

        result = self._guarded(attempt)
        self._shared = n
        return result

    def logits(self) -> np.ndarray | None:
        """float32 (vocab,) after the last committed token, or None if there are none.
        Raises DataError if they are damaged."""
        wanted = self.tokens

        def attempt() -> bytearray | None:
            if self.tokens != wanted:
                raise Damaged("it was changed while it was being read")
            record = self._header.logits
            if record is None:
                return None
            buffer = bytearray(4 * record.count)
            self._read(LOGITS_FILE, memoryview(buffer), record.offset)
            if zlib.crc32(buffer) != record.crc:
                raise Damaged("the checksum of the logits is wrong")
            return buffer

        buffer = self._guarded(attempt)
        if buffer is None:
            return None
        import numpy as np

        return np.frombuffer(buffer, np.dtype("<f4"))

    def _can_cut(self, n: int) -> bool:
        layers = self._header.layers or ()
        return n <= self.n_past and all(can_cut(layer, self.n_past, n) for layer in layers)

    def _load_tensor(self, tensor: Tensor, rows: int) -> bytearray:
        return load_tensor(self._files.fd(CACHE_FILE), tensor, rows)

    # -------------------------------------------------------------------------------------- writing

    def commit(self, tokens: Sequence[int], cache: list | None, logits: Any) -> None:
        """Makes this the session's state, all of it or (on any failure) nothing.

        tokens: ALL ids that the caches have read. cache: a list of mlx_lm cache objects, or None
        where there are none to keep. logits: float32 (vocab,) after the last token, or None.
        Only what changed is written: rows of tokens that this session restored or committed before
        are taken to be as they were.
        Raises IOFailure if the disk is full, DataError for a cache of a class it does not know.
        """
        if cache is None:
            return self.commit_layers(tokens, None, logits)
        from toastkit.session import caches

        return self.commit_layers(tokens, caches.describe(cache), logits)

    def commit_layers(
        self, tokens: Sequence[int], sources: Sequence[LayerSource] | None, logits: Any
    ) -> None:
        """What commit does, for layers that are described already."""
        if self.lock is None or not self.lock.held:
            raise ValueError("the session is open for reading only")
        tokens = list(tokens)
        try:
            if self._stale:
                self._load()
            header = self._write_data(tokens, sources, logits)
            self._publish(header, tokens)
        except Damaged as error:
            raise self._damaged(error) from error
        except OSError as error:
            raise from_os_error(error, f"cannot save session {self.name}", creating=True) from error

    def _write_data(
        self, tokens: list[int], sources: Sequence[LayerSource] | None, logits: Any
    ) -> Header:
        """Writes and syncs all but the header, which is returned."""
        old = self._header
        new = Header(old.fingerprint, old.generation + 1, len(tokens))
        new.tokens = writing.write_tokens(
            self._files.fd(TOKENS_FILE), old.tokens, self.tokens, tokens
        )
        if logits is not None:
            data = writing.logits_bytes(logits)
            new.logits = writing.write_logits(self._files.fd(LOGITS_FILE), old.logits, data)
        if sources is not None:
            shared = min(self._shared, writing.common_prefix(self.tokens, tokens))
            fd = self._files.fd(CACHE_FILE)
            new.layers = writing.write_layers(fd, old, sources, shared, len(tokens))
        if not self.ephemeral:
            self._files.sync()
        return new

    def _publish(self, header: Header, tokens: list[int]) -> None:
        """Puts the header in place: the moment at which the commit happens."""
        self._stale = True
        files.replace_file(self.path / HEADER_FILE, encode_header(header), not self.ephemeral)
        self._header, self.tokens, self._shared = header, tokens, len(tokens)
        self._stale = False
        if not self.ephemeral:
            files.sync_directory(self.path)
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
            data = files.read_file(self.path / HEADER_FILE, MAX_HEADER_BYTES)
        except FileNotFoundError:
            if self.lock is not None:
                return  # created, and not yet committed to
            raise NoInputError(f"no such session: {self.name}") from None
        header = decode_header(data)
        if self._expected is not None and header.fingerprint != self._expected:
            raise DataError(
                f"session {self.name} belongs to another model "
                f"({header.fingerprint[:12]}, not {self._expected[:12]})",
                hint="give the model it was made with, or another --session",
            )
        problem = writing.damage(header, self._files.size)
        if problem:
            raise Damaged(problem)
        self.tokens = self._read_tokens(header)
        self._header, self._stale, self._shared = header, False, 0

    def _read_tokens(self, header: Header) -> list[int]:
        buffer = bytearray(4 * header.count)
        view = memoryview(buffer)
        for first, count in header.tokens.slices:
            self._read(TOKENS_FILE, view[: 4 * count], 4 * first)
            view = view[4 * count :]
        if zlib.crc32(buffer) != header.tokens.crc:
            raise Damaged("the checksum of the tokens is wrong")
        return unpack_ids(bytes(buffer))

    def _read(self, name: str, buffer: memoryview, offset: int) -> None:
        if not self._files.read(name, buffer, offset):
            raise Damaged(f"{name} is too short")
