"""toast-entropy-gear: entropy, rolling mean and gear beside the logits."""

from __future__ import annotations

import click

from toastkit.commands import cli, options


@cli.command("entropy-gear")
@options.telemetry
@click.pass_context
def entropy_gear(context: click.Context, **flags) -> int:
    from toastkit.commands.pipes import run_filter
    from toastkit.stages.gear import gear

    settings = options.monitor_options(flags)
    return run_filter(lambda frames, signals: gear(frames, settings), "entropy-gear")


def main() -> None:
    cli.run(entropy_gear)
