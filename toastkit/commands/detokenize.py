"""toast-detokenize: token frames into text."""

from __future__ import annotations

import click

from toastkit.client.output import TextOutput
from toastkit.commands import cli, options
from toastkit.errors import DataError
from toastkit.frames import End, Frame, Head, Text
from toastkit.text.exact_numbers import counted

REST = 0.002  # seconds: nobody sees text come sooner, and each time decode may be interrupted


@cli.command("detokenize")
@options.model("the stream's")
@options.stop
@options.keep_special
@options.echo
@click.option("--frames", "as_frames", is_flag=True, help="Write text frames among the others.")
@options.no_newline
@options.fail_on_length
def detokenize(**flags) -> int:
    from toastkit.commands.pipes import run_filter
    from toastkit.model.locate import for_stream, locate
    from toastkit.stages.detokenize import TextOptions
    from toastkit.stages.detokenize import detokenize as stage
    from toastkit.stages.run.pipe_feed import PipeFeed
    from toastkit.stages.run.settings import Outcome
    from toastkit.text.tokenizer import Tokenizer
    from toastkit.threads import never_interrupt

    options.let_stream_name_model(flags)
    cli.typed_wins(flags, "as_frames", "no_newline")
    if flags["as_frames"]:
        cli.refuse_together("is for text, not with --frames", "no_newline")
    never_interrupt()  # decode and sample: text waits more easily than tokens
    settings = TextOptions(flags["stop"], flags["keep_special"], flags["echo"])
    outcome = Outcome()
    tokenizers: dict[str, Tokenizer] = {}

    def tokenizer_for(head: Head) -> Tokenizer:
        # Other weights may well have the same tokenizer: -m is not checked against the stream.
        given = flags["model"]
        key = given or head.fingerprint
        if key not in tokenizers:
            files = locate(given) if given else for_stream(None, head.model, head.fingerprint)
            tokenizers[key] = Tokenizer(files)
        return tokenizers[key]

    write = None if flags["as_frames"] else TextWriter(not flags["no_newline"])
    code = run_filter(
        lambda frames, signals: stage(frames, tokenizer_for, settings, PipeFeed(), outcome),
        write=write,
        rest=REST,
    )
    return code or check_length(outcome, flags["fail_on_length"])


class TextWriter:
    """Write the text of text frames to stdout at once, and a final newline if an answer lacks
    one."""

    def __init__(self, newline: bool):
        self._newline = newline
        self._output = TextOutput()

    def __call__(self, frame: Frame) -> None:
        if isinstance(frame, Text):
            self._output.write(frame.s)
        elif isinstance(frame, End) and self._newline:
            self._output.end(whole=frame.reason not in ("interrupt", "error"))


def check_length(outcome, fail_on_length: bool) -> int:
    """The exit code for how the answers ended: 0, or DataError under --fail-on-length."""
    if fail_on_length and "length" in outcome.reasons:
        raise DataError(f"the answer was cut off after {counted(outcome.tokens, 'token')}")
    return 0


def main() -> None:
    cli.run(detokenize)
