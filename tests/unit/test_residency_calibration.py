"""Times of a device on disk: kept by what they are of, and measured anew where they are of no
use."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toastkit.errors import CannotCreateError
from toastkit.residency import calibration
from toastkit.residency.predict import Calibration, Slowdown, Source

OF = {"device": "cpu", "name": "Abacus", "threads": 2, "layers": [10, 20]}
FOUND = Calibration(
    (0.25, 1 / 3), (0.5, 0.5), (0.125, 0.0), 0.75, 0.0, 0.9,
    Source(1e9, Slowdown(0.5, 1.0), Slowdown(0.25, 2.5)),
    Source(1e8, Slowdown(0.0, 0.25), Slowdown(0.0, 0.0)),
)  # fmt: skip
NONE = {"reading": 0, "computing": 0}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "toastkit" / "residency"


def test_what_is_saved_is_loaded(cache: Path) -> None:
    assert calibration.load(OF) is None
    file = calibration.save(OF, FOUND)
    assert file == calibration.path(OF) and file.parent == cache
    assert calibration.load(OF) == FOUND
    assert file.stat().st_mode & 0o777 == 0o600 and cache.stat().st_mode & 0o777 == 0o700
    assert os.listdir(cache) == [file.name]
    calibration.save(OF, replace(FOUND, outside_token=2.0))
    again = calibration.load(OF)
    assert again is not None and again.outside_token == 2.0


@pytest.mark.parametrize("change", [{"threads": 4}, {"layers": [10, 21]}, {"name": "Sand"}])
def test_of_something_else_nothing_is_known(change: dict) -> None:
    calibration.save(OF, FOUND)
    assert calibration.load({**OF, **change}) is None


def changed(**fields: Any) -> bytes:
    calibration.save(OF, FOUND)
    return json.dumps({**json.loads(calibration.path(OF).read_text()), **fields}).encode()


@pytest.mark.parametrize(
    "fields",
    [
        {"schema": 1}, {"schema": None}, {"of": {}}, {"of": {**OF, "name": "Sand"}}, {"more": 1},
        {"token": [0.25]}, {"token": 0.25}, {"token": [0.25, "x"]}, {"token": [0.25, -1]},
        {"stays": True}, {"stays": float("nan")}, {"outside_token": 1e300}, {"cold": {}},
        {"cold": {"rate": 0, "token": NONE, "chunk": NONE}}, {"cold": [1, 2, 3]},
        {"cold": {"rate": float("nan"), "token": NONE, "chunk": NONE}},
        {"cached": {"rate": float("inf"), "token": NONE, "chunk": NONE}},
        {"cold": {"rate": 1, "token": 0.5, "chunk": NONE}}, {"outside_chunk": 10**400},
        {"cached": {"rate": 1, "token": {"reading": 4.5, "computing": 0}, "chunk": NONE}},
        {"cached": {"rate": 1, "token": NONE, "chunk": {"reading": 0}}},
    ],
)  # fmt: skip
def test_a_file_of_another_make_is_ignored(fields: dict) -> None:
    calibration.path(OF).parent.mkdir(parents=True, mode=0o700)
    calibration.path(OF).write_bytes(changed(**fields))
    assert calibration.load(OF) is None


@given(st.binary(max_size=80))
def test_a_broken_file_is_ignored(data: bytes) -> None:
    calibration.save(OF, FOUND)
    calibration.path(OF).write_bytes(data)
    assert calibration.load(OF) is None


def test_one_that_is_cut_short_or_too_long() -> None:
    whole = changed()
    for data in (whole[:-20], whole + b" " * calibration.MAX_BYTES, b"[" * 100_000):
        calibration.path(OF).write_bytes(data)
        assert calibration.load(OF) is None


def test_what_is_no_file_is_neither_read_nor_waited_for() -> None:
    calibration.save(OF, FOUND)
    os.unlink(calibration.path(OF))
    os.mkfifo(calibration.path(OF))
    assert calibration.load(OF) is None


def test_where_nothing_can_be_kept(cache: Path) -> None:
    cache.parent.parent.mkdir()
    cache.parent.write_text("")
    with pytest.raises(CannotCreateError, match="cannot save times"):
        calibration.save(OF, FOUND)
    assert calibration.load(OF) is None
