"""Which mlx_lm is installed: on Python 3.10 the last one for it, without some of what we test."""

from __future__ import annotations

from importlib.metadata import version

import pytest

NEW = tuple(map(int, version("mlx-lm").split(".")[:2])) >= (0, 32)
needs_new = pytest.mark.skipif(not NEW, reason="mlx-lm 0.32 has it, which wants Python 3.11")
