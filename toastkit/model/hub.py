"""Models of the Hugging Face hub: in its local cache, or fetched by toastkit.model.download."""

from __future__ import annotations

import fcntl
import json
import os
import re
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from toastkit.base_directories import base_directory
from toastkit.errors import (
    CannotCreateError,
    DataError,
    IOFailure,
    NoInputError,
    ToastError,
    UnavailableError,
    UsageError,
)
from toastkit.model.files import CONFIG_FILE, ModelFiles
from toastkit.model.toast_format import SUFFIX

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
ON = ("1", "ON", "YES", "TRUE")


def is_hub_id(name: str) -> bool:
    """True if a name has the form of a hub id: org/name. FOLDER/NAME.toast is a path."""
    return HUB_ID.fullmatch(name) is not None and len(name) < 256 and not name.endswith(SUFFIX)


def is_offline() -> bool:
    """True if the user forbids the network (HF_HUB_OFFLINE)."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ON


def hub_cache() -> Path:
    """Return the Hugging Face cache directory, absolute: HF_HUB_CACHE, else HF_HOME/hub, else the
    default. As in huggingface_hub a variable may contain ~ and other variables."""
    home = os.environ.get("HF_HOME") or os.path.join(base_directory("CACHE"), "huggingface")
    cache = os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(cache))).absolute()


def fetch(hub_id: str, revision: str | None, progress: bool) -> Path:
    """Return the directory of a hub model, downloading it if needed; files that a broken download
    completed are kept. A model that another program fetched without its tokenizer is completed.

    revision: branch, tag or commit. progress: show bars on stderr. Raises UsageError for an invalid
    hub id or timeout, NoInputError if the hub has no such model, DataError if it has no usable
    weights, UnavailableError if the hub cannot be reached or stalls, IOFailure if a download is
    damaged or the disk is full.
    """
    if not is_hub_id(hub_id):
        name, at, version = hub_id.partition("@")
        hint = f"--revision {version} says which version" if at and is_hub_id(name) else None
        raise UsageError(f"not a hub id: {hub_id[:100]!r}", hint=hint or "a hub id is org/name")
    if revision is not None and not re.fullmatch(r"\w[\w./-]{0,200}", revision):
        raise UsageError(f"not a revision: {revision[:100]!r}")
    cached = cached_snapshot(hub_id, revision or "main")
    offline = is_offline() or find_spec("huggingface_hub") is None
    if cached is not None and (offline or (cached / "tokenizer.json").is_file()):
        return cached
    if is_offline():
        raise UnavailableError(
            f"cannot fetch {hub_id}: it is not in the cache, and HF_HUB_OFFLINE is set"
        )
    if offline:
        raise UnavailableError(f"cannot fetch {hub_id}: huggingface_hub is not installed")
    patience = os.environ.get("HF_HUB_DOWNLOAD_TIMEOUT", "")
    if not re.fullmatch("[0-9]{0,9}", patience):
        raise UsageError(f"HF_HUB_DOWNLOAD_TIMEOUT: {patience[:40]!r} is no number of seconds")
    return _download(hub_id, revision, progress)


def repository(hub_id: str) -> Path:
    """Return the cache's folder for a hub id."""
    return hub_cache() / f"models--{hub_id.replace('/', '--')}"


def hub_id_of(folder: str) -> str | None:
    """Return the hub id of a folder name in the cache, None if it is not a model's."""
    hub_id = folder.removeprefix("models--").replace("--", "/", 1)
    return hub_id if folder.startswith("models--") and is_hub_id(hub_id) else None


def cached_snapshot(hub_id: str, revision: str = "main") -> Path | None:
    """Return a complete snapshot in the cache, or None."""
    folder = repository(hub_id)
    try:
        reference = folder / "refs" / revision
        commit = reference.read_text().strip() if reference.is_file() else revision
        snapshot = folder / "snapshots" / commit
        if not re.fullmatch(r"[\w-][\w.-]*", commit) or not (snapshot / CONFIG_FILE).is_file():
            return None
        complete = all(path.is_file() for path in ModelFiles(snapshot, hub_id).weight_files())
        return snapshot if complete else None
    except (ToastError, OSError, ValueError):
        return None


def _download(hub_id: str, revision: str | None, progress: bool) -> Path:
    """Download in a child process, which ends with this one. Raises what it answers."""
    import subprocess

    # Not -m, which would look for modules in the current directory first.
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from toastkit.model.download import main; main()"
    )
    # We report in one line what the library logs.
    settings = {"HF_HUB_VERBOSITY": "critical", **os.environ, "HF_HUB_CACHE": str(hub_cache())}
    if not progress:
        settings["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    try:
        with subprocess.Popen(
            [sys.executable, "-c", code, hub_id, revision or ""],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=settings, start_new_session=True,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            try:
                answer = process.stdout.read()
            finally:
                process.kill()
    finally:
        _sweep(hub_id)
    if not answer:
        raise UnavailableError(f"cannot fetch {hub_id}: the download ended by itself")
    fields = json.loads(answer)
    if "path" in fields:
        return Path(fields["path"])
    for kind in (DataError, NoInputError, CannotCreateError, IOFailure):
        if kind.code == fields["code"]:
            raise kind(fields["message"], fields["hint"])
    raise UnavailableError(fields["message"], fields["hint"])


def _sweep(hub_id: str) -> None:
    """Remove the partial files of killed downloads: the library writes each to a new name, resumes
    none, and holds a lock while it writes."""
    folder = repository(hub_id)
    for path in (folder / "blobs").glob("*.????????.incomplete"):
        lock = hub_cache() / ".locks" / folder.name / f"{path.name.split('.')[0]}.lock"
        with suppress(OSError), open(lock, "ab") as file:  # another writes it, or has removed it
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
