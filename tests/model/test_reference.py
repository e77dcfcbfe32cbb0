"""The embedded model against the record of an independent implementation (transformers on torch):
the same distribution after every prompt, and the same 48 tokens after it."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from tests.model.reference import PROMPTS
from toastkit.engine.state import ModelState
from toastkit.frames import End, Prefilled, Text, Token, Tokens, unpack_ids
from toastkit.interrupts import Interrupt
from toastkit.model.config import load_config
from toastkit.sampling.sampling_options import SamplingOptions
from toastkit.stages.answer import AnswerOptions, answer
from toastkit.stages.run.one_process import LocalRuns
from toastkit.stages.run.settings import Outcome, ReadOptions
from toastkit.stages.sample import DrawOptions
from toastkit.stages.tokenize import Prompt, PromptOptions, PromptTokenizer, tokenize

TOLERANCE = 2e-3  # of a log-probability
STEPS = 8  # of the engine; more are made by one process and by the pipeline
SHORT = [p for p in PROMPTS if len(p["token_ids"]) < 30]
RAW = [p for p in SHORT if p["name"].endswith("_raw")]
LONGER = [p for p in PROMPTS if len(p["token_ids"]) >= 30]


def log_softmax(logits) -> np.ndarray:
    exact = np.array(logits, np.float64)
    exact -= exact.max()
    return exact - math.log(np.exp(exact).sum())


def check_top20(logits, prompt: dict) -> None:
    found = log_softmax(logits)
    expected = dict(prompt["top20"])
    assert max(abs(found[i] - p) for i, p in expected.items()) < TOLERANCE
    # The 20 are the top: nothing else is more likely than the last of them.
    others = np.delete(found, list(expected))
    assert others.max() <= min(expected.values()) + TOLERANCE
    bits = -(np.exp(found) * found).sum() / math.log(2)
    assert bits == pytest.approx(prompt["entropy_bits"], abs=TOLERANCE)


# A third of the prompts goes through the engine here, a third through one process, below, and a
# third through the pipeline: tests/pipes/test_pipeline.py.
@pytest.mark.parametrize("prompt", PROMPTS[::3], ids=[p["name"] for p in PROMPTS[::3]])
def test_prefill_and_steps(crumb, prompt: dict) -> None:
    cache = crumb.new_cache()
    logits = crumb.prefill(prompt["token_ids"], cache)
    check_top20(logits, prompt)
    tokens = []
    while len(tokens) < STEPS:
        tokens.append(int(mx.argmax(logits)))
        logits = crumb.step(tokens[-1], cache)
    assert int(mx.argmax(logits)) == prompt["greedy"][STEPS] and tokens == prompt["greedy"][:STEPS]
    # The rest in one pass, which goes on from the steps: what each token makes of those before it.
    rest = crumb.score(prompt["greedy"][STEPS:], cache)
    assert mx.argmax(rest, axis=-1).tolist()[:-1] == prompt["greedy"][STEPS + 1 :]


BY_CHUNK = {1: RAW[:1], 7: RAW[1:], 48: LONGER[:1], 10_000: SHORT[:1]}


@pytest.mark.parametrize("chunk", BY_CHUNK)
@pytest.mark.parametrize("engine", ["crumb", "crumb_by_mlx"])
def test_chunks_change_nothing(engine: str, chunk: int, request: pytest.FixtureRequest) -> None:
    crumb = request.getfixturevalue(engine)
    for prompt in BY_CHUNK[chunk]:
        ids, state = prompt["token_ids"], ModelState(crumb.new_cache())
        ends = [0, *crumb.reading(state, ids, lambda: chunk)]
        check_top20(state.logits, prompt)
        steps = [after - before for before, after in zip(ends, ends[1:])]
        assert ends[-1] == len(ids) and max(steps) <= chunk
        assert steps[-1] == 1 or crumb.last_token.possible


def test_score_is_prefill_at_every_position(crumb) -> None:
    prompt = next(p for p in PROMPTS if p["name"] == "arith_1")
    ids = prompt["token_ids"]
    scores = np.array(crumb.score(ids, crumb.new_cache()))
    assert scores.shape == (len(ids), crumb.vocab) and scores.dtype == np.float32
    check_top20(scores[-1], prompt)
    for length in (1, 9, len(ids) - 1):
        logits = crumb.prefill(ids[:length], crumb.new_cache())
        assert np.abs(log_softmax(logits) - log_softmax(scores[length - 1])).max() < 1e-4


# ------------------------------------------------------------------------------------ one process


def run_all(
    crumb, prompts: list[Prompt], deferred: bool = True, **settings
) -> tuple[list, Outcome]:
    """What `toast-decode --raw --ignore-eos` does, in this process: frames and outcome."""
    tokenizer = PromptTokenizer(crumb.files, load_config(crumb.files), PromptOptions(raw=True))
    limit = settings.pop("max_tokens", 48)
    chain = settings.pop("sampling", SamplingOptions())
    draw = DrawOptions(chain, settings.pop("top", 0), limit, settings.pop("ignore_eos", True))
    read = ReadOptions(chunk=settings.pop("chunk", None))
    options = AnswerOptions(read=read, draw=draw, **settings)
    signals, outcome = Interrupt(), Outcome()
    runs = LocalRuns(None, signals, deferred=deferred)
    return list(
        answer(
            tokenize(prompts, tokenizer),
            tokenizer.tokenizer,
            lambda head: crumb,
            runs,
            options,
            signals,
            outcome,
        )
    ), outcome


def test_one_process(crumb) -> None:
    """Prompts as runs of one stream, as text: tokenizer, model, sampler and detokenizer."""
    chosen = PROMPTS[1::3]
    frames, outcome = run_all(crumb, [Prompt(text=p["text"]) for p in chosen], top=20)
    assert outcome.reasons == ["length"] * len(chosen) and outcome.tokens == 48
    prompts = [unpack_ids(f.ids) for f in frames if type(f) is Tokens]
    assert prompts == [p["token_ids"] for p in chosen]
    assert [(f.n_past, f.n_cached) for f in frames if type(f) is Prefilled] == [
        (len(ids), 0) for ids in prompts
    ]
    tokens = [f for f in frames if type(f) is Token]
    text = "".join(f.s for f in frames if type(f) is Text)
    for number, prompt in enumerate(chosen):
        mine = tokens[48 * number : 48 * number + 48]
        assert [t.id for t in mine] == prompt["greedy"]
        assert [t.pos for t in mine] == list(range(len(prompts[number]), len(prompts[number]) + 48))
        assert [i for i, _ in mine[0].top][0] == mine[0].id
        top = dict(mine[0].top)
        expected = dict(prompt["top20"])
        shared = set(top) & set(expected)
        assert len(shared) >= 19  # the 20th and the 21st may change places
        assert max(abs(top[i] - expected[i]) for i in shared) < TOLERANCE
        assert mine[0].logprob == top[mine[0].id]
    assert text == "".join(crumb_text(crumb, p["greedy"]) for p in chosen)


def crumb_text(crumb, ids: list[int]) -> str:
    """An answer as a reader sees it: special tokens are not printed."""
    from toastkit.text.tokenizer import Tokenizer

    return Tokenizer(crumb.files).decode(ids, keep_special=False)


def test_the_recorded_text(crumb) -> None:
    """The same by the record's own text, where no special token is in the answer."""
    for prompt in PROMPTS:
        plain = "<|" not in prompt["greedy_text"] and "\ufffd" not in prompt["greedy_text"]
        if plain:
            assert crumb_text(crumb, prompt["greedy"]) == prompt["greedy_text"], prompt["name"]


def test_answers_end_where_the_turn_ends(crumb) -> None:
    """Without --ignore-eos an answer is the record up to its end-of-turn token."""
    prompts = [p for p in SHORT if 2 in p["greedy"]][:2]
    assert len(prompts) == 2
    frames, outcome = run_all(crumb, [Prompt(text=p["text"]) for p in prompts], ignore_eos=False)
    assert outcome.reasons == ["eos"] * len(prompts)
    expected = [p["greedy"][: p["greedy"].index(2) + 1] for p in prompts]
    assert [f.id for f in frames if type(f) is Token] == [i for ids in expected for i in ids]


CHAINS = [
    SamplingOptions(),
    SamplingOptions(temperature=0.9, top_p=0.9, seed=5, repetition_penalty=1.2),
    SamplingOptions(temperature=1.2, top_k=30, min_p=0.02, seed=6),
]


@pytest.mark.parametrize("chain", CHAINS)
def test_numpy_and_the_device_give_the_same_answers(crumb, chain: SamplingOptions) -> None:
    """Two prompts in one stream, drawn both ways, with everything that --json tells."""

    def answers(deferred: bool) -> tuple[list, np.ndarray]:
        frames, _ = run_all(
            crumb, [Prompt(text=p["text"]) for p in SHORT[:2]], deferred, sampling=chain,
            ignore_eos=False, max_tokens=6, top=3, telemetry=True,
        )  # fmt: skip
        tokens = [f for f in frames if type(f) is Token]
        told: list = [(t.pos, t.id, [i for i, _ in t.top]) for t in tokens]
        told += [f.s if type(f) is Text else f.reason for f in frames if type(f) in (Text, End)]
        return told, np.array([(t.entropy, t.logprob) for t in tokens])

    host, device = answers(False), answers(True)
    assert host[0] == device[0]
    assert np.abs(host[1] - device[1]).max() < 1e-4


@pytest.mark.parametrize("deferred", [False, True])
def test_telemetry_and_chunks_change_no_token(crumb, deferred: bool) -> None:
    prompt = next(p for p in PROMPTS if p["name"] == "chat_system")
    frames, _ = run_all(
        crumb, [Prompt(text=prompt["text"])], deferred, telemetry=True, chunk=7, max_tokens=12
    )
    tokens = [f for f in frames if type(f) is Token]
    assert [t.id for t in tokens] == prompt["greedy"][:12]
    assert tokens[0].entropy == pytest.approx(prompt["entropy_bits"], abs=TOLERANCE)
    assert all(t.gear is None for t in tokens)
