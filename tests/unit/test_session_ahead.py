"""Rows that are written before the commit that they are for."""

from __future__ import annotations

import errno
import os
import resource
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from session_states import (
    HEADS,
    MODEL,
    ROW_BYTES,
    commit,
    expected_rows,
    growing,
    hybrid,
    nested,
    plain,
    row,
    rows_of,
    state_bytes,
)

from toastkit.errors import IOFailure
from toastkit.session.blocks import LayerSource, TensorSource
from toastkit.session.directory import Session

TOKENS = list(range(1000))


def ahead(session: Session, count: int, room: int = len(TOKENS)) -> None:
    """Writes what a state has that has read so many of the tokens."""
    session.write_layers_ahead(TOKENS[:count], partial(hybrid, TOKENS[:count]), room)


def check(path: Path, count: int) -> None:
    """That the session holds so many of the tokens."""
    with Session.open(path, MODEL, write=False) as reader:
        assert reader.n_past == count
        rows = expected_rows(TOKENS[:count])
        assert rows_of(reader, count) == [rows, rows, state_bytes(TOKENS[:count])]


def rows_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows of keys and values each reading asks for, from now on."""
    counts: list[int] = []
    real = TensorSource.__init__

    def counting(self, name, dtype, shape, axis, read) -> None:
        def counted(first: int, last: int) -> bytes | memoryview:
            if axis is not None:
                counts.append(last - first)
            return read(first, last)

        real(self, name, dtype, shape, axis, counted)

    monkeypatch.setattr(TensorSource, "__init__", counting)
    return counts


@pytest.mark.parametrize("before", [0, 300])
def test_a_commit_writes_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    """And the blocks of each tensor lie side by side, as if it had written all of them."""
    counts = rows_read(monkeypatch)
    with Session.open(tmp_path, MODEL) as session:
        if before:
            commit(session, TOKENS[:before], *hybrid(TOKENS[:before]))
        for count in (400, 656, 990):
            ahead(session, count)
        counts.clear()
        commit(session, TOKENS, *hybrid(TOKENS))
        assert counts == [10, 10]
        for tensor in session.header.layers[0].tensors:
            places = [r.offset for r in tensor.ranges[-(before // -256) :]]
            assert places == [places[0] + i * 256 * ROW_BYTES for i in range(len(places))]
    check(tmp_path, len(TOKENS))


def test_nobody_sees_it_before(tmp_path: Path) -> None:
    """Nor afterwards, where there is no commit; the next one takes the same place."""
    path = tmp_path / "s"
    with Session.open(path, MODEL) as session:
        ahead(session, 700)
    assert not path.exists()
    with Session.open(path, MODEL) as session:
        commit(session, TOKENS[:300], *hybrid(TOKENS[:300]))
        size = (path / "cache.bin").stat().st_size
        for _ in range(5):
            session.restore_layers(300, lambda layers, load: None)
            ahead(session, 700)
            check(path, 300)
    check(path, 300)
    with Session.open(path, MODEL) as session:
        assert rows_of(session, 300)
        commit(session, TOKENS, *hybrid(TOKENS))
    check(path, len(TOKENS))
    assert (path / "cache.bin").stat().st_size < size + 3 * 1000 * ROW_BYTES


def test_another_state_takes_over_what_is_the_same(tmp_path: Path) -> None:
    other = [*TOKENS[:500], *[7] * 300]
    with Session.open(tmp_path, MODEL) as session:
        ahead(session, 700)
        commit(session, other, growing(other), hybrid(other)[1])
        ahead(session, 900)
        session.restore_layers(800, lambda layers, load: None)
        commit(session, other, growing(other), hybrid(other)[1])
        assert rows_of(session, 800) == [*[expected_rows(other)] * 2, state_bytes(other)]


@pytest.mark.parametrize(
    ("count", "copied"), [(700, 700), (650, 512), (512, 512), (200, 0)], ids=str
)
def test_a_fork_has_rows_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, copied: int
) -> None:
    """By the system: the first commit writes what has come since, and rows of the last block if the
    state was cut back there."""
    counts = rows_read(monkeypatch)
    with Session.open(tmp_path / "a", MODEL) as session:
        commit(session, TOKENS[:700], *plain(TOKENS[:700]))
    with Session.open(tmp_path / "b", MODEL) as fork:
        with Session.open(tmp_path / "a", MODEL, write=False) as source:
            fork.goes_on_from(source, count, len(TOKENS))
        counts.clear()
        fork.write_layers_ahead(TOKENS[:900], lambda: plain(TOKENS[:900]), len(TOKENS))
        commit(fork, TOKENS, *plain(TOKENS))
        assert counts == [900 - copied] * 6 + [100] * 6
        for tensor in fork.header.layers[0].tensors:
            places = [r.offset for r in tensor.ranges]
            assert places == [places[0] + i * 256 * ROW_BYTES for i in range(len(places))]
        assert rows_of(fork, len(TOKENS)) == [expected_rows(TOKENS)] * 6
    with Session.open(tmp_path / "a", MODEL, write=False) as source:
        assert rows_of(source, 700) == [expected_rows(TOKENS[:700])] * 6


def test_a_hybrid_fork_has_the_growing_rows_of_all_parts_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recurrent states and windows are written, as at every commit."""
    counts = rows_read(monkeypatch)
    with Session.open(tmp_path / "a", MODEL) as session:
        commit(session, TOKENS[:700], *nested(TOKENS[:700]))
    with Session.open(tmp_path / "b", MODEL) as fork:
        with Session.open(tmp_path / "a", MODEL, write=False) as source:
            fork.goes_on_from(source, 700, len(TOKENS))
        counts.clear()
        fork.write_layers_ahead(TOKENS[:900], lambda: nested(TOKENS[:900]), len(TOKENS))
        commit(fork, TOKENS, *nested(TOKENS))
        assert counts == [200] * 6 + [100] * 6
        with Session.open(tmp_path / "whole", MODEL) as whole:
            commit(whole, TOKENS, *nested(TOKENS))
            assert rows_of(fork, len(TOKENS)) == rows_of(whole, len(TOKENS))


@pytest.mark.parametrize("problem", ["changed", "refused", "committed", "missing"])
def test_a_fork_that_cannot_be_copied_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    """Where the source is not known to be as it was committed, where the system has no such call or
    refuses it, or where somebody has committed to the source meanwhile."""
    counts = rows_read(monkeypatch)
    with Session.open(tmp_path / "a", MODEL) as session:
        commit(session, TOKENS[:700], *hybrid(TOKENS[:700]))
    if problem == "changed":
        os.utime(tmp_path / "a" / "cache.bin")
    real = os.copy_file_range

    def copy(*args: int) -> int:
        if problem == "refused":
            raise OSError(errno.EXDEV, "")
        if problem == "committed":
            with Session.open(tmp_path / "a", MODEL) as session:
                commit(session, TOKENS[:800], *hybrid(TOKENS[:800]))
        return real(*args)

    if problem == "missing":
        monkeypatch.delattr(os, "copy_file_range")
    else:
        monkeypatch.setattr(os, "copy_file_range", copy)
    with Session.open(tmp_path / "b", MODEL) as fork:
        with Session.open(tmp_path / "a", MODEL, write=False) as source:
            fork.goes_on_from(source, 700, len(TOKENS))
        counts.clear()
        commit(fork, TOKENS, *hybrid(TOKENS))
        assert counts[-2:] == [len(TOKENS)] * 2
    check(tmp_path / "b", len(TOKENS))


def test_rows_of_the_last_commit_stay(tmp_path: Path) -> None:
    """Also those behind a place that history goes on from otherwise."""
    other = [*TOKENS[:100], *[7] * 300]
    with Session.open(tmp_path, MODEL) as session:
        commit(session, TOKENS[:300], *hybrid(TOKENS[:300]))
        ahead(session, 100)
        session.write_layers_ahead(other, partial(hybrid, other), len(other))
        check(tmp_path, 300)


def test_rows_of_another_size_or_place_are_no_such_rows(tmp_path: Path) -> None:
    """As of chunks that have lost their front, or of what has no row for each token."""
    with Session.open(tmp_path, MODEL) as session:
        for size, start, count in (
            (16, 0, 300), (17, 0, 300), (17, 100, 300), (17, 100, 310), (0, 0, 310),
        ):  # fmt: skip
            rows = [row(count, i, size) for i in range(start, 300)]
            tensor = TensorSource(
                "keys", "float32", (1, HEADS, len(rows), size), 2,
                lambda first, last, rows=rows: b"".join(rows[first:last]),
            )  # fmt: skip
            settings = {"offset": 300, "chunk_size": 50, "start_position": start}
            tensors = [tensor, replace(tensor, name="values")]
            commit(session, TOKENS[:count], LayerSource("ChunkedKVCache", settings, tensors))
            assert rows_of(session, count) == [b"".join(rows)] * 2


def test_a_full_disk_is_for_the_commit_to_tell(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Session.open(tmp_path, MODEL) as session:
        commit(session, TOKENS[:300], *hybrid(TOKENS[:300]))
        size = (tmp_path / "cache.bin").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, hard))
        try:
            ahead(session, 900)
            assert (tmp_path / "cache.bin").stat().st_size <= size
            with pytest.raises(IOFailure, match="file too large"):
                commit(session, TOKENS, *hybrid(TOKENS))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        check(tmp_path, 300)
        commit(session, TOKENS, *hybrid(TOKENS))
    check(tmp_path, len(TOKENS))


def test_a_disk_that_fails_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system tells of it once, and the commit hears of it."""
    path = tmp_path / "s"
    with Session.open(path, MODEL) as session:
        commit(session, TOKENS[:300], *hybrid(TOKENS[:300]))
        with monkeypatch.context() as patch:

            def fails(fd: int) -> None:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            patch.setattr(os, "fsync", fails)
            ahead(session, 900)
            session._files._ahead.join()
        with pytest.raises(IOFailure, match="(?i)input/output error"):
            commit(session, TOKENS, *hybrid(TOKENS))
        check(path, 300)
        commit(session, TOKENS, *hybrid(TOKENS))
    check(path, len(TOKENS))


def test_a_commit_that_was_not_told_of_owns_what_was_written_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one writes nothing behind those rows: they are that commit's."""
    path, real = tmp_path / "s", os.replace

    def interrupted(source, target, **directories) -> None:
        real(source, target, **directories)
        raise KeyboardInterrupt

    def fails(source, target, **directories) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    other = [*TOKENS[:100], *[7] * 100]
    with Session.open(path, MODEL) as session:
        ahead(session, 100)
        for act, error in ((interrupted, KeyboardInterrupt), (fails, IOFailure)):
            tokens = TOKENS[:200] if act is interrupted else other
            with monkeypatch.context() as patch, pytest.raises(error):
                patch.setattr(os, "replace", act)
                commit(session, tokens, *hybrid(tokens))
    check(path, 200)


def test_a_failure_after_the_rename_keeps_both_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Until the directory is synced, either may be found after a crash."""
    path, real = tmp_path / "s", os.replace

    def fails(source, target, **directories) -> None:
        real(source, target, **directories)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with Session.open(path, MODEL) as session:
        commit(session, TOKENS)
        before = (path / "session.msgpack").read_bytes()
        with monkeypatch.context() as patch, pytest.raises(IOFailure):
            patch.setattr(os, "replace", fails)
            commit(session, [2] * 10)
    for header, tokens in (((path / "session.msgpack").read_bytes(), [2] * 10), (before, TOKENS)):
        (path / "session.msgpack").write_bytes(header)
        with Session.open(path, MODEL) as session:
            assert rows_of(session, len(tokens)) == [expected_rows(tokens)] * 2
