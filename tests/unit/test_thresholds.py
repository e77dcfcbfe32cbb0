"""Thresholds on disk: kept per model, whole or not at all, and put into a monitor's options."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from toastkit.errors import CannotCreateError, DataError, IOFailure
from toastkit.gears import thresholds
from toastkit.gears.calibration import Thresholds
from toastkit.gears.monitor import EntropyMonitor, MonitorOptions

MODEL = "0123456789abcdef" * 2
FOUND = Thresholds(0.25, 0.625, "prompts", 144, 4096)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "toastkit" / "thresholds"


def test_what_is_saved_is_loaded(cache: Path):
    assert thresholds.load(MODEL) is None
    file = thresholds.save(MODEL, FOUND)
    assert file == thresholds.path(MODEL) == cache / f"{MODEL}.json"
    assert thresholds.load(MODEL) == FOUND
    assert thresholds.load("f" * 32) is None
    fields = json.loads(file.read_text())
    assert fields["schema"] == 1 and fields["low"] == 0.25 and fields["strategy"] == "prompts"
    assert file.stat().st_mode & 0o777 == 0o600 and cache.stat().st_mode & 0o777 == 0o700
    assert os.listdir(cache) == [file.name]


def test_saving_again_replaces():
    thresholds.save(MODEL, FOUND)
    other = Thresholds(1 / 3, 0.7000000000000001, "file", 30, 4096, overlap=True)
    thresholds.save(MODEL, other)
    assert thresholds.load(MODEL) == other


def test_a_relative_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert thresholds.path(MODEL) == tmp_path / ".cache/toastkit/thresholds" / f"{MODEL}.json"


@pytest.mark.parametrize(
    "word", ["", ".", "..", "../x", "a/b", ".x", "-x", "a\0", "a\n", "x" * 129, "é", None, 3]
)
def test_a_fingerprint_that_is_not_a_plain_word(word):
    with pytest.raises(DataError, match="^invalid fingerprint: ") as caught:
        thresholds.path(word)
    assert caught.value.message.isprintable()
    with pytest.raises(DataError):
        thresholds.save(word, FOUND)
    assert thresholds.load(word) is None
    base = MonitorOptions()
    assert thresholds.monitor_options(word, 4096, base)[0] == base


def test_thresholds_that_cannot_be_are_not_saved(cache: Path):
    with pytest.raises(DataError):
        thresholds.save(MODEL, Thresholds(2.0, 1.0, "file", 10, 4096))
    assert not cache.exists()


def test_a_folder_that_cannot_be_made(cache: Path):
    cache.parent.mkdir(parents=True)
    cache.touch()
    with pytest.raises(CannotCreateError, match="^cannot save thresholds in .*: file exists$"):
        thresholds.save(MODEL, FOUND)
    assert thresholds.load(MODEL) is None


def test_a_full_disk_leaves_the_former_ones(cache: Path, monkeypatch: pytest.MonkeyPatch):
    thresholds.save(MODEL, FOUND)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(IOFailure, match="no space left on device$"):
        thresholds.save(MODEL, Thresholds(0.1, 0.9, "file", 30, 4096))
    assert thresholds.load(MODEL) == FOUND
    assert os.listdir(cache) == [f"{MODEL}.json"]


GOOD = {"schema": 1, "low": 0.1, "high": 0.9, "strategy": "file", "samples": 9, "vocab": 4096}


def changed(**fields) -> bytes:
    return json.dumps({**GOOD, **fields}).encode()


@pytest.mark.parametrize(
    "data, reason",
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 3000, "not JSON"),
        (b"[]", "not an object of a few fields"),
        (changed() + b" " * 5000, "not an object of a few fields"),
        (b"{}", "it has no schema"),
        (changed(schema=None), "it has no schema"),
        (changed(schema=2), "its schema 2 is newer than 1"),
        (changed(more=1), "it has other fields"),
        (b'{"schema": 1}', "it has other fields"),
        (changed(low=2), "invalid thresholds: low 2 is not less than high 0.9"),
        (changed(low=float("nan")), "invalid thresholds: not finite numbers"),
        (changed(strategy="x\n"), "invalid thresholds: the strategy is none of"),
        (changed(samples="9"), "invalid thresholds: the number of samples"),
    ],
)
def test_a_malformed_file_is_named(cache: Path, data: bytes, reason: str):
    cache.mkdir(parents=True)
    file = thresholds.path(MODEL)
    file.write_bytes(changed())
    assert thresholds.load(MODEL) == Thresholds(0.1, 0.9, "file", 9, 4096)
    file.write_bytes(data)
    with pytest.raises(DataError) as caught:
        thresholds.load(MODEL)
    assert caught.value.message.startswith(f"cannot read thresholds {file}: {reason}")
    assert "\n" not in caught.value.message
    assert caught.value.hint == "remove it, or calibrate again"
    thresholds.save(MODEL, FOUND)
    assert thresholds.load(MODEL) == FOUND


def test_a_directory_in_its_place(cache: Path):
    thresholds.path(MODEL).mkdir(parents=True)
    with pytest.raises(DataError, match="^cannot read thresholds .*json is a directory$"):
        thresholds.load(MODEL)
    with pytest.raises(CannotCreateError):
        thresholds.save(MODEL, FOUND)
    assert len(os.listdir(cache)) == 1


def test_stored_thresholds_go_into_the_options():
    base = MonitorOptions(window=3, low=1.0, high=9.0, hysteresis=0.2)
    thresholds.save(MODEL, FOUND)
    options, origin = thresholds.monitor_options(MODEL, 4096, base)
    assert origin == "calibrated (prompts, 144 samples)"
    assert (options.window, options.hysteresis) == (3, 0.2)
    monitor = EntropyMonitor(4096, options)
    assert (monitor.low, monitor.high) == (0.25, 0.625)


def test_thresholds_of_another_vocabulary_are_left_aside():
    thresholds.save(MODEL, FOUND)
    base = MonitorOptions()
    found = thresholds.monitor_options(MODEL, 5000, base)
    assert found == (base, "defaults for 32,768 ids, scaled to 5,000")


@pytest.mark.parametrize(
    "base, vocab, origin",
    [
        (MonitorOptions(), 4096, "defaults for 32,768 ids, scaled to 4,096"),
        (MonitorOptions(window=9), 32768, "defaults for 32,768 ids"),
        (MonitorOptions(low=1.0), 4096, "given for 32,768 ids, scaled to 4,096"),
        (MonitorOptions(high=4.0, reference_vocab=4096), 4096, "given for 4,096 ids"),
        (MonitorOptions(low=1.0, scale_to_vocab=False), 4096, "given, not scaled"),
        (MonitorOptions(scale_to_vocab=False), 4096, "defaults, not scaled"),
    ],
)
def test_where_other_thresholds_come_from(base, vocab, origin):
    assert thresholds.origin_of(base, vocab) == origin
    assert thresholds.monitor_options(MODEL, vocab, base) == (base, origin)


def test_a_broken_file_is_not_silently_left_aside(cache: Path):
    cache.mkdir(parents=True)
    thresholds.path(MODEL).write_bytes(b"{}")
    with pytest.raises(DataError):
        thresholds.monitor_options(MODEL, 4096, MonitorOptions())
