"""Options of the residency: which decoder layers stay on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from toastkit.commands.cli import given, refuse_together
from toastkit.commands.options import together
from toastkit.commands.sizes import HowMany

if TYPE_CHECKING:
    from toastkit.residency.residency_options import ResidencyOptions


RESIDENT = HowMany(
    ("all", "auto"), "layers",
    "all, auto, a number of layers, a share of them such as 50%, or a size such as 6G", share=True,
)  # fmt: skip
placement = click.option(
    "--placement", type=click.Choice(["first", "last", "interleaved"]), default="interleaved",
    show_default=True, help="Which of the layers stay.",
)  # fmt: skip
residency = together(
    click.option(
        "--resident", type=RESIDENT, metavar="all|auto|N|P%|SIZE", default="all",
        show_default=True, help="Layers that stay on the device; the others are read as they run.",
    ),
    placement,
    click.option(
        "--priority", type=click.Choice(["max-tps", "balanced", "max-context"]),
        default="balanced", show_default=True,
        help="What --resident auto keeps memory for: layers, both, or a long context.",
    ),
)  # fmt: skip
RESIDENT_NAMES = ("resident", "placement", "priority")


def reject_unused(flags: dict[str, Any]) -> None:
    """Raise UsageError for residency options without effect."""
    if flags["resident"].kind != "auto":
        refuse_together("is for --resident auto", "priority")
    if flags["resident"].kind == "all":
        refuse_together("needs a --resident other than all", "placement")


def residency_options(flags: dict[str, Any]) -> ResidencyOptions | None:
    """ResidencyOptions from flags, None for all."""
    return None if flags["resident"].kind == "all" else _options(flags)


def insisted(flags: dict[str, Any]) -> str | None:
    """The setting that a daemon must have to be used, from the command line. None if there is none:
    environment variables are for models that are loaded here, since an answer does not depend on
    which layers are resident."""
    return _options(flags).setting if given(*RESIDENT_NAMES) else None


def _options(flags: dict[str, Any]) -> ResidencyOptions:
    from toastkit.residency.residency_options import ResidencyOptions

    amount = flags["resident"]
    return ResidencyOptions(amount.kind, amount.amount, flags["placement"], flags["priority"])
