"""Where a checkpoint is: a directory, the embedded `crumb`, or a Hugging Face hub id.

`locate` finds it (the local cache first, the network only when it must) and gives a `ModelFiles`,
from which everything else reads. Imports neither MLX nor huggingface_hub until a download is due.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from toastkit.errors import DataError, NoInputError, UnavailableError, from_os_error

CRUMB = Path(__file__).parent / "crumb"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# All that inference reads; no Python, no pickle.
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
MAX_SMALL_FILE_BYTES = 256 << 20


class ModelFiles:
    """A checkpoint directory. name: what a user calls it. path: the directory."""

    def __init__(self, path: Path, name: str):
        self.path = path
        self.name = name

    def read(self, name: str) -> bytes | None:
        """The content of a small file (config, tokenizer, template), or None where it is absent."""
        path = self.path / name
        try:
            if path.stat().st_size > MAX_SMALL_FILE_BYTES:
                raise DataError(f"{self.name}: {name} is larger than {MAX_SMALL_FILE_BYTES} bytes")
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise from_os_error(error, f"cannot read {path}") from error

    def read_json(self, name: str) -> dict | None:
        """A JSON object from a small file, None where it is absent; DataError if it is broken."""
        data = self.read(name)
        if data is None:
            return None
        try:
            value = json.loads(data, object_hook=_untag_float)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{self.name}: {name} is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise DataError(f"{self.name}: {name} is not a JSON object")
        return value

    def weight_files(self) -> list[Path]:
        """The safetensors files, sorted. Raises NoInputError where there are none."""
        files = sorted(self.path.glob("model*.safetensors"))
        if not files:
            raise NoInputError(f"{self.name}: no model*.safetensors in the checkpoint")
        return files


def _untag_float(value: dict) -> object:
    """transformers writes a non-finite float as {"__float__": "Infinity"}: undo it."""
    if set(value) == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(value["__float__"])
    return value


def find(name: str) -> ModelFiles:
    """The checkpoint that a stream names, if it is on this machine; never fetches one.

    Raises NoInputError where it is not there.
    """
    if HUB_ID.fullmatch(name) and len(name) < 256 and not Path(name).exists():
        cached = _cached_snapshot(name)
        if cached is None:
            raise NoInputError(f"no such model here: {name}")
        return ModelFiles(cached, name)
    return locate(name)


def locate(name: str) -> ModelFiles:
    """The checkpoint that `-m NAME` means: here, or fetched from the hub.

    Raises NoInputError where it is not there, UnavailableError where it would have to be fetched
    and cannot be.
    """
    if name == "crumb":
        return ModelFiles(CRUMB, "crumb")
    try:
        path = Path(name).expanduser()
        path.stat()
    except (OSError, ValueError, RuntimeError):
        path = None  # no such file, too long a name, a NUL in it, an unknown user's home
    if path is not None and path.is_dir():
        if not (path / "config.json").is_file():
            raise NoInputError(f"{name} is not a model: no config.json in it")
        return ModelFiles(path.resolve(), str(path.resolve()))
    if path is not None:
        raise NoInputError(f"{name} is not a model directory")
    if HUB_ID.fullmatch(name) and len(name) < 256:
        return ModelFiles(_hub_snapshot(name), name)
    raise NoInputError(
        f"no such model: {name[:100]}", hint="-m takes a directory, a hub id (org/name), or crumb"
    )


def hub_cache() -> Path:
    """The Hugging Face cache directory: HF_HUB_CACHE, else HF_HOME/hub, else the default."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME")
    if not home:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        home = str(Path(base) / "huggingface")
    return Path(home).expanduser() / "hub"


def _hub_snapshot(hub_id: str) -> Path:
    """The snapshot of a hub id: from the cache without a network call, else downloaded."""
    cached = _cached_snapshot(hub_id)
    if cached is not None:
        return cached
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise NoInputError(
            f"no such model: {hub_id} is not in the cache, and HF_HUB_OFFLINE is set"
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise UnavailableError(
            f"cannot fetch {hub_id}: huggingface_hub is not installed"
        ) from error
    try:
        return Path(snapshot_download(hub_id, allow_patterns=HUB_PATTERNS))
    except KeyboardInterrupt:
        raise
    except Exception as error:  # the library raises many kinds: not found, gated, offline, I/O
        reason = (str(error).strip().split("\n")[0] or type(error).__name__)[:200]
        raise UnavailableError(
            f"cannot fetch {hub_id}: {reason}", hint="give a directory, or check the network"
        ) from error


def _cached_snapshot(hub_id: str) -> Path | None:
    """A complete snapshot in the local cache, or None."""
    repo = hub_cache() / f"models--{hub_id.replace('/', '--')}"
    try:
        revision = (repo / "refs" / "main").read_text().strip()
        snapshot = repo / "snapshots" / revision
        if not re.fullmatch(r"[\w.-]+", revision) or not (snapshot / "config.json").is_file():
            return None
        index = snapshot / "model.safetensors.index.json"
        if not index.is_file():
            return snapshot if any(snapshot.glob("model*.safetensors")) else None
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
        return snapshot if all((snapshot / shard).is_file() for shard in shards) else None
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return None  # not there, or not whole: fetched anew
