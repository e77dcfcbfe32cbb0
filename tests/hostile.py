"""Runs a command on input that was made to hurt, with a lid on it, and says what it took."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest

from tests.forked import executable

SECONDS = 20
PEAK_BYTES = 1 << 30


class Taken(NamedTuple):
    """What a command left behind. code: exit status, or minus the signal. peak: bytes of its own
    process that were resident at most."""

    code: int
    out: bytes
    error: str
    peak: int


def peak_bytes() -> int:
    """That this process had in memory at most, counted anew from here where the system allows it;
    0 where it does not say."""
    try:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def run_hostile(
    command: Sequence[object],
    stdin: bytes | IO | None = None,
    *,
    seconds: float = SECONDS,
    peak: int = PEAK_BYTES,
    **popen,
) -> Taken:
    """Runs a command to its end. It fails the test by taking longer than `seconds`, by having more
    than `peak` bytes resident, or by ending with a traceback.

    stdin: what it is fed from a file, or a stream of its own; None for /dev/null.
    """
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as out:
        source.write(stdin if isinstance(stdin, bytes) else b"")
        source.seek(0)
        with tempfile.TemporaryFile() as error:
            given = source if isinstance(stdin, bytes) else stdin or subprocess.DEVNULL
            # Linux counts the peak of the process that made a child as the child's.
            own = peak_bytes()
            child = subprocess.Popen(
                [str(part) for part in command], stdin=given, stdout=out, stderr=error, **popen
            )
            late = threading.Event()

            def stop() -> None:
                late.set()
                child.kill()

            clock = threading.Timer(seconds, stop)
            clock.start()
            try:
                # wait4 and not Popen.wait: it tells the peak of this child alone.
                _, status, usage = os.wait4(child.pid, 0)
            finally:
                clock.cancel()
            child.returncode = os.waitstatus_to_exitcode(status)
            out.seek(0)
            error.seek(0)
            unit = 1 if os.uname().sysname == "Darwin" else 1024
            taken = Taken(
                child.returncode, out.read(), error.read().decode(errors="replace"),
                usage.ru_maxrss * unit,
            )  # fmt: skip
    assert not late.is_set(), f"still busy after {seconds} s: {taken.error}"
    assert taken.peak <= max(peak, own + (own >> 4)), (
        f"{taken.peak >> 20} MiB resident: {taken.error}"
    )
    assert "Traceback" not in taken.error and "bug" not in taken.error, taken.error
    return taken


def run_without_privileges(name: str, *arguments: object, stdin: bytes = b"") -> Any:
    """Runs an installed command to its end as a user who may not read everything, which root may
    elsewhere; skips the test where root cannot be held back."""
    if os.geteuid() == 0 and not sys.platform.startswith("linux"):
        pytest.skip("root reads everything here")
    done = subprocess.run(
        [executable(name), *map(str, arguments)], input=stdin,
        capture_output=True, timeout=60, preexec_fn=_without_privileges,
    )  # fmt: skip
    if done.returncode == 99:
        pytest.skip("root cannot be held back here")
    return done


def _without_privileges() -> None:
    """Takes from root what lets it read everything, for the program that is started next."""
    if os.geteuid() == 0:
        drop = ctypes.CDLL(None).prctl
        for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
            if drop(24, capability, 0, 0, 0):  # PR_CAPBSET_DROP
                os._exit(99)
