"""MLX in the tests' own home, and the embedded model, loaded once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core")


@pytest.fixture(scope="session", autouse=True)
def mlx_started(private_home: Path) -> None:
    """MLX as commands start it, before any test here computes: on the CPU it compiles nothing. Who
    turned that on again would have a compiler run for every shape in all tests that follow."""
    from toastkit.engine import device

    device.start()


@pytest.fixture(scope="session")
def crumb(mlx_started: None):
    """An Engine for the embedded model, in float32 on whatever device this machine has."""
    from toastkit.engine.opening import open_engine
    from toastkit.model.locate import locate

    return open_engine(locate("crumb"), dtype="float32")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, crumb):
    """Engines of published checkpoints, by name: see service_driver."""
    from tests.model.service_driver import Engines

    return Engines(tmp_path_factory.mktemp("memory"), crumb)


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directories of this test alone; where conversations lie."""
    from tests.model.service_driver import private_homes

    return private_homes(tmp_path, monkeypatch)


@pytest.fixture
def client(crumb) -> Iterator[Any]:
    """A process that is attached to a service of the embedded model: see attached_client."""
    from tests.model.attached_client import connected

    if crumb.device != "cpu":
        pytest.skip("what these ops give is held against the CPU")
    with connected(crumb) as made:
        yield made
