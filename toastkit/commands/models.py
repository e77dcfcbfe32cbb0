"""What the subcommands of toast-model share: finding a model, tables, what is said with -v."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

import click

from toastkit.commands import cli
from toastkit.errors import NoInputError

as_json = click.option("--json", "as_json", is_flag=True, help="Write JSON.")


def names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """For completion: the models on this machine."""
    from toastkit.model.library import list_models

    def nothing(line: str) -> None:
        pass

    found = [one.name for one in list_models(nothing, nothing)]
    return [name for name in found if name.startswith(incomplete)]


def find(name: str):
    """A checkpoint that is on this machine: nothing here fetches one as a side effect."""
    from toastkit.model.hub import is_hub_id
    from toastkit.model.locate import find as look_for

    try:
        return look_for(name)
    except NoInputError as error:
        if error.hint is None and is_hub_id(name):
            error.hint = f"toast-model pull {name}"
        raise


def table(
    head: tuple[str, ...], rows: Iterable[tuple[str, ...]], right: Container[int] = ()
) -> None:
    """Prints columns as wide as their widest word. right: numbers of those that are flush right."""
    rows = [head, *rows]
    widths = [max(len(row[n]) for row in rows) for n in range(len(head))]
    for row in rows:
        words = [
            word.rjust(width) if n in right else word.ljust(width)
            for n, (word, width) in enumerate(zip(row, widths))
        ]
        print("  ".join(words).rstrip())


def whisper(flags: dict[str, Any]) -> Callable[[str], None]:
    """Says a line with -v."""
    return cli.say if flags["verbose"] else lambda line: None
