"""What gears do to how well the embedded model predicts texts: perplexity, distribution, auto."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, groupby

import numpy as np
from gears_report import percent, table, title
from gears_scores import HIGH, WINDOW, Scored, Scorer, Text, Way, same_both_ways

from toastkit.errors import DataError
from toastkit.frames import GEARS
from toastkit.gears.calibration import from_prefill
from toastkit.gears.cost import mean_bits
from toastkit.gears.monitor import MonitorOptions
from toastkit.gears.selector import GearSelector, SelectorOptions
from toastkit.model.locate import locate

VOCAB = 4096  # of the embedded model
# What came with the embedded model, by bits: tokens, and the perplexity of a torch implementation
# in float32, all matrices of the layers per-row symmetric, embedding and head kept. "high":
# transformers.
PUBLISHED = {
    "story": (21765, {"high": 1.7324, "8": 1.7332, "6": 1.7335, "4": 1.7574, "2": 2010.6578}),
    "arith": (13301, {"high": 1.5628, "8": 1.5636, "6": 1.5634, "4": 1.5887, "2": 1409.1332}),
    "chat": (15370, {"high": 1.4081, "8": 1.4080, "6": 1.4075, "4": 1.4516, "2": 2749.6504}),
    "code": (22687, {"high": 15.1666, "8": 15.1708, "6": 15.2085, "4": 15.9209, "2": 4671.5803}),
    "prose": (23300, {"high": 52.4325, "8": 52.4395, "6": 52.529, "4": 54.3788, "2": 1939.8427}),
    "gsm8k": (22111, {"high": 8.6664, "8": 8.6681, "6": 8.6754, "4": 9.0386, "2": 1346.4693}),
}
# The widths and how an engine with two packed gears gets to them.
WIDTHS = {"8": ((4, 8), "mid"), "6": ((2, 6), "mid"), "4": ((4, 8), "low"), "2": ((2, 6), "low")}
AGREES = 0.01  # share by which a perplexity may be off
SEEDS = (1, 2)
DURATIONS = (1, 4, 8)
BEYOND = 2.0  # standard errors from which a difference is taken to be one


@dataclass(frozen=True)
class Bench:
    """What the sections work on. auto_texts: the beginnings that are scored token by token. scope:
    of the gears there."""

    scorer: Scorer
    texts: list[Text]
    auto_texts: list[Text]
    scope: str


# --------------------------------------------------------------------------------------- perplexity


def perplexity(bench: Bench) -> None:
    """Every width in both scopes, next to the published figure for the same format."""
    scorer = bench.scorer
    ways = {
        (scope, width): Way(scope, bits, gear)
        for scope in ("attention", "all")
        for width, (bits, gear) in WIDTHS.items()
    }
    wanted = [(text, way) for text in bench.texts for way in (HIGH, *ways.values())]
    scorer.score(sorted(wanted, key=lambda one: -one[0].count))
    off = same_both_ways(scorer, bench.texts[0])
    title(
        "Perplexity by precision",
        f"Windows of {WINDOW:,} tokens, float32 activations. The published figures were computed",
        "independently, for all matrices of the layers, over whole texts. Texts that are cut off",
        "here are not held against them. Packed matrices were multiplied from dequantised copies;",
        f"multiplied as they are, 256 tokens in low gear differ by {off:.1g} nats at most.",
    )
    rows, verdicts = [], []
    for text in bench.texts:
        for width in ("high", *WIDTHS):
            attention, whole = (
                scorer.of(text, HIGH if width == "high" else ways[scope, width]).perplexity
                for scope in ("attention", "all")
            )
            row = [text.name, width, f"{text.count:,}", _digits(attention), _digits(whole)]
            count, figures = PUBLISHED[text.name]
            if count == text.count:
                off = whole / figures[width] - 1
                verdicts.append(abs(off) <= AGREES)
                agrees = "yes" if verdicts[-1] else "no"
                row += [_digits(figures[width]), f"{100 * off:+.3f}%", agrees]
            else:
                row += ["-"] * 3
            rows.append(row)
    table(
        ("text", "bits", "tokens", "attention", "all", "published", "difference", "within 1%"),
        rows,
        left=2,
    )
    if verdicts:
        print(f"Agree within 1%: {sum(verdicts)} of {len(verdicts)}.\n")


def _digits(perplexity: float) -> str:
    return f"{perplexity:.4f}" if perplexity < 100 else f"{perplexity:,.1f}"


# ------------------------------------------------------------------------------------- distribution


def distribution(bench: Bench) -> None:
    """Which gears the entropies of each text would choose, by thresholds and duration."""
    scorer = bench.scorer
    scorer.score((text, HIGH) for text in bench.texts)
    title(
        "Gears by text and thresholds",
        f"Entropies of high gear, in windows of {WINDOW:,} tokens; the selector runs over them, as",
        "it does where gears are only shown. A window begins in high gear, and nothing is known of",
        "a prompt. Thresholds: of the paper, scaled to 4,096 ids; calibrated by the answers to the",
        "built-in prompts; by the beginning of the text itself (prefill: its first window, or a",
        "quarter of a shorter text, which counts in no row); by easy and hard prompts",
        "(gears_prompts.json). hold: tokens that a gear is held at least. run: mean tokens of one.",
    )
    shared = {"default": MonitorOptions(), **_calibrated(scorer)}
    rows = []
    for text in bench.texts:
        entropies = scorer.of(text, HIGH).entropies
        head = min(WINDOW, len(entropies) // 4)
        by_itself = _by_prefill(entropies[:head])
        own = {} if by_itself is None else {"prefill": by_itself}
        for name, monitor in {**shared, **own}.items():
            for hold in DURATIONS:
                options = SelectorOptions(monitor, hold)
                selector = GearSelector(VOCAB, options)
                gears = chosen(entropies, options)[head:]
                low_high = f"{selector.monitor.low:.2f} {selector.monitor.high:.2f}"
                rows.append([text.name, name, low_high, str(hold), *_spread_of(gears)])
    table(
        ("text", "thresholds", "bits", "hold", *GEARS, "shifts/100", "run"), rows, left=2
    )  # fmt: skip
    rows = []
    for text in bench.texts:
        marks = np.percentile(scorer.of(text, HIGH).entropies, (10, 30, 50, 60, 80, 90))
        rows.append([text.name, *(f"{mark:.2f}" for mark in marks)])
    print("Percentiles of the entropies, in bits:\n")
    table(("text", "p10", "p30", "p50", "p60", "p80", "p90"), rows)


def _calibrated(scorer: Scorer) -> dict[str, MonitorOptions]:
    found = {name: scorer.thresholds(name) for name in ("prompts", "file")}
    return {
        name: MonitorOptions(low=now.low, high=now.high, scale_to_vocab=False)
        for name, now in found.items()
    }


def _by_prefill(entropies: np.ndarray) -> MonitorOptions | None:
    try:
        found = from_prefill(entropies, VOCAB)
    except DataError:  # too few of them
        return None
    return MonitorOptions(low=found.low, high=found.high, scale_to_vocab=False)


def chosen(entropies: np.ndarray, options: SelectorOptions) -> list[str]:
    """The gear of each pass, as engine.geared chooses it: by the entropies before it."""
    from toastkit.engine.geared import DIGITS, FIRST, by_selector

    gears = []
    for start in range(0, len(entropies), WINDOW):
        chooser, gear = by_selector(GearSelector(VOCAB, options)), FIRST
        for entropy in entropies[start : start + WINDOW]:
            gears.append(gear)
            gear = chooser(round(float(entropy), DIGITS)).gear
    return gears


def _spread_of(gears: list[str]) -> list[str]:
    """Cells: shares of the gears, shifts in 100 tokens, mean run."""
    counts, runs = Counter(gears), sum(1 for _ in groupby(gears))
    shares = [percent(counts[gear] / len(gears)) for gear in GEARS]
    return [*shares, f"{100 * (runs - 1) / len(gears):.2f}", f"{len(gears) / runs:.1f}"]


# --------------------------------------------------------------------------------------------- auto


@dataclass(frozen=True)
class Cost:
    """By gear: bits of a managed weight with its scales, and bytes that a token reads."""

    bits: dict[str, float]
    token: dict[str, float]


def auto(bench: Bench) -> None:
    """Whether gears that follow the entropy are worth more than as many bits handed out blindly."""
    scorer, scope = bench.scorer, bench.scope
    calibrated = _calibrated(scorer)["prompts"]
    selectors = {"auto": SelectorOptions(), "auto, calibrated": SelectorOptions(calibrated)}
    ways = {name: Way(scope, selector=selector) for name, selector in selectors.items()}
    fixed = {gear: Way(scope, gear=gear) for gear in GEARS}
    texts = bench.auto_texts
    scorer.score((text, way) for text in texts for way in (*ways.values(), *fixed.values()))
    blind = {
        (text, name): [Way(scope, schedule=_shuffled(scorer.of(text, way).gears, s)) for s in SEEDS]
        for text in texts
        for name, way in ways.items()
    }
    scorer.score((text, way) for (text, _), found in blind.items() for way in found)
    cost = _cost(scope)
    _say_what_auto_is(scope, cost, selectors["auto, calibrated"])
    rows: list[list[str]] = []
    verdicts: list[Verdict] = []
    for text in texts:
        fixed_scores = {gear: scorer.of(text, way) for gear, way in fixed.items()}
        rows += [
            _quality_row(text, gear, scores, cost) for gear, scores in fixed_scores.items()
        ]  # fmt: skip
        for name, way in ways.items():
            scores = scorer.of(text, way)
            mixed = [scorer.of(text, one) for one in blind[text, name]]
            rows.append(_quality_row(text, name, scores, cost))
            for seed, other in zip(SEEDS, mixed):
                rows.append(_quality_row(text, f"{name}, shuffled {seed}", other, cost))
            verdicts += _verdicts(text, name, scores, mixed, fixed_scores, cost)
    head = ("text", "gears", "perplexity", "nats", "bits", "MB/token", *GEARS, "shifts/100", "run")
    table(head, rows, left=2)
    _say_verdicts(verdicts)
    _where_low_costs(bench, ways["auto"], fixed)


def _say_what_auto_is(scope: str, cost: Cost, calibrated: SelectorOptions) -> None:
    default, own = (GearSelector(VOCAB, o).monitor for o in (SelectorOptions(), calibrated))
    bits = ", ".join(f"{gear} {cost.bits[gear]:.2f}" for gear in GEARS)
    title(
        f"Auto against fixed gears and blind mixtures, scope {scope}",
        "auto really shifts, token by token, with the default minimum duration; thresholds "
        f"{default.low:.2f} and",
        f"{default.high:.2f} bits, or calibrated by prompts {own.low:.2f} and {own.high:.2f}.",
        f"bits: of a managed weight with its scales ({bits}), mean over",
        "tokens. MB/token: all weights that a token reads, in the checkpoint's types.",
        "shuffled: the runs of auto, as long as they were, in random order: as many bits, blindly.",
        "",
        "The entropy of one position chooses the gear of the pass that reads the token there and",
        "predicts the next: a hard token is seen to be hard only once it has been predicted.",
    )


def _cost(scope: str) -> Cost:
    from toastkit.gears.plan import plan
    from toastkit.store.store import Store

    store = Store(locate("crumb"))
    found = plan(store, scope)
    store.close()
    bits = {row.gear: 8 * row.managed / found.parameters for row in found.gears}
    return Cost(bits, {row.gear: row.token for row in found.gears})


def _shuffled(gears: list[str], seed: int) -> tuple[str, ...]:
    """The runs of all passes but the first of each window, in random order."""
    asked = [gear for n, gear in enumerate(gears) if n % WINDOW]
    runs = [tuple(run) for _, run in groupby(asked)]
    random.Random(seed).shuffle(runs)
    return tuple(chain.from_iterable(runs))


def _quality_row(text: Text, name: str, scores: Scored, cost: Cost) -> list[str]:
    counts = Counter(scores.gears)
    return [
        text.name, name, f"{scores.perplexity:.4f}", f"{scores.loss:.5f}",
        f"{mean_bits(counts, cost.bits):.2f}", f"{mean_bits(counts, cost.token) / 1e6:.2f}",
        *_spread_of(scores.gears),
    ]  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """auto against a mixture of as many bits. gain: nats a token that auto is better by, error: the
    standard error of that, over tokens in pairs."""

    text: str
    name: str
    against: str
    mixed: float
    auto: float
    gain: float
    error: float

    @property
    def word(self) -> str:
        if not self.error:
            return "one gear"
        if abs(self.gain) < BEYOND * self.error:
            return "undecided"
        return "better" if self.gain > 0 else "worse"


def _verdicts(
    text: Text, name: str, scores: Scored, mixed: list[Scored], fixed: dict[str, Scored], cost: Cost
) -> Iterator[Verdict]:
    line, words = _on_the_line(mean_bits(Counter(scores.gears), cost.bits), fixed, cost)
    shuffled = np.mean([other.nats for other in mixed], axis=0)
    for against, nats in (("runs shuffled", shuffled), (words, line)):
        gains = nats - scores.nats
        error = float(gains.std(ddof=1) / len(gains) ** 0.5)
        yield Verdict(
            text.name, name, against, float(nats.mean()), scores.loss, float(gains.mean()), error
        )


def _on_the_line(bits: float, fixed: dict[str, Scored], cost: Cost) -> tuple[np.ndarray, str]:
    """Nats of each token in the best mixture of two fixed gears that has so many bits in the mean,
    and what it is."""
    best: tuple[float, np.ndarray, str] | None = None
    for below in GEARS:
        for above in GEARS:
            low, high = cost.bits[below], cost.bits[above]
            if not low <= bits <= high or low == high:
                continue
            share = (bits - low) / (high - low)
            nats = (1 - share) * fixed[below].nats + share * fixed[above].nats
            if best is None or nats.mean() < best[0]:
                best = float(nats.mean()), nats, f"{percent(1 - share, 0)} {below}, rest {above}"
    assert best is not None  # a mean lies between the least and the most
    return best[1], best[2]


def _say_verdicts(verdicts: list[Verdict]) -> None:
    print("Does auto lie below a mixture of the same mean bits? gain: nats a token, mixture less")
    print(
        "auto; error: the standard error of that, over tokens in pairs (not over the lots drawn);"
    )
    print("better or worse from two of those on. Mixtures: auto's own runs shuffled (mean of two),")
    print("and the straight line between fixed gears in (bits, nats), the lowest one.\n")
    rows = [
        [one.text, one.name, one.against, f"{one.mixed:.5f}", f"{one.auto:.5f}",
         f"{one.gain:+.5f}", f"{one.error:.5f}", one.word]
        for one in verdicts
    ]  # fmt: skip
    table(("text", "gears", "mixture", "its nats", "auto's", "gain", "error", "auto is"), rows, 3)
    counts = Counter(one.word for one in verdicts)
    said = ", ".join(f"{word} {counts[word]}" for word in ("better", "worse", "undecided"))
    print(f"Of {len(verdicts)} comparisons: {said}, one gear {counts['one gear']}.\n")


def _where_low_costs(bench: Bench, way: Way, fixed: dict[str, Way]) -> None:
    """Why: whether the tokens that low gear predicts worse are those that auto kept from it."""
    print("What low gear costs a token, in nats, among the tokens for which auto chose each gear,")
    print(
        "and how that goes with entropy (correlation): that which chose, one position before, and"
    )
    print("that of the distribution itself, which nobody knows in time.\n")
    rows = []
    for text in bench.auto_texts:
        high, low = (bench.scorer.of(text, fixed[gear]) for gear in ("high", "low"))
        gears = np.array(bench.scorer.of(text, way).gears)
        loss = low.nats - high.nats
        row = [text.name, f"{loss.mean():+.5f}"]
        for gear in GEARS:
            part = loss[gears == gear]
            row.append(f"{part.mean():+.5f}" if len(part) else "-")
        before, own = high.entropies[:-1], high.entropies[1:]
        row += [f"{np.corrcoef(entropy, loss[1:])[0, 1]:+.3f}" for entropy in (before, own)]
        rows.append(row)
    head = ("text", "all tokens", *(f"in {gear}" for gear in GEARS), "entropy before", "its own")
    table(head, rows)
