"""Lists and removes the models on this machine: toastkit's own folder, the Hugging Face cache,
crumb. Needs no MLX."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from toastkit.errors import NoInputError, ToastError, UsageError, from_os_error, reported_as
from toastkit.model.config import load_config
from toastkit.model.files import ModelFiles
from toastkit.model.hub import cached_snapshot, hub_cache, hub_id_of, is_hub_id, repository
from toastkit.model.locate import find, models_home
from toastkit.model.toast_format import SUFFIX


class Listed(NamedTuple):
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
    """Yield the models of toastkit's folder, then of the Hugging Face cache, then crumb, by name.

    complain(line): reports a broken entry. quietly(line): reports a repository in the cache that is
    not a complete model, of which there may be many.
    """
    for path in _entries(models_home(), complain):
        if path.name.startswith(".") or not (path.is_dir() or path.suffix == SUFFIX):
            continue
        yield from _listed(path.name.removesuffix(SUFFIX), path, "own", complain)
    for path in _entries(hub_cache(), complain):
        hub_id = hub_id_of(path.name)
        if hub_id is not None:
            found = cached_snapshot(hub_id)
            if found is None:
                quietly(f"{hub_id}: no whole model in the Hugging Face cache")
                continue
            yield from _listed(hub_id, found, "hub", complain)
    yield from _listed("crumb", None, "embedded", complain)


def _entries(folder: Path, complain: Callable[[str], None]) -> list[Path]:
    """Return the entries of a folder, sorted; a missing folder is empty."""
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
    """Yield one entry, or none if it is broken. path: None if only the name is known."""
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
    """Return the files with a name that finds them: the short one, or the path if something else
    has the short one."""
    try:
        files = find(name)
        if path is None or files.path.resolve() == path.resolve():
            return ModelFiles(files.path, name)
    except ToastError:
        if path is None:
            raise
    return find(str(path))


# --------------------------------------------------------------------------------------- remove


class Removal(NamedTuple):
    """What `rm` would delete. name: as `list` has it, even if a path was given. size: bytes on the
    disk. paths: the last one may be missing."""

    name: str
    size: int
    paths: tuple[Path, ...]


def removal(name: str) -> Removal:
    """Return what a name stands for in toastkit's folder or the Hugging Face cache, and nowhere
    else.

    Raises UsageError for a name of something that is not ours to delete, NoInputError if there is
    nothing.
    """
    if name == "crumb":
        raise UsageError("crumb is a part of toastkit and stays")
    own = [path for path in _own_paths(name) if os.path.lexists(path)]
    if len(own) > 1:
        raise UsageError(
            f"{name} is a file and a directory", hint=f"say {own[0].name} or {own[1].name}{os.sep}"
        )
    if own:
        return Removal(own[0].name.removesuffix(SUFFIX), _size(own[0]), (own[0],))
    if is_hub_id(name):
        folder = repository(name)
        if folder.is_dir() or folder.is_symlink():
            locks = hub_cache() / ".locks" / folder.name
            return Removal(name, _size(folder), (folder, locks))
    if "\0" not in name and os.path.lexists(name):
        raise UsageError(
            f"{name[:200]} is in neither {models_home()} nor the Hugging Face cache",
            hint="toast-model list shows what can be removed",
        )
    raise NoInputError(f"no such model: {name[:100]}")


def _own_paths(name: str) -> list[Path]:
    """Return direct children of toastkit's folder that a name or a path may mean."""
    home = models_home()
    try:
        path = Path(os.path.expanduser(name))
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
    """Return the bytes of the files at and below a path; links are not followed."""
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):  # removed meanwhile
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def remove(what: Removal) -> None:
    """Delete it. A link is deleted, never followed. Raises CannotCreateError, IOFailure."""
    for path in what.paths:
        with reported_as(f"cannot remove {path}", creating=True), suppress(FileNotFoundError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
