"""toast-decode: text in, text out; frames in, frames out."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import click

from toastkit.client.output import write_text
from toastkit.commands import cli, options, policy_flags, run_reports
from toastkit.commands.sizes import IntegerRange
from toastkit.errors import UsageError
from toastkit.frames import End, Frame, Text, Token, starts_frames

ONLY_TEXT = (
    "session", "system", "messages", "raw", "tools", "template_arg", "no_generation_prompt",
    "truncate", "each_line", "chunk", "fork", "require_hit", *options.SAMPLING_NAMES, "logit_bias",
    "ban", "seed", "ignore_eos", "top", "stop", "keep_special", "echo", "as_json", "no_newline",
    "fail_on_length", "prefill_experts",
)  # fmt: skip
ONLY_FRAMES = ("greedy", "force", "steps", "inline")


@cli.command("decode")
@options.prompt
@options.model("crumb; of frames, the stream's")
@options.session
@options.prompting
@options.reading
@options.sampling
@options.max_tokens
@options.stop
@options.keep_special
@options.echo
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object per token.")
@options.no_newline
@options.fail_on_length
@click.option("--greedy", is_flag=True, help="Frames: take the most likely token, need no sampler.")
@click.option(
    "--force",
    metavar="FILE|-",
    help="Frames: follow the token ids of a file, or of stdin's frames.",
)
@click.option("--steps", type=IntegerRange(1), metavar="N", help="Frames: stop after N steps.")
@options.inline
@policy_flags.policies
@options.engine
@options.no_daemon
def decode(prompt: tuple[str, ...], **flags) -> int:
    options.settle_prompting(flags)
    cli.typed_wins(flags, "as_json", "no_newline")
    policy_flags.reject_unused(flags)
    first = _first_byte(prompt, flags)
    if starts_frames(first):
        cli.exclusive(flags, "greedy", "force")
        _refuse_text(prompt, flags)
        return _filter(flags, first)
    cli.refuse_together("is for frames, but there are none on stdin", *ONLY_FRAMES)
    if flags["as_json"]:
        cli.refuse_together("is for text, not with --json", "no_newline")
    else:
        cli.refuse_together("needs --json, which shows them", "top")
    if flags["require_hit"] and flags["session"] is None and flags["fork"] is None:
        raise UsageError("--require-hit needs a --session or a --fork")
    return _answer(prompt, flags, first)


def _refuse_text(prompt: tuple[str, ...], flags: dict[str, Any]) -> None:
    """Raise UsageError for what makes no sense with frames in and out."""
    if prompt:
        raise UsageError("stdin holds frames: there is no room for a prompt")
    cli.refuse_together("is for text, but stdin holds frames", *ONLY_TEXT)
    if not flags["greedy"] and flags["force"] is None:
        why = "is not for the middle of a pipe: give it to toast-entropy-gear"
        cli.refuse_together(why, *policy_flags.TELEMETRY_NAMES)


def _first_byte(prompt: tuple[str, ...], flags: dict[str, Any]) -> bytes:
    """The byte of stdin that tells frames from text, b"" if stdin is not read."""
    from toastkit.commands.stdin import first_byte, holds_prompt

    if flags["messages"] is None and holds_prompt(prompt, flags["tools"]):
        return first_byte()
    return b""


def _filter(flags: dict[str, Any], first: bytes) -> int:
    """Frames in, frames out: the middle of a pipeline."""
    from toastkit.commands.engines import Engines
    from toastkit.commands.pipes import run_filter
    from toastkit.stages.decode import decode as stage
    from toastkit.stages.run.own_tokens import ForcedFeed, GreedyFeed, forced_ids
    from toastkit.stages.run.pipe_decode import DecodeEnd
    from toastkit.stages.run.settings import StepOptions

    options.let_stream_name_model(flags)
    own: Any = None
    if flags["greedy"]:
        own = GreedyFeed()
    elif flags["force"] is not None:
        own = ForcedFeed(None if flags["force"] == "-" else forced_ids(flags["force"]))
    settings = StepOptions(flags["max_tokens"], flags["steps"])
    follower = None
    if flags["gear"] == "auto":
        from toastkit.stages.gear import Follower, followed

        follower = Follower(policy_flags.gear_rules(flags))
    engines = Engines(flags, prompts=False)

    def build(frames, signals):
        engines.heed(signals)
        runs = DecodeEnd(signals, own, flags["inline"] or own is not None, follower)
        if follower is not None:
            frames = followed(frames, follower)
        if isinstance(own, ForcedFeed):
            frames = own.listen(frames)
        made = stage(frames, engines, runs, settings, signals)
        return run_reports.told(made) if flags["verbose"] else made

    try:
        return run_filter(build, first, heeds=flags["force"] != "-")
    finally:
        engines.close()


def _answer(prompt: tuple[str, ...], flags: dict[str, Any], first: bytes) -> int:
    """Text in, text out: all stages in this process."""
    from toastkit.commands.detokenize import TextWriter, check_length
    from toastkit.commands.prompt import prompt_tokenizer, prompts
    from toastkit.interrupts import Signals
    from toastkit.model.config import sampling_defaults
    from toastkit.stages.run.settings import Outcome

    wanted = prompts(prompt, flags, first)
    if not flags["each_line"]:
        wanted = iter(list(wanted))  # read before the model is loaded: a bad prompt costs nothing
    signals = Signals()
    tokenizer = prompt_tokenizer(flags, later=True)
    outcome = Outcome()
    put = JsonWriter() if flags["as_json"] else TextWriter(not flags["no_newline"])
    defaults = sampling_defaults(tokenizer.files)
    options.refuse_idle(flags, defaults)
    chain = options.sampling_options(flags, defaults, None)
    chain.validate(tokenizer.vocab)
    # Opened before the tokenizer is read: another thread prefaults its pages meanwhile.
    engine, here = _open(tokenizer, flags, signals)
    with closing(engine):
        stage = _stages(wanted, tokenizer, flags, chain, engine, here, signals, outcome)
        signals.graceful = True
        try:
            with closing(run_reports.told(stage) if flags["verbose"] else stage) as frames:
                for frame in frames:
                    put(frame)
        except BrokenPipeError:
            if signals:
                return signals.code
            raise
    return signals.code or check_length(outcome, flags["fail_on_length"])


def _open(tokenizer, flags, signals) -> tuple[Any, bool]:
    """The engine, and whether it is this process's own, which is not loaded yet."""
    from toastkit.commands.engines import attach, open_unloaded

    policies = policy_flags.policy_options(flags)
    if policies.gives_up:
        signals.on_memory_warning()
    if not policies.changes_results:
        engine = attach(flags, lambda: tokenizer.fingerprint)
        if engine is not None:
            return engine, False
    return open_unloaded(tokenizer.files, flags, policies, signals), True


def _stages(wanted, tokenizer, flags, chain, engine, here, signals, outcome):
    """All stages over an engine, according to the flags. here: as from _open."""
    from toastkit.commands.engines import load
    from toastkit.commands.progress import read_options
    from toastkit.descriptors import reader_gone
    from toastkit.engine import device
    from toastkit.stages.answer import AnswerOptions, answer, draws_on_device
    from toastkit.stages.detokenize import TextOptions
    from toastkit.stages.run.one_process import LocalRuns
    from toastkit.stages.sample import DrawOptions
    from toastkit.stages.tokenize import tokenize

    experts = policy_flags.policy_options(flags).experts
    settings = AnswerOptions(
        read=read_options(flags),
        draw=DrawOptions(
            chain, flags["top"], flags["max_tokens"], flags["ignore_eos"], flags["as_json"]
        ),
        text=TextOptions(flags["stop"], flags["keep_special"], flags["echo"]),
        telemetry=flags["as_json"],
        gears=policy_flags.gear_settings(flags),
    )
    # The logits of a daemon are on the host.
    deferred = here and draws_on_device(device.start(flags["device"]), settings, experts)
    runs = LocalRuns(flags["session"], signals, reader_gone, deferred)
    unloaded = [engine] if here else []

    def engine_for(head: Any) -> Any:
        while unloaded:
            load(unloaded.pop(), flags)
        return engine

    frames = tokenize(wanted, tokenizer, rated=settings.follow)
    return answer(frames, tokenizer.tokenizer, engine_for, runs, settings, signals, outcome)


class JsonWriter:
    """Write a JSON object per token, with the text that became certain with it, and one at the end
    of each answer."""

    def __init__(self) -> None:
        self._text = ""

    def __call__(self, frame: Frame) -> None:
        if isinstance(frame, Text):
            self._text += frame.s
        elif isinstance(frame, Token):
            self._write(
                {
                    "pos": frame.pos, "id": frame.id, "text": self._text,
                    "logprob": frame.logprob, "entropy": frame.entropy,
                    **({"gear": frame.gear} if frame.gear else {}),
                    **({"top": frame.top} if frame.top else {}),
                }
            )  # fmt: skip
        elif isinstance(frame, End):
            told = {k: frame.extra[k] for k in run_reports.COUNTED if k in frame.extra}
            self._write({"end": frame.reason, "n": frame.n, "text": self._text, **told})

    def _write(self, value: dict) -> None:
        self._text = ""
        write_text(json.dumps(value, ensure_ascii=False) + "\n")


def main() -> None:
    cli.run(decode)
