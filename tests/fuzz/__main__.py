"""python -m tests.fuzz [--seconds N | --seed TARGET-NUMBER]: attacks by turns, then what failed.

Each turn is a process of its own, in a home of its own: a crash, a hang and a leak of one case are
told from the outside, and the case is named that was under way.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import random
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from tests.hostile import PEAK_BYTES, SECONDS

ROOT = Path(__file__).parents[2]
TARGETS = {
    "frames": "frame_cases.frames",
    "sessions": "session_cases.sessions",
    "socket": "socket_cases.a_front",
    "daemon": "socket_cases.a_daemon",
}
TURN_SECONDS = 20
MAX_ADDRESSES = 16 << 30  # bytes; what would take the machine down fails sooner
MAX_FILE_BYTES = 1 << 30


def main() -> int:
    """Runs turns until the time is over; 1 where a case has failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", help="of one case, as it was printed")
    parser.add_argument("--target", action="append", choices=TARGETS, help="only this one")
    parser.add_argument("--turn", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.turn:
        take_turn(*arguments.turn)
        return 0
    if arguments.seed:
        target, _, first = arguments.seed.partition("-")
        return 0 if turn(target, int(first), 0, Counter()) else 1
    targets = arguments.target or list(TARGETS)
    end = time.monotonic() + arguments.seconds
    done: Counter[str] = Counter()
    good, number = True, 0
    while (left := end - time.monotonic()) > 0:
        rest = len(targets) - number % len(targets)  # of this round
        seconds = min(TURN_SECONDS, left / rest)
        good &= turn(targets[number % len(targets)], secrets.randbelow(10**9), seconds, done)
        number += 1
    print(", ".join(f"{target}: {done[target]:,} cases" for target in targets))
    return 0 if good else 1


def turn(target: str, first: int, seconds: float, done: Counter[str]) -> bool:
    """Cases of one target, from seed `first` on, in a process of its own; whether all passed."""
    home = Path(tempfile.mkdtemp(prefix="t"))  # short: sockets are made in it
    case, said = home / "case", home / "said"
    (home / "here").mkdir()
    command = [
        sys.executable, "-W", "error::RuntimeWarning", "-m", "tests.fuzz",
        "--turn", target, str(first), str(seconds),
    ]  # fmt: skip
    with open(said, "wb") as output:
        child = subprocess.Popen(
            command, cwd=home / "here", env=environment(home), stdin=subprocess.DEVNULL,
            stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        code = child.wait()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # a daemon that has outlived it
        words = said.read_text(errors="replace")
        count = int(case.read_text() or 0) if case.exists() else -1
        shutil.rmtree(home, ignore_errors=True)
    if count < 0:
        sys.exit(f"{words}\n{target}: no case could begin")
    done[target] += count
    if code:
        print(words[-4000:], f"failed ({code}): make fuzz SEED={target}-{first + count}",
              sep="\n", flush=True)  # fmt: skip
    return code == 0


def environment(home: Path) -> dict[str, str]:
    """That of a user with nothing in the home, and no network. Without native products, which would
    be built in each home, by processes of their own that nobody ends."""
    kept = {
        name: text for name, text in os.environ.items()
        if not name.startswith(("TOAST_", "HF_", "XDG_", "HUGGINGFACE_"))
    }  # fmt: skip
    for name in ("STATE_HOME", "CACHE_HOME", "CONFIG_HOME", "DATA_HOME", "RUNTIME_DIR"):
        kept[f"XDG_{name}"] = str(home / name.lower())
        (home / name.lower()).mkdir(mode=0o700)
    return {**kept, "HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONFAULTHANDLER": "1",
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "unit"))),
            "TOAST_NATIVE": "off"}  # fmt: skip


def take_turn(target: str, first: str, seconds: str) -> None:
    """The child: at least one case, then as many as there is time for. The file `case` beside its
    directory holds how many are done."""
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESSES, MAX_ADDRESSES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    unit = 1 if sys.platform == "darwin" else 1024
    module, _, name = TARGETS[target].partition(".")
    made = getattr(importlib.import_module(f"tests.fuzz.{module}"), name)
    end = time.monotonic() + float(seconds)
    count = 0
    with made(not float(seconds)) as case, open("../case", "w") as told:
        while count == 0 or time.monotonic() < end:
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            case(random.Random(int(first) + count))
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
            assert peak <= PEAK_BYTES, f"{peak >> 20} MiB resident"
            count += 1
            os.pwrite(told.fileno(), str(count).encode(), 0)
        faulthandler.dump_traceback_later(SECONDS, exit=True)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    sys.exit(main())
