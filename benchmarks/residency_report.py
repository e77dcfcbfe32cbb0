"""What the parts of benchmarks/residency.py share: settings, the paper's figures, a few words."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import residency_files
from gears_report import title
from measure import spread
from residency_case import Case, Spec

# Paper 001, Apple machines: tokens a second and GB of memory, all resident (tables 2 and 5), on
# another machine than ours.
TABLE_2 = {
    "0.8B-8": (302.7, 0.80), "0.8B-bf16": (219.2, 1.47), "2B-6": (214.3, 1.49),
    "2B-8": (203.0, 1.93), "2B-bf16": (129.4, 3.58), "4B-4": (148.1, 2.34), "4B-6": (117.1, 3.32),
    "4B-bf16": (66.2, 7.94), "9B-6": (77.9, 6.90), "9B-8": (67.3, 8.97), "27B-4": (35.0, 14.34),
}  # fmt: skip
# GB resident and at 0% resident.
TABLE_3 = {
    "0.8B-8": (0.74, 0.29),
    "4B-4": (2.34, 0.47),
    "9B-8": (8.86, 2.29),
    "27B-4": (14.09, 1.70),
}
# By per cent resident: tokens a second as a share of the baseline, and the share of I/O.
TABLE_4 = {0: (1.7 / 68.3, 0.81), 25: (2.2 / 68.3, 0.80), 50: (3.2 / 68.3, 0.77),
           75: (5.9 / 68.3, 0.70), 100: (1.0, 0.0)}  # fmt: skip
TABLE_9 = {0: 0.06, 25: 0.11, 50: 0.15, 75: 0.18, 90: 0.29, 100: 0.64}  # iPad
TABLE_8 = {"balanced": "2/32, 0.26", "max-context": "22/32, 0.39", "max-tps": "24/32, 0.03"}


@dataclass(frozen=True)
class Settings:
    """What was asked for on the command line. names: of models in the folder `models`, the first
    for sections that measure one. tokens: of a timing. prompt: tokens of a long prompt. widths:
    tokens of passes beside which layers are read. checked: tokens after which --resident auto has
    looked at memory again. budget: bytes, of the hero. percents: of layers that stay. shares: of
    the way from the least budget to all. pairs: rounds of 100% and plain."""

    models: Path
    names: Sequence[str]
    rounds: int
    tokens: int
    prompt: int
    chunks: Sequence[int]
    widths: Sequence[int]
    checked: int
    context: int
    bystander: int
    budget: str
    dtype: str | None
    native: str
    hero: Path | None
    percents: Sequence[int]
    shares: Sequence[float]
    pairs: int

    @property
    def dense(self) -> str:
        """The first model, not quantised: weights that weigh more beside what they compute."""
        return f"{self.names[0].partition('-')[0]}-bf16"

    def spec(self, name: str, resident: str = "all", **rest: Any) -> Spec:
        """A case of a model, which is made if it is not there."""
        path = residency_files.model(self.models, name)
        return Spec(str(path), resident, dtype=self.dtype, native=self.native, **rest)


def section(name: str, text: str) -> None:
    """Begins a section. text: what one has to know to read it."""
    title(name, *textwrap.wrap(text, 100))


def speed(case: Case, count: int, ahead: int | None = None) -> dict[str, Any]:
    """Decodes; with rate, tokens a second, and waiting, a share of the time."""
    found = case.do("tokens", count=count, ahead=ahead)
    rate, waiting = count / found["seconds"], found.get("wait", 0.0) / found["seconds"]
    return {**found, "rate": rate, "waiting": waiting}


def warmed(spec: Spec, tokens: int = 2) -> Case:
    """A case that has run a few tokens, which count for nothing."""
    case = Case(spec)
    try:
        case.do("tokens", count=tokens)
    except BaseException:
        case.close()
        raise
    return case


def gb(count: float) -> str:
    """Bytes in GB (10^9)."""
    return f"{count / 1e9:.2f}"


def rates(values: Sequence[float], digits: int = 2) -> str:
    """median (least .. most)."""
    return spread(list(values), digits=digits)


def ratios(above: Sequence[float], below: Sequence[float], digits: int = 2) -> str:
    """The same of quotients, round by round."""
    return spread([a / b for a, b in zip(above, below)], digits=digits)


def share(values: Sequence[float]) -> str:
    """A share in per cent, of the round in the middle."""
    return f"{100 * median(values):.0f}%"


def gathered(rounds: int, run: Callable[[], dict[str, dict[str, Any]]]) -> dict[str, dict]:
    """Runs rounds that give, by case, figures by name; the figures of all rounds, as lists."""
    found: dict[str, dict[str, list]] = {}
    for _ in range(rounds):
        for name, figures in run().items():
            for figure, value in figures.items():
                found.setdefault(name, {}).setdefault(figure, []).append(value)
    return found
