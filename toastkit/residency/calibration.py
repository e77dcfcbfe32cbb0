"""Measured times of a model on a device, cached for models of the same shape:

    $XDG_CACHE_HOME/toastkit/residency/KEY.json

One JSON object: schema (3), the subject that was measured, and the fields of Calibration. The key
is a hash of the subject. The file is replaced as a whole. One that cannot be read, or is about
something else, counts as missing: measuring again costs seconds.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from toastkit.base_directories import own_directory
from toastkit.residency.predict import MAX_SLOWDOWN, Calibration, Slowdown, Source

SCHEMA_VERSION = 3
MAX_BYTES = 1 << 20
MAX_SECONDS = 1e6
LAYER_FIELDS = ("token", "chunk_fixed", "chunk_token")
NUMBERS = ("outside_token", "outside_chunk", "stays")


def about(
    device: str,
    dtype: str | None,
    outside: int,
    layers: Sequence[int],
    weights: Path,
    native: str | None = None,
) -> dict[str, Any]:
    """The subject of measured times: device and threads, versions, the shape of a model, and its
    file system. device: "cpu" or "gpu". dtype: of activations. outside, layers: bytes. weights: a
    file of them. native: how native matmuls are computed, None without them."""
    from importlib.metadata import version

    import mlx.core as mx

    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    name = processor()
    if device == "gpu":
        name = str(mx.device_info().get("device_name", name))
    return {
        "device": device, "name": name, "threads": threads, "system": platform.system(),
        "mlx": version("mlx"), "dtype": dtype, "outside": outside, "layers": list(layers),
        "disk": os.stat(weights).st_dev, "native": native,
    }  # fmt: skip


def processor() -> str:
    """The kind of the machine's processor."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def path(of: dict[str, Any]) -> Path:
    """The file of a subject's times. of: see `about`."""
    key = hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:32]
    return Path(own_directory("CACHE", "residency", f"{key}.json"))


def save(of: dict[str, Any], measured: Calibration) -> Path:
    """Store measured times, replacing earlier ones; returns the file. of: see `about`. Raises
    CannotCreateError, IOFailure."""
    from toastkit.private_files import keep_text

    file = path(of)
    text = json.dumps({"schema": SCHEMA_VERSION, "of": of, **asdict(measured)}) + "\n"
    keep_text(file, text, "times")
    return file


def load(of: dict[str, Any]) -> Calibration | None:
    """Load measured times; None if there are none, or the file is of no use. of: see `about`."""
    from toastkit.private_files import read_file

    try:
        data = read_file(path(of), MAX_BYTES)
        fields = json.loads(data) if len(data) <= MAX_BYTES else None
    except (OSError, ValueError, RecursionError):  # not UTF-8 is a ValueError too
        return None
    if not isinstance(fields, dict) or fields.pop("schema", None) != SCHEMA_VERSION:
        return None
    if fields.pop("of", None) != of:
        return None
    try:
        return _decode(fields, len(of["layers"]))
    except (TypeError, ValueError, KeyError, OverflowError):
        return None


def _decode(fields: dict[str, Any], layers: int) -> Calibration:
    """Decode the fields. Raises TypeError, ValueError, KeyError, OverflowError for what `save` did
    not write."""
    values: dict[str, Any] = {name: _seconds(fields.pop(name)) for name in NUMBERS}
    for name in LAYER_FIELDS:
        given = fields.pop(name)
        if not isinstance(given, list) or len(given) != layers:
            raise ValueError(name)
        values[name] = tuple(map(_seconds, given))
    for name in ("cached", "cold"):
        values[name] = _source(**fields.pop(name))
    if fields:
        raise ValueError("other fields")
    return Calibration(**values)


def _source(rate: Any, token: Any, chunk: Any) -> Source:
    slow = Slowdown(**token), Slowdown(**chunk)
    shares = [_number(share) for one in slow for share in (one.reading, one.computing)]
    if _number(rate) <= 0 or not all(0 <= share <= MAX_SLOWDOWN for share in shares):
        raise ValueError("no source")
    return Source(rate, *slow)


def _seconds(value: Any) -> float:
    if not 0 <= _number(value) <= MAX_SECONDS:
        raise ValueError("no seconds")
    return float(value)


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError("no number")
    return value
