"""Runs in one process: sessions resumed, forked and cut back, limits, interrupts, odd logits."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.model.checkpoints import open_model, tied_llama
from toastkit.engine.device_sampler import DeviceSampler
from toastkit.errors import DataError, NoInputError, UsageError
from toastkit.frames import End, Head, Logits, Prefilled, Token, Tokens, dumps, pack_ids
from toastkit.interrupts import Interrupt
from toastkit.model.config import fingerprint, load_config
from toastkit.sampling.sampling_options import SamplingOptions
from toastkit.session.directory import Session
from toastkit.stages.decode import decode
from toastkit.stages.prefill import prefill
from toastkit.stages.run.one_process import LocalRuns
from toastkit.stages.run.own_tokens import ForcedFeed, GreedyFeed, forced_ids
from toastkit.stages.run.protocol import Next
from toastkit.stages.run.settings import ReadOptions, StepOptions
from toastkit.stages.sample import DrawOptions, sample_deferred
from toastkit.stages.streams import compose
from toastkit.stages.tokenize import Prompt, PromptOptions, PromptTokenizer

# Of a chat with the embedded model: its own special tokens and a few words.
PROMPT = [1, 316, 201, 1032, 445, 261, 552, 547, 261, 3072, 294, 261, 1536, 16, 2, 201, 1, 317, 201]
MORE = [2, 201, 1, 316, 201, 445, 261, 552, 16, 2, 201, 1, 317, 201]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, mlx_started):
    """An Engine for a small model with attention only: its state can be cut back."""
    path = tied_llama(tmp_path_factory.mktemp("models") / "llama")
    return open_model(path)


class Run:
    """One answer: what went in is what came of it. ids: drawn. logits: of each step, as read."""

    def __init__(self, engine, ids: list[int], **settings):
        self.interrupt = settings.pop("interrupt", Interrupt())
        self.stop_after = settings.pop("stop_after", None)
        session = settings.pop("session", None)
        limit = settings.pop("count", 6)
        options = settings.pop("sampling", SamplingOptions())
        read = ReadOptions(**settings)
        head = Head("m", fingerprint(engine.files), engine.vocab, [])
        runs = LocalRuns(None if session is None else str(session), self.interrupt)
        self.logits: list[np.ndarray] = []
        draw = DrawOptions(options, 0, limit)
        shared = {"engine_for": lambda head: engine, "runs": runs, "interrupt": self.interrupt}
        self.frames = list(
            compose(
                [head, Tokens(pack_ids(ids))],
                partial(prefill, options=read, **shared),
                partial(decode, options=StepOptions(limit), **shared),
                self.listen,
                partial(
                    sample_deferred,
                    sampler_for=lambda head: (DeviceSampler(options, head.vocab), draw),
                    feed=runs.feed,
                ),
            )
        )
        self.ids = [f.id for f in self.frames if type(f) is Token]
        self.read = next((f for f in self.frames if type(f) is Prefilled), None)
        self.end = self.frames[-1]
        assert type(self.end) is End and self.end.n == len(self.ids)

    def listen(self, frames):
        for frame in frames:
            if type(frame) is Logits:
                self.logits.append(np.array(frame.logits))
                if len(self.logits) == self.stop_after:
                    self.interrupt.signal = 2
            yield frame

    @property
    def cached(self) -> int:
        return self.read.n_cached


def same(first: Run, second: Run, tolerance: float = 1e-4) -> None:
    """Two runs gave the same answer from the same logits."""
    assert first.ids == second.ids and first.end == second.end
    assert len(first.logits) == len(second.logits)
    for a, b in zip(first.logits, second.logits):
        assert np.abs(a - b).max() <= tolerance


def stored(path: Path) -> list[int]:
    with Session.open(path, None, create=False, write=False) as session:
        return session.tokens


def digest(path: Path) -> dict[str, str]:
    """What a session's files hold."""
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(path.iterdir())
        if file.is_file()
    }


# ---------------------------------------------------------------------------------------- sessions


@pytest.mark.parametrize("name", ["crumb", "llama"])
def test_a_restored_state_is_the_one_that_was_never_saved(name, request, tmp_path: Path) -> None:
    """Bit for bit: two turns in one memory, and two turns with a session between them."""
    engine = request.getfixturevalue(name)
    first = Run(engine, PROMPT, session=tmp_path / "s")
    assert (first.cached, len(first.ids)) == (0, 6)
    assert stored(tmp_path / "s") == PROMPT + first.ids
    ids = PROMPT + first.ids + MORE
    second = Run(engine, ids, session=tmp_path / "s")
    assert (second.cached, second.read.n_new) == (len(PROMPT) + 6, len(MORE))
    assert stored(tmp_path / "s") == ids + second.ids

    cache = engine.new_cache()
    logits = engine.prefill(PROMPT, cache)
    for token in first.ids:
        logits = engine.step(token, cache)
    logits = engine.prefill(MORE, cache)
    assert np.array_equal(np.array(logits), second.logits[0])
    same(second, Run(engine, ids))


@pytest.mark.parametrize("name", ["crumb", "llama"])
def test_a_prompt_that_is_stored_whole_needs_no_step(name, request, tmp_path: Path) -> None:
    engine = request.getfixturevalue(name)
    first = Run(engine, PROMPT, session=tmp_path / "s", count=3)
    ids = PROMPT + first.ids
    again = Run(engine, ids, session=tmp_path / "s")
    assert (again.cached, again.read.n_new) == (len(ids), 0)
    same(again, Run(engine, ids))


@pytest.mark.parametrize("ids", [PROMPT, PROMPT[:9], PROMPT[:12] + MORE, [5, *PROMPT]])
def test_attention_is_cut_back_to_the_common_prefix(llama, tmp_path: Path, ids: list[int]) -> None:
    Run(llama, PROMPT, session=tmp_path / "s")
    common = next((n for n, (a, b) in enumerate(zip(ids, PROMPT)) if a != b), len(ids))
    cut = Run(llama, ids, session=tmp_path / "s")
    assert cut.cached == min(common, len(ids) - 1)
    same(cut, Run(llama, ids))
    assert stored(tmp_path / "s") == ids + cut.ids
    same(Run(llama, ids + cut.ids + MORE, session=tmp_path / "s"), Run(llama, ids + cut.ids + MORE))


@pytest.mark.parametrize("ids", [PROMPT, PROMPT[:12] + MORE])
def test_a_recurrent_state_is_resumed_at_its_end_or_not_at_all(
    crumb, tmp_path: Path, ids: list[int]
) -> None:
    Run(crumb, PROMPT, session=tmp_path / "s", count=2)
    missed = Run(crumb, ids, session=tmp_path / "s", count=3)
    assert (missed.cached, missed.read.n_new) == (0, len(ids))
    same(missed, Run(crumb, ids, count=3))
    assert stored(tmp_path / "s") == ids + missed.ids
    with pytest.raises(NoInputError, match="with which this prompt does not begin"):
        Run(crumb, PROMPT[:5] + MORE, session=tmp_path / "s", require_hit=True)
    assert stored(tmp_path / "s") == ids + missed.ids


def test_a_hit_can_be_required(crumb, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--require-hit needs"):
        Run(crumb, PROMPT, require_hit=True)
    with pytest.raises(NoInputError, match="session .* is empty"):
        Run(crumb, PROMPT, session=tmp_path / "s", require_hit=True)
    first = Run(crumb, PROMPT, session=tmp_path / "s", count=2)
    second = Run(
        crumb, PROMPT + first.ids + MORE, session=tmp_path / "s", require_hit=True, count=2
    )
    assert second.cached == len(PROMPT) + 2


@pytest.mark.parametrize("into", [None, "new"])
def test_a_fork_leaves_its_source_as_it_is(crumb, tmp_path: Path, into: str | None) -> None:
    source = tmp_path / "source"
    first = Run(crumb, PROMPT, session=source, count=4)
    before = digest(source)
    ids = PROMPT + first.ids + MORE
    target = into and tmp_path / into
    forked = Run(crumb, ids, session=target, fork=str(source), require_hit=True)
    assert forked.cached == len(PROMPT) + 4
    same(forked, Run(crumb, ids))
    assert digest(source) == before
    if target:
        assert stored(target) == ids + forked.ids
        last = Run(crumb, ids + forked.ids + MORE, session=target, count=2)
        assert last.cached == len(ids + forked.ids)
    with pytest.raises(NoInputError, match="no such session"):
        Run(crumb, PROMPT, fork=str(tmp_path / "missing"))


def test_a_session_of_another_model_is_refused(crumb, llama, tmp_path: Path) -> None:
    Run(llama, PROMPT, session=tmp_path / "s", count=1)
    before = digest(tmp_path / "s")
    with pytest.raises(DataError, match="belongs to another model"):
        Run(crumb, PROMPT, session=tmp_path / "s")
    with pytest.raises(DataError, match="belongs to another model"):
        Run(crumb, PROMPT, fork=str(tmp_path / "s"))
    assert digest(tmp_path / "s") == before


# ------------------------------------------------------------------------------ interrupts, limits


def test_an_interrupted_answer_is_kept_and_goes_on(crumb, tmp_path: Path) -> None:
    whole = Run(crumb, PROMPT)
    cut = Run(crumb, PROMPT, session=tmp_path / "s", stop_after=3)
    assert cut.end.reason == "interrupt" and whole.ids[: len(cut.ids)] == cut.ids
    kept = stored(tmp_path / "s")
    assert kept[: len(PROMPT)] == PROMPT and 0 < len(kept) - len(PROMPT) < 6
    rest = Run(crumb, kept, session=tmp_path / "s", count=6 - (len(kept) - len(PROMPT)))
    assert rest.cached == len(kept)
    assert kept[len(PROMPT) :] + rest.ids == whole.ids


def test_an_interrupted_prompt_is_kept_and_goes_on(llama, tmp_path: Path) -> None:
    interrupt = Interrupt()

    def stop(done: int, total: int) -> None:
        interrupt.signal = 2 if done >= 8 else 0

    settings = {"session": tmp_path / "s", "chunk": 4}
    cut = Run(llama, PROMPT, progress=stop, interrupt=interrupt, **settings)
    assert cut.end == End("interrupt", 0) and cut.read is None
    assert stored(tmp_path / "s") == PROMPT[:8]
    rest = Run(llama, PROMPT, **settings)
    assert rest.cached == 8
    same(rest, Run(llama, PROMPT))


@pytest.mark.parametrize("length", [59, 63, 64])
def test_the_context_ends_an_answer(llama, monkeypatch, length: int) -> None:
    monkeypatch.setattr(llama, "context", 64)
    ids = [(7 * n) % 4000 for n in range(length)]
    run = Run(llama, ids, count=None)
    assert run.end == End("length", 64 - length + 1)
    same(run, Run(llama, ids, count=64 - length + 1))


def test_a_prompt_over_the_context_is_refused_with_both_numbers(llama) -> None:
    with pytest.raises(DataError, match="the prompt has 513 tokens, the model's context is 512"):
        Run(llama, [1] * 513)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_an_answer_has_as_many_tokens_as_were_asked_for(llama, tmp_path: Path, count: int) -> None:
    run = Run(llama, PROMPT, session=tmp_path / "s", count=count)
    assert run.end == End("length", count) and len(run.logits) >= count
    assert stored(tmp_path / "s") == PROMPT + run.ids


# ------------------------------------------------------------------------------------- odd logits


class Broken:
    """An engine whose logits go wrong. change(array) gives what it says instead."""

    def __init__(self, engine, change):
        self._engine, self._change = engine, change

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    def consume(self, state, token, wish):
        self._engine.consume(state, token, wish)
        state.logits = self._change(state.logits)

    def reading(self, state, ids, chunk):
        yield from self._engine.reading(state, ids, chunk)
        state.logits = self._change(state.logits)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers(llama, temperature: float) -> None:
    sampling = SamplingOptions(temperature=temperature, seed=3, top_p=0.9)
    for value in (np.nan, np.inf, -np.inf):
        everywhere = Broken(llama, lambda logits, value=value: mx.full(logits.shape, value))
        run = Run(everywhere, PROMPT, sampling=sampling, count=3)
        assert len(run.ids) == 3 and run.end.reason == "length"
        drawn = [f.logprob for f in run.frames if type(f) is Token]
        assert drawn == pytest.approx([-np.log(4096)] * 3, abs=1e-3)
        assert all(dumps(f) for f in run.frames if type(f) is not Logits)
    even = mx.arange(4096) % 2 == 0  # the others get no number; the largest of the even is 1
    half = Broken(llama, lambda logits: mx.where(even, logits / mx.abs(logits).max(), mx.nan))
    first, again = (Run(half, PROMPT, sampling=sampling, count=4) for _ in range(2))
    assert first.ids == again.ids
    if temperature == 0:  # a NaN counts as 0
        for token, logits in zip(first.ids, first.logits):
            assert token == np.where(np.isnan(logits), 0, logits).argmax()


# ----------------------------------------------------------------------------------------- prompts


def cut_down(crumb, prompt: Prompt, **settings) -> tuple[PromptTokenizer, list[int], list[str]]:
    notes: list[str] = []
    options = PromptOptions(truncate=True, note=notes.append, **settings)
    tokenizer = PromptTokenizer(crumb.files, load_config(crumb.files), options)
    return tokenizer, tokenizer.encode(prompt), notes


LONG = "The fox is by the river. " * 1300 + "Now what?"


@pytest.mark.parametrize(("wanted", "room"), [(None, 8192 - 256), (100, 8092), (8000, 4096)])
def test_truncate_keeps_the_template_whole(crumb, wanted: int | None, room: int) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": LONG}]
    tokenizer, ids, notes = cut_down(crumb, Prompt(messages=messages), max_tokens=wanted)
    assert room - 16 < len(ids) <= room
    text = tokenizer.tokenizer.decode(ids, keep_special=True)
    short = [messages[0], {"role": "user", "content": "X"}]
    start, end = tokenizer.render(Prompt(messages=short)).split("X")
    assert text.startswith(start) and text.endswith("Now what?" + end)
    assert len(notes) == 1 and "8192" in notes[0] and str(len(ids)) in notes[0]


def test_truncate_of_raw_text_keeps_its_end(crumb) -> None:
    tokenizer, ids, _ = cut_down(crumb, Prompt(text=LONG), raw=True, max_tokens=92)
    assert ids == tokenizer.tokenizer.encode_prompt(LONG, False)[-8100:]
    plain = PromptTokenizer(crumb.files, load_config(crumb.files), PromptOptions(raw=True))
    with pytest.raises(DataError, match="tokens, the model's context is 8192"):
        plain.encode(Prompt(text=LONG))
    with pytest.raises(DataError, match="^empty prompt$"):
        plain.encode(Prompt(text=""))


# ------------------------------------------------------------------------------------------- feeds


def test_greedy_and_forced_feeds(tmp_path: Path) -> None:
    head = Head("m", "f", 4, [3])
    logits = np.array([0, 2, 1, -1], np.float32)
    greedy = GreedyFeed()
    greedy.begin(head)
    assert greedy.choose(logits) == Next(1)
    assert greedy.choose(-logits) == Next(3, "eos")
    assert greedy.choose(np.array([np.nan, -1, np.nan, -2], np.float32)) == Next(0)
    given = ForcedFeed([2, 3])
    for _ in range(2):
        given.begin(head)
        assert [given.choose(logits) for _ in range(3)] == [Next(2), Next(3), None]
    stream = ForcedFeed(None)
    frames = stream.listen(
        iter([Token(0, 1), Tokens(pack_ids([2, 3])), End("eos", 3), Token(9, 9)])
    )
    stream.begin(head)
    assert [stream.choose(logits) for _ in range(4)] == [Next(1), Next(2), Next(3), None]
    assert list(frames) == [Token(9, 9)]
    frames = stream.listen(iter([Token(0, 1), head, Token(9, 9)]))  # no end comes before the next
    stream.begin(head)
    assert [stream.choose(logits) for _ in range(3)] == [Next(1), None, None]
    assert list(frames) == [head, Token(9, 9)]


def test_forced_ids_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "ids"
    file.write_bytes(b" 1 22\n333\n")
    assert forced_ids(str(file)) == [1, 22, 333]
    file.write_bytes(dumps(Token(0, 7)) + dumps(End("eos", 1)))
    assert forced_ids(str(file)) == [7]
    for bad in (b"1 x", b"-1", b"4294967296", b"1.5"):
        file.write_bytes(bad)
        with pytest.raises(DataError):
            forced_ids(str(file))
    with pytest.raises(NoInputError):
        forced_ids(str(tmp_path / "missing"))
