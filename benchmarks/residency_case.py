"""One model in a process of its own, which benchmarks/residency.py tells what to do.

    python residency_case.py '{"path": ..., "resident": "50%"}'

JSON of `Spec` on the command line, then an order a line on stdin and an answer a line on stdout.
The first line says what was opened, or {"refused": ...}.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Spec:
    """A case. resident: as the flag has it. gear: low, mid or high throughout, "" without gears.
    files: "disk" has them out of the system's cache before each order, so that each read goes to
    the disk; "cache" has them in it, where they fit; "own" leaves it to toastkit. limit: bytes of
    memory that the policy is told there are, in place of what it would find. group: a cgroup to be
    in."""

    path: str
    resident: str = "all"
    placement: str = "first"
    priority: str = "balanced"
    context: int | None = None
    gear: str = ""
    dtype: str | None = None
    native: str = "auto"
    files: str = "own"
    limit: int | None = None
    group: str | None = None


class Refused(Exception):
    """The model cannot run so: a message of toastkit's."""


class Case:
    """The parent's end: a process with a model. opened: what it said of it. Raises Refused where
    toastkit refuses to open it, RuntimeError where the process dies."""

    def __init__(self, spec: Spec):
        command = [sys.executable, __file__, json.dumps(asdict(spec))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            self.opened = self._answer()
        except BaseException:
            self.close()
            raise

    def do(self, order: str, **rest: Any) -> dict[str, Any]:
        """Gives an order, which is a method of `Model`. The answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"order": order, **rest}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with status {self._process.wait()}")
        answer = json.loads(line)
        if "refused" in answer:
            raise Refused(answer["refused"])
        return answer

    def close(self) -> None:
        """Ends the process, and waits for it."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # it was killed, for want of memory
                    pipe.close()
        self._process.wait()

    def __enter__(self) -> Case:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---------------------------------------------------------------------------- in the process itself


def resident_bytes(peak: bool = False) -> int:
    """Of this process in memory, now or at most since the start or the last reset."""
    try:
        field = "VmHWM:" if peak else "VmRSS:"
        return int(Path("/proc/self/status").read_text().split(field)[1].split()[0]) << 10
    except (OSError, IndexError):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class LedgerPeak:
    """The most that the ledger has held. It is true at every moment, so that it is enough to look
    when a layer has come or goes, and when something is read ahead."""

    def __init__(self, engine: Any):
        self._ledger, self._holdings = engine.ledger, engine.holdings
        self.bytes = 0
        self._rest = 0
        self.look()
        bring, drop, reader = self._holdings.bring, self._holdings.drop, self._holdings.store.reader
        self._holdings.bring = self._around(bring)
        self._holdings.drop = self._around(drop)
        reader.watch = self._held

    def _around(self, function: Callable) -> Callable:
        def watched(*args: Any) -> None:
            self.look()  # caches have grown
            function(*args)
            self.look()

        return watched

    def look(self) -> None:
        """Takes a reading."""
        owners = self._ledger.by_owner()
        held = owners.pop("reading", 0)
        self._rest = sum(owners.values())
        self._held(held)

    def _held(self, held: int) -> None:
        self.bytes = max(self.bytes, self._rest + held)


class Model:
    """What orders are about. Reports are in bytes and seconds."""

    def __init__(self, spec: Spec):
        from residency_files import join_group

        join_group(spec.group)
        from toastkit.engine import device

        self.device = device.start()
        import mlx.core as mx
        import mlx_lm.models.qwen3_5  # noqa: F401  (so that it is there before memory is measured)

        from toastkit.engine.state import ModelState

        self.mx: Any = mx
        self.spec = spec
        self.before = resident_bytes()
        start = time.perf_counter()
        self.engine = self._open()
        self.seconds = time.perf_counter() - start
        self.files = [header.path for header in self.engine.files.headers]
        self.peak = LedgerPeak(self.engine)
        self.state = ModelState(self.engine.new_cache())
        self.token = 5
        self._files_in_place()

    def _open(self) -> Any:
        from toastkit.commands.policy_flags import RESIDENT
        from toastkit.engine.opening import open_engine
        from toastkit.gears.gear_options import GearOptions
        from toastkit.model.locate import locate
        from toastkit.residency import residency_policy
        from toastkit.residency.residency_options import ResidencyOptions

        spec = self.spec
        if spec.limit is not None:
            limit = spec.limit
            injected = lambda: max(0, limit - resident_bytes())  # noqa: E731
            told = partial(residency_policy.ResidencyPolicy, available=injected)
            residency_policy.ResidencyPolicy = told  # type: ignore[misc,assignment]
        kind, amount = RESIDENT.convert(spec.resident, None, None)
        gears = GearOptions(spec.gear, "all", cache_bytes=0) if spec.gear else None
        residency = ResidencyOptions(kind, amount, spec.placement, spec.priority, spec.context)
        return open_engine(
            locate(spec.path), dtype=spec.dtype, native=spec.native, gear_options=gears,
            residency=residency,
        )  # fmt: skip

    def about(self) -> dict[str, Any]:
        """What was opened."""
        found = {
            "seconds": self.seconds,
            "device": self.device,
            "dtype": self.engine.dtype,
            "files": sum(os.stat(path).st_size for path in self.files),
            "layers": self.engine.holdings.store.layer_count,
            "resident": self.engine.holdings.store.layer_count,
        }
        policy = self.engine.residency
        if policy is not None:
            from toastkit.residency.sizing import cache_reserve

            sizes = policy.sizes
            found |= {
                "resident": len(policy.resident),
                "minimum": policy.least,
                "outside": sizes.outside,
                "layer": max(sizes.layers),
                "whole": sizes.outside + sum(sizes.layers),
                "reserve": cache_reserve(sizes, "balanced", 4096),
            }
        return found

    def _files_in_place(self) -> None:
        """In the system's cache, or out of it."""
        from residency_files import drop, warm

        streams, store = self.engine.holdings.streams, self.engine.holdings.store
        if self.spec.files == "disk":
            store.keeps_cached = False
            drop(self.files)
        elif streams.layers and self.spec.files == "cache":
            store.keeps_cached = True
            warm(self.files)

    # ---------------------------------------------------------------------------------- orders

    def tokens(self, count: int, ahead: int | None = None) -> dict[str, Any]:
        """Decodes. ahead: layers that are read ahead at most, None for toastkit's own number."""
        self._ahead(ahead)
        return self._timed(lambda: [self._token() for _ in range(count)])

    def _ahead(self, ahead: int | None) -> None:
        from toastkit.holdings.read_ahead import MAX_AHEAD

        streams = self.engine.holdings.streams
        wanted = MAX_AHEAD if ahead is None else ahead
        if streams.most_ahead != wanted:
            streams.most_ahead = wanted
            streams.forget_ahead()

    def _token(self) -> float:
        start = time.perf_counter()
        self.engine.consume(self.state, self.token)
        self.mx.async_eval(self.state.logits)
        self.engine.look_ahead(self.state)
        self.token = int(self.mx.argmax(self.state.logits).item())
        return time.perf_counter() - start

    def _timed(self, work: Callable[[], Any]) -> dict[str, Any]:
        """Runs it with the files in their place; what it took."""
        if self.spec.files == "disk":
            from residency_files import drop

            drop(self.files)
        self.engine.begin_run()
        start = time.perf_counter()
        parts = work()
        seconds = time.perf_counter() - start
        self.peak.look()
        report = self.engine.run_report().get("residency", {})
        return {"seconds": seconds, "parts": parts, **report}

    def prefill(self, count: int, chunk: int | None = None) -> dict[str, Any]:
        """Reads a prompt of so many tokens, into a cache of its own."""
        from toastkit.engine.engine import CHUNK

        cache = self.engine.new_cache()
        ids = [7 + 13 * n % 1000 for n in range(count)]
        found = self._timed(lambda: self.engine.prefill(ids, cache, chunk))
        found["parts"] = count
        return {**found, "chunk": chunk or CHUNK[self.device], "cache": cache.nbytes}

    def passes(self, count: int, width: int) -> dict[str, Any]:
        """Runs so many passes over so many tokens each, in a cache of their own."""
        cache = self.engine.new_cache()
        ids = self.mx.array([[7 + 13 * n for n in range(width)]], self.mx.uint32)

        def work() -> None:
            for _ in range(count):
                self.engine._run(ids, cache)
                self.mx.eval([layer.state for layer in cache])

        return self._timed(work)

    def layers(self, passes: int = 1) -> dict[str, Any]:
        """Has the streamed layers come and go in their order, as in so many tokens, and computes
        nothing."""
        streams = self.engine.holdings.streams

        def work() -> None:
            for _ in range(passes):
                for index in streams.layers:
                    with streams.present(index):
                        pass

        return self._timed(work)

    def warm(self, path: str) -> dict[str, Any]:
        """Reads another file, in this process and so for its cgroup."""
        from residency_files import warm

        warm([Path(path)])
        return {}

    def keeps(self) -> dict[str, Any]:
        """Whether what is read may stay in the system's cache."""
        return {"cached": self.engine.holdings.store.keeps_cached}

    def memory(self) -> dict[str, Any]:
        """Bytes at most since the last reset, and now: by MLX, of the process, by the ledger.
        before: of the process without a model."""
        self.peak.look()
        return {
            "mlx": self.mx.get_peak_memory(),
            "process": resident_bytes(peak=True),
            "ledger": self.peak.bytes,
            "before": self.before,
            "mlx_now": self.mx.get_active_memory(),
            "process_now": resident_bytes(),
            "ledger_now": self.engine.ledger.total(),
            "owners": self.engine.ledger.by_owner(),
        }

    def reset(self) -> dict[str, Any]:
        """Has the peaks begin from here."""
        self.mx.reset_peak_memory()
        with suppress(OSError):  # the process's peak is then that since its start
            Path("/proc/self/clear_refs").write_text("5")
        self.peak.bytes = 0
        self.peak.look()
        return {}


def main() -> None:
    from toastkit.errors import ToastError

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whoever prints something does not answer
    try:
        model = Model(Spec(**json.loads(sys.argv[1])))
    except ToastError as error:
        print(json.dumps({"refused": str(error.message)}), file=answers)
        return
    print(json.dumps(model.about()), file=answers)
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(getattr(model, order.pop("order"))(**order)), file=answers)


if __name__ == "__main__":
    main()
