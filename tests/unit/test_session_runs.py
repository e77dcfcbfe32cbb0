"""Blocks of no whole number of pages: side by side in the file, and files of before they were."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from session_states import (
    HEADS,
    MODEL,
    Counted,
    commit,
    counted,
    growing,
    make_schema_1,
    packed,
    row,
    rows_of,
    schema_of,
)

from toastkit.private_files import held_until, hold_bytes
from toastkit.session.directory import Session
from toastkit.session.extents import ALIGNMENT, Space

__all__ = ["counted"]
TOKENS = [n * 7 % 1000 for n in range(3000)]
SIZES = [3, 17, 33, 66]  # in pages of ALIGNMENT bytes 0.375, 2.125, 4.125, 8.25
BLOCK = 256 * HEADS * 4


def rows(tokens: list[int], size: int) -> list[bytes]:
    """What is restored of `growing`."""
    return [b"".join(row(token, n, size) for n, token in enumerate(tokens))] * 2


def named(session: Session) -> list[tuple[int, int]]:
    """(offset, size in bytes) of the rows that the last commit names."""
    return [(r.offset, r.length) for t in session.header.all_tensors() for r in t.ranges]


@pytest.mark.parametrize("size", SIZES)
def test_a_tensor_is_one_run(tmp_path: Path, size: int) -> None:
    """However it is written, the file is as long as its rows, and a few pages."""
    with Session.open(tmp_path, MODEL, durable=False) as session:
        for count in (700, 1500, 2200):
            layers = [growing(TOKENS[:count], size)]
            session.write_layers_ahead(TOKENS[:count], partial(list, layers), len(TOKENS))
        commit(session, TOKENS, growing(TOKENS, size))
        for tensor in session.header.all_tensors():
            first = tensor.ranges[0].offset
            assert first % ALIGNMENT == 0
            assert [r.offset - first for r in tensor.ranges] == [
                n * BLOCK * size for n in range(len(tensor.ranges))
            ]
    bytes_ = 2 * len(TOKENS) * BLOCK // 256 * size
    assert (tmp_path / "cache.bin").stat().st_size < bytes_ + BLOCK * size + 2 * ALIGNMENT
    with Session.open(tmp_path, MODEL, write=False) as reader:
        assert rows_of(reader, 3000) == rows(TOKENS, size)
    assert schema_of(tmp_path) == 2


@pytest.mark.parametrize("size", SIZES)
def test_what_is_cut_back_begins_a_run_at_its_place(
    tmp_path: Path, counted: Counted, size: int
) -> None:
    """Only the block of the cut is written again; the last commit's bytes behind the blocks that
    stay are left alone, those in their last page too."""
    other = [*TOKENS[:800], *range(500)]
    with Session.open(tmp_path, MODEL, durable=False) as session:
        commit(session, TOKENS, growing(TOKENS, size))
        was, places = (tmp_path / "cache.bin").read_bytes(), named(session)
        counted.take()
        commit(session, other, growing(other, size))
        written = 2 * (1300 - 768) * BLOCK // 256 * size
        assert written <= counted.take() < written + 100_000  # tokens, logits and the header
        now = (tmp_path / "cache.bin").read_bytes()
        assert all(now[at : at + count] == was[at : at + count] for at, count in places)
        for tensor in session.header.all_tensors():
            steps = [b.offset - a.offset for a, b in zip(tensor.ranges, tensor.ranges[1:])]
            assert [n for n, step in enumerate(steps) if step != BLOCK * size] == [2]
            assert (tensor.ranges[3].offset - 3 * BLOCK * size) % ALIGNMENT == 0
        longer = [*other, *range(900)]
        commit(session, longer, growing(longer, size))
        assert rows_of(session, len(longer)) == rows(longer, size)


def test_whole_pages_are_schema_1(tmp_path: Path) -> None:
    """Which any toastkit reads; and so are a few positions."""
    for size, count, schema in ((16, 3000, 1), (17, 200, 1), (17, 300, 2), (32, 600, 1)):
        tokens, path = TOKENS[:count], tmp_path / f"{size}-{count}"
        with Session.open(path, MODEL) as session:
            commit(session, tokens, growing(tokens, size))
        assert schema_of(path) == schema


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [100, 256, 300, 1024])
def test_a_session_of_schema_1_goes_on(
    tmp_path: Path, counted: Counted, size: int, count: int
) -> None:
    """Its blocks stay where they are, new ones get their places in runs."""
    tokens = TOKENS[:count]
    with Session.open(tmp_path, MODEL) as session:
        commit(session, tokens, growing(tokens, size))
    make_schema_1(tmp_path)
    with Session.open(tmp_path, MODEL) as session:
        assert rows_of(session, count) == rows(tokens, size)
        places = [[r.offset for r in t.ranges] for t in session.header.all_tensors()]
        for more in (count + 1, count + 200, count + 1500):
            counted.take()
            commit(session, TOKENS[:more], growing(TOKENS[:more], size))
            written = 2 * (more - len(tokens)) * BLOCK // 256 * size
            assert counted.take() < written + 100_000
            tokens = TOKENS[:more]
        assert [[r.offset for r in t.ranges][: len(places[0])] for t in
                session.header.all_tensors()] == places  # fmt: skip
    with Session.open(tmp_path, MODEL, write=False) as reader:
        assert rows_of(reader, len(tokens)) == rows(tokens, size)


@pytest.mark.parametrize("count", [768, 2048, 1280, 700])
def test_a_page_that_a_reader_holds_is_left_alone(tmp_path: Path, count: int) -> None:
    """A reader has an earlier commit in place, of which a run went on where one ends now: in the
    same page, or in the next."""
    with Session.open(tmp_path, MODEL, durable=False) as session:
        commit(session, TOKENS, *packed(TOKENS))
        with open(tmp_path / "cache.bin", "rb") as reader:
            for at, size in (places := named(session)):
                hold_bytes(reader.fileno(), at, size)
            was = reader.read()
            commit(session, TOKENS[:count], *packed(TOKENS[:count]))
            for more in (1, 100, 700):
                tokens = [*TOKENS[:count], *range(more)]
                commit(session, tokens, *packed(tokens))
            reader.seek(0)
            now = reader.read()
            assert all(now[at : at + size] == was[at : at + size] for at, size in places)
        assert rows_of(session, len(tokens))[:2] == rows(tokens, 17)


def test_space_behind_a_run() -> None:
    page = ALIGNMENT
    space = Space([(0, page + 100), (4 * page, 100)])
    assert space.beside(page + 100, 100, 200, 0) == page + 100  # a run's end: the page is its own
    assert space.beside(page + 100, 100, 200, 0) == 2 * page + 100  # but not twice
    assert space.beside(4 * page + 50, 50, 10, 0) == 3 * page + 50  # within a run
    assert space.beside(4 * page + 100, 101, 10, 0) == 5 * page + 101  # of another place
    assert space.beside(4 * page + 100, 100, page, 0) == 6 * page + 100  # whose next page is taken


def test_space_behind_a_run_that_is_held(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(3 * ALIGNMENT))
    with open(tmp_path / "file", "rb") as reader, open(tmp_path / "file", "r+b") as writer:
        hold_bytes(reader.fileno(), 150, 10)

        def behind(end: int) -> int:
            space = Space([(0, end)], lambda *place: held_until(writer.fileno(), *place))
            return space.beside(end, end, 50, 0)

        assert behind(160) == 160
        assert behind(100) == ALIGNMENT + 100
