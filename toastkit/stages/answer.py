"""All stages after tokenize in one process, as run by the daemon and by `toast-decode` on text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from toastkit.engine.step_engine import StepEngine
from toastkit.frames import Frame, Head
from toastkit.interrupts import Interrupt
from toastkit.sampling.sampling_options import SamplingOptions
from toastkit.stages.decode import decode
from toastkit.stages.detokenize import TextOptions, detokenize
from toastkit.stages.prefill import prefill
from toastkit.stages.run.one_process import LocalRuns
from toastkit.stages.run.settings import Outcome, ReadOptions, StepOptions
from toastkit.stages.sample import (
    DrawOptions,
    LateSampler,
    host_sampler,
    sample,
    sample_deferred,
)
from toastkit.stages.streams import Stage, compose
from toastkit.text.tokenizer import Tokenizer
from toastkit.threads import in_background

if TYPE_CHECKING:
    from toastkit.experts.experts_options import ExpertsOptions
    from toastkit.stages.follow import GearSettings


class AnswerOptions(NamedTuple):
    """Settings of each stage. gears: of the model, None if it has none. telemetry: token frames
    carry the entropy."""

    draw: DrawOptions
    read: ReadOptions = ReadOptions()
    step: StepOptions = StepOptions()
    text: TextOptions = TextOptions()
    gears: GearSettings | None = None
    telemetry: bool = False

    @property
    def follow(self) -> bool:
        """True if the model shifts gears by entropy."""
        return self.gears is not None and self.gears.options.mode == "auto"


def draws_on_device(device: str, options: AnswerOptions, experts: ExpertsOptions | None) -> bool:
    """True if tokens should be sampled where the logits are. A GPU computes while the host
    continues. A CPU does not, and numpy samples and takes the entropy faster on it, except for the
    plain argmax with nothing else wanted of a step. device: "cpu" or "gpu"."""
    waits = experts is not None and experts.threshold is not None
    plain = options.draw.sampling.temperature == 0
    return device == "gpu" or (plain and not (options.telemetry or options.follow or waits))


def answer(
    frames: Iterable[Frame],
    tokenizer: Tokenizer,
    engine_for: Callable[[Head], StepEngine],
    runs: LocalRuns,
    options: AnswerOptions,
    interrupt: Interrupt,
    outcome: Outcome,
) -> Iterator[Frame]:
    """The frames of the whole pipeline, token by token, with one synchronisation per token.

    frames: head and tokens of each run, as from `tokenize`. tokenizer: of the model.
    engine_for(head): the engine, called once the session is open and the prompt is known. runs:
    whether it is deferred decides where tokens are sampled; they are the same tokens.

    Without telemetry or gears the entropy is not computed, so the plain path does no needless work.
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
        *_sampling(options, runs, tokenizer),
        partial(
            detokenize, tokenizer_for=lambda head: tokenizer,
            options=options.text, feed=runs.feed, outcome=outcome,
        ),
    ]  # fmt: skip
    return compose(frames, *stages)


def xtc_special_ids(chain: SamplingOptions, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens that XTC never removes: newline and the end-of-turn tokens, as in mlx_lm."""
    if chain.xtc_probability == 0:
        return ()
    return (*tokenizer.encode("\n", add_special=False), *tokenizer.eos_ids)


def _sampling(options: AnswerOptions, runs: LocalRuns, tokenizer: Tokenizer) -> list[Stage]:
    """The stages between logits and tokens: on the device, or with numpy."""
    draw, gears = options.draw, options.gears
    special = xtc_special_ids(draw.sampling, tokenizer)
    new_sampler: Any
    if runs.deferred:
        from toastkit.engine.device_sampler import DeviceSampler as new_sampler
    else:
        new_sampler = partial(LateSampler, in_background(host_sampler, "numpy"))

    def sampler_for(head: Head) -> tuple[Any, DrawOptions]:
        return new_sampler(draw.sampling, head.vocab, special), draw

    shared: dict[str, Any] = {"sampler_for": sampler_for, "feed": runs.feed}
    drawing: Stage = partial(sample_deferred if runs.deferred else sample, **shared)
    if gears is None and not options.telemetry:
        return [drawing]
    from toastkit.stages import gear

    if gears is not None and options.follow:
        if not runs.deferred:
            return [partial(gear.gear, rules=gears.rules), drawing]
        follower = gear.Follower(gears.rules)
        following = partial(gear.followed, follower=follower)
        drawing = partial(sample_deferred, **shared, follower=follower)
        return [gear.entropy_on_device, following, drawing]
    stages = [drawing]
    if options.telemetry:
        stages = [gear.entropy_on_device if runs.deferred else gear.measured, drawing]
    fixed = None if gears is None else gears.options.fixed
    return stages if fixed is None else [*stages, partial(gear.in_gear, gear=fixed)]
