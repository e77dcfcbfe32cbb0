"""Whether modules of this process are to be native, and how they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from toastkit.errors import UnavailableError

SETTINGS = ("auto", "off", "require")
MOST_THREADS = 256  # as the pool has it


class NativeOptions(NamedTuple):
    """native: one of SETTINGS, see `start`. threads: that compute the products of this process,
    None for as many as it may run. native_exact: activations stay float32 in products with packed
    weights, see kernels.h."""

    native: str = "off"
    threads: int | None = None
    native_exact: bool = False


OFF = NativeOptions()


class Status(NamedTuple):
    """on: products are native. why: by which instruction set, in how many threads; or why they are
    not. exact: as of NativeOptions. awaited: the library is being built."""

    on: bool
    why: str
    exact: bool = False
    awaited: bool = False

    def __str__(self) -> str:
        """As it is said to a user."""
        return f"on ({self.why})" if self.on else f"off: {self.why}"


def status() -> Status:
    """What `start` would come to now, "auto" being its setting; nothing is built for it."""
    from toastkit.native.building.libraries import find

    found = find()
    return _loaded(found.path) if found.path else Status(False, found.why)


def start(options: NativeOptions, say: Callable[[str], None] | None = None) -> Status:
    """Has the library loaded for the modules of this process, where it is there. options.native:
    "auto": what is not there is built meanwhile, for later; "require": now; "off": nothing is
    asked. options.threads count for all engines of the process; None leaves them as they are.
    say: takes a line where a compiler is waited for.
    Raises UnavailableError, CannotCreateError, IOFailure where it is required and cannot be."""
    if options.native == "off":
        return Status(False, "they are turned off")
    from toastkit.native.building.libraries import PATIENCE, build, build_meanwhile, find

    found = find()
    if options.native != "require":
        if found.pending and build_meanwhile():
            return Status(False, "they are being built in the background, for later", awaited=True)
        return _loaded(found.path, options) if found.path else Status(False, found.why)
    made = _loaded(found.path or build(PATIENCE, say), options)
    if not made.on and found.path:  # by another compiler's library, say
        made = _loaded(build(PATIENCE, say, useless=found.path), options)
    if not made.on:
        raise UnavailableError(f"no native products: {made.why}")
    return made


def _loaded(path: str, options: NativeOptions | None = None) -> Status:
    """options: None looks, and changes nothing."""
    from toastkit.native.library import load, use

    try:
        library = load(path)
    except (OSError, AttributeError) as error:
        return Status(False, f"{path}: {error}")
    if options is None:
        return Status(True, library.instructions)
    use(library)
    if options.threads is not None:
        library.set_threads(options.threads)
    said = f"{library.instructions}, threads: {library.threads}"
    exact = options.native_exact
    return Status(True, f"{said}, exact" if exact else said, exact)
