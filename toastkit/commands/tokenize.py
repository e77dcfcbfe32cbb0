"""toast-tokenize: a prompt into token frames."""

from __future__ import annotations

import sys

import click

from toastkit.commands import cli, options
from toastkit.errors import UsageError


@cli.command("tokenize")
@click.argument("prompt", nargs=-1)
@options.model
@options.session
@options.prompting
@options.max_tokens
@click.option("--count", is_flag=True, help="Print the number of tokens instead.")
@click.option("--template-only", is_flag=True, help="Print the rendered text instead.")
@click.pass_context
def tokenize(context: click.Context, prompt: tuple[str, ...], **flags) -> int:
    from toastkit.commands.prompt import prompt_tokenizer, prompts

    if flags["count"] and flags["template_only"]:
        raise UsageError("--count and --template-only exclude each other")
    if not flags["truncate"]:
        cli.refuse_together(context, "is only for --truncate here", "max_tokens")
    tokenizer = prompt_tokenizer(flags)
    wanted = prompts(prompt, flags)
    if flags["template_only"]:
        for one in wanted:
            sys.stdout.write(tokenizer.render(one))
        return 0
    if flags["count"]:
        for one in wanted:
            print(len(tokenizer.encode(one)), flush=True)
        return 0
    return _frames(tokenizer, wanted, flags["session"])


def _frames(tokenizer, wanted, session: str | None) -> int:
    from toastkit.errors import ToastError
    from toastkit.frames import Error, FrameWriter
    from toastkit.session.names import resolve
    from toastkit.stages.tokenize import tokenize as stage

    writer = FrameWriter(sys.stdout.buffer)
    path = None if session is None else str(resolve(session))
    try:
        writer.write_all(stage(wanted, tokenizer, path))
    except ToastError as error:
        writer.write(Error(error.code, "toast-tokenize", error.message, error.hint))
        raise
    return 0


def main() -> None:
    cli.run(tokenize)
