"""Stages as plain generators over frames made by hand: no model, no MLX, no processes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hand_made import EOS, VOCAB, Recorder, answer, draw, drawn, head, kinds, step

from toastkit.errors import DataError, RemoteError
from toastkit.frames import (
    End,
    Error,
    Head,
    Logits,
    Prefilled,
    Reference,
    Stats,
    Text,
    Token,
    Tokens,
    Unknown,
)
from toastkit.gears.monitor import MonitorOptions
from toastkit.sampling.options import SamplingOptions
from toastkit.stages.arrays import from_numpy
from toastkit.stages.gear import gear
from toastkit.stages.options import StepOptions
from toastkit.stages.streams import compose, ends_run, whole_runs

# --------------------------------------------------------------------------------------- whole runs


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
    frames = draw(answer(3, 1, 4, 1), feed, limit=StepOptions(max_tokens=2))
    assert drawn(frames) == [3, 1] and frames[-1] == End("length", 2)
    assert [end for *_, end in feed.sent] == [None, "length"]


def test_an_end_of_turn_token_at_the_limit_is_an_end_of_turn() -> None:
    frames = draw(answer(3, EOS), limit=StepOptions(max_tokens=2))
    assert frames[-1] == End("eos", 2)


@pytest.mark.parametrize("reason", ["interrupt", "length", "error"])
def test_an_end_from_decode_keeps_its_reason_and_gets_our_count(reason: str) -> None:
    stream = answer(3, 1)
    stream[-1] = End(reason, 99)
    assert draw(stream)[-1] == End(reason, 2)


def test_log_probabilities_alternatives_and_telemetry() -> None:
    stream = answer(3)
    stream[3] = step(2, 3, second=1, entropy=1.25, gear="mid")
    (token,) = [f for f in draw(stream, top=2) if type(f) is Token]
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
    assert drawn(draw(saved, limit=StepOptions(max_tokens=3))) == [1, 2, 3]


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
        list(gear(stream, MonitorOptions()))


# --------------------------------------------------------------------------------------------- gear


def test_every_step_is_annotated() -> None:
    flat = from_numpy(np.zeros(VOCAB, np.float32))
    sharp = from_numpy(np.array([500, 0, 0, 0, 0, 0], np.float32))
    run = [head(), Logits(0, flat), Logits(1, sharp), Logits(2, flat), End("stop", 3)]
    frames = list(gear([*run, *run], MonitorOptions(window=2)))
    bits = math.log2(VOCAB)
    for part in (frames[1:4], frames[6:9]):
        assert [f.entropy for f in part] == pytest.approx([bits, 0, bits], abs=1e-5)
        assert [f.mean for f in part] == pytest.approx([bits, bits / 2, bits / 2], abs=1e-5)
        assert [f.slope for f in part] == pytest.approx([0, -bits, bits], abs=1e-5)
        assert part[0].gear == "high" and part[0].shifted is False
        assert part[1].shifted is (part[1].gear != "high") and all(f.reason for f in part)
    assert [f.logits for f in frames[1:4]] == [flat, sharp, flat]
    assert frames[4] == End("stop", 3)
