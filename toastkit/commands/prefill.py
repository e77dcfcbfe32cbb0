"""toast-prefill: run a prompt through the model into a session."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from toastkit.commands import cli, options, policy_flags, run_reports

if TYPE_CHECKING:
    from toastkit.commands.engines import Engines
    from toastkit.frames import Frame


@cli.command("prefill")
@options.model("the stream's")
@options.session
@options.reading
@policy_flags.prompt_policies
@options.engine
@options.no_daemon
def prefill(**flags) -> int:
    from toastkit.commands.engines import Engines
    from toastkit.commands.pipes import run_filter
    from toastkit.commands.progress import read_options
    from toastkit.stages.prefill import prefill as stage
    from toastkit.stages.run.pipe_prefill import PrefillEnd

    policy_flags.reject_unused(flags)
    options.let_stream_name_model(flags)
    settings = read_options(flags)
    engines = Engines(flags)

    def build(frames, signals):
        engines.heed(signals)
        made = stage(frames, engines, PrefillEnd(flags["session"]), settings, signals)
        return _told(made, engines) if flags["verbose"] else made

    try:
        return run_filter(build, heeds=True)
    finally:
        engines.close()


def _told(frames: Iterable[Frame], engines: Engines) -> Iterator[Frame]:
    """Pass frames on; print a line on stderr for what each policy did during a prefill."""
    from toastkit.frames import Prefilled

    for frame in frames:
        if isinstance(frame, Prefilled) and engines.engine is not None:
            run_reports.tell(engines.engine.run_report())
            engines.engine.begin_run()  # counts per prompt
        yield frame


def main() -> None:
    cli.run(prefill)
