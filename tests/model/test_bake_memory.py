"""Baking takes memory for a layer, not for a model. BAKE_GIB=3 takes one of 3 GiB, and minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "bake.py"
CASES = {"copy", "dtype", "quant", "gears", "split", "experts"}
# Buffers whose size does not depend on the model: chunks, blocks of rows, and what of them malloc
# keeps.
CONSTANT = 24 << 20


def test_the_peak_is_bounded_by_the_largest_layer() -> None:
    large = os.environ.get("BAKE_GIB")
    size = ["--gib", large] if large else ["--gib", "0.04", "--hidden", "192"]
    done = subprocess.run([sys.executable, str(BENCHMARK), *size, "--json"], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(done.stdout)
    assert set(found) == CASES
    for case, sizes in found.items():
        assert sizes["layer"] < sizes["model"] / 5
        for kind in ("mlx", "process"):
            limit = min(2.5 * sizes["layer"] + CONSTANT, sizes["model"] / 1.5)
            assert sizes[kind] < limit, f"{case}: {kind}"
