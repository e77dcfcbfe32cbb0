"""Whether modules of this process are to be native."""

from __future__ import annotations

from typing import NamedTuple

SETTINGS = ("auto", "off", "require")


class Status(NamedTuple):
    """on: products are native. why: by which instruction set; or why they are not."""

    on: bool
    why: str

    def __str__(self) -> str:
        """As it is said to a user."""
        return f"on ({self.why})" if self.on else f"off: {self.why}"


def status() -> Status:
    """What `start` would come to now, "auto" being its setting; nothing is built for it."""
    from toastkit.native.building import find

    found = find()
    return _loaded(found.path) if found.path else Status(False, found.why)


def start(setting: str) -> Status:
    """Has the library loaded for the modules of this process, where it is there. setting: "auto":
    what is not there is built meanwhile, for later; "require": now; "off": nothing is asked.
    Raises UnavailableError, CannotCreateError, IOFailure where it is required and cannot be."""
    if setting == "off":
        return Status(False, "they are turned off")
    from toastkit.native.building import PATIENCE, build, build_meanwhile, find

    found = find()
    if setting == "require":
        found = found._replace(path=build(PATIENCE))
    elif found.pending:
        build_meanwhile()
    return _loaded(found.path) if found.path else Status(False, found.why)


def _loaded(path: str) -> Status:
    from toastkit.native.library import load, use

    try:
        library = load(path)
    except (OSError, AttributeError) as error:
        return Status(False, f"{path}: {error}")
    use(library)
    return Status(True, library.instructions)
