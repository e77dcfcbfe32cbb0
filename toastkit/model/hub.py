"""Models of the Hugging Face hub: in its local cache, or fetched. huggingface_hub is imported only
when a download is due."""

from __future__ import annotations

import os
import re
from pathlib import Path

from toastkit.errors import (
    DataError,
    NoInputError,
    ToastError,
    UnavailableError,
    UsageError,
    from_os_error,
)
from toastkit.folders import base_folder
from toastkit.model.files import ModelFiles

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# All that inference reads; no Python, no pickle.
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
# Other copies of the same weights, and exports for other programs, lie in folders or are so called.
HUB_IGNORE = ["*/*", "consolidated*"]
ON = ("1", "ON", "YES", "TRUE")


def is_hub_id(name: str) -> bool:
    """Whether a name can be one on the hub: org/name."""
    return HUB_ID.fullmatch(name) is not None and len(name) < 256


def is_offline() -> bool:
    """Whether the user forbids the network (HF_HUB_OFFLINE)."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ON


def hub_cache() -> Path:
    """The Hugging Face cache directory: HF_HUB_CACHE, else HF_HOME/hub, else the default."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME") or os.path.join(base_folder("CACHE"), "huggingface")
    return Path(home).expanduser() / "hub"


def fetch(hub_id: str, revision: str | None, progress: bool) -> Path:
    """The directory of a hub model, downloaded unless it is here; goes on where a broken download
    stopped.

    revision: branch, tag or commit. progress: show bars on stderr.
    Raises UsageError for what is no hub id, NoInputError where the hub has no such model,
    DataError where it has no safetensors weights, UnavailableError where the hub cannot be asked.
    """
    if not is_hub_id(hub_id):
        raise UsageError(f"not a hub id: {hub_id[:100]!r}", hint="a hub id is org/name")
    if revision is not None and not re.fullmatch(r"\w[\w./-]{0,200}", revision):
        raise UsageError(f"not a revision: {revision[:100]!r}")
    here = cached_snapshot(hub_id, revision or "main")
    if here is not None:
        return here
    if is_offline():
        raise UnavailableError(
            f"cannot fetch {hub_id}: it is not in the cache, and HF_HUB_OFFLINE is set"
        )
    path = _download(hub_id, revision, progress)
    files = ModelFiles(path, hub_id)
    if files.read("config.json") is None:
        raise DataError(f"{hub_id} is not a model: no config.json in it")
    files.weight_files()
    return path


def repository(hub_id: str) -> Path:
    """The cache's folder for a hub id."""
    return hub_cache() / f"models--{hub_id.replace('/', '--')}"


def cached_snapshot(hub_id: str, revision: str = "main") -> Path | None:
    """A whole snapshot in the cache, or None."""
    folder = repository(hub_id)
    try:
        reference = folder / "refs" / revision
        commit = reference.read_text().strip() if reference.is_file() else revision
        snapshot = folder / "snapshots" / commit
        if not re.fullmatch(r"[\w-][\w.-]*", commit) or not (snapshot / "config.json").is_file():
            return None
        whole = all(path.is_file() for path in ModelFiles(snapshot, hub_id).weight_files())
        return snapshot if whole else None
    except (ToastError, OSError, ValueError):
        return None


def _download(hub_id: str, revision: str | None, progress: bool) -> Path:
    # Both are read when the library is imported. What it logs, we say in a line.
    os.environ.setdefault("HF_HUB_VERBOSITY", "critical")
    if not progress:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise UnavailableError(
            f"cannot fetch {hub_id}: huggingface_hub is not installed"
        ) from error
    at = f" at {revision}" if revision else ""
    try:
        found = huggingface_hub.snapshot_download(
            hub_id,
            revision=revision,
            cache_dir=hub_cache(),
            allow_patterns=HUB_PATTERNS,
            ignore_patterns=HUB_IGNORE,
        )
        return Path(found)
    except errors.GatedRepoError as error:
        raise UnavailableError(
            f"cannot fetch {hub_id}: its licence has to be accepted first",
            hint=f"accept it at https://huggingface.co/{hub_id}, then: hf auth login",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise NoInputError(f"no such revision on the hub: {hub_id}{at}") from error
    except errors.RepositoryNotFoundError as error:
        raise NoInputError(
            f"no such model on the hub: {hub_id}", hint="a private one needs: hf auth login"
        ) from error
    except Exception as error:  # offline, a proxy's page, a full disk: many kinds
        raise _fetch_failed(hub_id, error) from error


def _fetch_failed(hub_id: str, error: Exception) -> ToastError:
    """What went wrong in a download. The library's own text can be a paragraph."""
    here: BaseException | None = error
    while here is not None:
        if isinstance(here, OSError) and here.errno is not None and here.filename is not None:
            return from_os_error(here, f"cannot fetch {hub_id}", creating=True)
        name = type(here).__name__
        if "Connect" in name or "Timeout" in name or isinstance(here, ConnectionError):
            return UnavailableError(
                f"cannot fetch {hub_id}: the hub cannot be reached",
                hint="what has been downloaded is kept: run it again when the network is back",
            )
        here = here.__cause__
    reason = (str(error).strip().split("\n")[0] or type(error).__name__)[:200].rstrip(".")
    return UnavailableError(f"cannot fetch {hub_id}: {reason}")
