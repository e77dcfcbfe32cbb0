"""Parses JSON from a checkpoint: UTF-8, refused before parsing if its values would take far more
memory than its text."""

from __future__ import annotations

import json
from typing import Any

# Commas and opening brackets; a tensor in a header has about nine.
MAX_MARKS = 3 << 20


def parse(data: bytes, **hooks: Any) -> Any:
    """Return the value. hooks: as of json.loads. Raises ValueError, in a few words."""
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_MARKS:
        raise ValueError(f"it has more than {MAX_MARKS} values")
    try:
        return json.loads(data.decode("utf-8-sig"), **hooks)
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
