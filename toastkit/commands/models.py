"""Shared by the subcommands of toast-model: tables, messages of -v."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

import click

from toastkit.commands import cli

as_json = click.option("--json", "as_json", is_flag=True, help="Write JSON.")


def table(
    head: tuple[str, ...], rows: Iterable[tuple[str, ...]], right: Container[int] = ()
) -> None:
    """Print columns as wide as their widest word. right: indices of right-aligned columns."""
    rows = [head, *rows]
    widths = [max(len(row[n]) for row in rows) for n in range(len(head))]
    for row in rows:
        words = [
            word.rjust(width) if n in right else word.ljust(width)
            for n, (word, width) in enumerate(zip(row, widths))
        ]
        print("  ".join(words).rstrip())


def say_verbose(flags: dict[str, Any]) -> Callable[[str], None]:
    """A function that prints a line with -v, and nothing without it."""
    return cli.say if flags["verbose"] else lambda line: None
