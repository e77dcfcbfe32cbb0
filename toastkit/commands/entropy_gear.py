"""toast-entropy-gear: entropy, rolling mean and gear beside the logits; calibration."""

from __future__ import annotations

from typing import Any

import click

from toastkit.commands import cli, options
from toastkit.commands.gear_flags import TELEMETRY_NAMES, gear_rules, telemetry
from toastkit.errors import ToastError
from toastkit.native.starting import NativeOptions

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
    from toastkit.commands.calibrate import OFF, PREFILL, calibrate

    cli.refuse_together("is for frames, and --calibrate reads none", *TELEMETRY_NAMES)
    if strategy != PREFILL:
        cli.refuse_together("is for --calibrate prefill", "raw")
    if strategy == OFF:
        cli.refuse_together("is for measuring: --calibrate off loads no model", *MEASURE_NAMES)
    return calibrate(strategy, flags)


def main() -> None:
    cli.run(entropy_gear)
