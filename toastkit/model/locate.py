"""Locates a checkpoint: a directory, a `.toast` file, a name in toastkit's own folder, `crumb`, or
a hub id. This machine comes before the network. Imports neither MLX nor numpy."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from toastkit.base_directories import listed, own_directory
from toastkit.errors import DataError, NoInputError, did_you_mean, from_os_error
from toastkit.model import toast_format
from toastkit.model.config import fingerprint
from toastkit.model.files import ModelFiles
from toastkit.model.hub import cached_snapshot, fetch, hub_cache, hub_id_of, is_hub_id, is_offline

CRUMB = Path(__file__).parent / "crumb" / "crumb.toast"
OWN_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,200}")


def locate(name: str) -> ModelFiles:
    """Return the checkpoint that `-m NAME` means: on this machine, or fetched from the hub.

    Raises NoInputError if it does not exist, UnavailableError if it would have to be fetched and
    cannot be, DataError for a file that is no .toast.
    """
    found = _find_local(name)
    if found is not None:
        return found
    if is_offline():
        raise NoInputError(f"no such model: {name} is not in the cache, and HF_HUB_OFFLINE is set")
    return ModelFiles(fetch(name, None, progress=sys.stderr.isatty()), name)


def find(name: str) -> ModelFiles:
    """Return what `locate` does if it is on this machine; never fetches. Raises NoInputError if it
    is not, DataError for a file that is no .toast."""
    return _found(name, _find_local(name))


def for_stream(given: str | None, named: str, expected: str) -> ModelFiles:
    """Return the checkpoint of a frame stream: of -m if given, else the one that the head names.

    The writer of the stream chose that name: nothing is fetched for it, and a path counts only if
    absolute, as toastkit writes them. expected: the head's fingerprint. Raises as `locate` and
    `find` do, and DataError for a checkpoint that is not the head's.
    """
    files = locate(given) if given else _found(named, _find_local(named, relative=False))
    if fingerprint(files) != expected:
        other = f"{given or named} is not the model that this stream was tokenised for"
        raise DataError(f"{other} ({named})", hint=None if given else "-m names another one")
    return files


def _find_local(name: str, relative: bool = True) -> ModelFiles | None:
    """Return a checkpoint on this machine, None for a hub id that is not in the cache. relative:
    accept a relative path. Raises NoInputError for any other name."""
    if name == "crumb":
        return ModelFiles(CRUMB, "crumb")
    path = _existing(name) if relative or os.path.isabs(name) else None
    if path is not None and (path.is_file() or (path / "config.json").is_file()):
        return _model_at(path, str(path.resolve()))
    own = _own(name)
    if own is not None:
        return _model_at(own, name)
    if path is not None:
        raise NoInputError(f"{name} is not a model: no config.json in it")
    if is_hub_id(name):
        cached = cached_snapshot(name)
        return None if cached is None else ModelFiles(cached, name)
    kinds = "a model is a directory, a .toast file, a hub id, or a name that toast-model list shows"
    known = [other for other in names_here() if other != name]  # it may lead nowhere
    raise NoInputError(f"no such model: {name[:100]}", hint=did_you_mean(name, known, kinds))


def _found(name: str, files: ModelFiles | None) -> ModelFiles:
    if files is None:
        raise NoInputError(f"no such model here: {name}", hint=f"toast-model pull {name}")
    return files


def _existing(name: str) -> Path | None:
    try:
        path = Path(os.path.expanduser(name))
        path.stat()
    except PermissionError as error:
        raise from_os_error(error, f"cannot read {name}") from error
    except (OSError, ValueError, RuntimeError):
        return None  # no such file, too long a name, a NUL in it, an unknown user's home
    return path


def _own(name: str) -> Path | None:
    """Return the path of a name in toastkit's own folder."""
    if not OWN_NAME.fullmatch(name):
        return None
    for path in (models_home() / f"{name}{toast_format.SUFFIX}", models_home() / name):
        if path.is_file() or (path / "config.json").is_file():
            return path
    return None


def _model_at(path: Path, name: str) -> ModelFiles:
    """Return the checkpoint at a path. Raises DataError for a file that is not a complete model."""
    files = ModelFiles(path.resolve(), name)
    if files.is_toast and files.read("config.json") is None:
        raise DataError(f"{name} is not a .toast file: no config.json in it")
    return files


def names_here() -> list[str]:
    """Return the names that -m may mean on this machine, without opening any: crumb, then those of
    removable_names."""
    return ["crumb", *removable_names()]


def removable_names() -> list[str]:
    """Return the names in toastkit's own folder, and of repositories in the hub's cache."""
    own = [name.removesuffix(toast_format.SUFFIX) for name in listed(models_home())]
    return [*own, *filter(None, map(hub_id_of, listed(hub_cache())))]


def models_home() -> Path:
    """Return the folder of toastkit's own models: NAME.toast files and NAME directories."""
    return Path(own_directory("DATA", "models"))
