"""The models on this machine: toastkit's own folder, the Hugging Face cache, crumb. List, fetch,
remove. Needs no MLX, and huggingface_hub only for a download."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from toastkit.errors import (
    DataError,
    NoInputError,
    ToastError,
    UnavailableError,
    UsageError,
    from_os_error,
)
from toastkit.model.config import load_config
from toastkit.model.files import HUB_ID, HUB_PATTERNS, ModelFiles, find, hub_cache, models_home
from toastkit.model.toast_format import SUFFIX

# Other copies of the same weights, and exports for other programs, lie in folders or are so called.
HUB_IGNORE = ["*/*", "consolidated*"]
ON = ("1", "ON", "YES", "TRUE")


@dataclass(frozen=True)
class Listed:
    """One model. name: what -m takes. size: bytes of its weight files. where: the directory or the
    file. source: "own", "hub" or "embedded"."""

    name: str
    size: int
    model_type: str
    where: Path
    source: str


def list_models(
    complain: Callable[[str], None], quietly: Callable[[str], None]
) -> Iterator[Listed]:
    """The models of toastkit's folder, then of the Hugging Face cache, then crumb, by name.

    complain(line): is told of an entry that is broken. quietly(line): of a repository in the cache
    that is no whole model, of which there may be many.
    """
    for path in _entries(models_home(), complain):
        if path.name.startswith(".") or not (path.is_dir() or path.suffix == SUFFIX):
            continue
        yield from _listed(path.name.removesuffix(SUFFIX), path, "own", complain)
    for path in _entries(hub_cache(), complain):
        hub_id = path.name.removeprefix("models--").replace("--", "/", 1)
        if path.name.startswith("models--") and HUB_ID.fullmatch(hub_id):
            try:
                found = find(hub_id).path
            except (ToastError, OSError):
                quietly(f"{hub_id}: no whole model in the Hugging Face cache")
                continue
            yield from _listed(hub_id, found, "hub", complain)
    yield from _listed("crumb", None, "embedded", complain)


def _entries(folder: Path, complain: Callable[[str], None]) -> list[Path]:
    """What is in a folder, sorted; a folder that is not there holds nothing."""
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        complain(from_os_error(error, f"cannot read {folder}").message)
        return []


def _listed(
    name: str, path: Path | None, source: str, complain: Callable[[str], None]
) -> Iterator[Listed]:
    """One entry, or none where it is broken. path: None for what only its name leads to."""
    try:
        files = _named(name, path)
        config = load_config(files)
        size = sum(file.stat().st_size for file in files.weight_files())
    except ToastError as error:
        shown = "" if error.message.startswith(name) else f"{name}: "
        complain(f"{shown}{error.message}")
    except OSError as error:
        complain(from_os_error(error, name).message)
    else:
        yield Listed(files.name, size, config.model_type, files.path, source)


def _named(name: str, path: Path | None) -> ModelFiles:
    """The files under a name that leads to them: the short one, or the path where something else
    has the short one."""
    try:
        files = find(name)
        if path is None or files.path == path.resolve():
            return ModelFiles(files.path, name)
    except ToastError:
        if path is None:
            raise
    return find(str(path))


# ---------------------------------------------------------------------------------------- fetch


def fetch(hub_id: str, revision: str | None, progress: bool) -> Path:
    """The directory of a hub model, downloaded unless it is here; goes on where a broken download
    stopped.

    revision: branch, tag or commit. progress: show bars on stderr.
    Raises UsageError for what is no hub id, NoInputError where the hub has no such model,
    DataError where it has no safetensors weights, UnavailableError where the hub cannot be asked.
    """
    if not HUB_ID.fullmatch(hub_id) or len(hub_id) > 255:
        raise UsageError(f"not a hub id: {hub_id[:100]!r}", hint="a hub id is org/name")
    if revision is not None and not re.fullmatch(r"\w[\w./-]{0,200}", revision):
        raise UsageError(f"not a revision: {revision[:100]!r}")
    here = _cached(hub_id, revision or "main")
    if here is not None:
        return here
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ON:
        raise UnavailableError(
            f"cannot fetch {hub_id}: it is not in the cache, and HF_HUB_OFFLINE is set"
        )
    path = _download(hub_id, revision, progress)
    files = ModelFiles(path, hub_id)
    if files.read("config.json") is None:
        raise DataError(f"{hub_id} is not a model: no config.json in it")
    files.weight_files()
    return path


def _cached(hub_id: str, revision: str) -> Path | None:
    """A whole snapshot in the cache."""
    repository = _repository(hub_id)
    try:
        reference = repository / "refs" / revision
        commit = reference.read_text().strip() if reference.is_file() else revision
        snapshot = repository / "snapshots" / commit
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


# --------------------------------------------------------------------------------------- remove


@dataclass(frozen=True)
class Removal:
    """What `rm` would delete. size: bytes on the disk. paths: the last one may be missing."""

    name: str
    size: int
    paths: tuple[Path, ...]


def removal(name: str) -> Removal:
    """What a name stands for, in toastkit's folder or the Hugging Face cache and nowhere else.

    Raises UsageError for a name that stands for something that is not ours to delete, NoInputError
    where there is nothing.
    """
    if name == "crumb":
        raise UsageError("crumb is a part of toastkit and stays")
    own = [path for path in _own_paths(name) if os.path.lexists(path)]
    if len(own) > 1:
        raise UsageError(
            f"{name} is a file and a directory",
            hint=f"say {own[0].name} or {own[1].name}{os.sep}",
        )
    if own:
        return Removal(name, _size(own[0]), (own[0],))
    if HUB_ID.fullmatch(name) and len(name) < 256:
        repository = _repository(name)
        if repository.is_dir() and not repository.is_symlink():
            locks = hub_cache() / ".locks" / repository.name
            return Removal(name, _size(repository), (repository, locks))
    if "\0" not in name and os.path.lexists(name):
        raise UsageError(
            f"{name[:200]} is in neither {models_home()} nor the Hugging Face cache",
            hint="toast-model list shows what can be removed",
        )
    raise NoInputError(f"no such model: {name[:100]}")


def _repository(hub_id: str) -> Path:
    return hub_cache() / f"models--{hub_id.replace('/', '--')}"


def _own_paths(name: str) -> list[Path]:
    """Direct children of toastkit's folder that a name or a path may mean."""
    home = models_home()
    try:
        path = Path(name).expanduser()
        given = path.parent.resolve() / path.name if os.sep in name.rstrip(os.sep) else None
    except (OSError, ValueError, RuntimeError):
        return []
    if given is not None:
        inside = given.parent == home.resolve() and given.name not in ("", ".", "..")
        return [given] if inside else []
    plain = name.rstrip(os.sep)
    if not plain or plain.startswith(".") or "\0" in plain:
        return []
    if name.endswith((os.sep, SUFFIX)):
        return [home / plain]
    return [home / f"{plain}{SUFFIX}", home / plain]


def _size(path: Path) -> int:
    """Bytes of the files at and below a path; links are not followed."""
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                pass  # gone meanwhile
    return total


def remove(what: Removal) -> None:
    """Deletes it. A link is deleted, never followed. Raises CannotCreateError, IOFailure."""
    for path in what.paths:
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        except FileNotFoundError:
            pass
        except OSError as error:
            raise from_os_error(error, f"cannot remove {path}", creating=True) from error
