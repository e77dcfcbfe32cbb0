"""Calibrate the gears: derive thresholds from the entropies that a model shows.

Paper 003 section 4. Prompts are prefilled, and answered greedily, in the checkpoint's own
precision; entropies are measured as they are when gears are followed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from toastkit.errors import DataError, from_os_error
from toastkit.gears import calibration
from toastkit.gears.calibration import Thresholds, percentile

if TYPE_CHECKING:
    from toastkit.engine.engine import Engine
    from toastkit.stages.tokenize import Prompt, PromptTokenizer

ANSWER_TOKENS = 48  # per answer, at most; the paper calls its runs short and gives no number
QUANTILES = (10, 30, 50, 60, 80, 90)  # including those that the rules use


@dataclass(frozen=True)
class Calibration:
    """thresholds: of the model. samples: the entropies behind them in bits, by kind."""

    thresholds: Thresholds
    samples: dict[str, list[float]]

    def quantiles(self) -> list[str]:
        """One line per kind of samples."""
        lines = []
        for name, entropies in self.samples.items():
            rising = sorted(entropies)
            marks = ", ".join(f"p{rank} {percentile(rising, rank):.2f}" for rank in QUANTILES)
            lines.append(f"{name}: {len(rising)} entropies, {marks} bits")
        return lines


# Calibrations are prepared without the model, so that a bad prompt costs nothing, then run.
Measure = Callable[["Engine"], Calibration]


def from_prompt(tokenizer: PromptTokenizer, prompt: Prompt) -> Measure:
    """Section 4.1: from the logits after each token of a prompt. Raises DataError."""
    ids = tokenizer.encode(prompt)

    def measure(engine: Engine) -> Calibration:
        found = prompt_entropies(engine, ids)
        return Calibration(calibration.from_prefill(found, engine.vocab), {"prompt": found})

    return measure


def from_built_in(tokenizer: PromptTokenizer) -> Measure:
    """Section 4.2, as for MLX: from the answers to three prompts of mixed difficulty."""
    texts = calibration.CALIBRATION_PROMPTS
    return _of_answers(tokenizer, calibration.from_prompts, answers=texts)


def from_texts(tokenizer: PromptTokenizer, text: str) -> Measure:
    """Section 4.2, manually: from the answers to easy and to hard prompts.

    text: of their file, see calibration.parse_prompts. Raises DataError.
    """
    easy, hard = calibration.parse_prompts(text)
    return _of_answers(tokenizer, calibration.from_easy_and_hard, easy=easy, hard=hard)


def _of_answers(
    tokenizer: PromptTokenizer, derive: Callable[..., Thresholds], **texts: Sequence[str]
) -> Measure:
    """Thresholds from the answers to kinds of texts, each text a user's turn."""
    from toastkit.stages.tokenize import Prompt
    from toastkit.text.messages import user_messages

    def encoded(text: str) -> list[int]:
        return tokenizer.encode(Prompt(messages=user_messages(text)))

    prompts = {kind: list(map(encoded, some)) for kind, some in texts.items()}
    eos = tokenizer.tokenizer.eos_ids

    def measure(engine: Engine) -> Calibration:
        found: dict[str, list[float]] = {kind: [] for kind in prompts}
        for kind, some in prompts.items():
            for ids in some:
                found[kind] += answer_entropies(engine, ids, ANSWER_TOKENS, eos)
        return Calibration(derive(*found.values(), engine.vocab), found)

    return measure


def prompt_entropies(engine: Engine, ids: Sequence[int]) -> list[float]:
    """Entropies, in bits, of the logits after each token of a prompt, read with an empty cache.

    ids: at least one. Raises DataError for logits that are not numbers.
    """
    from toastkit.engine.perplexity import score

    # These are entropies of the predictions of each token: one more stands for the answer's first,
    # and is never read.
    parts = score(engine, [*ids, ids[-1]], window=len(ids))
    return [entropy for part in parts for entropy in part.entropies]


def answer_entropies(
    engine: Engine, ids: Sequence[int], count: int, eos: Collection[int]
) -> list[float]:
    """Entropies, in bits, of the logits of each step of a greedy answer.

    ids: the prompt. count: maximum tokens of the answer, which also ends with one of `eos`, and at
    the end of the model's context. Raises DataError for logits that are not numbers.
    """
    import mlx.core as mx

    from toastkit.gears.entropy_graph import entropy_bits

    if engine.context is not None:
        count = min(count, engine.context - len(ids) + 1)
    state, _ = engine.restore(None, ids)
    for _ in engine.reading(state, ids):
        pass
    found: list[float] = []
    while (logits := state.logits) is not None:
        token, bits, broken = mx.argmax(logits), entropy_bits(logits), mx.isnan(logits).any()
        mx.eval(token, bits, broken)
        if broken.item():
            raise DataError(
                "cannot calibrate: the model's logits are not numbers",
                hint="a wider --dtype may help; toast-model verify --values finds broken weights",
            )
        found.append(cast("float", bits.item()))
        if len(found) >= count or token.item() in eos:
            break
        engine.consume(state, token)
    mx.clear_cache()
    return found


def rule(thresholds: Thresholds) -> str:
    """How thresholds derive from entropies, in words."""
    c = calibration
    if thresholds.strategy == "prefill":
        most = math.log2(thresholds.vocab)
        return (
            f"of the n positive ones in rising order low is number {c.LOW_PERCENT / 100:g} n, high "
            f"the one after number {c.HIGH_PERCENT / 100:g} n, rounded down; moved to "
            f"{c.PREFILL_BAND:g} bits apart where they are closer; at most {c.LOW_CAP * most:.2f} "
            f"and {c.HIGH_CAP * most:.2f} bits ({c.LOW_CAP:g} and {c.HIGH_CAP:g} of log2 "
            f"{thresholds.vocab:,})"
        )
    if thresholds.strategy == "prompts":
        return (
            f"low is the median and at least {c.MIN_LOW:g} bits, high is {c.HIGH_BY_MEDIAN:g} "
            f"times that and at least {c.PROMPTS_BAND:g} bits above it"
        )
    return (
        f"p{c.EASY_PERCENT} of the easy prompts and p{c.HARD_PERCENT} of the hard ones, the lesser "
        f"is low; moved to {c.FILE_BAND:g} bits apart where they are closer"
    )


def forget(fingerprint: str) -> bool:
    """Remove a model's stored thresholds, valid or broken; return True if there were any. Raises
    CannotCreateError, IOFailure if they cannot be removed."""
    from toastkit.gears.thresholds import path

    file = path(fingerprint)
    try:
        file.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise from_os_error(error, f"cannot remove {file}", creating=True) from error
    return True
