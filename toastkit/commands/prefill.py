"""toast-prefill: a prompt through the model into a session."""

from __future__ import annotations

import click

from toastkit.commands import cli, options


@cli.command("prefill")
@options.model
@options.session
@options.reading
@options.engine
@options.no_daemon
@click.pass_context
def prefill(context: click.Context, **flags) -> int:
    from toastkit.commands.engines import Engines
    from toastkit.commands.pipes import run_filter
    from toastkit.commands.progress import read_options
    from toastkit.stages.prefill import prefill as stage
    from toastkit.stages.run.pipe_prefill import PrefillEnd

    settings = read_options(flags)
    engines = Engines(flags)

    def build(frames, signals):
        return stage(frames, engines, PrefillEnd(flags["session"]), settings, signals)

    try:
        return run_filter(build, "prefill")
    finally:
        engines.close()


def main() -> None:
    cli.run(prefill)
