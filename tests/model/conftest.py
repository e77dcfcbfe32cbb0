"""MLX in the tests' own home, and the embedded model, loaded once."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("mlx.core")


@pytest.fixture(scope="session", autouse=True)
def mlx_started(private_home: Path) -> None:
    """MLX with the run's own kernel cache, before any test here computes."""
    from toastkit.engine import device

    device.start()


@pytest.fixture(scope="session")
def crumb(mlx_started: None):
    """An Engine for the embedded model, in float32 on whatever device this machine has."""
    from toastkit.engine.engine import Engine
    from toastkit.model.locate import locate

    return Engine(locate("crumb"), dtype="float32")
