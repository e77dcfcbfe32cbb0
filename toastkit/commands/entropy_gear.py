"""toast-entropy-gear: entropy, rolling mean and gear beside the logits; calibration."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from toastkit.commands import cli, options
from toastkit.commands.policy_flags import TELEMETRY_NAMES, gear_rules, telemetry
from toastkit.errors import NoInputError, ToastError, did_you_mean
from toastkit.native.starting import NativeOptions
from toastkit.text.exact_numbers import counted
from toastkit.text.terminal import shown

if TYPE_CHECKING:
    from pathlib import Path

    from toastkit.stages.calibrate import Calibration, Measure
    from toastkit.stages.tokenize import PromptTokenizer

PREFILL, PROMPTS, OFF, STDIN = "prefill", "prompts", "off", "-"
WORDS = (PREFILL, PROMPTS, OFF)
MEASURE_NAMES = ("device", "dtype", "kv_bits", *NativeOptions._fields)
CALIBRATION_NAMES = ("model", "raw", *MEASURE_NAMES)


@cli.command("entropy-gear")
@telemetry
@click.option("--explain", is_flag=True, help="Say on stderr what decides, and how it went.")
@click.option(
    "--calibrate", "strategy", metavar="prefill|prompts|FILE|off", allow_from_autoenv=False,
    help="Measure a model's thresholds and store them, or forget them. Reads no frames.",
)  # fmt: skip
@options.model("crumb")
@click.option("--raw", is_flag=True, help="Read the text as it stands: no chat template.")
@options.engine
def entropy_gear(strategy: str | None, **flags) -> int:
    if strategy is None:
        cli.refuse_together("needs --calibrate", *CALIBRATION_NAMES)
        return _filter(flags)
    try:
        return _calibrate(strategy, flags)
    except ToastError as error:
        error.sent = True  # stdout is text here: nobody waits for an error frame
        raise


def _filter(flags: dict[str, Any]) -> int:
    """Frames in, frames out."""
    from toastkit.commands.pipes import run_filter
    from toastkit.stages.gear import gear, tallied

    explain = cli.say if flags["explain"] else None
    rules = gear_rules(flags, explain)

    def build(frames, signals):
        annotated = gear(frames, rules)
        return annotated if explain is None else tallied(annotated, explain)

    return run_filter(build)


def _calibrate(strategy: str, flags: dict[str, Any]) -> int:
    """Measure the model of the flags, store its thresholds and print them; return the exit code.

    strategy: one of WORDS, or the name of a file of prompts. Interrupted, it stores nothing.
    """
    cli.refuse_together("is for frames, and --calibrate reads none", *TELEMETRY_NAMES)
    if strategy != PREFILL:
        cli.refuse_together("is for --calibrate prefill", "raw")
    if strategy == OFF:
        cli.refuse_together("is for measuring: --calibrate off loads no model", *MEASURE_NAMES)
    from toastkit.commands.engines import load, open_unloaded
    from toastkit.commands.prompt import prompt_tokenizer
    from toastkit.gears.thresholds import save
    from toastkit.interrupts import Signals
    from toastkit.model.config import fingerprint

    Signals()  # SIGTERM and SIGHUP end it as Ctrl-C does
    if strategy == OFF:
        return _forget(flags)
    settings = _prompt_flags(strategy, flags)
    tokenizer = prompt_tokenizer(settings)
    files = tokenizer.files
    measure = _measure(strategy, tokenizer, settings)
    found = measure(load(open_unloaded(files, flags), flags))
    stored = save(fingerprint(files), found.thresholds)
    if flags["explain"]:
        _explain(found, stored)
    if found.thresholds.overlap and not flags["quiet"]:
        cli.say("warning: the hard prompts are no harder than the easy ones for this model")
    _print(files.name, found)
    return 0


def _forget(flags: dict[str, Any]) -> int:
    """Remove what was stored for the model, which is not loaded."""
    from toastkit.gears.thresholds import path
    from toastkit.model.config import fingerprint
    from toastkit.stages.calibrate import forget

    files = options.checkpoint(flags)
    mark = fingerprint(files)
    removed = forget(mark)
    if flags["explain"]:
        cli.say(f"{'removed' if removed else 'there is no'} {path(mark)}")
    print(f"{shown(files.name)}: {'thresholds removed' if removed else 'no thresholds are stored'}")
    return 0


def _prompt_flags(strategy: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Default flags of a command that takes prompts. A prompt that is too long for the model is
    truncated at the beginning so that an answer fits."""
    from toastkit.stages.calibrate import ANSWER_TOKENS

    return {
        **flags, "raw": flags["raw"] and strategy == PREFILL, "system": None, "messages": None,
        "template_arg": (), "tools": None, "no_generation_prompt": False, "each_line": False,
        "truncate": True, "max_tokens": ANSWER_TOKENS,
    }  # fmt: skip


def _measure(strategy: str, tokenizer: PromptTokenizer, flags: dict[str, Any]) -> Measure:
    """The measurement to run, with its prompts read and tokenised. Raises DataError,
    NoInputError."""
    from toastkit.commands.prompt import prompts
    from toastkit.stages import calibrate as stage

    if strategy == PROMPTS:
        return stage.from_built_in(tokenizer)
    typed = strategy in (PREFILL, STDIN) and sys.stdin.isatty()
    if typed and not flags["quiet"]:
        cli.say("reading from the terminal, up to Ctrl-D")
    if strategy == PREFILL:
        (prompt,) = prompts((STDIN,), flags)
        return stage.from_prompt(tokenizer, prompt)
    return stage.from_texts(tokenizer, _text_of_file(strategy))


def _text_of_file(name: str) -> str:
    """A file, or stdin, as text. Raises NoInputError, suggesting a word that may have been
    meant."""
    from toastkit.commands.stdin import not_utf8, read_input

    try:
        data = read_input(name, name)
    except NoInputError as error:
        error.hint = did_you_mean(name, WORDS, error.hint)
        raise
    except ValueError as error:  # a name with a NUL byte
        raise NoInputError(f"cannot read {name!r}: no such file") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_utf8("cannot read calibration prompts:", error) from error


def _explain(found: Calibration, stored: Path) -> None:
    from toastkit.stages.calibrate import rule

    for line in found.quantiles():
        cli.say(line)
    cli.say(f"rule: {rule(found.thresholds)}")
    cli.say(f"stored in {stored}")


def _print(name: str, found: Calibration) -> None:
    now = found.thresholds
    print(
        f"{shown(name)}: low {now.low:.2f}, high {now.high:.2f} bits "
        f"({now.strategy}, {counted(now.samples, 'sample')})"
    )


def main() -> None:
    cli.run(entropy_gear)
