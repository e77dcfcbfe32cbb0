"""MLX in the tests' own home, and the embedded model, loaded once."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.native_library import native_commands

__all__ = ["native_commands"]

pytest.importorskip("mlx.core")

from toastkit.model.architecture import import_architecture
from toastkit.model.config import ModelConfig

import_architecture(ModelConfig("llama", 16, None, {}))  # or files below would import transformers


@pytest.fixture(scope="session", autouse=True)
def mlx_started(private_home: Path) -> None:
    """MLX as commands start it, before any test here computes: on the CPU it compiles nothing. Who
    turned that on again would have a compiler run for every shape in all tests that follow."""
    from mlx_lm.models import base

    from toastkit.engine import device
    from toastkit.store import reader

    device.start()
    reader.IDLE_SECONDS = 0.5  # some tests wait for the threads of those before them
    base.inspect = SimpleNamespace(signature=cache(inspect.signature))  # it asks at each name


@pytest.fixture(scope="session")
def crumb(mlx_started: None, library_at_home: None):
    """An Engine for the embedded model, in float32 on whatever device this machine has."""
    from tests.model.checkpoints import open_crumb

    return open_crumb()


@pytest.fixture(scope="session")
def crumb_by_mlx(mlx_started: None):
    """The same with MLX's own operations throughout."""
    from tests.model.checkpoints import open_crumb

    return open_crumb(native="off")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, crumb):
    """Engines of published checkpoints, by name: see service_driver."""
    from tests.model.service_driver import Engines

    return Engines(tmp_path_factory.mktemp("memory"), crumb)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, mlx_started: None) -> Callable[..., Any]:
    """Engines of random mixtures of experts: see moe_engines."""
    from tests.model.moe_engines import engines

    return engines(tmp_path_factory.mktemp("moe"))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Any:
    """See test_streaming_failures.Disk."""
    from tests.model.test_streaming_failures import Disk

    return Disk(monkeypatch)


@pytest.fixture
def plain(engines):
    """The answers of the published llama without a cache."""
    return engines("llama")[1]


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directories of this test alone; where conversations lie."""
    from tests.model.service_driver import private_homes

    return private_homes(tmp_path, monkeypatch)


@pytest.fixture
def model(tmp_path: Path, mlx_started: None) -> Path:
    """A checkpoint that a test may change."""
    from tests.model.published import write_published

    return write_published(tmp_path / "llama", "llama")


@pytest.fixture
def start(homes: Path, model: Path) -> Iterator[Callable[..., Any]]:
    """start(**settings): a worker that runs, of these files or of model=; closed at the end."""
    from tests.model.worker_driver import Running

    made: list[Any] = []

    def start(**settings: Any) -> Any:
        made.append(Running(settings.pop("model", model), **settings))
        made[-1].worker.start()
        return made[-1]

    yield start
    for running in made:
        running.worker.close()
    assert not any(thread.name == "worker" for thread in threading.enumerate())


@pytest.fixture
def client(crumb_by_mlx) -> Iterator[Any]:
    """A process that is attached to a service of the embedded model, which reads a prompt's last
    token by itself: see attached_client."""
    from tests.model.attached_client import connected

    if crumb_by_mlx.device != "cpu":
        pytest.skip("what these ops give is held against the CPU")
    with connected(crumb_by_mlx) as made:
        yield made
