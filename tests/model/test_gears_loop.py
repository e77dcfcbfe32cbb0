"""The loop with gears, in one process: who decides, when the model shifts, and that off is off."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.checkpoints import open_crumb
from toastkit.engine.device_sampler import DeviceSampler
from toastkit.engine.engine import Engine
from toastkit.frames import End, Head, Logits, Prefilled, Token, Tokens, pack_ids
from toastkit.gears import entropy_graph, monitor
from toastkit.gears.classifier import classify
from toastkit.gears.gear_options import GearOptions
from toastkit.gears.monitor import MonitorOptions
from toastkit.gears.selector import SelectorOptions
from toastkit.holdings.holdings import Holdings
from toastkit.interrupts import Interrupt
from toastkit.model.config import fingerprint
from toastkit.sampling.host import HostSampler
from toastkit.sampling.sampling_options import SamplingOptions
from toastkit.session import gear_state
from toastkit.stages.answer import AnswerOptions, answer
from toastkit.stages.arrays import LogitsReader
from toastkit.stages.decode import decode
from toastkit.stages.follow import Follower, GearRules
from toastkit.stages.gear import entropy_on_device, followed, gear
from toastkit.stages.prefill import prefill
from toastkit.stages.run.one_process import LocalRuns
from toastkit.stages.run.settings import Outcome, ReadOptions, StepOptions
from toastkit.stages.sample import DrawOptions, sample, sample_deferred
from toastkit.stages.streams import compose
from toastkit.text.tokenizer import Tokenizer

# "Tell me a story about a fox." as a turn of a chat with the embedded model.
PROMPT = [1, 316, 201, 1032, 445, 261, 552, 547, 261, 3072, 294, 261, 1536, 16, 2, 201, 1, 317, 201]
DEFAULTS = MonitorOptions()
LIVELY = MonitorOptions(window=2, low=0.3, high=1.2)  # every gear within sixteen tokens
ALWAYS_HIGH = MonitorOptions(low=0, high=1e-6, hysteresis=0, scale_to_vocab=False)


def geared(mode: str = "auto", **options: Any) -> Engine:
    return open_crumb(gear_options=GearOptions(mode, **options))


class Answer:
    """An answer with gears. gears: that each token's pass ran in, as decode ran them. device_bytes:
    of the gears, at its end."""

    def __init__(
        self,
        engine: Engine,
        ids: list[int] = PROMPT,
        count: int = 16,
        rules: GearRules | None = None,
        deferred: bool = False,
        session: Path | None = None,
        difficulty: Any = None,
    ):
        rules = rules or GearRules(calibrated=False)
        name = None if session is None else str(session)
        extra = {} if difficulty is None else {"difficulty": difficulty}
        head = Head("m", fingerprint(engine.files), engine.vocab, [], session=name, extra=extra)
        runs = LocalRuns(name, Interrupt(), deferred=deferred)
        shared = {"engine_for": lambda head: engine, "runs": runs, "interrupt": Interrupt()}
        draw = DrawOptions(SamplingOptions(), 0, count)
        self.logits: list[np.ndarray] = []
        self.steps: list[Logits] = []
        self.gears: list[str | None] = []
        self._engine = engine
        self.frames = list(
            compose(
                [head, Tokens(pack_ids(ids))],
                partial(prefill, options=ReadOptions(), **shared),
                partial(decode, options=StepOptions(count), **shared),
                self.listen,
                *self._drawing(rules, draw, runs, deferred),
            )
        )
        self.ids = [f.id for f in self.frames if type(f) is Token]
        self.asked = [f.gear for f in self.frames if type(f) is Token]
        self.prefilled = next(f for f in self.frames if type(f) is Prefilled)
        assert type(self.frames[-1]) is End
        self.end = self.frames[-1]
        self.device_bytes = None if engine.gears is None else engine.gears.device_bytes

    def _drawing(self, rules: GearRules, draw: DrawOptions, runs: LocalRuns, deferred: bool):
        chain = draw.sampling
        if not deferred:
            host = lambda head: (HostSampler(chain, head.vocab), draw)  # noqa: E731
            return partial(gear, rules=rules), partial(sample, sampler_for=host, feed=runs.feed)
        follower = Follower(rules)
        made = lambda head: (DeviceSampler(chain, head.vocab), draw)  # noqa: E731
        drawing = partial(sample_deferred, sampler_for=made, feed=runs.feed, follower=follower)
        return entropy_on_device, partial(followed, follower=follower), drawing

    def listen(self, frames) -> Iterator:
        for frame in frames:
            if type(frame) is Logits:
                self.logits.append(np.array(frame.logits))
                self.steps.append(frame)
                manager = self._engine.gears
                self.gears.append(None if manager is None else manager.gear)
            yield frame


def rules(options: MonitorOptions = LIVELY, min_duration: int = 1) -> GearRules:
    return GearRules(SelectorOptions(options, min_duration), calibrated=False)


@pytest.fixture(scope="module")
def plain(crumb) -> Answer:
    return Answer(crumb)


@pytest.fixture(scope="module")
def auto(mlx_started: None) -> Engine:
    """With gears of all matrices: every answer goes up for its prompt, wherever the last one
    left it."""
    return geared("auto", scope="all")


@pytest.fixture(scope="module")
def lively(auto: Engine) -> dict[bool, Answer]:
    """Answers by whether they were drawn on the device."""
    return {deferred: Answer(auto, rules=rules(), deferred=deferred) for deferred in (False, True)}


@pytest.mark.parametrize("deferred", [False, True])
def test_a_gear_is_that_of_the_pass_that_reads_its_token(lively: dict, deferred: bool) -> None:
    found = lively[deferred]
    assert {"low", "mid", "high"} == set(found.asked)
    # The prompt in high; then each pass as the token that it reads says.
    assert found.gears == ["high", *found.asked[:-1]]
    counts = {name: found.gears[1:].count(name) for name in ("low", "mid", "high")}
    shifts = len(list(groupby(found.gears))) - 1
    report = found.end.extra["gears"]
    assert {name: report[name] for name in counts} == counts
    assert report["shifts"] == shifts > 2 and report["seconds"] > 0
    assert report["bytes"] == found.device_bytes


def test_each_pass_is_computed_in_its_gear(auto: Engine, lively: dict) -> None:
    """The same tokens, forced through the engine in that gear: from one cache on, a pass of the
    loop gives its logits."""
    found = lively[False]
    auto.shift("high")
    cache = auto.new_cache()
    logits = auto.prefill(PROMPT, cache)
    assert (np.array(logits) == found.logits[0]).all()
    for token, gear_of, wanted in zip(found.ids, found.gears[1:], found.logits[1:]):
        auto.shift(gear_of)
        assert (np.array(auto.step(token, cache)) == wanted).all()


@pytest.mark.parametrize(("mode", "deferred"), [("high", True), ("auto", False), ("auto", True)])
def test_high_is_bit_for_bit_the_plain_path(
    plain: Answer, auto: Engine, mode: str, deferred: bool
) -> None:
    engine = auto if mode == "auto" else geared(mode, scope="all")
    found = Answer(engine, rules=rules(ALWAYS_HIGH), deferred=deferred)
    assert found.ids == plain.ids
    assert all((a == b).all() for a, b in zip(found.logits, plain.logits, strict=True))


@pytest.mark.parametrize(("mode", "deferred"), [("low", False), ("mid", True)])
def test_a_fixed_gear_begins_after_the_prompt(plain: Answer, mode: str, deferred: bool) -> None:
    engine = geared(mode, scope="all")
    for _ in range(2):  # the second answer goes up for its prompt, and down again
        found = Answer(engine, count=3, rules=rules(), deferred=deferred)
        assert found.gears == ["high"] + [mode] * 2
        assert (found.logits[0] == plain.logits[0]).all()
        assert not (found.logits[1] == plain.logits[1]).all()
        assert found.end.extra["gears"]["shifts"] == 1


def test_host_and_device_choose_the_same_gears(lively: dict) -> None:
    host, dev = lively[False], lively[True]
    assert host.ids == dev.ids and host.asked == dev.asked
    assert [s.reason for s in host.steps] == [s.reason for s in dev.steps]
    assert np.allclose([s.entropy for s in host.steps], [s.entropy for s in dev.steps], atol=1e-4)


def test_off_is_the_plain_path(crumb, plain: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    """No manager, no other module, no entropy: what runs is what ran before there were gears."""
    off = open_crumb(gear_options=GearOptions("off"))
    assert off.gears is None and crumb.gears is None
    kinds = [{p: type(m) for p, m in e.model.named_modules()} for e in (off, crumb)]
    assert kinds[0] == kinds[1]

    def fail(*arguments: Any) -> None:
        pytest.fail("the entropy was computed")

    monkeypatch.setattr(monitor.EntropyMeter, "bits", fail)
    monkeypatch.setattr(entropy_graph, "entropy_bits", fail)
    monkeypatch.setattr(entropy_graph.NativeSummary, "__init__", fail)
    for deferred in (False, True):
        head = Head("m", fingerprint(off.files), off.vocab, [])
        options = AnswerOptions(draw=DrawOptions(SamplingOptions(), 0, 16))
        runs = LocalRuns(None, Interrupt(), deferred=deferred)
        frames = list(
            answer(
                [head, Tokens(pack_ids(PROMPT))], Tokenizer(off.files), lambda head: off, runs,
                options, Interrupt(), Outcome(),
            )
        )  # fmt: skip
        assert [f.id for f in frames if type(f) is Token] == plain.ids
        assert "gears" not in frames[-1].extra


def test_the_prompt_chooses_the_first_gear(auto: Engine) -> None:
    hard = classify("Prove that √2 + √3 ≠ π, step by step; derive each ∑ you use: why?")
    easy = classify("Hi!")
    assert (hard.gear, easy.gear) == ("high", "low")
    for difficulty in (hard, easy):
        first = Answer(
            auto, count=DEFAULTS.window - 1, rules=rules(DEFAULTS), difficulty=difficulty._asdict()
        )
        assert first.asked == [difficulty.gear] * (DEFAULTS.window - 1)
        assert "prompt score" in first.steps[0].reason


def test_a_gear_is_held(auto: Engine, lively: dict) -> None:
    held = Answer(auto, rules=rules(min_duration=3))
    for duration, found in ((1, lively[False]), (3, held)):
        lengths = [len(list(run)) for _, run in groupby(found.asked)]
        assert len(lengths) > 2 and min(lengths[:-1]) >= duration


def test_catastrophe_goes_up_at_once(auto: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The meter is told to see one: no text of the embedded model's is."""
    limit = 12.0  # log2 of the vocabulary
    values = iter([0.1] * 6 + [limit, limit] + [0.1] * 100)
    monkeypatch.setattr(LogitsReader, "entropy", lambda self, logits: next(values))
    found = Answer(auto, count=9, rules=rules(DEFAULTS, 5))
    assert found.asked[:8] == ["low"] * 6 + ["mid", "high"]  # mid is held for one token of five
    assert found.steps[7].reason == "catastrophic"
    assert found.gears[8] == "high"


def test_what_is_expected_is_prepared(auto: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[str | None] = []
    real = Engine.prepare
    monkeypatch.setattr(
        Engine, "prepare", lambda self, wish: (prepared.append(wish.expected), real(self, wish))
    )
    found = Answer(auto, count=8, rules=rules())
    assert prepared == [step.expected for step in found.steps[:-1]]
    assert any(step.expected != step.gear for step in found.steps)
    fixed = geared("low")
    monkeypatch.setattr(Holdings, "prepare", lambda *a: pytest.fail("prepared"))
    Answer(fixed, count=3, rules=rules())  # a fixed gear expects no other


# ------------------------------------------------------------------------------------- sessions


def test_gears_go_on_where_the_session_stopped(auto: Engine, tmp_path: Path) -> None:
    whole = Answer(auto, count=12, rules=rules(min_duration=3), session=tmp_path / "whole")
    for cut in (1, 5):
        path = tmp_path / f"cut{cut}"
        first = Answer(auto, count=cut, rules=rules(min_duration=3), session=path)
        ids = [*PROMPT, *first.ids]
        second = Answer(auto, ids, 12 - cut, rules(min_duration=3), session=path)
        assert second.prefilled.n_new == 0
        assert first.ids + second.ids == whole.ids
        assert first.asked + second.asked == whole.asked
        told = [(s.mean, s.slope, s.reason) for s in first.steps + second.steps]
        assert told == [(s.mean, s.slope, s.reason) for s in whole.steps]


def test_gears_begin_anew_where_more_was_read(auto: Engine, tmp_path: Path) -> None:
    path = tmp_path / "s"
    first = Answer(auto, count=4, session=path)
    ids = [*PROMPT, *first.ids, 2, 201]
    more = Answer(auto, ids, 2, session=path)
    assert more.prefilled.n_new == 2 and more.steps[0].mean == more.steps[0].entropy
    other = Answer(auto, [*ids, *more.ids], 1, rules(MonitorOptions(window=2)), session=path)
    assert other.prefilled.n_new == 0  # but other rules than those it was kept with
    assert other.steps[0].mean == other.steps[0].entropy


BROKEN_STATES = (
    b"", b"\x81", b"\xc1" * 50,
    {"position": 3, "selector": {}}, {"position": -1, "selector": None}, {},
)  # fmt: skip


def test_a_broken_state_is_as_good_as_none(auto: Engine, tmp_path: Path) -> None:
    first = Answer(auto, count=3, session=tmp_path / "first")
    for number, state in enumerate(BROKEN_STATES):
        path = shutil.copytree(tmp_path / "first", tmp_path / str(number))
        if isinstance(state, bytes):
            (path / gear_state.GEAR_FILE).write_bytes(state)
        else:
            committed = gear_state.committed(path)
            assert committed is not None
            gear_state.save(path, *committed, state)
        second = Answer(auto, [*PROMPT, *first.ids], 1, session=path)
        assert second.prefilled.n_new == 0
        assert second.steps[0].mean == second.steps[0].entropy
