"""Load the native library for the modules of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from toastkit.errors import UnavailableError

SETTINGS = ("auto", "off", "require")
MAX_THREADS = 256  # as in kernels/pool.cpp


class NativeOptions(NamedTuple):
    """native: one of SETTINGS, see `start`. threads: of this process's products, None for as many
    as it can run. native_exact: activations stay float32 in products with quantised weights, see
    kernels.h."""

    native: str = "off"
    threads: int | None = None
    native_exact: bool = False


OFF = NativeOptions()


class Status(NamedTuple):
    """on: products are native. why: instruction set and threads, or why they are off. exact: as in
    NativeOptions. awaited: the library is being built."""

    on: bool
    why: str
    exact: bool = False
    awaited: bool = False

    def __str__(self) -> str:
        """As shown to users."""
        return f"on ({self.why})" if self.on else f"off: {self.why}"


def status() -> Status:
    """The status that `start` would return now for "auto", without starting a build."""
    from toastkit.native.building.libraries import find

    found = find()
    return _loaded(found.path) if found.path else Status(False, found.why)


def start(options: NativeOptions, say: Callable[[str], None] | None = None) -> Status:
    """Load the library for the modules of this process. options.native: "auto": a missing library
    is built in the background, for later; "require": at once; "off": not at all. options.threads
    applies to all engines of the process; None changes nothing. say: takes a line while a compiler
    is waited for. Raises UnavailableError, CannotCreateError, IOFailure if required and
    impossible."""
    if options.native == "off":
        return Status(False, "they are turned off")
    from toastkit.native.building.libraries import build, build_meanwhile, find

    found = find()
    if options.native != "require":
        if found.pending and build_meanwhile():
            return Status(False, "they are being built in the background, for later", awaited=True)
        return _loaded(found.path, options) if found.path else Status(False, found.why)
    made = _loaded(found.path or build(True, say), options)
    if not made.on and found.path:  # e.g. another compiler's library
        made = _loaded(build(True, say, useless=found.path), options)
    if not made.on:
        raise UnavailableError(f"no native products: {made.why}")
    return made


def _loaded(path: str, options: NativeOptions | None = None) -> Status:
    """options: None only looks, and changes nothing."""
    from toastkit.native.library import load, use

    try:
        library = load(path)
    except (OSError, AttributeError) as error:
        said = str(error)  # the linker's begins with the path
        return Status(False, said if said.startswith(path) else f"{path}: {said}")
    if options is None:
        return Status(True, library.instructions)
    use(library)
    if options.threads is not None:
        library.set_threads(options.threads)
    said = f"{library.instructions}, threads: {library.threads}"
    exact = options.native_exact
    return Status(True, f"{said}, exact" if exact else said, exact)
