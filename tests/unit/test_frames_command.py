"""toast-frames: copying, filtering, counting and checking frames; usage errors."""

from __future__ import annotations

import io
import json
import re

import pytest

from tests.unit.test_cli import RUN, STREAM, here, lines_of
from toastkit.frames import FrameReader, Logits, Token, Unknown, dumps
from toastkit.stages.inspect import Statistics


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--slice", "a"], "--slice takes A:B, not 'a'"),
     (["--slice", "9" * 5000 + ":"], "--slice takes A:B, not"),
     (["--kinds", "lgits"], "no such kind of frame: lgits"),
     (["--kinds", " ,"], "--kinds names none"),
     (["--json", "--validate"], "--json does not go with --validate"),
     (["--validate", "--kinds", "head"], "--kinds does not go with --validate"),
     (["--validate", "--slice", "0:"], "--slice does not go with --validate"),
     (["--json", "--inline"], "--inline is for frames: --arrays says how --json writes logits"),
     (["--validate", "--inline"], "--inline does not go with --validate"),
     (["--top", "3"], "--top is for --json"),
     (["--json", "--arrays", "none", "--top", "3"], "--top is for --arrays topk"),
     (["--arrays", "none", "--stat", "--json"], "--arrays is for --json")],
)  # fmt: skip
def test_usage_errors(arguments: list[str], message: str) -> None:
    said, _ = lines_of(here("frames", *arguments, stdin=STREAM), "frames", 64)
    assert said.startswith(message)


def test_frames_are_copied_converted_and_back() -> None:
    odd = b"".join(map(dumps, [*RUN, Unknown("later", {"x": [1, None]})]))
    assert here("frames", stdin=odd).stdout == odd
    text = here("frames", "--json", stdin=odd).stdout
    kinds = [json.loads(line)["k"] for line in text.splitlines()]
    assert kinds == ["head", "tokens", "token", "stats", "end", "later"]
    assert here("frames", "--from-json", stdin=text).stdout == odd
    assert here("frames", "--from-json", "--json", stdin=text).stdout == text


def test_frames_are_chosen() -> None:
    def kept(*arguments: str, stdin: bytes = STREAM) -> list:
        return list(FrameReader(io.BytesIO(here("frames", *arguments, stdin=stdin).stdout)))

    assert kept("--kinds", "head, token") == [RUN[0], RUN[2]]
    assert kept("--slice", "1:3") == [RUN[0], *RUN[2:4]]
    assert kept("--slice", "3:") == [RUN[0], RUN[4]]
    assert kept("--slice", ":1", "--kinds", "token,end") == [RUN[2]]
    assert len(kept("--slice", "5:6", stdin=STREAM * 2)) == 3


def test_frames_are_checked_and_counted() -> None:
    def checked(stdin: bytes) -> bytes:
        return here("frames", "--validate", stdin=stdin).stdout

    open_end = "1 without an end\n"
    assert checked(STREAM * 2) == b"ok: 10 frames, 2 runs\n"
    assert checked(STREAM + dumps(RUN[0])).decode() == f"ok: 6 frames, 2 runs, {open_end}"
    assert checked(dumps(RUN[0])).decode() == f"ok: 1 frame, 1 run, {open_end}"
    assert checked(b"".join(map(dumps, RUN[:-1]))).decode() == f"ok: 4 frames, 1 run, {open_end}"
    assert checked(dumps(RUN[0]) + STREAM).decode() == f"ok: 6 frames, 2 runs, {open_end}"
    assert checked(dumps(RUN[0]) * 2) == b"ok: 2 frames, 2 runs, 2 without an end\n"
    lines_of(here("frames", "--validate", stdin=b""), "frames", 65)
    message, _ = lines_of(here("frames", "--validate", stdin=STREAM[:-1]), "frames", 65)
    assert message == f"cannot read frame 5 at byte {len(STREAM) - len(dumps(RUN[4]))}: truncated"
    lines_of(here("frames", "--validate", stdin=dumps(RUN[1])), "frames", 65)
    counts = json.loads(here("frames", "--stat", "--json", stdin=STREAM * 2).stdout)
    assert counts["frames"] == 10 and counts["bytes"] == 2 * len(STREAM)
    assert counts["kinds"] == dict.fromkeys(("head", "tokens", "token", "stats", "end"), 2)
    assert counts["ends"] == {"eos": 2} and counts["mean_logprob"] == -0.5
    plain = here("frames", "--stat", stdin=STREAM).stdout.decode()
    assert re.search(r"^frames +5$", plain, re.M) and "eos 1" in plain


def test_a_mean_that_is_no_number() -> None:
    """JSON has none for it."""
    stream = (
        dumps(RUN[0]) + dumps(Token(7, 1, float("nan"))) + dumps(Token(8, 1, -1.0, entropy=2.0))
    )
    counts = here("frames", "--stat", "--json", stdin=stream).stdout
    found = json.loads(counts, parse_constant=pytest.fail)
    assert found["mean_logprob"] is None and found["mean_entropy_bits"] == 2


def test_a_step_is_counted_once() -> None:
    """A sampler leaves tokens in place of logits; decode --greedy writes both."""
    annotated = {"gear": "low", "entropy": 1.5}
    for with_logits, with_tokens in ((True, False), (False, True), (True, True)):
        statistics = Statistics()
        for pos in (7, 8, 7):  # the last one is of another run
            if with_logits:
                statistics.add(Logits(pos, b"", seconds=0.25, **annotated))
            if with_tokens:
                statistics.add(Token(pos, 3, -0.5, **annotated))
        found = statistics.summary()
        assert (found["gears"], found["mean_entropy_bits"]) == ({"low": 3}, 1.5)
        assert found["seconds"] == (0.75 if with_logits else 0)
        assert not [name for name in found if name.startswith("_")]
