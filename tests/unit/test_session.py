"""The session directory without MLX: names, commit, reuse, lock, ephemeral, readers."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import threading
from pathlib import Path

import pytest
from session_states import (
    MODEL,
    ROW_BYTES,
    Counted,
    at,
    commit,
    counted,
    expected_rows,
    growing,
    hybrid,
    logits_of,
    packed,
    recurrent,
    rows_of,
    state_bytes,
)

from toastkit.errors import (
    BusyError,
    CannotCreateError,
    DataError,
    IOFailure,
    NoInputError,
    UsageError,
)
from toastkit.session import names
from toastkit.session.blocks import written
from toastkit.session.commit import MAX_SLICES
from toastkit.session.directory import Session
from toastkit.session.extents import ALIGNMENT, Space
from toastkit.session.layout import Layer
from toastkit.session.lock import WriterLock
from toastkit.session.run import RunDirectory
from toastkit.session.savepoints import can_trim

__all__ = ["counted"]

# ---------------------------------------------------------------------------------------- names


def test_names_and_directories(state_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert names.sessions_root() == state_home
    assert names.resolve("chat one") == state_home / "chat one"
    assert names.resolve("./chat") == Path("./chat").absolute()
    assert names.resolve("..") == Path("..").absolute()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert names.resolve("here") == state_home / "here"
    (tmp_path / "here" / "session.msgpack").touch()
    assert names.resolve("here") == tmp_path / "here"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert names.sessions_root() == Path.home() / ".local/state/toastkit/sessions"


@pytest.mark.parametrize("name", ["", "-x", ".hidden", "a\nb", "a\x1b[2J", "x" * 129, "a\0/b"])
def test_bad_names(name: str):
    with pytest.raises(UsageError) as caught:
        names.resolve(name)
    assert caught.value.message.isprintable()


# ----------------------------------------------------------------------------- commit and reuse


def test_commit_and_reopen(state_home: Path):
    path = names.resolve("one")
    tokens = list(range(700))
    with Session.open(path, MODEL) as session:
        assert (session.n_past, session.generation, session.logits()) == (0, 0, None)
        commit(session, tokens)
        assert session.tokens == tokens
    with Session.open(path, MODEL, write=False) as session:
        assert session.n_past == 700 and session.generation == 1 and session.name == "one"
        assert session.logits().tolist() == logits_of(tokens).tolist()
        assert rows_of(session, 700) == [expected_rows(tokens)] * 2
        assert rows_of(session, 300) == [expected_rows(tokens[:300])] * 2
    modes = {p.name: p.stat().st_mode & 0o777 for p in path.iterdir()}
    assert set(modes.values()) == {0o600} and path.stat().st_mode & 0o777 == 0o700


def test_reusable(state_home: Path):
    with Session.open(names.resolve("one"), MODEL) as session:
        commit(session, [1, 2, 3, 4])
        assert session.reusable([1, 2, 3, 4, 5]) == 4
        assert session.reusable([1, 2, 3, 4]) == 4
        assert session.reusable([1, 2, 3]) == 2  # the last is run again, for its logits
        assert session.reusable([1, 2, 9, 9]) == 2
        assert session.reusable([9]) == 0 and session.reusable([]) == 0
        written(session.commit_layers([1, 2, 3, 4], [growing([1, 2, 3, 4])], None))
        assert session.reusable([1, 2, 3, 4]) == 3
        commit(session, [1, 2, 3, 4], recurrent([1, 2, 3, 4]))
        assert session.reusable([1, 2, 3, 4, 5]) == 4
        assert session.reusable([1, 2, 3, 4]) == 4
        assert session.reusable([1, 2, 3]) == 0 and session.reusable([1, 2, 9, 9]) == 0


def layer(kind: str, tensors: bool = True, **settings: int) -> Layer:
    return Layer(kind, settings, [None] if tensors else [])  # type: ignore[list-item]


def test_which_layers_can_be_cut():
    assert can_trim(layer("KVCache", offset=9), 9, 3)
    assert can_trim(layer("KVCache", False, offset=0), 9, 3)
    assert not can_trim(layer("KVCache", offset=8), 9, 3)
    assert can_trim(layer("RotatingKVCache", offset=9, max_size=10), 9, 3)
    assert not can_trim(layer("RotatingKVCache", offset=9, max_size=9), 9, 3)
    assert can_trim(layer("RotatingKVCache", offset=9, max_size=9), 9, 9)
    chunked = layer("ChunkedKVCache", offset=19, chunk_size=8, start_position=8)
    assert can_trim(chunked, 19, 9) and can_trim(chunked, 19, 16) and not can_trim(chunked, 19, 7)
    begun = layer("ChunkedKVCache", False, offset=16, chunk_size=8, start_position=16)
    assert can_trim(begun, 16, 16) and not can_trim(begun, 16, 15)
    assert not can_trim(layer("ArraysCache", size=2), 9, 3)
    both = Layer("CacheList", {}, [], [layer("KVCache", offset=9), layer("ArraysCache", size=1)])
    assert not can_trim(both, 9, 3) and can_trim(both, 9, 9)


def test_one_more_token_writes_no_more_than_a_block(state_home: Path, counted: Counted):
    tokens = list(range(2000))
    with Session.open(names.resolve("one"), MODEL) as session:
        commit(session, tokens)
        assert counted.take() > 2 * 2000 * ROW_BYTES
        commit(session, [*tokens, 7])
        assert counted.take() < 2 * 256 * ROW_BYTES
    with Session.open(names.resolve("one"), MODEL) as session:
        assert session.reusable([*tokens, 7, 8, 9]) == 2001
        assert rows_of(session, 2001) == [expected_rows([*tokens, 7])] * 2
        counted.take()
        commit(session, [*tokens, 7, 8])
        assert counted.take() < 2 * 256 * ROW_BYTES
    with Session.open(names.resolve("one"), MODEL) as session:
        # Nothing was restored: rows on disk cannot be taken for the caller's.
        commit(session, [*tokens, 7, 8, 9])
        assert counted.take() > 2 * 2000 * ROW_BYTES


def test_committed_bytes_are_never_overwritten(state_home: Path):
    """Whatever a commit writes, the one before it is whole until the header is replaced."""
    path = names.resolve("one")
    rng = random.Random(1)
    with Session.open(path, MODEL) as session:
        tokens: list[int] = []
        for _ in range(60):
            tokens = tokens[: rng.randint(max(0, len(tokens) - 400), len(tokens))]
            tokens = tokens + [rng.randrange(1000) for _ in range(rng.randint(1, 400))]
            before = {p.name: p.read_bytes() for p in path.iterdir() if p.is_file()}
            old = session.header.all_tensors(), session.header.tokens.slices
            commit(session, tokens, *hybrid(tokens), *packed(tokens))
            cache = (path / "cache.bin").read_bytes()
            for tensor in old[0]:
                for offset, length, _ in tensor.ranges:
                    was = before["cache.bin"][offset : offset + length]
                    assert cache[offset : offset + length] == was
            for first, count in old[1]:
                part = slice(4 * first, 4 * (first + count))
                assert (path / "tokens.u32").read_bytes()[part] == before["tokens.u32"][part]
            assert rows_of(session, len(tokens))[:2] == [expected_rows(tokens)] * 2
    used = sum(size for _, size in session.header.extents())
    assert (path / "cache.bin").stat().st_size <= 4 * used + (1 << 20)


def test_history_in_many_slices(state_home: Path):
    with Session.open(names.resolve("one"), MODEL) as session:
        for i in range(3 * MAX_SLICES):
            tokens = [*range(i), 10**6]
            written(session.commit_layers(tokens, None, None))
            assert len(session.header.tokens.slices) <= MAX_SLICES
    with Session.open(names.resolve("one"), MODEL) as session:
        assert session.tokens == tokens
        with pytest.raises(DataError, match="no caches"):
            rows_of(session, 3)


def test_space_is_first_fit():
    assert Space([(0, ALIGNMENT), (9 * ALIGNMENT, 1)]).beside(ALIGNMENT, 0, 5, 0) == ALIGNMENT
    space = Space([(ALIGNMENT, ALIGNMENT), (4 * ALIGNMENT, 2 * ALIGNMENT)])
    assert space.allocate(2 * ALIGNMENT) == 2 * ALIGNMENT
    assert space.allocate(1) == 0
    assert space.allocate(1) == 6 * ALIGNMENT
    assert space.allocate(ALIGNMENT + 1) == 7 * ALIGNMENT


# ----------------------------------------------------------------------- opening, locking, errors


def test_space_that_is_held_is_left_alone():
    held = [(0, 5), (5 * ALIGNMENT, 1)]

    def until(first: int, count: int) -> int | None:
        ends = (start + n for start, n in held if start < first + count and first < start + n)
        return next(ends, None)

    space = Space([(2 * ALIGNMENT, ALIGNMENT)], until)
    places = [space.allocate(size * ALIGNMENT) for size in (1, 1, 2, 1)]
    assert [place // ALIGNMENT for place in places] == [1, 3, 6, 8]


def test_a_session_that_another_process_takes_away_unborn_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    left, acquire = [1, 2], WriterLock.acquire

    def late(path: Path) -> WriterLock:
        if left:
            left.pop()
            path.rmdir()
        return acquire(path)

    monkeypatch.setattr(WriterLock, "acquire", late)
    with Session.open(tmp_path / "new", MODEL) as session:
        commit(session, [1, 2, 3])
    assert not left


def test_a_lock_file_that_was_removed_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Between open and flock the holder may remove the session: nobody else locks that file."""
    real = fcntl.flock

    def removed_first(fd: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        (tmp_path / "lock").unlink()
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    lock = WriterLock.acquire(tmp_path)
    with pytest.raises(BusyError):
        WriterLock.acquire(tmp_path)
    lock.release()


def test_another_models_session_is_refused(state_home: Path):
    path = names.resolve("one")
    with Session.open(path, MODEL) as session:
        commit(session, [1])
    for write in (True, False):
        with pytest.raises(DataError, match="belongs to another model"):
            Session.open(path, "cd" * 32, write=write)
    Session.open(path, None).close()
    Session.open(path, MODEL).close()  # the lock was released


def test_no_such_session(state_home: Path, tmp_path: Path):
    for write in (True, False):
        with pytest.raises(NoInputError, match="no such session: one"):
            Session.open(names.resolve("one"), MODEL, create=False, write=write)
    assert not state_home.exists()
    vanished = Session.create_ephemeral(MODEL)
    vanished.close()
    with pytest.raises(NoInputError, match="was for that pipeline only") as caught:
        Session.open(vanished.path, MODEL, create=False)
    assert "--session" in (caught.value.hint or "")
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis.tex").touch()
    with pytest.raises(CannotCreateError, match="other files"):
        Session.open(tmp_path / "papers", MODEL)
    with pytest.raises(CannotCreateError, match="not a directory"):
        Session.open(tmp_path / "papers" / "thesis.tex", MODEL)
    assert [p.name for p in (tmp_path / "papers").iterdir()] == ["thesis.tex"]


def test_two_writers(state_home: Path):
    path = names.resolve("one")
    path.mkdir(parents=True)
    (path / "lock").write_text("12345678901\n")
    with Session.open(path, MODEL) as session:
        commit(session, [1, 2])
        for by in (f" (process {os.getpid()})", ""):
            with pytest.raises(BusyError) as caught:
                Session.open(path, MODEL)
            assert caught.value.message == f"session one is in use by another writer{by}"
            (path / "lock").write_text("nothing like a number\n")
        with Session.open(path, MODEL, write=False) as reader:
            assert reader.tokens == [1, 2]
            with pytest.raises(ValueError):
                commit(reader, [1, 2, 3])
    Session.open(path, MODEL).close()


def test_ephemeral_sessions_vanish(state_home: Path):
    with Session.create_ephemeral(MODEL) as session:
        commit(session, [1, 2])
        assert session.ephemeral and session.path.parent == state_home
    assert list(state_home.iterdir()) == []
    killed = Session.create_ephemeral(MODEL)
    killed.lock.release()
    held = Session.create_ephemeral(MODEL)
    for path in (killed.path, held.path):
        os.utime(path, (0, 0))
    with Session.create_ephemeral(MODEL) as session:
        assert {p.name for p in state_home.iterdir()} == {session.path.name, held.path.name}
    held.close()
    held.close()


def test_reader_beside_a_writer(state_home: Path):
    """A reader sees whole commits only, while the extents under it are used again."""
    path = names.resolve("one")
    histories = [[version] * 600 for version in range(2)]
    with Session.open(path, MODEL) as session:
        commit(session, histories[0], growing(histories[0]), recurrent(histories[0]))
        stop = threading.Event()

        def write() -> None:
            version = 0
            while not stop.is_set():
                version = 1 - version
                tokens = histories[version]
                commit(session, tokens, *hybrid(tokens), savepoints=at(hybrid, tokens, 300))

        writer = threading.Thread(target=write)
        writer.start()
        whole = changed = 0
        try:
            for _ in range(60):
                try:
                    with Session.open(path, MODEL, write=False) as reader:
                        tokens = reader.tokens
                        assert tokens in histories
                        assert rows_of(reader, 600)[0] == expected_rows(tokens)
                        if reader.savepoints:
                            assert rows_of(reader, 300)[2] == state_bytes(tokens[:300])
                        whole += 1
                except DataError as error:
                    assert "session one" in error.message
                    changed += 1
        finally:
            stop.set()
            writer.join()
    assert whole > 0 and whole + changed == 60


def test_reader_follows_a_longer_history(state_home: Path):
    path = names.resolve("one")
    with Session.open(path, MODEL) as session:
        commit(session, [1] * 300)
        with Session.open(path, MODEL, write=False) as reader:
            changed = [[2] * 300, [1] * 301]
            for tokens in changed:
                commit(session, tokens)
            commit(session, [1] * 302)
            assert rows_of(reader, 300) == [expected_rows([1] * 300)] * 2
            for tokens in ([2] * 300, [3] * 300, [4] * 300):
                commit(session, tokens)
            with pytest.raises(DataError, match="changed while it was being read"):
                rows_of(reader, 300)


def test_what_users_made_stays(state_home: Path, tmp_path: Path) -> None:
    """An empty directory in which no session came about; one whose name is like an ephemeral's."""
    made = tmp_path / "made"
    made.mkdir()
    for path in (made, tmp_path / "new"):
        with Session.open(path, MODEL):
            assert path.is_dir()
    assert list(tmp_path.glob("*w*")) == [] and list(made.iterdir()) == []
    with Session.open(tmp_path / ".ephemeral-h", MODEL) as session:
        commit(session, [1], growing([1]))
    assert (tmp_path / ".ephemeral-h" / names.HEADER_FILE).exists()


def test_a_run_that_cannot_be_made_leaves_nothing(
    state_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    for name in ("mkfifo", "rename"):
        with monkeypatch.context() as patch, pytest.raises(IOFailure, match="no space left"):
            patch.setattr(os, name, full)
            RunDirectory.create(tmp_path)
    assert list((tmp_path / "runs").iterdir()) == []


def test_what_cannot_be_created_says_why(
    state_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def full(path: str, flags: int, *rest: object, **settings: object) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path, flags, *rest, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(IOFailure, match="no space left on device"):
        Session.open(tmp_path / "s", MODEL)
    with pytest.raises(IOFailure):
        Session.create_ephemeral(MODEL)
    assert not (tmp_path / "s").exists() and os.listdir(state_home) == []
