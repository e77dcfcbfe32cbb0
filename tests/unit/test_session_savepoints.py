"""Savepoints within a session: what may be reused, what a commit writes of them, what is refused.

The states are those of session_states.py: every byte follows from the tokens that were read.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from session_states import (
    HEADS,
    MODEL,
    ROW_BYTES,
    SIZE,
    WINDOW,
    Counted,
    at,
    body_of,
    commit,
    counted,
    expected_rows,
    growing,
    hybrid,
    listed,
    nested,
    plain,
    put_body,
    recurrent,
    rows_of,
    sliding,
    state_bytes,
    windowed,
)

from toastkit.errors import DataError
from toastkit.session.blocks import LayerSource, written
from toastkit.session.directory import Session
from toastkit.session.savepoints import Savepoint

__all__ = ["counted"]
TOKENS = list(range(300))
HALF = ROW_BYTES // 2


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


def save(path: Path, make: Callable, *counts: int, tokens: list[int] = TOKENS) -> None:
    with Session.open(path, MODEL, durable=False) as session:
        commit(session, tokens, *make(tokens), savepoints=at(make, tokens, *counts))


# ------------------------------------------------------------------------------- what may be reused


def test_the_last_savepoint_within_the_common_part(path: Path):
    save(path, hybrid, 30, 100)
    with Session.open(path, MODEL, write=False) as session:
        assert session.savepoints == [30, 100] and not session.can_trim
        assert session.reusable([*TOKENS, 7]) == 300
        assert session.reusable(TOKENS) == 300
        assert session.reusable(TOKENS[:-1]) == 100
        assert session.reusable([*TOKENS[:101], 7]) == 100
        assert session.reusable([*TOKENS[:100], 7]) == 100
        assert session.reusable(TOKENS[:100]) == 30  # the last token is run again
        assert session.reusable([*TOKENS[:99], 7]) == 30
        assert session.reusable(TOKENS[:30]) == 0
        for n in (30, 100):
            assert rows_of(session, n)[:2] == [expected_rows(TOKENS[:n])] * 2
            assert rows_of(session, n)[2] == state_bytes(TOKENS[:n])
        with pytest.raises(DataError, match="changed while it was being read"):
            rows_of(session, 99)


def test_a_window_that_had_not_slid_yet_can_be_cut(path: Path):
    save(path, windowed, 50, 200)
    with Session.open(path, MODEL, write=False) as session:
        assert session.reusable([*TOKENS[:250], 7]) == 200
        assert session.reusable([*TOKENS[:199], 7]) == 50
        assert session.reusable([*TOKENS[:40], 7]) == 40  # from the savepoint at 50
        for n in (40, 50):
            assert rows_of(session, n)[0][: n * ROW_BYTES] == expected_rows(TOKENS[:n])
            assert rows_of(session, n)[2:] == [expected_rows(TOKENS[:n])] * 2
            first = session.restore_layers(n, lambda layers, load: layers[0].settings)
            assert first == {"offset": n, "keep": 0, "max_size": WINDOW, "idx": n}


def test_where_all_can_be_cut_savepoints_change_nothing(path: Path):
    save(path, plain, 30, 100)
    with Session.open(path, MODEL, write=False) as session:
        assert session.can_trim and session.savepoints == [30, 100]
        assert [session.reusable([*TOKENS[:n], 7]) for n in (1, 30, 77, 250)] == [1, 30, 77, 250]
        assert not [t for p in session.header.savepoints for t in p.layers if t is not None]


def test_only_what_cannot_be_cut_is_stored(path: Path):
    save(path, nested, 30)
    with Session.open(path, MODEL, write=False) as session:
        first, second, third = session.header.savepoints[0].layers
        assert [part and part.kind for part in first] == ["ArraysCache", None]
        assert [part and part.kind for part in second] == [None, "RotatingKVCache"]
        assert third is None
        stored = rows_of(session, 30)
    rows = expected_rows(TOKENS[:30])
    assert stored == [state_bytes(TOKENS[:30]), *[rows] * 8]


def test_a_layer_that_has_read_other_tokens_is_stored(path: Path):
    """Attention, but its rows are not the state's tokens: it cannot be cut back by their number."""
    save(path, lambda read: [growing(read[: len(read) // 2]), growing(read)], 100)
    with Session.open(path, MODEL, write=False) as session:
        assert session.reusable([*TOKENS[:200], 7]) == 100
        assert rows_of(session, 100)[0] == expected_rows(TOKENS[:50])
        assert rows_of(session, 100)[2] == expected_rows(TOKENS[:100])
        assert session.header.savepoints[0].layers[1] is None


# ---------------------------------------------------------------------------- what a commit writes


def test_a_savepoint_is_written_once(path: Path, counted: Counted):
    first, second = TOKENS[:280], TOKENS
    size = len(state_bytes([]))
    with Session.open(path, MODEL) as session:
        commit(session, first, *hybrid(first), savepoints=at(hybrid, first, 50, 100))
        assert counted.take() > 3 * size + 2 * 280 * ROW_BYTES
        owned = {t.ranges[0].offset for p in session.header.savepoints for t in p.layers[1].tensors}
        commit(session, second, *hybrid(second), savepoints=at(hybrid, second, 50, 100))
        without = size + 2 * 44 * ROW_BYTES + 4096  # the state at the end, a block, small files
        assert size + 2 * 20 * ROW_BYTES < counted.take() < without
        commit(session, second, *hybrid(second), savepoints=[Savepoint(100, [None, None])])
        assert counted.take() < without and session.savepoints == [100]
        kept = session.header.savepoints[0].layers[1].tensors[0].ranges[0].offset
        assert kept in owned and rows_of(session, 100)[2] == state_bytes(second[:100])


def test_after_a_restore_at_a_savepoint_it_is_shared(path: Path, counted: Counted):
    save(path, hybrid, 50, 100, 200)
    branch = [*TOKENS[:100], *range(1000, 1050)]
    with Session.open(path, MODEL) as session:
        assert session.reusable(branch) == 100
        rows_of(session, 100)
        counted.take()
        commit(session, branch, *hybrid(branch), savepoints=at(hybrid, branch, 50, 100, 120))
        assert counted.take() < 2 * len(state_bytes([])) + 2 * 150 * ROW_BYTES + 4096
        assert session.savepoints == [50, 100, 120]
        for n in session.savepoints:
            assert rows_of(session, n)[2] == state_bytes(branch[:n])


@pytest.mark.parametrize("make", [hybrid, nested])
def test_nothing_is_taken_over_that_was_not_restored(path: Path, make: Callable, counted: Counted):
    save(path, make, 100)
    other = [*TOKENS[:99], 999, *TOKENS[100:]]
    for tokens in (TOKENS, other):
        with Session.open(path, MODEL) as session:
            if tokens is other:
                rows_of(session, 300)  # all was restored, but the tokens differ before 100
            old = {r.offset for t in session.header.all_tensors() for r in t.ranges}
            commit(session, tokens, *make(tokens), savepoints=at(make, tokens, 100))
            new = {r.offset for t in session.header.all_tensors() for r in t.ranges}
            assert tokens is other or not old & new
            assert state_bytes(tokens[:100]) in rows_of(session, 100)


def test_closed_and_gone_on(path: Path, counted: Counted):
    """Who keeps the caches says so, and need not restore."""
    save(path, hybrid, 100)
    longer, whole = [*TOKENS, 5], 2 * 300 * ROW_BYTES
    points = at(hybrid, longer, 100)
    with Session.open(path, MODEL) as session:
        assert not session.continues(300, 2) and not session.continues(301, 1)
        assert not session.continues(-1, 1) and session.continues(300, 1)
        counted.take()
        commit(session, longer, *hybrid(longer), savepoints=points)
        assert counted.take() < len(state_bytes([])) + 4096
    with Session.open(path, MODEL) as session:
        assert not session.continues(301, 1)  # another has committed since
        counted.take()
        commit(session, longer, *hybrid(longer), savepoints=points)
        assert counted.take() > whole + 2 * len(state_bytes([]))
        assert rows_of(session, 100)[2] == state_bytes(longer[:100])


@pytest.mark.parametrize("durable", [True, False])
def test_syncs_are_left_out_where_they_are_not_wanted(path: Path, durable: bool, counted: Counted):
    with Session.open(path, MODEL, durable=durable) as session:
        commit(session, [1, 2])
    assert bool(counted.syncs) == durable
    with Session.open(path, MODEL) as session:
        assert session.tokens == [1, 2]


def test_a_header_is_put_in_place_behind_all_that_it_names(
    path: Path, monkeypatch: pytest.MonkeyPatch
):
    """After a power failure it would name what was never written."""
    done: list = []
    sync, rename = os.fsync, os.replace
    with Session.open(path, MODEL) as session, monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: (done.append(os.fstat(fd).st_ino), sync(fd)))
        patch.setattr(os, "replace", lambda *a, **k: (done.append("rename"), rename(*a, **k)))
        commit(session, [1, 2])
    names = {file.stat().st_ino: file.name for file in (path, *path.iterdir())}
    order = [names.get(event, event) for event in done]
    assert sorted(order[:3]) == ["cache.bin", "logits.f32", "tokens.u32"]
    assert order[3:] == ["session.msgpack", "rename", path.name]


def test_rows_of_another_dtype_are_written_again(path: Path):
    def halved(tokens: list[int]) -> LayerSource:
        layer = growing(tokens)
        for tensor in layer.tensors:
            tensor.dtype = "float16"
            tensor.read = lambda first, last: expected_rows(tokens)[first * HALF : last * HALF]
        return layer

    with Session.open(path, MODEL) as session:
        commit(session, TOKENS[:200])
        commit(session, TOKENS, halved(TOKENS))
    with Session.open(path, MODEL) as session:
        assert rows_of(session, 300) == [expected_rows(TOKENS)[: 300 * HALF]] * 2


def test_the_first_row_of_chunks_is_not_that_of_the_first_token(path: Path):
    def chunked(tokens: list[int]) -> LayerSource:
        layer = growing(tokens)
        layer.kind = "ChunkedKVCache"
        layer.settings |= {"chunk_size": 256, "start_position": 100}
        for tensor in layer.tensors:
            tensor.shape = (1, HEADS, len(tokens) - 100, SIZE)
            whole = tensor.read
            tensor.read = lambda first, last, whole=whole: whole(first + 100, last + 100)
        return layer

    other = [*TOKENS[:250], *[7] * 50]
    with Session.open(path, MODEL) as session:
        for tokens in (TOKENS, other):
            commit(session, tokens, chunked(tokens))
            assert rows_of(session, 300) == [expected_rows(tokens)[100 * ROW_BYTES :]] * 2


def test_a_savepoint_without_a_way_back_is_left_out(path: Path):
    """A window that could be cut when the savepoint was made has begun to slide since."""
    with Session.open(path, MODEL) as session:
        short, bare = TOKENS[:50], [Savepoint(30, [None, None])]
        commit(session, short, *windowed(short), savepoints=bare)
        assert session.savepoints == [30] and session.can_trim
        commit(session, TOKENS, *windowed(TOKENS), savepoints=bare)
        assert session.savepoints == [] and not session.can_trim


def test_a_copy_that_is_not_needed_yet_is_kept(path: Path):
    with Session.open(path, MODEL) as session:
        short = TOKENS[:50]
        commit(session, short, *windowed(short), savepoints=at(windowed, short, 30))
        commit(session, TOKENS, *windowed(TOKENS), savepoints=[Savepoint(30, [None, None])])
        assert session.savepoints == [30]
        assert rows_of(session, 30)[0] == expected_rows(TOKENS[:30])


@pytest.mark.parametrize(
    "points",
    [
        [Savepoint(0, [None, None])],
        [Savepoint(300, [None, None])],
        [Savepoint(-1, [None, None])],
        [Savepoint(3, [None, recurrent([1])])] * 2,
        [Savepoint(3, [None])],
        [Savepoint(3, [recurrent([1]), None])],
        [Savepoint(3, [None, listed(recurrent([1]))])],
    ],
)
def test_savepoints_of_another_state(path: Path, points: list[Savepoint]):
    with Session.open(path, MODEL) as session:
        with pytest.raises(ValueError, match="savepoint"):
            commit(session, TOKENS, *hybrid(TOKENS), savepoints=points)
        with pytest.raises(ValueError, match="savepoint"):
            written(session.commit_layers(TOKENS, None, None, points))
        with pytest.raises(ValueError, match="contiguous float32"):
            written(session.commit_layers(TOKENS, None, b"logits"))
        assert session.generation == 0


def test_other_layers_are_not_taken_over(path: Path):
    """The same tokens in a state of another kind."""
    tokens = TOKENS[:100]
    with Session.open(path, MODEL) as session:
        commit(session, tokens, *hybrid(tokens), savepoints=at(hybrid, tokens, 50))
        commit(session, tokens, *windowed(tokens), savepoints=at(windowed, tokens, 50))
        assert rows_of(session, 50)[0] == expected_rows(tokens[:50])
        commit(session, tokens, *nested(tokens), savepoints=at(nested, tokens, 50))
        assert rows_of(session, 50)[0] == state_bytes(tokens[:50])
        wider = [sliding(tokens, 70), growing(tokens)]
        commit(session, tokens, *windowed(tokens), savepoints=at(windowed, tokens, 50))
        commit(session, tokens, *wider, savepoints=[Savepoint(50, [None, None])])
        assert session.savepoints == []
    with Session.open(path, MODEL) as session:
        assert session.generation == 5


# ------------------------------------------------------------------------------ files under harm


def test_a_file_of_before_savepoints_opens(path: Path):
    save(path, hybrid)
    body = body_of(path)
    assert body.pop("checkpoints") == []
    put_body(path, body)
    with Session.open(path, MODEL) as session:
        assert session.savepoints == [] and session.tokens == TOKENS
        rows_of(session, 300)
        commit(session, TOKENS, *hybrid(TOKENS), savepoints=at(hybrid, TOKENS, 30))
    with Session.open(path, MODEL) as session:
        assert session.savepoints == [30]


def test_damage_in_a_savepoint(path: Path):
    save(path, hybrid, 30, 100)
    record = body_of(path)["checkpoints"][0]["layers"][1]["tensors"][0]
    file = path / "cache.bin"
    data = bytearray(file.read_bytes())
    data[record["ranges"][0][0] + 5] ^= 1
    file.write_bytes(data)
    with Session.open(path, MODEL) as session:
        assert rows_of(session, 100) and rows_of(session, 300)
        with pytest.raises(DataError, match="s: the checksum of 0 is wrong"):
            rows_of(session, 30)
    file.write_bytes(data[: record["ranges"][0][0]])
    with pytest.raises(DataError, match="cache.bin has .* bytes where its header says"):
        Session.open(path, MODEL)


ORDER, NUMBER = "the savepoints are out of order", "a savepoint has another number of layers"


@pytest.mark.parametrize(
    ("problem", "where", "value"),
    [
        (ORDER, "checkpoints 0 count", 100),
        (ORDER, "checkpoints 1 count", 300),
        (ORDER, "checkpoints 0 count", 0),
        ("checkpoints is not a list", "checkpoints", None),
        ("a savepoint is not a map", "checkpoints 1", []),
        ("checkpoints.count is not a count", "checkpoints 0 count", None),
        ("checkpoints.layers is not a list", "checkpoints 0 layers", None),
        ("it holds savepoints but no caches", "layers", None),
        (NUMBER, "checkpoints 0 layers", [None, None]),
        (NUMBER, "checkpoints 0 layers 0", [None]),
        (NUMBER, "layers", []),
        ("a savepoint of a KVCache has the kind ArraysCache", "checkpoints 0 layers 2", "state"),
        ("checkpoints.layers is not a list", "checkpoints 0 layers 0", "state"),
        ("a layer is not a map", "checkpoints 0 layers 2", 5),
        ("two ranges overlap", "checkpoints 1 layers 0", ["state", None]),
    ],
)
def test_headers_that_no_commit_wrote(path: Path, problem: str, where: str, value: object):
    """One value of the header replaced; "state" stands for a layer that is there, at 30."""
    save(path, nested, 30, 100)
    body = body_of(path)
    state = body["checkpoints"][0]["layers"][0][0]
    value = state if value == "state" else value
    value = [state, None] if value == ["state", None] else value
    *steps, last = (int(step) if step.isdecimal() else step for step in where.split())
    functools.reduce(lambda found, step: found[step], steps, body)[last] = value
    put_body(path, body)
    with pytest.raises(DataError, match=f"cannot read session {path}: {problem}"):
        Session.open(path, MODEL)
