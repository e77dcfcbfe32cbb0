"""The session directory without MLX: names, commit, reuse, lock, damage, kill -9, full disk."""

from __future__ import annotations

import functools
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from array import array
from pathlib import Path

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toastkit.errors import (
    BusyError,
    CannotCreateError,
    DataError,
    IOFailure,
    NoInputError,
    ToastError,
    UsageError,
)
from toastkit.session import names
from toastkit.session.blocks import LayerSource, TensorSource
from toastkit.session.commit import MAX_SLICES
from toastkit.session.directory import Session
from toastkit.session.extents import ALIGNMENT, Space
from toastkit.session.layout import Layer, can_cut

MODEL = "ab" * 32
HEADS, SIZE = 2, 16
ROW_BYTES = HEADS * SIZE * 4


# ------------------------------------------------- a state that needs no MLX: bytes by (token, row)


def row(token: int, position: int) -> bytes:
    """The bytes of one position of a growing tensor."""
    return struct.pack("<II", token, position) * (ROW_BYTES // 8)


def growing(tokens: list[int]) -> LayerSource:
    """A KVCache that has read these tokens."""

    def read(first: int, last: int) -> bytes:
        return b"".join(row(tokens[i], i) for i in range(first, last))

    shape = (1, HEADS, len(tokens), SIZE)
    tensors = [TensorSource(name, "float32", shape, 2, read) for name in ("keys", "values")]
    return LayerSource("KVCache", {"offset": len(tokens)}, tensors if tokens else [])


def recurrent(tokens: list[int]) -> LayerSource:
    """An ArraysCache that has read these tokens."""
    data = struct.pack("<I", zlib.crc32(array("I", tokens).tobytes())) * 5000
    return LayerSource(
        "ArraysCache", {"size": 1}, [TensorSource("0", "uint32", (5000,), None, lambda a, b: data)]
    )


def logits_of(tokens: list[int]) -> array:
    return array("f", [float(len(tokens)), float(sum(tokens) % 1000)] * 50)


def commit(session: Session, tokens: list[int], *sources: LayerSource) -> None:
    session.commit_layers(tokens, sources or [growing(tokens)], logits_of(tokens))


def rows_of(session: Session, n: int) -> list[bytes]:
    """What restoring the first n tokens gives: the bytes of every stored tensor."""

    def rebuild(layers: list[Layer], load) -> list[bytes]:
        return [
            bytes(load(tensor, n if tensor.axis is not None else 1))[
                : tensor.row_bytes * (n if tensor.axis is not None else 1)
            ]
            for layer in layers
            for tensor in layer.tensors
        ]

    return session.restore_layers(n, rebuild)


def expected_rows(tokens: list[int]) -> bytes:
    return b"".join(row(token, i) for i, token in enumerate(tokens))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "toastkit" / "sessions"


# ---------------------------------------------------------------------------------------- names


def test_names_and_directories(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert names.sessions_root() == root
    assert names.resolve("chat one") == root / "chat one"
    assert names.resolve("./chat") == Path("./chat")
    assert names.resolve("..") == Path("..")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert names.resolve("here") == root / "here"
    (tmp_path / "here" / "session.msgpack").touch()
    assert names.resolve("here") == Path("here")
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert names.sessions_root() == Path.home() / ".local/state/toastkit/sessions"


@pytest.mark.parametrize("name", ["", "-x", ".hidden", "a\nb", "a\x1b[2J", "x" * 129, "a\0/b"])
def test_bad_names(name: str):
    with pytest.raises(UsageError) as caught:
        names.resolve(name)
    assert caught.value.message.isprintable()


# ----------------------------------------------------------------------------- commit and reuse


def test_commit_and_reopen(root: Path):
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


def test_reusable(root: Path):
    with Session.open(names.resolve("one"), MODEL) as session:
        commit(session, [1, 2, 3, 4])
        assert session.reusable([1, 2, 3, 4, 5]) == 4
        assert session.reusable([1, 2, 3, 4]) == 4
        assert session.reusable([1, 2, 3]) == 2  # the last is run again, for its logits
        assert session.reusable([1, 2, 9, 9]) == 2
        assert session.reusable([9]) == 0 and session.reusable([]) == 0
        session.commit_layers([1, 2, 3, 4], [growing([1, 2, 3, 4])], None)
        assert session.reusable([1, 2, 3, 4]) == 3
        commit(session, [1, 2, 3, 4], recurrent([1, 2, 3, 4]))
        assert session.reusable([1, 2, 3, 4, 5]) == 4
        assert session.reusable([1, 2, 3, 4]) == 4
        assert session.reusable([1, 2, 3]) == 0 and session.reusable([1, 2, 9, 9]) == 0


def layer(kind: str, tensors: bool = True, **settings: int) -> Layer:
    return Layer(kind, settings, [None] if tensors else [])  # type: ignore[list-item]


def test_which_layers_can_be_cut():
    assert can_cut(layer("KVCache", offset=9), 9, 3)
    assert can_cut(layer("KVCache", False, offset=0), 9, 3)
    assert not can_cut(layer("KVCache", offset=8), 9, 3)
    assert can_cut(layer("RotatingKVCache", offset=9, max_size=10), 9, 3)
    assert not can_cut(layer("RotatingKVCache", offset=9, max_size=9), 9, 3)
    assert can_cut(layer("RotatingKVCache", offset=9, max_size=9), 9, 9)
    chunked = layer("ChunkedKVCache", offset=19, chunk_size=8, start_position=8)
    assert can_cut(chunked, 19, 9) and can_cut(chunked, 19, 16) and not can_cut(chunked, 19, 7)
    assert not can_cut(layer("ArraysCache", size=2), 9, 3)
    both = Layer("CacheList", {}, [], [layer("KVCache", offset=9), layer("ArraysCache", size=1)])
    assert not can_cut(both, 9, 3) and can_cut(both, 9, 9)


def written_bytes(monkeypatch: pytest.MonkeyPatch, action) -> int:
    total = 0
    real = os.pwrite

    def counted(fd: int, data, offset: int) -> int:
        nonlocal total
        total += memoryview(data).nbytes
        return real(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", counted)
        action()
    return total


def test_one_more_token_writes_no_more_than_a_block(root: Path, monkeypatch: pytest.MonkeyPatch):
    tokens = list(range(2000))
    with Session.open(names.resolve("one"), MODEL) as session:
        first = written_bytes(monkeypatch, lambda: commit(session, tokens))
        assert first > 2 * 2000 * ROW_BYTES
        second = written_bytes(monkeypatch, lambda: commit(session, [*tokens, 7]))
        assert second < 2 * 256 * ROW_BYTES
    with Session.open(names.resolve("one"), MODEL) as session:
        assert session.reusable([*tokens, 7, 8, 9]) == 2001
        assert rows_of(session, 2001) == [expected_rows([*tokens, 7])] * 2
        third = written_bytes(monkeypatch, lambda: commit(session, [*tokens, 7, 8]))
        assert third < 2 * 256 * ROW_BYTES
    with Session.open(names.resolve("one"), MODEL) as session:
        # Nothing was restored: rows on disk cannot be taken for the caller's.
        fourth = written_bytes(monkeypatch, lambda: commit(session, [*tokens, 7, 8, 9]))
        assert fourth > 2 * 2000 * ROW_BYTES


def test_committed_bytes_are_never_overwritten(root: Path):
    """Whatever a commit writes, the one before it is whole until the header is replaced."""
    path = names.resolve("one")
    rng = random.Random(1)
    with Session.open(path, MODEL) as session:
        tokens: list[int] = []
        for _ in range(60):
            tokens = tokens[: rng.randint(max(0, len(tokens) - 400), len(tokens))]
            tokens = tokens + [rng.randrange(1000) for _ in range(rng.randint(1, 400))]
            before = {p.name: p.read_bytes() for p in path.iterdir() if p.is_file()}
            old = session._header.all_tensors(), session._header.tokens.slices
            commit(session, tokens, growing(tokens), recurrent(tokens))
            cache = (path / "cache.bin").read_bytes()
            for tensor in old[0]:
                for offset, length, _ in tensor.ranges:
                    was = before["cache.bin"][offset : offset + length]
                    assert cache[offset : offset + length] == was
            for first, count in old[1]:
                part = slice(4 * first, 4 * (first + count))
                assert (path / "tokens.u32").read_bytes()[part] == before["tokens.u32"][part]
            assert rows_of(session, len(tokens))[:2] == [expected_rows(tokens)] * 2
    used = sum(size for _, size in session._header.extents())
    assert (path / "cache.bin").stat().st_size <= 4 * used + (1 << 20)


def test_history_in_many_slices(root: Path):
    with Session.open(names.resolve("one"), MODEL) as session:
        for i in range(3 * MAX_SLICES):
            tokens = [*range(i), 10**6]
            session.commit_layers(tokens, None, None)
            assert len(session._header.tokens.slices) <= MAX_SLICES
    with Session.open(names.resolve("one"), MODEL) as session:
        assert session.tokens == tokens
        with pytest.raises(DataError, match="no caches"):
            rows_of(session, 3)


def test_space_is_first_fit():
    space = Space([(ALIGNMENT, ALIGNMENT), (4 * ALIGNMENT, 2 * ALIGNMENT)])
    assert space.allocate(2 * ALIGNMENT) == 2 * ALIGNMENT
    assert space.allocate(1) == 0
    assert space.allocate(1) == 6 * ALIGNMENT
    assert space.allocate(ALIGNMENT + 1) == 7 * ALIGNMENT


# ----------------------------------------------------------------------- opening, locking, errors


def test_another_models_session_is_refused(root: Path):
    path = names.resolve("one")
    with Session.open(path, MODEL) as session:
        commit(session, [1])
    for write in (True, False):
        with pytest.raises(DataError, match="belongs to another model"):
            Session.open(path, "cd" * 32, write=write)
    Session.open(path, None).close()
    Session.open(path, MODEL).close()  # the lock was released


def test_no_such_session(root: Path, tmp_path: Path):
    for write in (True, False):
        with pytest.raises(NoInputError, match="no such session: one"):
            Session.open(names.resolve("one"), MODEL, create=False, write=write)
    assert not root.exists()
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis.tex").touch()
    with pytest.raises(CannotCreateError, match="other files"):
        Session.open(tmp_path / "papers", MODEL)
    with pytest.raises(CannotCreateError, match="not a directory"):
        Session.open(tmp_path / "papers" / "thesis.tex", MODEL)
    assert [p.name for p in (tmp_path / "papers").iterdir()] == ["thesis.tex"]


def test_two_writers(root: Path):
    path = names.resolve("one")
    with Session.open(path, MODEL) as session:
        commit(session, [1, 2])
        with pytest.raises(BusyError) as caught:
            Session.open(path, MODEL)
        assert caught.value.message == (
            f"session one is in use by another writer (process {os.getpid()})"
        )
        with Session.open(path, MODEL, write=False) as reader:
            assert reader.tokens == [1, 2]
            with pytest.raises(ValueError):
                commit(reader, [1, 2, 3])
    Session.open(path, MODEL).close()


def test_ephemeral_sessions_vanish(root: Path):
    with Session.create_ephemeral(MODEL) as session:
        commit(session, [1, 2])
        assert session.ephemeral and session.path.parent == root
    assert list(root.iterdir()) == []
    killed = Session.create_ephemeral(MODEL)
    killed.lock.release()
    held = Session.create_ephemeral(MODEL)
    for path in (killed.path, held.path):
        os.utime(path, (0, 0))
    with Session.create_ephemeral(MODEL) as session:
        assert {p.name for p in root.iterdir()} == {session.path.name, held.path.name}
    held.close()
    held.close()


def test_reader_beside_a_writer(root: Path):
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
                commit(session, tokens, growing(tokens), recurrent(tokens))

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
                        whole += 1
                except DataError as error:
                    assert "session one" in error.message
                    changed += 1
        finally:
            stop.set()
            writer.join()
    assert whole > 0 and whole + changed == 60


def test_reader_follows_a_longer_history(root: Path):
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


# ----------------------------------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "session"
    with Session.open(path, MODEL) as session:
        tokens = list(range(300))
        commit(session, tokens, growing(tokens), recurrent(tokens))
    return path


def opens_or_is_refused(path: Path) -> None:
    for write in (True, False):
        try:
            with Session.open(path, None, write=write) as session:
                rows_of(session, session.n_past)
                session.logits()
        except DataError as error:
            assert "\n" not in error.message and "session" in error.message


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_header_fuzz(saved: Path, data: st.DataObject):
    """Any bytes in the header's place: a session or a DataError. With the checksum made right too,
    so that the checks behind it are reached."""
    header = saved / "session.msgpack"
    good = header.read_bytes()
    try:
        envelope = msgpack.unpackb(good)
        fix = data.draw(st.booleans(), "fix the checksum")
        broken = bytearray(envelope["body"] if fix else good)
        for _ in range(data.draw(st.integers(1, 4), "flips")):
            at = data.draw(st.integers(0, len(broken) - 1), "at")
            broken[at] = data.draw(st.integers(0, 255), "byte")
        broken = broken[: data.draw(st.sampled_from([len(broken), len(broken) // 2]), "length")]
        if fix:
            envelope.update(body=bytes(broken), crc=zlib.crc32(broken))
            broken = bytearray(msgpack.packb(envelope))
        header.write_bytes(broken)
        opens_or_is_refused(saved)
    finally:
        header.write_bytes(good)


def replaced(value, seen: list, target: int, by):
    """A copy of nested maps and lists with the target-th value replaced."""
    seen.append(None)
    if len(seen) - 1 == target:
        return by
    if isinstance(value, dict):
        return {k: replaced(v, seen, target, by) for k, v in value.items()}
    if isinstance(value, list):
        return [replaced(v, seen, target, by) for v in value]
    return value


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    target=st.integers(0, 60),
    by=st.sampled_from([None, -1, 0, 1, 300, 2**40, 2**63, 0.5, "", "KVCache", "x", b"", [], {}]),
)
def test_header_with_another_value(saved: Path, target: int, by):
    header = saved / "session.msgpack"
    good = header.read_bytes()
    try:
        envelope = msgpack.unpackb(good)
        body = msgpack.packb(replaced(msgpack.unpackb(envelope["body"]), [], target, by))
        header.write_bytes(msgpack.packb({**envelope, "body": body, "crc": zlib.crc32(body)}))
        opens_or_is_refused(saved)
    finally:
        header.write_bytes(good)


def test_newer_schema_and_garbage(root: Path):
    path = names.resolve("one")
    with Session.open(path, MODEL) as session:
        commit(session, [1])
    header = path / "session.msgpack"
    envelope = msgpack.unpackb(header.read_bytes())
    header.write_bytes(msgpack.packb({**envelope, "schema": 2}))
    with pytest.raises(DataError, match="cannot read session one: its schema 2 is newer than 1"):
        Session.open(path, MODEL)
    for garbage in (b"", b"garbage", b"\x81", os.urandom(1000)):
        header.write_bytes(garbage)
        with pytest.raises(DataError, match="cannot read session one: "):
            Session.open(path, MODEL)


@pytest.mark.parametrize("name", ["tokens.u32", "cache.bin", "logits.f32"])
@pytest.mark.parametrize("how", ["flip", "shorten", "remove"])
def test_damaged_data_files(root: Path, name: str, how: str):
    path = names.resolve("one")
    with Session.open(path, MODEL) as session:
        commit(session, [1] * 300)
    file = path / name
    data = bytearray(file.read_bytes())
    if how == "remove":
        file.unlink()
    else:
        data[100] ^= 1
        file.write_bytes(data if how == "flip" else data[:-1])
    with pytest.raises(DataError, match="session one"), Session.open(path, MODEL) as session:
        session.logits()
        rows_of(session, 300)


# ------------------------------------------------------------------------- full disk and kill -9


def test_full_disk_leaves_the_earlier_commit(root: Path):
    path = names.resolve("one")
    tokens = list(range(300))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Session.open(path, MODEL) as session:
        commit(session, tokens)
        longer = [*tokens, *range(900)]
        failures = 0
        for limit in range(0, (path / "cache.bin").stat().st_size * 4, 40_000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            try:
                commit(session, longer)
            except IOFailure as error:
                failures += 1
                assert "cannot save session one: file too large" in error.message
            else:
                break
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert session.tokens == tokens
            with Session.open(path, MODEL, write=False) as reader:
                assert rows_of(reader, 300) == [expected_rows(tokens)] * 2
                assert reader.logits().tolist() == logits_of(tokens).tolist()
        assert failures > 2 and session.tokens == longer
    with Session.open(path, MODEL) as session:
        assert rows_of(session, 1200) == [expected_rows(longer)] * 2
    assert not (path / "session.msgpack.tmp").exists()


def test_interrupted_between_rename_and_return(root: Path, monkeypatch: pytest.MonkeyPatch):
    """A commit that happened but was not told of: the next one must not overwrite it."""
    path = names.resolve("one")
    real = os.replace

    def interrupted(source, target) -> None:
        real(source, target)
        raise KeyboardInterrupt

    with Session.open(path, MODEL) as session:
        commit(session, [1] * 300)
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", interrupted)
            with pytest.raises(KeyboardInterrupt):
                commit(session, [1] * 400)
        session.commit_layers([1] * 400, [growing([1] * 400)], None)
        assert session.generation == 3
        assert rows_of(session, 400) == [expected_rows([1] * 400)] * 2


@functools.cache
def history(generation: int) -> list[int]:
    """The tokens of a commit in test_kill: grown or cut back from the one before, by a rule."""
    tokens: list[int] = []
    for number in range(1, generation):
        tokens = history(number)
    rng = random.Random(generation)
    if rng.random() < 0.4:
        tokens = tokens[: rng.randint(0, len(tokens))]
    grown = rng.choice([1, 3, 250, 256, 600])
    tokens = tokens + [rng.randrange(50) for _ in range(grown)]
    return tokens[:100] if len(tokens) > 3000 else tokens


def commit_forever(path: str) -> None:
    """The child of test_kill: goes on from whatever commit it finds."""
    with Session.open(path, MODEL) as session:
        if session.n_past:
            rows_of(session, session.n_past)
        print("ready", flush=True)
        while True:
            tokens = history(session.generation + 1)
            commit(session, tokens, growing(tokens), recurrent(tokens))


def test_kill_at_any_instant(tmp_path: Path):
    path = tmp_path / "session"
    rng = random.Random(time.time_ns())
    code = f"from test_session import commit_forever; commit_forever({str(path)!r})"
    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    reached = []
    for _ in range(12):
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment
        )
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        time.sleep(rng.uniform(0, 0.12))
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        if not (path / "session.msgpack").exists():
            continue
        with Session.open(path, MODEL) as session:
            reached.append(session.generation)
            tokens = history(session.generation)
            assert session.tokens == tokens
            stored = rows_of(session, len(tokens))
            assert stored[:2] == [expected_rows(tokens)] * 2
            assert stored[2] == bytes(recurrent(tokens).tensors[0].read(0, 1))
            assert session.logits().tolist() == logits_of(tokens).tolist()
    assert reached == sorted(reached) and len(set(reached)) > 3


def test_an_error_is_a_toast_error_when_the_directory_goes(root: Path):
    with Session.open(names.resolve("one"), MODEL) as session:
        commit(session, [1])
        for file in session.path.iterdir():
            file.unlink()
        session.path.rmdir()
        with pytest.raises(ToastError, match="cannot save session one"):
            commit(session, [1, 2])
