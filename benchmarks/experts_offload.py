"""Experts offloaded: tokens a second, hits and device bytes, by slots, rate, prefetch and MoBiLE.

    python benchmarks/experts_offload.py [--model olmoe|qwen1.5|crumb] [--layers N] [--slots N,N]
        [--rates disk,25,0.5] [--ways WAY,WAY] [--base WAY] [--tokens N] [--repeat] [--round N]
        [--native off|require] [--json FILE] [--folder DIR]

A random checkpoint in the shape of OLMoE-1B-7B or Qwen1.5-MoE-A2.7B, with fewer layers or all (16,
24: each way takes 1.5 and 3.5 GB) and 4 bits a weight, or crumb, which is trained. Rates, in GB/s:
the files are in the system's cache, and read from there as slowly as that; PCIe 4.0 x16 has about
25, x8 12, an NVMe disk 3.5; 0 is as fast as memory is. disk: they are read past the cache, and
disk:0.3: as slowly as that, where the cache cannot hold them beside all ways' memory. One process,
the ways in turn, token by token, so that they share a machine that changes its pace;
--repeat: all with the same token after the same prompt, so that all that is wanted is in slots.
--json adds a round to FILE, and a table is made of all that are there. A way is

    whole      all experts on the device
    big        all experts of a token, fetched when a router has chosen them: the baseline
    little     half of them
    mobile-R   MoBiLE with a fallback ratio of R: as random weights are never sure of anything, who
               falls back is set, evenly. The big pass reads what the evicted one has named

and then any of

    +next-D    what the routers D layers ahead choose of this layer's input is read meanwhile (M7);
               D may be auto. With big alone: pre-gating
    +told      the next layer's choice is known, as if its router had been trained to foresee it
    +alone     a big pass of MoBiLE is told nothing
    +forgets   no expert stays after its layer: two layers' experts are buffered, and nothing else
    +careful   no step is optimistic; with +always each one is
    +need      the slots are divided among the layers by need, as AdapMoE's (which other tokens
               showed); its gating by sensitivity is left out

The estimate is equation 1 of paper 002, T / (T_l + R T_b): T of big, T_l and T_b of mobile-0 and
mobile-1 with the same additions where these ran too, else of the way itself.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from experts_cache import TEXTS, divided, experts_of, traced
from experts_models import SHAPES, make
from measure import machine
from residency_files import dd, drop, warm, weights

from toastkit.engine import big_little
from toastkit.engine.engine import Engine
from toastkit.engine.opening import open_engine
from toastkit.engine.savepoints import roll_back, take_savepoint
from toastkit.engine.state import ModelState
from toastkit.experts import slot_policy
from toastkit.experts.experts_options import ExpertsOptions, SlotOptions
from toastkit.experts.pass_times import estimated_speedup
from toastkit.model.files import ModelFiles
from toastkit.model.locate import locate
from toastkit.text.tokenizer import Tokenizer

PROMPT, WARM, NEED = 16, 2, 30  # tokens: of a prompt, before the times count, that show the need
COPIED = 256 << 20  # bytes, to see how fast memory is
DISK = "disk"
SUMS = ("wanted", "hit", "read", "wait", "ahead", "right", "optimistic", "retried")


class Rate:
    """A medium that gives so many bytes a second to all threads together, and to one as many: what
    a read has taken already counts, and so does what the system has slept too long."""

    def __init__(self, rate: float):
        self._rate, self._free = rate, 0.0
        self._lock, self._own = threading.Lock(), threading.local()

    def reading(self, read: Callable[..., int]) -> Callable[..., int]:
        """The function, which returns how many bytes it has read, at this rate."""

        def slowed(*arguments: Any) -> int:
            begun = time.perf_counter()
            count = read(*arguments)
            self._wait(count, begun)
            return count

        return slowed

    def _wait(self, count: int, begun: float) -> None:
        with self._lock:
            begun -= getattr(self._own, "late", 0.0)
            self._free = free = max(self._free, begun) + count / self._rate
        wait = free - time.perf_counter()
        if wait > 0:
            time.sleep(wait)
        self._own.late = time.perf_counter() - free if wait > 0 else 0.0


def memory_rate() -> float:
    """Bytes a second that are copied in memory."""
    source, into = np.ones(COPIED, np.uint8), np.ones(COPIED, np.uint8)
    start = time.perf_counter()
    into[:] = source
    return COPIED / (time.perf_counter() - start)


class Model:
    """path: of the checkpoint, None for crumb. ids: of its text; random ones otherwise."""

    def __init__(self, options: argparse.Namespace, folder: Path):
        name, layers = options.model, options.layers
        self.path, self.ids = None, list[int]()
        if name == "crumb":
            self.name = f"crumb, {options.text}"
            text = (TEXTS / f"{options.text}.txt").read_text()
            self.ids = Tokenizer(self.files).encode_prompt(text, templated=False)
        else:
            self.path = make(folder, name, layers, 4)
            self.name = f"{name}, {layers} of {SHAPES[name]['num_hidden_layers']} layers"

    @property
    def files(self) -> ModelFiles:
        return locate("crumb" if self.path is None else str(self.path))

    def tokens(self, number: int, count: int) -> list[int]:
        """Of a round, or whatever else has a number."""
        if self.ids:
            start = (number + 1) * count % (len(self.ids) - count)
            return self.ids[start : start + count]
        return np.random.default_rng(number + 1).integers(5, 2000, count).tolist()


class Divided(slot_policy.SlotPolicy):
    """Slots of its own for each layer. counts: of each, by place."""

    counts: Sequence[int] = ()

    def form(self, path: str, form: Any) -> Any:
        layers = sorted({switch.layer for switch in self.sizes.switches})
        count = self.counts[layers.index(self.sizes.of[path].layer)]
        if count >= self.sizes.of[path].experts:
            return form
        self._holdings.modules[path].slots = count
        return form._replace(slots=count)


@contextmanager
def set_to(owner: Any, name: str, value: Any) -> Iterator[Any]:
    """An attribute that has another value meanwhile; gives what it had."""
    real = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield real
    finally:
        setattr(owner, name, real)


@contextmanager
def confident(sure: bool) -> Iterator[None]:
    """The little model is sure of the token meanwhile, or is not."""
    real = big_little.confidence
    # Still computed, as it would be.
    with set_to(big_little, "confidence", lambda logits: real(logits) * 0 + float(sure)):
        yield


class Way:
    """An engine and what it measured. name: as above."""

    def __init__(self, model: Model, name: str, slots: int, native: str, counts: Sequence = ()):
        self.name, (kind, *self.more) = name, name.split("+")
        self.kind, _, self.ratio = kind.partition("-")
        ahead = [one[5:] for one in self.more if one.startswith("next-")] or ["off"]
        options = None if kind == "whole" else SlotOptions("slots", slots, ahead[0])
        experts = ExpertsOptions(self.kind) if self.kind in ("little", "mobile") else None
        Divided.counts = counts
        policy = Divided if "need" in self.more else slot_policy.SlotPolicy
        with set_to(slot_policy, "SlotPolicy", policy):
            self.engine: Engine = open_engine(
                model.files, dtype="float32", expert_slots=options, experts=experts, native=native
            )
        if "alone" in self.more:
            self.engine.holdings.slots.foresight.last_choices = lambda rows: {}
        self.state = ModelState(self.engine.new_cache())
        self.seconds: list[float] = []
        self.fell: list[bool] = []

    def begin(self, model: Model, number: int, rate: str) -> None:
        """Reads a prompt and a few tokens more, as fast as it goes; what follows counts."""
        store = self.engine.holdings.store
        medium, _, limit = rate.rpartition(":")
        store.keeps_cached = DISK not in (medium, limit)
        if not store.keeps_cached and model.path is not None:
            drop(weights(model.path))  # what was loaded is in the cache
        for _ in self.engine.reading(self.state, model.tokens(number + 1000, PROMPT)):
            pass
        for token in model.tokens(number + 2000, WARM):
            self.engine.consume(self.state, token)
        mx.eval(self.state.logits)
        optimistic = self.engine.holdings.slots.optimistic
        if {"careful", "always"}.intersection(self.more):
            optimistic.trusts, optimistic.note = "always" in self.more, lambda found: None
        if limit not in (DISK, "0"):
            store._raw._pread = Rate(float(limit) * 1e9).reading(store._raw._pread)
        self.read, self.busy = store.reader.bytes_read, store.reader.busy_seconds
        self.engine.begin_run()

    def step(self, token: int, n: int, known: dict[int, list[int]] | None, again: bool) -> None:
        """The n-th token of all rounds. known: what layers will choose of it, by place. again: the
        next one is to find the state as this one did."""
        point = take_savepoint(self.state.cache, 0, one_step=True) if again else None
        slots, ratio = self.engine.holdings.slots, float(self.ratio or 0)
        self.fell.append(math.floor((n + 1) * ratio + 0.5) > math.floor(n * ratio + 0.5))
        start = time.perf_counter()
        if known is not None:
            slots.foresight.tell(known, 1)
        with confident(not self.fell[-1]):
            self.engine.consume(self.state, token)
            mx.eval(self.state.logits)
        while slots.is_reading:  # what was foreseen wrongly is not to come while another way runs
            time.sleep(0.001)
        self.seconds.append(time.perf_counter() - start)
        if point is not None:
            self.state.tokens.pop()
            roll_back(self.state.cache, 1, point)
        for layer in slots.layers if "forgets" in self.more else ():
            for expert in layer.table.held:
                layer.drop(expert)

    def measured(self) -> dict[str, Any]:
        """Of the tokens since `begin`."""
        reader, ledger = self.engine.holdings.store.reader, self.engine.ledger
        return {
            "seconds": self.seconds, "fell": self.fell, "device": ledger.of("experts"),
            "bytes": reader.bytes_read - self.read, "busy": reader.busy_seconds - self.busy,
            **self.engine.run_report().get("slots", {}),
        }  # fmt: skip


def known_choices(model: Model, kind: str, number: int, tokens: list[int]) -> list[dict]:
    """What each token will choose, but in the first layer. kind: big or little."""
    way = Way(model, kind, experts_of(model.files) - 1, "off")
    way.begin(model, number, "0")
    found = []
    for token in tokens:
        way.engine.consume(way.state, token)
        mx.eval(way.state.logits)
        layers = way.engine.holdings.slots.layers
        found.append({place: list(layer.choice) for place, layer in enumerate(layers) if place})
    way.engine.close()
    return found


# ---------------------------------------------------------------------------------------- tables


def by_round(rounds: list[dict[str, Any]]) -> list[float]:
    """Seconds of a token."""
    return [statistics.mean(one["seconds"]) for one in rounds]


def passes(rounds: list[dict[str, Any]], fell: bool) -> float | None:
    """Mean seconds of the tokens that fell back, or did not; None without any."""
    found = [s for one in rounds for s, f in zip(one["seconds"], one["fell"]) if f == fell]
    return statistics.mean(found) if found else None


def estimate(name: str, case: dict[str, list[dict[str, Any]]], base: str) -> list[str]:
    """T_l / T, T_b / T and equation 1."""
    more = name[len(name.partition("+")[0]) :]
    # Nobody falls back in mobile-0: it has no big pass to be told anything.
    none, all_do = case.get("mobile-0" + more.replace("+alone", "")), case.get("mobile-1" + more)
    little, again = passes(none or case[name], False), passes(all_do or case[name], True)
    if little is None or base not in case or not name.startswith("mobile"):
        return [""] * 3
    plain = statistics.mean(by_round(case[base]))
    big = (again or little) - little
    fell = [fell for one in case[name] for fell in one["fell"]]
    speedup = estimated_speedup(plain, little, big, sum(fell) / len(fell))
    return [f"{value:.2f}" for value in (little / plain, big / plain, speedup)]


def counted(rounds: list[dict[str, Any]]) -> list[str]:
    """What slots report."""
    seconds = [second for one in rounds for second in one["seconds"]]
    total = {key: sum(one.get(key, 0) for one in rounds) for key in SUMS}
    if not total["wanted"]:
        return ["", "0", "", "", ""]
    return [
        f"{total['hit'] / total['wanted']:.0%}", f"{total['read'] / len(seconds) / 1e6:.1f}",
        f"{total['wait'] / sum(seconds):.0%}",
        f"{total['right'] / total['ahead']:.0%}" if total["ahead"] else "",
        f"{total['optimistic']}, {total['retried']}",
    ]  # fmt: skip


def table(case: dict[str, list[dict[str, Any]]], base: str) -> Iterator[str]:
    """A case's rows, in Markdown."""
    head = ("way", "tokens a second", f"times {base}", "T_l/T", "T_b/T", "eq. 1", "hit",
            "MB a token", "waiting", "right ahead", "optimistic, again", "experts, MB")  # fmt: skip
    yield "| " + " | ".join(head) + " |\n|---|" + "---:|" * (len(head) - 1)
    plain = by_round(case[base]) if base in case else []
    for name, rounds in case.items():
        times = by_round(rounds)
        ratios = [b / a for a, b in zip(times, plain)] or [math.nan]
        speedup = statistics.mean(plain) / statistics.mean(times) if plain else math.nan
        cells = [
            name, f"{1 / statistics.mean(times):.2f}",
            f"{speedup:.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            *estimate(name, case, base), *counted(rounds),
            f"{rounds[-1]['device'] / 1e6:.0f}" if rounds[-1]["device"] else "all",
        ]  # fmt: skip
        yield "| " + " | ".join(cells) + " |"


def told(label: str, case: dict[str, list[dict[str, Any]]]) -> str:
    """The case, how many tokens, and how fast the files really were."""
    rounds = next(iter(case.values()))
    read = [one for ways in case.values() for one in ways if one["busy"] > 0]
    reached = sum(one["bytes"] for one in read) / max(sum(one["busy"] for one in read), 1e-9) / 1e9
    count = len(rounds[0]["seconds"])
    return f"\n{label}: {len(rounds)} rounds of {count} tokens; {reached:.2f} GB/s reached\n"


def options_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.add_argument("--model", choices=("olmoe", "qwen1.5", "crumb"), default="olmoe")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--text", default="story", help="of tests/texts, for crumb")
    parser.add_argument("--slots", default="16")
    parser.add_argument("--rates", default="0.5")
    parser.add_argument("--native", choices=("off", "require"), default="off")
    parser.add_argument("--ways", default="big,little,mobile-0.11")
    parser.add_argument("--base", default="big", help="the way that others are compared with")
    parser.add_argument("--tokens", type=int, default=20, help="of a round")
    parser.add_argument("--repeat", action="store_true", help="the same token again and again")
    parser.add_argument("--round", type=int, help="this one; without, the first one not in FILE")
    parser.add_argument("--json", type=Path, help="where rounds are kept, and added to")
    parser.add_argument("--folder", type=Path, help="where checkpoints are kept")
    parser.add_argument("--tables", action="store_true", help="print what is in FILE, and run none")
    return parser.parse_args()


def run_case(model: Model, options: argparse.Namespace, slots: int, rate: str, case: dict) -> None:
    """Adds a round of each way to a case."""
    names = options.ways.split(",")
    number = max((len(case.get(name, ())) for name in names), default=0)
    number = number if options.round is None else options.round
    tokens = model.tokens(number, options.tokens)
    if options.repeat:
        tokens = tokens[:1] * len(tokens)
    kinds = {"big" if n.startswith("big") else "little" for n in names if "told" in n}
    known = {kind: known_choices(model, kind, number, tokens) for kind in kinds}
    counts: list[int] = []
    if any("need" in name for name in names):
        counts = divided(traced(model.files, model.tokens(-1, NEED)), slots)
        print("slots by need:", counts)
    if DISK not in rate and model.path is not None:
        warm(weights(model.path))
    ways = [Way(model, name, slots, options.native, counts) for name in names]
    for way in ways:
        way.begin(model, number, rate)
    for n, token in enumerate(tokens):
        first = n % len(ways)  # who comes first finds no experts in the processor's cache
        for way in ways[first:] + ways[:first]:
            kind = way.kind if way.kind == "big" else "little"
            choices = known[kind][n] if "told" in way.more else None
            way.step(token, number * options.tokens + n, choices, options.repeat)
    for way in ways:
        case.setdefault(way.name, []).append(way.measured())
        way.engine.close()


def main() -> None:
    options = options_of(argparse.ArgumentParser(description=__doc__.split("\n")[0]))
    kept: dict[str, dict] = {}
    if options.json is not None and options.json.exists():
        kept = json.loads(options.json.read_text())
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if not options.tables:
            model = Model(options, options.folder or Path(folder))
            about = f"{machine()}; memory {memory_rate() / 1e9:.1f} GB/s"
            if DISK in options.rates and model.path is not None:
                about += f", disk {dd(weights(model.path), True) / 1e9:.2f} by dd iflag=direct"
            print(about)
            for slots in map(int, options.slots.split(",")):
                for rate in options.rates.split(","):
                    label = f"{model.name}, {slots} slots, {rate} GB/s".replace("disk GB/s", DISK)
                    label += ", one token" * options.repeat
                    label += ", native" * (options.native != "off")
                    run_case(model, options, slots, rate, kept.setdefault(label, {}))
                    if options.json is not None:
                        options.json.write_text(json.dumps(kept, indent=1))
    for label, case in kept.items():
        print(told(label, case), *table(case, options.base), sep="\n")


if __name__ == "__main__":
    main()
