"""Stages as plain generators over frames made by hand: no model, no MLX, no processes."""

from __future__ import annotations

import math
import os
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hand_made import EOS, VOCAB, Recorder, answer, draw, drawn, head, kinds, step
from session_states import MODEL, commit

from toastkit.errors import DataError, RemoteError
from toastkit.frames import (
    End,
    Error,
    Frame,
    Head,
    Logits,
    Prefilled,
    Reference,
    Stats,
    Text,
    Token,
    Tokens,
    Unknown,
    pack_ids,
)
from toastkit.gears.classifier import classify
from toastkit.gears.monitor import MonitorOptions
from toastkit.gears.selector import SelectorOptions
from toastkit.interrupts import Interrupt
from toastkit.sampling.host import HostSampler
from toastkit.sampling.sampling_options import SamplingOptions
from toastkit.session.directory import Session
from toastkit.stages.arrays import from_numpy
from toastkit.stages.feed import feed_tokens
from toastkit.stages.follow import GearRules
from toastkit.stages.gear import gear, tallied
from toastkit.stages.prefill import prefill
from toastkit.stages.run.one_process import LocalRuns
from toastkit.stages.run.pipe_decode import DecodeEnd
from toastkit.stages.run.settings import ReadOptions
from toastkit.stages.streams import compose, ends_run, whole_runs

# --------------------------------------------------------------------------------------- whole runs


def test_a_run_that_ended_in_error_is_no_success() -> None:
    """Not without the error frame that says which, wherever the end stands; others still pass."""
    run = [head(), End("error", 0)]
    for stream in (run, [*run, head(), End("eos", 0)], [head(), End("stop", 0), End("error", 0)]):
        passed = []
        with pytest.raises(DataError, match="no error frame says in which") as caught:
            passed += list(whole_runs(stream, ends_run))
        assert caught.value.code == 65
    with pytest.raises(RemoteError, match="no disk"):
        list(whole_runs([*run, Error(74, "toast-prefill", "no disk")], ends_run))
    with pytest.raises(RemoteError, match="no disk"):
        list(feed_tokens([Error(74, "toast-prefill", "no disk")], None, False))


def test_a_run_without_its_head_is_no_success() -> None:
    """But what was recorded of one that a stage has closed already is dropped, up to its end."""
    step = [Token(1, 7), End("eos", 1)]
    with pytest.raises(DataError, match="follow the end of a run, and no head"):
        list(whole_runs([head(), *step, *step], ends_run))

    def closes(frame: Frame) -> bool:
        return isinstance(frame, (Prefilled, End))

    begun = [head(), Prefilled(3, 3, 0, 0.1)]
    assert list(whole_runs([*begun, *step, head(), *step], closes)) == [*begun, head(), *step]
    with pytest.raises(DataError, match="follow the end of a run, and no head"):
        list(whole_runs([*begun, *step, *step], closes))


def test_whole_runs_pass_unchanged() -> None:
    stream = [
        Unknown("later", {}), head(), Tokens(b""), Stats("x"), End("eos", 1), Stats("y"),
        head(), End("stop", 0), Unknown("later", {}),
    ]  # fmt: skip
    assert list(whole_runs(stream[1:], ends_run)) == stream[1:]


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        ([], "no frames on input"),
        ([Tokens(b""), End("eos", 0)], "does not begin with a head"),
        ([End("eos", 0)], "does not begin with a head"),
        ([Unknown("later", {}), head(), End("eos", 0)], "does not begin with a head"),
        ([head()], "ended in the middle of a run"),
        ([head(), Tokens(b"")], "ended in the middle of a run"),
        ([head(), End("eos", 0), head(), Tokens(b"")], "ended in the middle of a run"),
        ([head(), head(), End("eos", 0)], "before the last one has ended"),
    ],
)
def test_a_stream_that_is_not_whole_runs(stream: list, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(whole_runs(stream, ends_run))


@pytest.mark.parametrize(
    ("last", "hint"),
    [
        (Tokens(b""), "are toast-prefill and toast-decode missing?"),
        (Tokens(b"", final=False), None),
        (Prefilled(1, 1, 0, 0.0), "is toast-decode missing?"),
        (Token(0, 1), None),
    ],
)
def test_who_is_missing_in_a_pipe(last: Frame, hint: str | None) -> None:
    with pytest.raises(DataError) as caught:
        list(whole_runs([head(), last], ends_run))
    assert caught.value.hint == hint
    with pytest.raises(DataError) as caught:
        list(whole_runs([head(), last], lambda frame: False))
    assert caught.value.hint is None


def test_a_cut_stream_gives_what_it_has_first() -> None:
    passed = []
    with pytest.raises(DataError):
        for frame in whole_runs([head(), Tokens(b"")], ends_run):
            passed.append(frame)
    assert kinds(passed) == [Head, Tokens]


def test_an_error_from_upstream_is_raised_here_with_its_code() -> None:
    stream = [head(), Error(75, "toast-prefill", "session x is busy", "wait"), End("error", 0)]
    with pytest.raises(RemoteError) as caught:
        list(whole_runs(stream, ends_run))
    error = caught.value
    assert (error.code, error.stage, error.message, error.hint) == (
        75, "toast-prefill", "session x is busy", "wait",
    )  # fmt: skip


def test_stages_compose_lazily() -> None:
    taken = []

    def source():
        for n in range(5):
            taken.append(n)
            yield n

    doubled = compose(source(), lambda s: (2 * n for n in s), lambda s: (n + 1 for n in s))
    assert next(doubled) == 1 and taken == [0]
    assert list(doubled) == [3, 5, 7, 9]


# ------------------------------------------------------------------------------------------- sample


def test_each_step_is_drawn_sent_and_passed_on() -> None:
    feed = Recorder()
    frames = draw(answer(3, 1, 4), feed)
    assert kinds(frames) == [Head, Tokens, Prefilled, Token, Token, Token, End]
    assert [(f.pos, f.id) for f in frames if type(f) is Token] == [(2, 3), (3, 1), (4, 4)]
    assert feed.told == [
        ("begin",), ("send", 2, 3, None), ("send", 3, 1, None), ("send", 4, 4, None), ("finish",),
    ]  # fmt: skip
    assert frames[-1] == End("stop", 3)


def test_a_token_is_sent_before_it_is_described(monkeypatch: pytest.MonkeyPatch):
    """decode goes on while its log-probability is computed."""
    feed, real = Recorder(), HostSampler.describe

    def describe(self: HostSampler, *arguments):
        feed.told.append(("describe",))
        return real(self, *arguments)

    monkeypatch.setattr(HostSampler, "describe", describe)
    draw(answer(3, 1), feed)
    told = [call[0] for call in feed.told]
    assert told == ["begin", "send", "describe", "send", "describe", "finish"]


def test_a_token_is_sent_before_the_next_step_is_asked_for() -> None:
    feed = Recorder()
    seen = []

    def stream():
        for frame in answer(3, 1):
            if type(frame) is Logits:
                seen.append(len(feed.sent))
            yield frame

    draw(stream(), feed)
    assert seen == [0, 1]


@pytest.mark.parametrize(("ignore", "expected"), [(False, [3, EOS]), (True, [3, EOS, 1, 2])])
def test_an_end_of_turn_token_ends_the_answer(ignore: bool, expected: list[int]) -> None:
    feed = Recorder()
    frames = draw(answer(3, EOS, 1, 2), feed, ignore_eos=ignore)
    assert drawn(frames) == expected
    assert frames[-1] == (End("stop", 4) if ignore else End("eos", 2))
    assert [end for *_, end in feed.sent] == ([None] * 4 if ignore else [None, "eos"])


def test_the_answer_has_a_longest_length() -> None:
    feed = Recorder()
    frames = draw(answer(3, 1, 4, 1), feed, max_tokens=2)
    assert drawn(frames) == [3, 1] and frames[-1] == End("length", 2)
    assert [end for *_, end in feed.sent] == [None, "length"]


def test_an_end_of_turn_token_at_the_limit_is_an_end_of_turn() -> None:
    frames = draw(answer(3, EOS), max_tokens=2)
    assert frames[-1] == End("eos", 2)


@pytest.mark.parametrize("reason", ["interrupt", "length"])
def test_an_end_from_decode_keeps_its_reason_and_gets_our_count(reason: str) -> None:
    stream = answer(3, 1)
    stream[-1] = End(reason, 99)
    assert draw(stream)[-1] == End(reason, 2)


def test_log_probabilities_alternatives_and_telemetry() -> None:
    stream = answer(3)
    stream[3] = step(2, 3, second=1, entropy=1.25, gear="mid", expected="low")
    feed = Recorder()
    (token,) = [f for f in draw(stream, feed, top=2) if type(f) is Token]
    assert feed.gears == [("mid", "low")]
    total = math.log(math.exp(3) + math.e + 4)
    assert token.logprob == pytest.approx(3 - total, abs=1e-6)
    assert [i for i, _ in token.top] == [3, 1]
    assert [p for _, p in token.top] == pytest.approx([3 - total, 1 - total], abs=1e-6)
    assert (token.gear, token.entropy) == ("mid", 1.25)
    assert draw(stream, want_logprob=False)[3].logprob is None


def test_the_head_records_what_the_draws_came_from() -> None:
    options = SamplingOptions(temperature=0.5, seed=7)
    first = draw([head(extra={"note": 1}), End("eos", 0)], options=options)[0]
    assert first.extra == {"note": 1, "sampling": {"temperature": 0.5, "seed": 7}}


def test_a_replayed_stream_is_drawn_anew() -> None:
    """Tokens, text and statistics of an earlier draw are in it; the new answer may be shorter."""
    hot = SamplingOptions(temperature=3.0, seed=11)
    stream = answer(*[1, 2, 3, 4] * 4)
    first = draw(stream, options=hot)
    saved = []
    for frame in stream:
        saved.append(frame)
        if type(frame) is Logits:
            saved += [Token(frame.pos, 0, -1.0), Text("x")]
    again = draw(saved, options=hot)
    assert drawn(again) == drawn(first)
    assert drawn(draw(saved, options=SamplingOptions(temperature=3.0, seed=12))) != drawn(first)
    assert drawn(draw(saved, max_tokens=3)) == [1, 2, 3]


def test_runs_do_not_know_of_each_other() -> None:
    """History, counts and reasons begin anew with each head."""
    penalised = SamplingOptions(repetition_penalty=100.0)
    one = answer(3, 3, 1, prompt=(2,))
    feed = Recorder()
    frames = draw(one + answer(3, prompt=(4,)) + one, feed, penalised)
    single = drawn(draw(one, options=penalised))
    assert single[0] == 3 and single[1] != 3
    assert drawn(frames) == [*single, 3, *single]
    assert [f for f in frames if type(f) is End] == [End("stop", 3), End("stop", 1), End("stop", 3)]
    assert feed.told.count(("begin",)) == feed.told.count(("finish",)) == 3


def test_prompt_tokens_count_for_penalties() -> None:
    options = SamplingOptions(repetition_penalty=100.0)
    assert drawn(draw(answer(3, prompt=(1, 2)), options=options)) == [3]
    assert drawn(draw(answer(3, prompt=(1, 3)), options=options)) != [3]


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (from_numpy(np.zeros(VOCAB + 1, np.float32)), r"shape \[7\], the head says 6"),
        (from_numpy(np.zeros((1, VOCAB), np.float32)), r"shape \[1, 6\]"),
        (None, "without logits"),
        (Reference(0, 1, "float32", (VOCAB,)), "names no single run"),
    ],
)
def test_logits_that_cannot_be_read(logits, message: str) -> None:
    stream = [head(), Logits(2, logits), End("stop", 0)]
    with pytest.raises(DataError, match=message):
        draw(stream)
    with pytest.raises(DataError, match=message):
        list(gear(stream, GearRules()))


# --------------------------------------------------------------------------------------------- gear


FLAT = from_numpy(np.zeros(VOCAB, np.float32))
SHARP = from_numpy(np.array([500, 0, 0, 0, 0, 0], np.float32))
BITS = math.log2(VOCAB)


def rules(window: int = 2, **settings) -> GearRules:
    """Thresholds that no entropy of FLAT and SHARP comes near: mid is from 1 to 2 bits, and there
    is no catastrophe but two FLAT in a row."""
    monitor = MonitorOptions(window, low=1, high=2, hysteresis=0, scale_to_vocab=False)
    return GearRules(SelectorOptions(monitor, 1), calibrated=False, **settings)


def steps(*logits) -> list:
    """A run's frames after its head."""
    return [*(Logits(n, each) for n, each in enumerate(logits)), End("stop", len(logits))]


def test_every_step_is_annotated() -> None:
    run = [head(), *steps(FLAT, SHARP, SHARP)]
    frames = list(gear([*run, *run], rules()))
    for part in (frames[1:4], frames[6:9]):
        assert [f.entropy for f in part] == pytest.approx([BITS, 0, 0], abs=1e-5)
        assert [f.mean for f in part] == pytest.approx([BITS, BITS / 2, 0], abs=1e-5)
        assert [f.slope for f in part] == pytest.approx([0, -BITS, 0], abs=1e-5)
        assert [f.gear for f in part] == ["high", "mid", "low"]
        assert [f.shifted for f in part] == [False, True, True]
        assert [f.expected for f in part] == ["high", "low", "low"]
        assert all(f.reason for f in part)
    assert [f.logits for f in frames[1:4]] == [FLAT, SHARP, SHARP]
    assert frames[4] == End("stop", 3)


def test_a_run_begins_in_the_gear_that_its_prompt_asks_for() -> None:
    hard = {"difficulty": classify("Prove: a = b + c.")._asdict()}
    run = steps(SHARP, SHARP, SHARP, SHARP)
    stream = [head(extra=hard), *run, head(), *run, head(extra={"difficulty": {}}), *run]
    gears = [f.gear for f in gear(stream, rules(window=3)) if type(f) is Logits]
    assert gears == ["high", "high", "low", "low", *["low"] * 8]


def test_what_explains_the_gears() -> None:
    said: list[str] = []
    easy = head(extra={"difficulty": classify("Hi")._asdict()})
    stream = [easy, *steps(SHARP, SHARP, FLAT, FLAT), head(), *steps(FLAT), head(), *steps()]
    stage = tallied(gear(stream, rules(explain=said.append)), said.append)
    assert kinds(stage) == kinds(stream)
    threshold = "thresholds 1.00 and 2.00 bits: given, not scaled"
    assert said == [
        threshold, f"prompt: {classify('Hi').explain()}",
        "position 2: mid, 1.00 < mean 1.29 < 2.00", "position 3: high, catastrophic",
        "gears: low 2, mid 1, high 1 of 4 tokens; 2 shifts; mean entropy 1.29 bits",
        threshold, "prompt: not seen",
        "gears: low 0, mid 0, high 1 of 1 token; 0 shifts; mean entropy 2.58 bits",
        "gears: no tokens",
    ]  # fmt: skip


# ------------------------------------------------------------------------------------- decode's end


def test_room_is_made_for_the_logits_of_the_model(tmp_path: Path) -> None:
    """Not for those that a stream speaks of, which would be 0.5 GB of disk."""
    path = tmp_path / "s"
    with Session.open(path, MODEL) as session:
        commit(session, [1, 2, 3])
    end = DecodeEnd(Interrupt(), None, inline=False)
    with closing(end.attach(Head("m", MODEL, 1 << 23, [], session=str(path)))) as run:
        assert isinstance(run.head.run, str)
        with pytest.raises(DataError, match="says 8388608 logits a step, the model has 4096"):
            run.take(SimpleNamespace(vocab=4096), [1, 2, 3])
        assert sorted(os.listdir(run.head.run)) == ["alive", "feed"]


def test_a_prompt_for_other_logits_is_not_read() -> None:
    stream = [Head("m", MODEL, 4097, []), Tokens(pack_ids([1]))]
    engine = SimpleNamespace(vocab=4096)
    runs = LocalRuns(None, Interrupt())
    with pytest.raises(DataError, match="says 4097 logits a step, the model has 4096"):
        list(prefill(stream, lambda head: engine, runs, ReadOptions(), Interrupt()))
