"""Texts scored in gears by processes of their own, several at once: nothing here is timed.

Of the embedded model, in float32, so that the figures are those of any machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gears_report import say

from toastkit.gears.calibration import Thresholds
from toastkit.gears.gear_options import GearOptions
from toastkit.gears.selector import SelectorOptions
from toastkit.model.locate import locate

if TYPE_CHECKING:
    from toastkit.engine.engine import Engine
    from toastkit.engine.perplexity import Scores

WINDOW = 1024  # tokens that are read with one cache, as for the published figures
OWN_TEXTS = Path(__file__).parents[1] / "tests" / "texts"
NAMES = ("story", "arith", "chat", "code", "prose", "gsm8k")
EASY_AND_HARD = Path(__file__).with_name("gears_prompts.json")


@dataclass(frozen=True)
class Text:
    """A text, or the beginning of one."""

    name: str
    ids: tuple[int, ...]

    @property
    def count(self) -> int:
        """Tokens that are scored: all but the first."""
        return len(self.ids) - 1

    def cut(self, limit: int | None) -> Text:
        """The beginning: so many scored tokens at most."""
        if limit is None or self.count <= limit:
            return self
        return Text(self.name, self.ids[: limit + 1])


def read_texts(
    folder: Path | None, limit: int | None, names: Sequence[str] = NAMES, model: str = "crumb"
) -> list[Text]:
    """The texts of these names that are there, in the repository or in the folder, as a model's
    tokenizer has them."""
    from toastkit.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(locate(model))
    found = []
    for name in names:
        paths = [OWN_TEXTS / f"{name}.txt", *([folder / f"{name}.txt"] if folder else [])]
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            print(f"{name}: no such text here, left out (--texts DIR).\n")
            continue
        ids = tokenizer.encode_prompt(path.read_text(encoding="utf-8"), templated=False)
        found.append(Text(name, tuple(ids)).cut(limit))
    return found


@dataclass(frozen=True)
class Way:
    """How a text is scored. gear: throughout; without one, as the selector says, or as scheduled:
    the gears of all passes but the first of each window, which is in high. A gear throughout goes
    in chunks from dequantised copies, which is faster and gives the same figures."""

    scope: str = "all"
    bits: tuple[int, int] = (4, 8)
    gear: str | None = None
    selector: SelectorOptions | None = None
    schedule: tuple[str, ...] | None = None
    path: str = "dequant"


@dataclass(frozen=True)
class Scored:
    """Of each token: nats, -log p of it. entropies: bits, of what it was predicted from. gears: of
    the passes that predicted it."""

    nats: np.ndarray
    entropies: np.ndarray
    gears: list[str]

    @property
    def loss(self) -> float:
        """Nats a token."""
        return math.fsum(self.nats) / len(self.nats)

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


HIGH = Way(gear="high")


class Scorer:
    """Scores texts in so many processes, each text in each way once."""

    def __init__(self, processes: int):
        self._pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))
        self._known: dict[tuple, Scored] = {}
        self._thresholds: dict[str, Thresholds] = {}

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._pool.shutdown(cancel_futures=True)

    def score(self, wanted: Iterable[tuple[Text, Way]]) -> None:
        """Has these ready for `of`; says how it gets on."""
        missing = {(text.ids, way): text.name for text, way in wanted}
        missing = {key: name for key, name in missing.items() if key not in self._known}
        futures: dict[Future, tuple] = {self._pool.submit(_score, *key): key for key in missing}
        for done, future in enumerate(as_completed(futures), 1):
            key = futures[future]
            self._known[key], seconds = future.result()
            speed = len(key[0]) / seconds
            say(f"{done} of {len(futures)}: {missing[key]}, {_words(key[1])}, {speed:.0f} tokens/s")

    def of(self, text: Text, way: Way) -> Scored:
        """A text's scores; computed now if they were not before."""
        if (text.ids, way) not in self._known:
            self.score([(text, way)])
        return self._known[text.ids, way]

    def thresholds(self, strategy: str) -> Thresholds:
        """The model calibrated by its answers, "prompts" or "file" (of easy and hard ones)."""
        if strategy not in self._thresholds:
            self._thresholds[strategy] = self._pool.submit(_calibrate, strategy).result()
        return self._thresholds[strategy]


def _words(way: Way) -> str:
    if way.gear is not None:
        bits = {"low": way.bits[0], "mid": way.bits[1]}.get(way.gear)
        return f"{way.scope}, {'high' if bits is None else f'{bits} bits'}"
    return f"{way.scope}, {'auto' if way.schedule is None else 'schedule'}, token by token"


def _score(ids: tuple[int, ...], way: Way) -> tuple[Scored, float]:
    """Scores, and the seconds that it took."""
    from toastkit.engine.geared import by_selector, score_in_gear, score_in_gears
    from toastkit.gears.selector import GearSelector
    from toastkit.holdings.policy import Wish

    engine = _engine(way.scope, way.bits, way.path if way.gear is not None else "fused")
    start = time.perf_counter()
    if way.gear is not None:
        parts = score_in_gear(engine, ids, WINDOW, way.gear)
    elif way.schedule is not None:
        wishes = map(Wish, way.schedule)
        parts = score_in_gears(engine, ids, WINDOW, lambda: lambda entropy: next(wishes))
    else:
        selector = way.selector
        parts = score_in_gears(
            engine, ids, WINDOW, lambda: by_selector(GearSelector(engine.vocab, selector))
        )
    found = _joined(parts)
    return found, time.perf_counter() - start


def _joined(parts: Iterable[Scores]) -> Scored:
    logprobs: list[float] = []
    entropies: list[float] = []
    gears: list[str] = []
    for part in parts:
        logprobs += part.logprobs
        entropies += part.entropies
        gears += part.gears or ()
    return Scored(-np.array(logprobs), np.array(entropies), gears)


@cache
def _engine(scope: str, bits: tuple[int, int], path: str) -> Engine:
    from toastkit.engine.opening import open_engine

    keep_all = 1 << 40  # gears are made once; what the cache costs is not the question here
    options = GearOptions("auto", scope, bits, path, keep_all)
    return open_engine(locate("crumb"), dtype="float32", gear_options=options)


def _calibrate(strategy: str) -> Thresholds:
    from toastkit.model.config import load_config
    from toastkit.stages.calibrate import from_built_in, from_texts
    from toastkit.stages.tokenize import PromptOptions, PromptTokenizer

    files = locate("crumb")
    tokenizer = PromptTokenizer(files, load_config(files), PromptOptions())
    if strategy == "prompts":
        measure = from_built_in(tokenizer)
    else:
        measure = from_texts(tokenizer, EASY_AND_HARD.read_text(encoding="utf-8"))
    engine = _engine("all", (4, 8), "fused")
    if engine.gears is not None:
        engine.shift("high")
    return measure(engine).thresholds


def same_both_ways(scorer: Scorer, text: Text) -> float:
    """The largest difference, in nats, between packed numbers and dequantised copies of them, over
    some tokens in low gear."""
    part, way = text.cut(256), Way(gear="low")
    ways = (way, replace(way, path="fused"))
    scorer.score((part, one) for one in ways)
    dense, fused = (scorer.of(part, one).nats for one in ways)
    return float(np.abs(dense - fused).max())
