"""All stages in one process: prompts in, text and token frames out. What `toast-decode` runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from toastkit.engine.engine import Engine
from toastkit.frames import Frame, Head
from toastkit.gears.monitor import MonitorOptions
from toastkit.stages.decode import decode
from toastkit.stages.detokenize import TextOptions, detokenize
from toastkit.stages.gear import entropy_on_device, gear, gear_of_tokens
from toastkit.stages.local import LocalRuns
from toastkit.stages.options import Interrupt, Outcome, ReadOptions, StepOptions
from toastkit.stages.prefill import prefill
from toastkit.stages.sample import DrawOptions, sample, sample_deferred
from toastkit.stages.streams import Stage, compose
from toastkit.stages.tokenize import Prompt, PromptTokenizer, tokenize


@dataclass(frozen=True)
class AnswerOptions:
    """Settings of each stage. telemetry: entropy and gear are wanted in the token frames.
    xtc_special_ids: tokens that XTC never removes."""

    read: ReadOptions = ReadOptions()
    step: StepOptions = StepOptions()
    draw: DrawOptions | None = None
    text: TextOptions = TextOptions()
    monitor: MonitorOptions = field(default_factory=MonitorOptions)
    telemetry: bool = False
    xtc_special_ids: tuple[int, ...] = ()


def answer(
    prompts: Iterable[Prompt],
    tokenizer: PromptTokenizer,
    engine_for: Callable[[Head], Engine],
    runs: LocalRuns,
    options: AnswerOptions,
    interrupt: Interrupt,
    outcome: Outcome,
) -> Iterator[Frame]:
    """The frames of the whole pipeline, token by token, with one synchronisation a token.

    engine_for(head): the engine, called once the session is open and the prompt is known.
    runs: whether it is deferred decides where tokens are drawn; they are the same tokens.

    Without telemetry the entropy is not computed: the plain path does nothing that it need not.
    """

    stages: list[Stage] = [
        partial(
            prefill, engine_for=engine_for, runs=runs,
            options=options.read, interrupt=interrupt,
        ),
        partial(
            decode, engine_for=engine_for, runs=runs,
            options=options.step, interrupt=interrupt,
        ),
        *_sampling(options, runs),
        partial(
            detokenize, tokenizer_for=lambda head: tokenizer.tokenizer,
            options=options.text, feed=runs.feed, outcome=outcome,
        ),
    ]  # fmt: skip
    return compose(tokenize(prompts, tokenizer), *stages)


def _sampling(options: AnswerOptions, runs: LocalRuns) -> list[Stage]:
    """The stages between logits and tokens: on the device, or with numpy."""
    assert options.draw is not None
    draw = options.draw

    new_sampler: Any
    if runs.deferred:
        from toastkit.sampling.device import DeviceSampler as new_sampler
    else:
        from toastkit.sampling.host import HostSampler as new_sampler

    def sampler_for(head: Head) -> tuple[Any, DrawOptions]:
        return new_sampler(draw.sampling, head.vocab, options.xtc_special_ids), draw

    telemetry = options.telemetry
    if not runs.deferred:
        drawing: Stage = partial(sample, sampler_for=sampler_for, feed=runs.feed)
        return [partial(gear, options=options.monitor), drawing] if telemetry else [drawing]
    drawing = partial(sample_deferred, sampler_for=sampler_for, feed=runs.feed)
    if not telemetry:
        return [drawing]
    return [entropy_on_device, drawing, partial(gear_of_tokens, options=options.monitor)]
