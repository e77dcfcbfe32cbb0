"""Perplexity against numpy in double precision, against mlx_lm's own evaluation, and against the
figures that were recorded with the embedded model by an independent implementation."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.model.checkpoints import open_model, tied_llama, write_quantised
from toastkit.engine.engine import CHUNK
from toastkit.engine.perplexity import LOGITS_BYTES, Totals, default_chunk, score, timed, windows
from toastkit.errors import DataError
from toastkit.model.locate import locate
from toastkit.text.tokenizer import Tokenizer

TEXTS = Path(__file__).parents[1] / "texts"
# By transformers in float32, whole texts, windows of 1,024: tests/reference.json was made with it.
RECORDED = {
    "story": (21765, 1.7324, 0.7764),
    "arith": (13301, 1.5628, 0.6466),
    "chat": (15370, 1.4081, 0.4563),
}
WHOLE_TEXTS = "TOASTKIT_WHOLE_TEXTS"  # set: score them whole, a minute each


def ids_of(domain: str, count: int | None = None) -> list[int]:
    text = (TEXTS / f"{domain}.txt").read_text(encoding="utf-8")
    return Tokenizer(locate("crumb")).encode_prompt(text, templated=False)[:count]


def scored(engine, ids: list[int], window: int, chunk: int | None = None) -> tuple:
    """Positions, log-probabilities and entropies of a whole text."""
    parts = list(score(engine, ids, window, chunk))
    positions = [p.position + n for p in parts for n in range(len(p.ids))]
    assert [i for p in parts for i in p.ids] == ids[1:]
    return (
        positions,
        [x for p in parts for x in p.logprobs],
        [x for p in parts for x in p.entropies],
    )


def expected(logits, targets: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """(log-probabilities in nats, entropies in bits) of float64 (n, vocab), by numpy."""
    values = np.array(logits, np.float64)
    values -= values.max(axis=1, keepdims=True)
    values -= np.log(np.exp(values).sum(axis=1, keepdims=True))
    entropies = -(np.exp(values) * values).sum(axis=1) / math.log(2)
    return values[np.arange(len(targets)), targets], entropies


class Scripted:
    """An engine that gives the same logits (vocab,) after every token."""

    device = "cpu"

    def __init__(self, logits) -> None:
        self.logits = mx.array(logits, mx.float32)
        self.vocab = len(logits)

    def new_cache(self) -> list:
        return []

    def decide(self, wish) -> bool:
        return False

    def score(self, ids, cache: list):
        return mx.broadcast_to(self.logits, (len(ids), self.vocab))


# ----------------------------------------------------------------------------------- the arithmetic


@pytest.mark.parametrize(("count", "size"), [(2, 1), (2, 8), (9, 8), (10, 8), (17, 8), (50, 7)])
def test_windows_predict_every_token_once(count: int, size: int) -> None:
    ids = list(range(count))
    parts = list(windows(ids, size))
    assert [i for _, part in parts for i in part[1:]] == ids[1:]
    assert all(part[0] == start and 2 <= len(part) <= size + 1 for start, part in parts)
    assert all(len(part) == size + 1 for _, part in parts[:-1])


def test_nothing_to_predict() -> None:
    assert list(windows([], 8)) == list(windows([5], 8)) == []


def test_a_large_vocabulary_is_summed_accurately() -> None:
    logits = np.random.default_rng(1).normal(0, 0.3, 151_936).astype(np.float32)
    (part,) = score(Scripted(logits), [1, 2, 151_935], 8)
    logprobs, entropies = expected([logits, logits], [2, 151_935])
    assert np.abs(part.logprobs - logprobs).max() < 3e-6
    assert np.abs(part.entropies - entropies).max() < 6e-6


def test_tokens_that_are_ruled_out() -> None:
    """They add nothing to the entropy; one that comes all the same is infinitely unlikely."""
    (part,) = score(Scripted([0.0, 0.0, -math.inf]), [0, 1, 2], 8)
    assert part.logprobs == pytest.approx([-math.log(2), -math.inf])
    assert part.entropies == pytest.approx([1.0, 1.0])
    totals = Totals()
    totals.add(part)
    assert totals.perplexity == math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_numbers(bad: float) -> None:
    with pytest.raises(DataError, match="the model's logits for token 1 are not numbers"):
        list(score(Scripted([0.0, bad, 1.0]), [0, 0], 8))


def test_an_id_outside_the_vocabulary() -> None:
    with pytest.raises(DataError, match="token 3 is outside the vocabulary of 3"):
        list(score(Scripted([0.0, 0.0, 0.0]), [0, 3], 8))


def test_totals() -> None:
    totals, other = Totals(), Totals(tokens=1, nats=4.0, entropy=2.0, bytes=6, seconds=0.5)
    for part in timed(score(Scripted([0.0] * 16), [1] * 9, 4), totals):
        assert part.ids
    assert (totals.tokens, totals.bits_per_byte) == (8, None)
    assert totals.perplexity == pytest.approx(16) and totals.mean_entropy == pytest.approx(4)
    assert totals.speed == totals.tokens / totals.seconds
    totals.bytes = 10
    nats = totals.nats
    totals.include(other)
    assert (totals.tokens, totals.bytes) == (9, 16) and totals.nats == nats + 4
    assert totals.loss == totals.nats / 9
    assert totals.bits_per_byte == pytest.approx(totals.nats / math.log(2) / 16)
    assert Totals(tokens=1, nats=1e6).perplexity == math.inf
    assert math.isnan(Totals().perplexity)


def test_the_logits_of_a_pass_are_bounded() -> None:
    small, large, huge = Scripted([0.0]), Scripted([0.0]), Scripted([0.0])
    large.vocab, huge.vocab = 1_000_000, LOGITS_BYTES
    assert default_chunk(small) == CHUNK["cpu"]
    assert default_chunk(large) * 4 * large.vocab <= LOGITS_BYTES < default_chunk(large) * 8e6
    assert default_chunk(huge) == 1


def test_slices_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = np.random.default_rng(2).normal(0, 3, 1000)
    ids = [(61 * n) % 1000 for n in range(12)]
    (whole,) = score(Scripted(logits), ids, 32)
    monkeypatch.setattr("toastkit.engine.perplexity.SLICE_BYTES", 3 * 4000)
    (part,) = score(Scripted(logits), ids, 32)
    assert part == whole


# ----------------------------------------------------------------------------------- random weights


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, mlx_started):
    """An Engine for a small random llama."""
    path = tied_llama(tmp_path_factory.mktemp("models") / "llama")
    return open_model(path, native="auto", native_exact=True)


def test_scores_are_those_of_the_logits(small) -> None:
    ids = [(37 * n + 5) % 4096 for n in range(100)]
    positions, logprobs, entropies = scored(small, ids, 32)
    assert positions == list(range(1, 100))
    for start in (0, 32, 64, 96):
        part = ids[start : start + 33]
        logits = small.score(part[:-1], small.new_cache())
        wanted = expected(logits, part[1:])
        here = slice(start, start + len(part) - 1)
        assert np.abs(np.array(logprobs[here]) - wanted[0]).max() < 1e-5
        assert np.abs(np.array(entropies[here]) - wanted[1]).max() < 1e-5


@pytest.mark.parametrize("chunk", [1, 7, 32, 1000])
def test_chunks_change_nothing(small, chunk: int) -> None:
    ids = [(53 * n + 1) % 4096 for n in range(70)]
    for mine, whole in zip(scored(small, ids, 32, chunk), scored(small, ids, 32), strict=True):
        assert np.abs(np.array(mine) - np.array(whole)).max() < 1e-5


# -------------------------------------------------------------------------------------------- crumb


@pytest.mark.parametrize("domain", RECORDED)
def test_the_beginnings_of_the_texts(crumb, domain: str) -> None:
    """Perplexity and entropy are numpy's; chunks hand the state of recurrent layers on."""
    ids = ids_of(domain, 41)
    _, logprobs, entropies = scored(crumb, ids, 24, 9)
    wanted = [
        expected(crumb.score(part[:-1], crumb.new_cache()), part[1:])
        for _, part in windows(ids, 24)
    ]
    assert math.fsum(logprobs) == pytest.approx(sum(w[0].sum() for w in wanted), abs=1e-3)
    assert math.fsum(entropies) == pytest.approx(sum(w[1].sum() for w in wanted), abs=1e-3)
    assert 1 < math.exp(-math.fsum(logprobs) / 40) < 12  # it knows such texts


@pytest.mark.skipif(WHOLE_TEXTS not in os.environ, reason=f"minutes of work: set {WHOLE_TEXTS}")
@pytest.mark.parametrize("domain", RECORDED)
def test_whole_texts(crumb, domain: str) -> None:
    tokens, perplexity, entropy = RECORDED[domain]
    totals = Totals()
    for part in score(crumb, ids_of(domain), 1024):
        totals.add(part)
    assert totals.tokens == tokens
    assert totals.perplexity == pytest.approx(perplexity, rel=5e-3)
    assert totals.mean_entropy == pytest.approx(entropy, abs=5e-3)


@pytest.fixture(scope="module")
def quantised(crumb, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with four bits a weight, in the layout of mlx_lm.convert."""
    weights = dict(tree_flatten(crumb.model.parameters()))
    path = tmp_path_factory.mktemp("quantised") / "crumb4"
    return write_quantised(path, crumb.config.raw, weights, 64)


def test_a_quantised_copy_agrees_with_mlx_lm(crumb, quantised: Path) -> None:
    """The perplexity that mlx_lm's own evaluation finds, on the same windows."""
    from mlx_lm.perplexity import eval_ppl
    from mlx_lm.utils import load_model

    ids = ids_of("story", 33)
    mine = math.exp(-np.mean(scored(open_model(quantised), ids, 32)[1]))
    model, _ = load_model(quantised)
    model.set_dtype(mx.float32)
    theirs, _ = eval_ppl(model, mx.array([part for _, part in windows(ids, 32)]))
    assert mine == pytest.approx(theirs, rel=1e-5)
    plain = math.exp(-np.mean(scored(crumb, ids, 32)[1]))
    assert abs(mine - plain) > 1e-3  # it is another model, and no worse than a little
    assert mine == pytest.approx(plain, rel=0.25)


def test_gears_of_a_quantised_copy_are_told_and_not_run(quantised: Path, toast, tmp_path) -> None:
    file = tmp_path / "story.txt"
    file.write_text((TEXTS / "story.txt").read_text(encoding="utf-8")[:200], encoding="utf-8")
    arguments = ["-m", quantised, "--dtype", "float32", "--context", "16", file]
    plain = toast("perplexity", *arguments)
    assert (plain.returncode, plain.stderr) == (0, b"")
    watched = toast("perplexity", "--gear", "auto", *arguments)
    (said,) = watched.stderr.decode().splitlines()
    assert said.endswith("is quantised already: gears are shown and not shifted")
    figures, _, gears = watched.stdout.decode().partition(" tokens/s, ")
    assert figures.rpartition(",")[0] == plain.stdout.decode().rpartition(",")[0]
    assert re.fullmatch(r"gears would be low \d+% mid \d+% high \d+%, \d+ shifts?\n", gears)
    found = toast("perplexity", "-q", "--gear", "auto", "--json", *arguments)
    *tokens, total = found.stdout.splitlines()
    assert json.loads(total)["mean_bits"] is None and json.loads(tokens[0])["gear"] == "high"
    high = toast("perplexity", "-q", "--gear", "high", *arguments)
    assert high.stdout.endswith(b" tokens/s, high gear\n")
    low = toast("perplexity", "--gear", "low", *arguments)
    assert (low.returncode, low.stdout) == (64, b"")
    assert b"--gear low: " in low.stderr and b" is quantised already" in low.stderr
