"""A device is measured on the embedded model: what comes of it, in how much memory, and that it
leaves nothing changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model.checkpoints import open_crumb
from toastkit.engine import calibrating
from toastkit.engine.calibrating import measure
from toastkit.engine.engine import Engine
from toastkit.errors import DataError
from toastkit.residency.calibration import about, load, save
from toastkit.residency.predict import predict
from toastkit.residency.residency_options import ResidencyOptions


class Opener:
    """Opens crumb with some layers that stay, and remembers the engines."""

    def __init__(self) -> None:
        self.opened: list[tuple[ResidencyOptions, Engine]] = []

    def __call__(self, residency: ResidencyOptions) -> Engine:
        engine = open_crumb(residency=residency)
        self.opened.append((residency, engine))
        return engine


@pytest.fixture(autouse=True)
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass once, and over short chunks: what comes of it is told here, and not how long."""
    for name, value in (("ROUNDS", 1), ("CHUNK_SECONDS", 0.005), ("SWEEPS", 1)):
        monkeypatch.setattr(calibrating, name, value)


def test_a_measurement_is_kept_and_read_again(homes) -> None:
    opener, told = Opener(), []
    found = measure(opener, told.append)
    (none, first), (few, _) = opener.opened
    assert none.amount == 0 and few == ResidencyOptions("layers", 3, "first")
    assert len(told) == 2 + calibrating.SWEEPS
    assert first.residency is not None
    sizes = first.residency.sizes
    assert len(found.token) == len(found.chunk_token) == len(sizes.layers) == 8
    assert all(seconds > 0 for seconds in found.token) and found.cached.rate > found.cold.rate / 50
    assert 0 < found.stays <= 1 and found.outside_token > 0
    shape, (weights,) = (sizes.outside, sizes.layers), first.files.weight_files()
    of = about("cpu", "float32", *shape, weights)
    assert load(of) is None
    save(of, found)
    assert load(of) == found
    assert load(about("cpu", "bfloat16", *shape, weights)) is None
    assert load(about("cpu", "float32", *shape, weights, "avx2")) is None  # native products
    assert load(about("cpu", "float32", *shape, Path("/proc/self/stat"))) is None  # another disk
    told_of = predict(sizes.layers, found, range(8), cached=True, prompt=9, chunk=4)
    assert 0 < told_of.token < told_of.prompt


def test_a_pass_of_many_layers_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the layers that did not run are taken to be like those of their size."""
    monkeypatch.setattr(calibrating, "LITTLE_BYTES", 0)
    monkeypatch.setattr(calibrating, "WHOLE_SECONDS", 0.0)
    monkeypatch.setattr(calibrating, "FEW_LAYERS", 3)
    opener = Opener()
    found = measure(opener)
    ((_, engine),) = opener.opened  # no memory for any that stay
    assert found.stays == 1.0 and len(found.token) == 8
    assert len(set(found.token)) < 8 == len(engine.model.layers)


def test_it_leaves_the_engine_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    opener = Opener()
    engine = opener(ResidencyOptions("layers", 0))
    streams, store = engine.holdings.streams, engine.holdings.store
    before = streams.most_ahead, store.keeps_cached
    closed = []
    monkeypatch.setattr(engine, "close", lambda: closed.append(engine))
    monkeypatch.setattr(calibrating, "LITTLE_BYTES", 0)
    measure(lambda residency: engine)
    assert (streams.most_ahead, store.keeps_cached) == before and closed == [engine]
    streams.watch(0, True)  # nobody is told


def test_a_file_that_goes_away_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    opener = Opener()

    def broken(*_) -> None:
        raise DataError("its files have changed")

    def opened(residency: ResidencyOptions) -> Engine:
        engine = opener(residency)
        monkeypatch.setattr(engine.holdings, "bring", broken)
        return engine

    with pytest.raises(DataError, match="have changed"):
        measure(opened)
