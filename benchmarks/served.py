"""A daemon for the benchmarks, and a model whose context is long enough for them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.daemons import Answer, Daemon  # noqa: F401
from tests.unpack import unpack


def stretched_crumb(folder: Path, context: int) -> Path:
    """The embedded model, told that it can read further. What it says there is of no use; what it
    costs is."""
    path = unpack(folder / "crumb")
    config = json.loads((path / "config.json").read_text())
    config["max_position_embeddings"] = context
    (path / "config.json").write_text(json.dumps(config))
    return path
