"""Accuracy of big and little experts and of MoBiLE on crumb's arithmetic set, in the form of paper
002's Tables II to IV, beside the figures that came with crumb.

    python benchmarks/experts_accuracy.py [--rows N] [--json FILE] [--only NAME ...]

Greedy, float32, at most 110 tokens an answer; an answer is right when what follows its last ####
is. Prompts are read once by each model and their states are shared: what a setting changes is how
the steps after them run. mobile with gamma 0 is the little model and with gamma 1 the big one, to
the token (tests/model/test_big_little.py): run all the same, they have to be right as often.
--json adds what was measured to FILE, so that settings can be run one by one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from toastkit.engine.engine import Engine
from toastkit.engine.opening import open_engine
from toastkit.engine.savepoints import copy_caches
from toastkit.engine.state import ModelState
from toastkit.experts.experts_options import ExpertsOptions, LittleK
from toastkit.model.config import load_config
from toastkit.model.locate import locate
from toastkit.stages.tokenize import Prompt, PromptOptions, PromptTokenizer
from toastkit.text.tokenizer import Tokenizer

ROWS = Path(__file__).with_name("arith_test.jsonl")
MAX_TOKENS = 110  # tokens of an answer
BIG_K, GAMMAS, LITTLE = 4, (0.0, 0.5, 0.7, 0.8, 1.0), (1, 2, 3)
# Recorded with crumb by an implementation of its own, on torch: (right answers, fallback ratio).
RECORDED = {"big": (290, None), "little": (213, None), "mobile": (261, 0.0257)}  # of 300


@dataclass(frozen=True)
class Setting:
    """mode, gamma, k, prompt: of ExpertsOptions. last_steps: the last token of the prompt is a step
    like those after it, as in the recorded run, and not a pass of the prompt."""

    name: str
    mode: str = "big"
    gamma: float = 0.7
    k: int = 2
    prompt: str = "big"
    last_steps: bool = False

    @property
    def options(self) -> ExpertsOptions:
        return ExpertsOptions(self.mode, self.gamma, LittleK(self.k), self.prompt)


def settings() -> Iterator[Setting]:
    """The recorded ones, then those of the tables."""
    yield Setting("big")
    yield Setting("little, prompt too", "little", prompt="little")
    yield Setting("mobile as recorded", "mobile", last_steps=True)
    for k in LITTLE:
        yield Setting(f"little {k}", "little", k=k)
        for gamma in GAMMAS:
            yield Setting(f"mobile {gamma} {k}", "mobile", gamma, k)


@dataclass
class Result:
    """right: answers of so many rows. tokens: drawn. steps, fallbacks: of the engine."""

    rows: int = 0
    right: int = 0
    tokens: int = 0
    steps: int = 0
    fallbacks: int = 0
    seconds: float = 0.0

    @property
    def ratio(self) -> float:
        return self.fallbacks / max(self.steps, 1)


class Set:
    """The questions as tokens, and whether an answer is right."""

    def __init__(self, count: int):
        self.files = locate("crumb")
        self.tokenizer = Tokenizer(self.files)
        lines = ROWS.read_text(encoding="utf-8").splitlines()
        self.rows = [json.loads(line) for line in lines][:count]
        prompts = PromptTokenizer(
            self.files, load_config(self.files), PromptOptions(), self.tokenizer
        )
        self.ids = [prompts.encode(asked(row["question"])) for row in self.rows]

    def right(self, row: int, answer: Sequence[int]) -> bool:
        """answer: token ids."""
        said = self.tokenizer.decode(answer, keep_special=False)
        return "####" in said and _last(said) == _last(self.rows[row]["answer"])


def asked(question: str) -> Prompt:
    """A user turn."""
    return Prompt(messages=[{"role": "user", "content": question}])


def _last(text: str) -> str:
    return text.split("####")[-1].strip()


class Prompts:
    """The states after the prompts, each made once for all settings."""

    def __init__(self, questions: Set):
        self._ids = questions.ids
        self._states: dict[tuple[str, bool], list[ModelState]] = {}

    def of(self, engine: Engine, setting: Setting) -> list[ModelState]:
        """States of their own for one setting, that share arrays until they are written to. One
        whose last token is a step lacks that token."""
        key = (setting.prompt + str(setting.k) * (setting.prompt == "little"), setting.last_steps)
        if key not in self._states:
            self._states[key] = [self._read(engine, ids, key[1]) for ids in self._ids]
        return [
            ModelState(engine.counted(copy_caches(s.cache)), list(s.tokens), s.logits)
            for s in self._states[key]
        ]

    def _read(self, engine: Engine, ids: list[int], but_last: bool) -> ModelState:
        state = ModelState(engine.new_cache())
        for _ in engine.reading(state, ids[:-1] if but_last else ids):
            pass
        return state


def answers(engine: Engine, state: ModelState, ids: list[int], eos: set[int]) -> list[int]:
    """The tokens of a greedy answer, without the one that ends it."""
    drawn: list[int] = []
    if len(state.tokens) < len(ids):
        engine.consume(state, ids[-1])
    while len(drawn) < MAX_TOKENS:
        state.submit()
        engine.look_ahead(state)
        token = int(np.argmax(state.values()))
        if token in eos:
            break
        drawn.append(token)
        engine.consume(state, token)
    state.take_back()
    return drawn


def run(questions: Set, prompts: Prompts, setting: Setting) -> Result:
    """All rows in one setting."""
    engine = open_engine(questions.files, device_name="cpu", experts=setting.options)
    result = Result(len(questions.ids))
    states = prompts.of(engine, setting)
    start = time.perf_counter()
    for row, state in enumerate(states):
        said = answers(engine, state, questions.ids[row], set(questions.tokenizer.eos_ids))
        result.tokens += len(said)
        result.right += questions.right(row, said)
        state.cache = []
    result.seconds = time.perf_counter() - start
    report = engine.run_report()["experts"]
    result.steps, result.fallbacks = report["steps"], report["fallbacks"]
    engine.close()
    return result


# ---------------------------------------------------------------------------------------- tables


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def accuracy(result: Result) -> str:
    return f"{result.right / result.rows:.3f}"


def tables(results: dict[str, Result]) -> Iterator[str]:
    """The recorded figures, then Tables II, III and IV, as far as they were measured."""
    names = {"big": "big", "little, prompt too": "little", "mobile as recorded": "mobile"}
    rows = []
    for name, recorded in names.items():
        if name in results:
            one, (right, ratio) = results[name], RECORDED[recorded]
            told = ["-", "-"] if ratio is None else [f"{one.ratio:.4f}", f"{ratio:.4f}"]
            rows.append([name, f"{one.right} of {one.rows}", f"{right} of 300", *told])
    yield table(["setting", "right", "recorded", "fallback ratio", "recorded"], rows)
    half = BIG_K // 2

    def row(label: str, name: str, ratio: bool = True) -> list[list[str]]:
        if name not in results:
            return []
        one = results[name]
        return [[label, accuracy(one), f"{one.ratio:.4f}" if ratio else "-"]]

    head = ["method", "accuracy", "fallback ratio"]
    yield table(head, [
        *row(f"{BIG_K}/16 (big)", "big", False), *row(f"{half}/16 (little)", f"little {half}"),
        *row(f"{half}/16 + MoBiLE", f"mobile 0.7 {half}"),
    ])  # fmt: skip
    yield table(["gamma", *head[1:]], [
        line for gamma in GAMMAS for line in row(f"{gamma}", f"mobile {gamma} {half}")
    ])  # fmt: skip
    fourth = []
    for k in LITTLE:
        names_of_k = [f"little {k}", *(f"mobile {gamma} {k}" for gamma in GAMMAS)]
        found = [results.get(name) for name in names_of_k]
        cells = ["" if one is None else f"{accuracy(one)} ({one.ratio:.4f})" for one in found]
        fourth.append([f"{k}/16", *cells])
    yield table(["little", "vanilla", *(f"gamma {gamma}" for gamma in GAMMAS)], fourth)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, add_help=True)
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--json", type=Path, help="where results are kept, and added to")
    parser.add_argument("--only", nargs="*", help="settings, by their names")
    flags = parser.parse_args()
    kept: dict[str, Any] = {}
    if flags.json is not None and flags.json.exists():
        kept = json.loads(flags.json.read_text())
    results = {name: Result(**values) for name, values in kept.items()}
    questions = Set(flags.rows)
    prompts = Prompts(questions)
    for setting in settings():
        if flags.only is None or setting.name in flags.only:
            result = results[setting.name] = run(questions, prompts, setting)
            print(setting.name, asdict(result), file=sys.stderr, flush=True)
            if flags.json is not None:
                values = {name: asdict(one) for name, one in results.items()}
                flags.json.write_text(json.dumps(values, indent=1))
    print("\n".join(tables(results)))


if __name__ == "__main__":
    main()
