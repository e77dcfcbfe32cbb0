"""Options of the residency: which decoder layers stay on the device."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from toastkit.commands.cli import given, refuse_together
from toastkit.commands.options import together
from toastkit.commands.sizes import Size

if TYPE_CHECKING:
    from toastkit.residency.residency_options import ResidencyOptions


class Amount(NamedTuple):
    """What --resident says: kind and amount of ResidencyOptions."""

    kind: str
    amount: float = 0


class Resident(click.ParamType):
    """all, auto, a number of layers, a share of them in per cent, or a size with its unit."""

    name = "resident"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Amount:
        """What was asked for. A word that is none of these is a usage error."""
        if isinstance(value, Amount):
            return value
        word = value.strip().lower()
        if word in ("all", "auto"):
            return Amount(word)
        if re.fullmatch(r"[0-9]{1,9}", word):
            return Amount("layers", int(word))
        if found := re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)%", word):
            if float(found[1]) > 100:
                self.fail(f"{value!r} is more than 100%", param, ctx)
            return Amount("percent", float(found[1]))
        if re.fullmatch(r"[0-9.]+[kmgtib]+", word):
            return Amount("bytes", Size().convert(value, param, ctx) or 0)
        self.fail(
            f"{value[:40]!r} is not all, auto, a number of layers, a share of them such as 50%, or "
            "a size such as 6G",
            param,
            ctx,
        )

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str):
        """The two words; of numbers there are too many."""
        from click.shell_completion import CompletionItem

        return [CompletionItem(w) for w in ("all", "auto") if w.startswith(incomplete)]


residency = together(
    click.option(
        "--resident", type=Resident(), metavar="all|auto|N|P%|SIZE", default="all",
        show_default=True, help="Layers that stay on the device; the others are read as they run.",
    ),
    click.option(
        "--placement", type=click.Choice(["first", "last", "interleaved"]), default="interleaved",
        show_default=True, help="Which of the layers stay.",
    ),
    click.option(
        "--priority", type=click.Choice(["max-tps", "balanced", "max-context"]),
        default="balanced", show_default=True,
        help="What --resident auto keeps memory for: layers, both, or a long context.",
    ),
)  # fmt: skip
RESIDENT_NAMES = ("resident", "placement", "priority")


def refuse_idle(context: click.Context, flags: dict[str, Any]) -> None:
    """Raises UsageError for options of the residency that would change nothing."""
    if flags["resident"].kind != "auto":
        refuse_together(context, "is for --resident auto", "priority")
    if flags["resident"].kind == "all":
        refuse_together(context, "needs a --resident other than all", "placement")


def residency_options(flags: dict[str, Any]) -> ResidencyOptions | None:
    """ResidencyOptions from flags, None for all."""
    return None if flags["resident"].kind == "all" else _options(flags)


def insisted(context: click.Context, flags: dict[str, Any]) -> str | None:
    """The setting that a daemon must have if it is to be asked: of these on the command line.
    None where none is given: a variable is for models that are loaded here, since an answer
    does not depend on which layers stay."""
    return _options(flags).setting if given(context, *RESIDENT_NAMES) else None


def _options(flags: dict[str, Any]) -> ResidencyOptions:
    from toastkit.residency.residency_options import ResidencyOptions

    amount = flags["resident"]
    return ResidencyOptions(amount.kind, amount.amount, flags["placement"], flags["priority"])
