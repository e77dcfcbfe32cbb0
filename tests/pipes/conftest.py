"""Tests of real executables through real pipes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.conftest import executable


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels(private_home: Path) -> None:
    """MLX's first start on this home, so that no test waits for it or sees its notice."""
    subprocess.run(
        [executable("decode"), "-q", "-n", "2", "hello"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True, timeout=300,
    )  # fmt: skip
