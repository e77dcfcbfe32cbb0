"""toast-tokenize: a prompt into token frames."""

from __future__ import annotations

from typing import Any

import click

from toastkit.client.output import write_text
from toastkit.commands import cli, options
from toastkit.commands.sizes import IntegerRange


@cli.command("tokenize")
@options.prompt
@options.model("crumb")
@options.session
@options.prompting
@click.option(
    "-n", "--max-tokens", type=IntegerRange(1), metavar="N",
    help="With --truncate: leave room for an answer of N tokens (default: 256).",
)  # fmt: skip
@click.option("--count", is_flag=True, help="Print the number of tokens instead.")
@click.option("--template-only", is_flag=True, help="Print the rendered text instead.")
def tokenize(prompt: tuple[str, ...], **flags) -> int:
    from toastkit.commands.prompt import prompt_tokenizer, prompts
    from toastkit.stages.tokenize import at

    options.settle_prompting(flags)
    cli.typed_wins(flags, "count", "session")
    cli.typed_wins(flags, "template_only", "session", "truncate")
    cli.exclusive(flags, "count", "template_only")
    if flags["count"]:
        cli.refuse_together("is for frames, not with --count", "session")
    if flags["template_only"]:
        cli.refuse_together("is for tokens, not with --template-only", "session", "truncate")
    if not flags["truncate"]:
        cli.refuse_together("is only for --truncate here", "max_tokens")
    if not (flags["count"] or flags["template_only"]):
        return _frames(prompt, flags)
    wanted = prompts(prompt, flags)
    tokenizer = prompt_tokenizer(flags)
    for one in wanted:
        if flags["count"]:
            print(len(tokenizer.encode(one)), flush=True)
        else:
            with at(one.where):
                write_text(tokenizer.render(one))
    return 0


def _frames(prompt: tuple[str, ...], flags: dict[str, Any]) -> int:
    from toastkit.commands.pipes import frame_writer
    from toastkit.commands.prompt import prompt_tokenizer, prompts
    from toastkit.session.names import resolve
    from toastkit.stages.tokenize import tokenize as stage

    writer = frame_writer()
    session = flags["session"]
    path = None if session is None else str(resolve(session))
    for frame in stage(prompts(prompt, flags), prompt_tokenizer(flags), path):
        writer.write(frame)
    return 0


def main() -> None:
    cli.run(tokenize)
