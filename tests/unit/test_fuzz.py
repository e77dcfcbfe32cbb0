"""The fuzzer itself: a few cases of fixed seeds, so that it does not rot. `make fuzz` is the real
thing."""

from __future__ import annotations

import importlib
import random
from pathlib import Path

import pytest

from tests.fuzz.__main__ import TARGETS


@pytest.mark.parametrize(("target", "count"), [("frames", 20), ("sessions", 1), ("socket", 4)])
def test_some_cases(target: str, count: int, tmp_path: Path, state_home: Path, monkeypatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    module, name = TARGETS[target].split(".")
    with getattr(importlib.import_module(f"tests.fuzz.{module}"), name)(False) as case:
        for number in range(count):
            case(random.Random(number))
