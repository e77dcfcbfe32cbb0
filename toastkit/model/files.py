"""The files of a checkpoint, a directory or one `.toast` file, and where `-m NAME` finds them.

A directory has config.json, tokenizer.json and so on, and its weights in one of three layouts:
`model.safetensors`, shards that `model.safetensors.index.json` lists, or a file a layer as
`toast-model split` writes them. `locate` looks here before it asks the network. Imports neither
MLX nor numpy, and huggingface_hub only when a download is due.
"""

from __future__ import annotations

import json
import os
import re
import stat
from functools import cached_property
from pathlib import Path

from toastkit.errors import DataError, NoInputError, UnavailableError, from_os_error
from toastkit.model import toast_format
from toastkit.model.safetensors import Header, read_header

CRUMB = Path(__file__).parent / "crumb" / "crumb.toast"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
OWN_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,200}")
# All that inference reads; no Python, no pickle.
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
# What a model needs beside its weights; a .toast file carries those that there are.
SMALL_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
INDEX_FILE = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
MAX_SMALL_FILE_BYTES = 256 << 20


class ModelFiles:
    """A checkpoint. path: the directory or the .toast file. name: what a user calls it."""

    def __init__(self, path: Path, name: str):
        self.path = path
        self.name = name
        self.is_toast = path.is_file()

    def read(self, name: str) -> bytes | None:
        """The content of a small file (config, tokenizer, template), or None where it is absent.
        Raises DataError for one that is not small, what from_os_error gives."""
        try:
            if self.is_toast:
                return self._read_inside(name)
            path = self.path / name
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise DataError(f"{self.name}: {name} is not a regular file")
            self._check_size(name, status.st_size)
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise from_os_error(error, f"cannot read {self.path / name}") from error

    def _read_inside(self, name: str) -> bytes | None:
        entry = self.headers[0].entries.get(toast_format.FILE_PREFIX + name)
        if entry is None:
            return None
        self._check_size(name, entry.nbytes)
        with open(self.path, "rb") as file:
            file.seek(entry.start)
            return file.read(entry.nbytes)

    def _check_size(self, name: str, size: int) -> None:
        if size > MAX_SMALL_FILE_BYTES:
            raise DataError(f"{self.name}: {name} is larger than {MAX_SMALL_FILE_BYTES} bytes")

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
        """The safetensors files. Raises NoInputError where there are none or a shard is missing,
        DataError for an index that cannot be followed."""
        if self.is_toast:
            return [self.path]
        index = self.read_json(INDEX_FILE)
        if index is not None:
            return self._shards(index)
        try:
            names = sorted(os.listdir(self.path))
        except OSError as error:
            raise from_os_error(error, f"cannot read {self.path}") from error
        files = [n for n in names if n.startswith("model") and n.endswith(".safetensors")]
        if not files and toast_format.OUTSIDE_FILE in names:
            files = [toast_format.OUTSIDE_FILE]
            files += [n for n in names if re.fullmatch(r"layer_\d{4,}\.safetensors", n)]
        if not files:
            raise self._no_weights()
        return [self._regular(name) for name in files]

    def _regular(self, name: str) -> Path:
        path = self.path / name
        try:
            if stat.S_ISREG(path.stat().st_mode):
                return path
        except OSError as error:
            raise from_os_error(error, f"cannot read {path}") from error
        raise DataError(f"{self.name}: {name} is not a regular file")

    def _shards(self, index: dict) -> list[Path]:
        """The files that an index lists."""
        places = index.get("weight_map")
        if not isinstance(places, dict) or not places:
            raise DataError(f"{self.name}: {INDEX_FILE} has no weight_map")
        shards = []
        for name in sorted(set(map(str, places.values()))):
            # A symbolic link may lead elsewhere, as in the hub's cache; a name may not.
            if name != os.path.basename(name) or name in ("", ".", "..") or "\0" in name:
                raise DataError(f"{self.name}: {INDEX_FILE} points outside: {name[:100]!r}")
            if not name.endswith(".safetensors"):
                raise DataError(
                    f"{self.name}: {name[:100]} is not safetensors, and is never opened"
                )
            if not (self.path / name).exists():
                raise NoInputError(
                    f"{self.name}: {name[:100]} is missing, and {INDEX_FILE} needs it"
                )
            shards.append(self._regular(name))
        return shards

    def _no_weights(self) -> NoInputError:
        if any(found for pattern in PICKLES for found in self.path.glob(pattern)):
            return NoInputError(
                f"{self.name}: has its weights only as Python pickles, which are never opened",
                hint="convert it to safetensors first",
            )
        return NoInputError(f"{self.name}: no model*.safetensors in the checkpoint")

    @cached_property
    def headers(self) -> list[Header]:
        """The checked header of every weight file. Raises as weight_files and read_header do, and
        DataError where a split checkpoint lacks a layer or a newer toastkit wrote it."""
        headers = [read_header(path, self.name) for path in self.weight_files()]
        for header in headers:
            version = header.metadata.get(toast_format.VERSION_KEY, toast_format.VERSION)
            if version != toast_format.VERSION:
                raise DataError(
                    f"{self.name}: {header.path.name} has format {version[:20]!r}, not "
                    f"{toast_format.VERSION}", hint="a newer toastkit wrote it",
                )  # fmt: skip
        if headers[0].path.name == toast_format.OUTSIDE_FILE:
            self._check_split(headers)
        return headers

    def _check_split(self, headers: list[Header]) -> None:
        count = headers[0].metadata.get(toast_format.LAYERS_KEY, "")
        expected = [
            toast_format.LAYER_FILE.format(i)
            for i in range(int(count) if count.isdecimal() and len(count) < 6 else 0)
        ]
        found = {header.path.name for header in headers}
        for name in expected:
            if name not in found:
                raise NoInputError(f"{self.name}: {name} is missing")

    @property
    def is_baked(self) -> bool:
        """Whether toastkit wrote it: tensors have the names of the model's parameters already."""
        return all(toast_format.VERSION_KEY in header.metadata for header in self.headers)


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
    and cannot be, DataError for a file that is no .toast.
    """
    if name == "crumb":
        return ModelFiles(CRUMB, "crumb")
    path = _existing(name)
    if path is not None and (path.is_file() or (path / "config.json").is_file()):
        return _model_at(path, str(path.resolve()))
    own = _own(name)
    if own is not None:
        return _model_at(own, name)
    if path is not None:
        raise NoInputError(f"{name} is not a model: no config.json in it")
    if HUB_ID.fullmatch(name) and len(name) < 256:
        return ModelFiles(_hub_snapshot(name), name)
    raise NoInputError(
        f"no such model: {name[:100]}",
        hint="-m takes a directory, a .toast file, a hub id, or a name that toast-model list shows",
    )


def _existing(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        path.stat()
    except PermissionError as error:
        raise from_os_error(error, f"cannot read {name}") from error
    except (OSError, ValueError, RuntimeError):
        return None  # no such file, too long a name, a NUL in it, an unknown user's home
    return path


def _own(name: str) -> Path | None:
    """Where a name in toastkit's own folder leads."""
    if not OWN_NAME.fullmatch(name):
        return None
    for path in (models_home() / f"{name}{toast_format.SUFFIX}", models_home() / name):
        if path.is_file() or (path / "config.json").is_file():
            return path
    return None


def _model_at(path: Path, name: str) -> ModelFiles:
    """Raises DataError for a file that holds no whole model."""
    files = ModelFiles(path.resolve(), name)
    if files.is_toast and files.read("config.json") is None:
        raise DataError(f"{name} is not a .toast file: no config.json in it")
    return files


def models_home() -> Path:
    """Toastkit's own models: NAME.toast files and NAME directories."""
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "toastkit" / "models"


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
