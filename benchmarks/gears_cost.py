"""What gears cost and save: bytes, memory, milliseconds, shifts, each predicted and measured."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from gears_report import mib, say, table, title
from measure import in_turn, ratio, spread

from toastkit.engine.engine import Engine
from toastkit.engine.geared import Chooser, by_selector, score_in_gears
from toastkit.engine.opening import open_engine
from toastkit.gears.cost import break_even_tokens
from toastkit.gears.gear_options import GearOptions
from toastkit.gears.plan import GearPlan, plan
from toastkit.gears.selector import GearSelector, SelectorOptions
from toastkit.holdings.packed import dense_bytes
from toastkit.holdings.policy import Wish
from toastkit.model.files import ModelFiles
from toastkit.model.locate import locate
from toastkit.native.starting import NativeOptions
from toastkit.store.bake import bake
from toastkit.store.precision import Rows
from toastkit.store.store import Store

SCOPES, PATHS = ("attention", "all"), ("fused", "dequant")
ORDER, DENSE = ("high", "mid", "low"), "dense"
LOT = ("low", "high", "mid")  # in which a model runs whose entropies mean nothing
KEEP_ALL, KEEP_NOTHING = 1 << 40, 0  # of the gear cache
WARM = 2  # tokens that are not timed at least: the first dequantises, where that is the way
RUN = 8  # tokens in a gear, the fewest that the paper calls typical


@dataclass(frozen=True)
class Subject:
    """A model to measure. baked: the same with gears beside the originals. rounds: of timings, of
    so many tokens each, after `warm` that do not count. ids: a text for it. by_entropy: whether its
    entropies mean anything. native: see open_engine."""

    name: str
    files: ModelFiles
    baked: ModelFiles
    rounds: int
    warm: int
    tokens: int
    ids: Sequence[int]
    by_entropy: bool
    native: str

    def engine(self, scope: str, path: str, cache: int, baked: bool = False) -> Engine:
        """It, with gears."""
        options = GearOptions("auto", scope, (4, 8), path, cache)
        files = self.baked if baked else self.files
        return open_engine(files, gear_options=options, native=self.native)


def with_gears_baked(files: ModelFiles, out: Path) -> ModelFiles:
    """A copy of a checkpoint that holds low and mid gear."""
    store = Store(files)
    bake(store, out, gears=("low", "mid"))
    store.close()
    return locate(str(out))


def cost(subjects: Sequence[Subject]) -> None:
    """Bytes, memory, speed and shifts of each model, and an answer that changes gear."""
    title(
        "Cost",
        "Predicted: from the shapes alone (toast-model plan --gears); speed as if bytes were all",
        "that takes time. Figures are medians (least .. most), gears in turn within each round;",
        "the row `high again` is high gear once more: what it is off by is the machine's noise.",
    )
    for subject in subjects:
        plans = {scope: _plan(subject, scope) for scope in SCOPES}
        say(f"{subject.name}: bytes and memory")
        _bytes(subject, plans)
        say(f"{subject.name}: milliseconds a token")
        speeds = _speed(subject, plans)
        say(f"{subject.name}: shifts")
        shifts = _shifts(subject, plans, speeds)
        say(f"{subject.name}: an answer that changes gear")
        _answer(subject, plans["all"], shifts["all"])


def _plan(subject: Subject, scope: str) -> dict[str, GearPlan]:
    """The prediction, by gear, for the type that this machine computes in; as DENSE, that of high
    gear whose matrices are in the type of the activations, as dequantised copies are."""
    from toastkit.engine import device
    from toastkit.store.dtypes import loading

    on = device.start()
    native = device.native_products(NativeOptions(subject.native), on)
    types = loading(None, on == "cpu", native)
    with Store(subject.files) as store:
        found = {row.gear: row for row in plan(store, scope, types=types).gears}
    with Store(subject.files) as store:
        return found | {DENSE: plan(store, scope, types=types._replace(narrow=False)).gears[0]}


def _read(plans: dict[str, GearPlan], path: str, gear: str) -> float:
    """Predicted bytes that a token reads."""
    if path == "fused" or gear == "high":
        return plans[gear].token
    return plans["high"].token - plans["high"].managed_token + plans[DENSE].managed_token


@contextmanager
def _loaded(subject: Subject, *rest: Any) -> Iterator[tuple[Engine, int]]:
    """An engine, and MLX's bytes without it."""
    _collect()
    before = mx.get_active_memory()
    engine = subject.engine(*rest)
    yield engine, before


def _collect() -> None:
    gc.collect()
    mx.clear_cache()


# ------------------------------------------------------------------------------------ bytes, memory


def _bytes(subject: Subject, plans: dict[str, dict[str, GearPlan]]) -> None:
    """Predicted next to what lies in the module tree after a step, kept by nobody else."""
    rows = []
    for scope in SCOPES:
        for path in PATHS:
            with _loaded(subject, scope, path, KEEP_NOTHING) as (engine, before):
                for gear in ORDER:
                    rows.append([scope, path, gear])
                    rows[-1] += _bytes_in(engine, gear, before, plans[scope])
                del engine
    print(f"### {subject.name}: bytes, in MiB, nothing kept in the gear cache\n")
    print("token: read by one token; counted: of what its step touches in the module tree, experts")
    print("by their share. device: all weights; counted by the Ledger, and by MLX (active memory")
    print(
        "since before the model was loaded; what is mapped from its file is not MLX's). On the path"
    )
    print("dequant the copy in full is what is read, and it comes on top of the packed numbers.\n")
    head = ("scope", "path", "gear", "token predicted", "counted", "difference",
            "device predicted", "Ledger", "MLX")  # fmt: skip
    table(head, rows, left=3)


def _bytes_in(engine: Engine, gear: str, before: int, plans: dict[str, GearPlan]) -> list[str]:
    _steps(engine, gear, 1)
    _collect()
    active, counted = mx.get_active_memory() - before, touched(engine)
    assert engine.gears is not None
    path, device = engine.gears.options.path, plans[gear].device
    if path == "dequant" and gear != "high":
        device += plans[DENSE].managed
    token = _read(plans, path, gear)
    off = counted / token - 1
    sizes = map(mib, (token, counted)), map(mib, (device, engine.ledger.total(), active))
    first, second = map(list, sizes)
    return [*first, f"{100 * off:+.3f}%", *second]


def touched(engine: Engine) -> float:
    """Bytes of the weights that a step reads, as they lie in the module tree now: of experts the
    share that a token goes to, of an embedding that is not the head as well one row."""
    _, text = engine.config.levels
    raw = {**engine.config.raw, **text}
    total = 0.0
    seen: set[int] = set()
    modules: Any = engine.model.named_modules()
    for path, module in modules:
        if id(module) in seen or "._" in path:  # a dequantised copy is counted with its matrix
            continue
        seen.add(id(module))
        arrays = {
            name: value
            for name, value in module.items()
            if isinstance(value, mx.array) and not name.startswith("_")
        }
        size = float(sum(array.nbytes for array in arrays.values()))
        if dense := dense_bytes(module):  # it is read in place of what it was made from
            size += dense - sum(arrays[name].nbytes for name in Rows._fields)
        if hasattr(module, "num_experts") and "weight" in arrays:
            size *= raw["num_experts_per_tok"] / module.num_experts
        if isinstance(module, nn.Embedding) and not raw.get("tie_word_embeddings"):
            size /= arrays["weight"].shape[0]
        total += size
    return total


# -------------------------------------------------------------------------------------------- speed


def _steps(engine: Engine, gear: str | None, count: int, warm: int = WARM) -> float:
    """Seconds a token of `count` steps in a gear, or as it is, after some that are not timed."""
    assert engine.gears is not None
    cache = engine.new_cache()
    for number in range(warm + count):
        if number == warm:
            start = time.perf_counter()
        engine.decide(Wish(gear))
        mx.eval(engine.step(number + 3, cache))
    return (time.perf_counter() - start) / count


def _speed(subject: Subject, plans: dict[str, dict[str, GearPlan]]) -> dict[str, dict[str, float]]:
    """Prints milliseconds a token; returns the medians in seconds of the path fused, by scope and
    gear."""
    rows, kept = [], {}
    for scope in SCOPES:
        for path in PATHS:
            with _loaded(subject, scope, path, KEEP_ALL) as (engine, _):
                cases: dict[str, Callable[[], float]] = {
                    gear: partial(_steps, engine, gear, subject.tokens, subject.warm)
                    for gear in ORDER
                }
                cases["high again"] = cases["high"]
                results = in_turn(cases, subject.rounds)
                del engine, cases
            for name, values in results.items():
                gear = name.split()[0]
                token = _read(plans[scope], path, gear)
                predicted = plans[scope]["high"].token / token
                rows.append([
                    scope, path, name, spread(values, 1e-3), f"{token / median(values) / 1e9:.2f}",
                    f"{predicted:.2f}", ratio(results["high"], values),
                ])  # fmt: skip
            if path == "fused":
                kept[scope] = {gear: median(results[gear]) for gear in ORDER}
    print(f"### {subject.name}: speed, {subject.rounds} rounds\n")
    print(
        f"{subject.tokens} tokens a timing, {subject.warm} before them do not count: right after a"
    )
    print("shift, tokens are slower where the processor's caches hold some of the weights.\n")
    head = ("scope", "path", "gear", "ms a token", "GB/s", "times high, predicted", "measured")
    table(head, rows, left=3)
    return kept


# ------------------------------------------------------------------------------------------- shifts


def _shifts(
    subject: Subject, plans: dict[str, dict[str, GearPlan]], speeds: dict[str, dict[str, float]]
) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Prints milliseconds of shifts, and the tokens after which they have paid; returns the seconds
    by scope, kind and gear."""
    rows, found = [], {}
    for scope in SCOPES:
        found[scope] = _shift_times(subject, scope)
        high = plans[scope]["high"]
        pace = speeds[scope]["high"] / high.token  # seconds a byte
        for gear in ("mid", "low", "high"):
            row, seconds = plans[scope][gear], speeds[scope]
            first, kept, baked = (found[scope][kind][gear] for kind in ("first", "kept", "baked"))
            line = [scope, gear, mib(row.shift), f"{1e3 * row.shift * pace:.1f}"]
            line += [spread(first, 1e-3, 1), spread(baked, 1e-3, 1), spread(kept, 1e-3, 2)]
            if gear == "high":
                rows.append([*line, *["-"] * 4])
                continue
            by_bytes = break_even_tokens(row.shift, high.token, row.token)
            measured = (
                break_even_tokens(median(times), seconds["high"], seconds[gear])
                for times in (first, baked, kept)
            )
            rows.append([*line, f"{by_bytes:.1f}", *map(_tokens, measured)])
    print(f"### {subject.name}: shifts, milliseconds, {subject.rounds} rounds\n")
    print("first: the gear is made (or, for high, its originals are read again from the file);")
    print("baked: read from a file that holds it; kept: it was in the gear cache. moved: what plan")
    print("says a first shift reads and writes; by bytes: at the pace at which high gear reads its")
    print("weights. Break-even: tokens until what a gear saves over high has paid for the shift,")
    print("by bytes alone, and with what was measured.\n")
    head = ("scope", "into", "moved, MiB", "by bytes", "first", "baked", "kept",
            "break-even by bytes", "first", "baked", "kept")  # fmt: skip
    table(head, rows, left=2)
    return found


def _tokens(count: float) -> str:
    return "never" if count == float("inf") else f"{count:.1f}"


def _shift_times(subject: Subject, scope: str) -> dict[str, dict[str, list[float]]]:
    """Seconds of shifts by kind and gear, the kinds in turn."""
    engines = {
        "first": subject.engine(scope, "fused", KEEP_NOTHING),
        "baked": subject.engine(scope, "fused", KEEP_NOTHING, True),
        "kept": subject.engine(scope, "fused", KEEP_ALL),
    }
    for number in range(subject.rounds + 1):
        for engine in engines.values():
            assert engine.gears is not None
            for gear in ("mid", "high", "low", "high"):
                engine.shift(gear)
            if number == 0:  # warming
                for shifts in engine.gears.times.values():
                    shifts.first.clear()
                    shifts.again.clear()
    found = {}
    for kind, engine in engines.items():
        assert engine.gears is not None
        times = engine.gears.times
        # Originals that lie mapped in the file are not kept: they are mapped anew each time.
        found[kind] = {
            gear: (times[gear].again if kind == "kept" else []) or times[gear].first
            for gear in ORDER
        }
    engines.clear()
    _collect()
    return found


# --------------------------------------------------------------------------- an answer with shifts


def _answer(
    subject: Subject, plans: dict[str, GearPlan], shifts: dict[str, dict[str, list[float]]]
) -> None:
    """T_dynamic of section 9 for an answer that changes gear, predicted and measured."""
    # Room for both packed gears, and not for the originals, which are read again.
    timings = _timings(subject, plans["low"].managed + plans["mid"].managed)
    told = timings["auto"][-1].gears
    seconds = {gear: fmean(one.total for one in timings[gear]) / len(told) for gear in ORDER}
    counts = Counter(told)
    into = Counter(after for before, after in pairwise(told) if before != after)
    total = sum(into.values())
    each = {gear: median(shifts["first" if gear == "high" else "kept"][gear]) for gear in ORDER}
    one = sum(n * each[gear] for gear, n in into.items()) / max(1, total)
    predicted = _dynamic_seconds(counts, seconds, total, one)
    values = [timing.total for timing in timings["auto"]]
    by_bytes = {gear: plans[gear].token for gear in ORDER}
    how = "gears by the entropy of a story" if subject.by_entropy else f"{RUN} tokens in each gear"
    print(f"### {subject.name}: {len(told)} tokens, scope all, {how}, {subject.rounds} rounds\n")
    print("T = S t_shift + the sum of n_gear t_gear; t_gear: of a token in the same loop in that")
    print("gear throughout; t_shift: mean of the shifts above, low and mid kept, high read again.")
    print("The loop reads the logits and measures the entropy of each token. The formula knows")
    print("nothing of caches that a shift leaves cold, and of gears that are prepared.\n")
    table(
        ("", "value", "of"),
        [
            *([f"t_{g}", f"{1e3 * seconds[g]:.2f} ms", f"{counts[g]} tokens"] for g in ORDER),
            ["t_shift", f"{1e3 * one:.2f} ms", f"{total} shifts"],
            ["T predicted", f"{predicted:.3f} s", ""],
            ["T measured", f"{spread(values, 1, 3)} s", f"{fmean(values) / predicted:.3f} of it"],
            ["speedup by bytes alone", f"{_speedup(counts, by_bytes, 0, 0):.3f}", ""],
            ["speedup predicted", f"{_speedup(counts, seconds, total, one):.3f}", ""],
            ["speedup measured", f"{seconds['high'] * len(told) / fmean(values):.3f}", ""],
        ],
    )


def _timings(subject: Subject, cache: int) -> dict[str, list[Timing]]:
    """The text in each gear throughout, and in gears that change, in turn. cache: of gears."""
    engine = subject.engine("all", "fused", cache)
    timings: dict[str, list[Timing]] = {name: [] for name in (*ORDER, "auto")}

    def run(name: str) -> float:
        chooser = _chooser(subject, name, engine.vocab)
        timings[name].append(_timed(engine, subject.ids, chooser))
        return timings[name][-1].total

    in_turn({name: partial(run, name) for name in timings}, subject.rounds)
    return {name: found[1:] for name, found in timings.items()}  # the first was the warming


@dataclass(frozen=True)
class Timing:
    """Seconds of the tokens from the third on, together, and the gears of those."""

    total: float
    gears: list[str]


def _timed(engine: Engine, ids: Sequence[int], chooser: Chooser) -> Timing:
    """Reads a text token by token. The first two tokens do not count: a text begins in high gear,
    and the second one may shift."""
    marks: list[float] = []
    gears: list[str] = []
    for part in score_in_gears(engine, ids, len(ids), lambda: chooser):
        marks.append(time.perf_counter())
        gears += part.gears or ()
    return Timing(marks[-1] - marks[WARM - 1], gears[WARM:])


def _chooser(subject: Subject, name: str, vocab: int) -> Chooser:
    if name != "auto":
        return lambda entropy: Wish(name)
    if subject.by_entropy:
        return by_selector(GearSelector(vocab, SelectorOptions()))
    # The first two passes are not timed: one in high that is not asked for, and one here.
    gears = iter([LOT[0], *(LOT[n // RUN % len(LOT)] for n in range(len(subject.ids)))])
    return lambda entropy: Wish(next(gears))


def _dynamic_seconds(counts: dict, seconds: dict, shifts: int, shift_seconds: float) -> float:
    """T_dynamic of section 9: tokens and shifts together. counts: tokens by gear. seconds: of a
    token, by gear."""
    return shifts * shift_seconds + sum(n * seconds[gear] for gear, n in counts.items() if n)


def _speedup(counts: dict, seconds: dict, shifts: int, shift_seconds: float) -> float:
    """How many times faster than all in high gear: N t_high / T_dynamic."""
    total = _dynamic_seconds(counts, seconds, shifts, shift_seconds)
    return sum(counts.values()) * seconds["high"] / total
