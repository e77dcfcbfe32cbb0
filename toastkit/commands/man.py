"""Find a manual page, installed beside the program or in the checkout, and open it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import sysconfig
from pathlib import Path
from typing import NoReturn

from toastkit.errors import NoInputError, UnavailableError


def find_page(name: str) -> Path:
    """The page NAME(1). Raises NoInputError if it is not installed."""
    file = f"man1/{name}.1"
    checkout = Path(__file__).parents[2] / "man"
    prefixes = {sysconfig.get_path("data"), sys.prefix, os.path.expanduser("~/.local")}
    for base in (checkout, *(Path(p) / "share" / "man" for p in sorted(prefixes))):
        if (base / file).is_file():
            return base / file
    raise NoInputError(f"the manual page {name}(1) is not installed")


def open_page(name: str) -> NoReturn:
    """Exec man(1), or mandoc(1) if there is no man."""
    page = find_page(name)
    for program in ("man", "mandoc"):
        if shutil.which(program):
            sys.stdout.flush()
            # Python ignores SIGPIPE; inherited, that would make the pager complain.
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.execlp(program, program, str(page))
    raise UnavailableError(f"neither man nor mandoc is installed: the page is {page}")
