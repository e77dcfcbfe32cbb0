"""What calibration measures, held against numpy, against the pipeline and against the rules."""

from __future__ import annotations

import json
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from tests.model.service_driver import Driver, user
from toastkit.errors import DataError
from toastkit.frames import Token
from toastkit.gears import calibration
from toastkit.gears.monitor import EntropyMeter
from toastkit.gears.thresholds import path, save
from toastkit.interrupts import Interrupt
from toastkit.model.config import load_config
from toastkit.sampling.sampling_options import SamplingOptions
from toastkit.stages import calibrate as stage
from toastkit.stages.answer import AnswerOptions, answer
from toastkit.stages.calibrate import answer_entropies, prompt_entropies
from toastkit.stages.run.one_process import LocalRuns
from toastkit.stages.run.settings import Outcome
from toastkit.stages.sample import DrawOptions
from toastkit.stages.tokenize import Prompt, PromptOptions, PromptTokenizer, tokenize

CLOSE = 2e-4  # bits, between two ways to compute the same


@pytest.fixture(scope="module")
def tokenizer(crumb) -> PromptTokenizer:
    return PromptTokenizer(crumb.files, load_config(crumb.files), PromptOptions())


@pytest.fixture
def greedy(crumb, tokenizer: PromptTokenizer, homes) -> Callable[..., list[Token]]:
    """greedy(text, count): the token frames of the pipeline's answer in one process."""

    def run(text: str, count: int) -> list[Token]:
        sampling = SamplingOptions(temperature=0)
        options = AnswerOptions(draw=DrawOptions(sampling, max_tokens=count), telemetry=True)
        frames = answer(
            tokenize([Prompt(messages=[user(text)])], tokenizer), tokenizer.tokenizer,
            lambda head: crumb, LocalRuns(None, Interrupt()), options, Interrupt(), Outcome(),
        )  # fmt: skip
        return [frame for frame in frames if type(frame) is Token]

    return run


def ids_of(tokenizer: PromptTokenizer, text: str) -> list[int]:
    return tokenizer.encode(Prompt(messages=[user(text)]))


# --------------------------------------------------------------------------------- what is measured


def test_a_prompt_has_an_entropy_after_each_token(crumb, tokenizer: PromptTokenizer) -> None:
    ids = ids_of(tokenizer, "What is 3 + 4? Show your work.")
    rows = np.array(crumb.score(ids, crumb.new_cache()))
    found = prompt_entropies(crumb, ids)
    assert found == pytest.approx([EntropyMeter(len(row)).bits(row) for row in rows], abs=CLOSE)
    assert len(found) == len(ids) and max(found) > 1
    assert prompt_entropies(crumb, ids[:1]) == pytest.approx(found[:1], abs=CLOSE)


@pytest.mark.parametrize("text", ["Who are you?", "Tell me a story."])
def test_an_answer_has_the_entropies_that_gears_are_chosen_by(
    crumb, tokenizer: PromptTokenizer, greedy, text: str
) -> None:
    tokens = greedy(text, 16)
    eos = tokenizer.tokenizer.eos_ids
    found = answer_entropies(crumb, ids_of(tokenizer, text), 16, eos)
    assert found == pytest.approx([token.entropy for token in tokens], abs=CLOSE)
    assert (len(found) < 16) == (tokens[-1].id in eos) == (text == "Who are you?")


def test_an_answer_ends_in_time(crumb, tokenizer: PromptTokenizer, greedy, monkeypatch) -> None:
    ids = ids_of(tokenizer, "Tell me a story.")
    third = greedy("Tell me a story.", 3)[-1].id
    assert len(answer_entropies(crumb, ids, 8, [third])) == 3
    assert len(answer_entropies(crumb, ids, 1, [])) == 1
    monkeypatch.setattr(crumb, "context", len(ids) + 1)
    assert len(answer_entropies(crumb, ids, 8, [])) == 2
    monkeypatch.setattr(crumb, "context", len(ids))
    assert len(answer_entropies(crumb, ids, 8, [])) == 1


def test_logits_that_are_not_numbers(crumb, tokenizer: PromptTokenizer, monkeypatch) -> None:
    ids = ids_of(tokenizer, "Hi")
    broken = mx.full((crumb.vocab,), float("nan"))
    monkeypatch.setattr(crumb, "step", lambda token, cache: broken)
    with pytest.raises(DataError, match="logits are not numbers"):
        answer_entropies(crumb, ids, 8, [])
    monkeypatch.setattr(crumb, "score", lambda ids, cache: mx.stack([broken] * len(ids)))
    with pytest.raises(DataError, match="are not numbers"):
        prompt_entropies(crumb, ids)


# ----------------------------------------------------------------------------------- what follows


def test_strategies_measure_what_their_rules_want(
    crumb, tokenizer: PromptTokenizer, monkeypatch
) -> None:
    monkeypatch.setattr(stage, "ANSWER_TOKENS", 5)
    prompt = Prompt(messages=[user("What is 3 + 4?")])
    found = stage.from_prompt(tokenizer, prompt)(crumb)
    entropies = prompt_entropies(crumb, tokenizer.encode(prompt))
    assert found.samples == {"prompt": entropies}
    assert found.thresholds == calibration.from_prefill(entropies, crumb.vocab)

    found = stage.from_built_in(tokenizer)(crumb)
    eos = tokenizer.tokenizer.eos_ids
    answers = [
        answer_entropies(crumb, ids_of(tokenizer, text), 5, eos)
        for text in calibration.CALIBRATION_PROMPTS
    ]
    assert found.samples == {"answers": sum(answers, [])} and all(map(len, answers))
    assert found.thresholds == calibration.from_prompts(sum(answers, []), crumb.vocab)

    easy, hard = list(calibration.CALIBRATION_PROMPTS[:2]), [calibration.CALIBRATION_PROMPTS[2]]
    found = stage.from_texts(tokenizer, json.dumps({"easy": easy, "hard": hard}))(crumb)
    assert found.samples == {"easy": sum(answers[:2], []), "hard": answers[2]}
    both = calibration.from_easy_and_hard(sum(answers[:2], []), answers[2], crumb.vocab)
    assert found.thresholds == both


def test_bad_prompts_cost_no_model(tokenizer: PromptTokenizer) -> None:
    with pytest.raises(DataError, match="empty prompt"):
        stage.from_prompt(tokenizer, Prompt(""))
    with pytest.raises(DataError, match="cannot read calibration prompts: not JSON"):
        stage.from_texts(tokenizer, "easy: Hi")


def test_what_is_said_of_a_calibration() -> None:
    entropies = [float(n) for n in range(11)]
    found = stage.Calibration(calibration.from_prefill(entropies, 4096), {"prompt": entropies})
    assert found.quantiles() == [
        "prompt: 11 entropies, p10 1.00, p30 3.00, p50 5.00, p60 6.00, p80 8.00, p90 9.00 bits"
    ]
    said = stage.rule(found.thresholds)
    assert "low is number 0.3 n, high the one after number 0.6 n" in said
    assert "0.72 and 1.44 bits (0.06 and 0.12 of log2 4,096)" in said
    assert "high is 2.5 times that" in stage.rule(calibration.from_prompts(entropies, 4096))
    both = calibration.from_easy_and_hard(entropies, entropies, 4096)
    assert "p80 of the easy prompts" in stage.rule(both)


def test_thresholds_are_forgotten_once(homes) -> None:
    mark = "ab" * 16
    assert stage.forget(mark) is False
    save(mark, calibration.from_prompts([1.0] * 5, 4096))
    path(mark).write_text("{")  # broken ones too
    assert stage.forget(mark) is True and not path(mark).exists()
    assert stage.forget(mark) is False


# ------------------------------------------------------------------------------- no gears, no gear


def test_where_no_gear_runs_none_is_told(crumb, greedy) -> None:
    """Neither by the one process nor by a daemon, whose model has no gears; the entropy is."""
    tokens = greedy("Hello.", 8)
    told = Driver(crumb).ask([user("Hello.")], max_tokens=8, temperature=0).channel.all_of("token")
    assert [t.gear for t in tokens] == [None] * 8 and not any("gear" in t for t in told)
    assert [t["entropy"] for t in told] == pytest.approx([t.entropy for t in tokens], abs=CLOSE)
