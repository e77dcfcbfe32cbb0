"""Options of what stays on the device: which decoder layers, and how many of their experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from toastkit.commands.cli import given, refuse_together
from toastkit.commands.options import together
from toastkit.commands.sizes import HowMany

if TYPE_CHECKING:
    from toastkit.experts.experts_options import SlotOptions
    from toastkit.residency.residency_options import ResidencyOptions

RESIDENT = HowMany(
    ("all", "auto"), "layers",
    "all, auto, a number of layers, a share of them such as 50%, or a size such as 6G", share=True,
)  # fmt: skip
SLOTS = HowMany(("auto",), "slots", "auto, a number of slots a layer, or a size such as 6G")
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
    click.option(
        "--expert-slots", type=SLOTS, metavar="auto|N|SIZE",
        help="Experts of a layer that are on the device (default: all).",
    ),
    click.option(
        "--expert-prefetch", type=click.Choice(["off", "auto", "1", "2", "3"]), default="off",
        show_default=True, help="Layers ahead that experts are foreseen and read.",
    ),
)  # fmt: skip
RESIDENT_NAMES = ("resident", "placement", "priority")
SLOT_NAMES = ("expert_slots", "expert_prefetch")


def reject_unused(flags: dict[str, Any]) -> None:
    """Raise UsageError for options without effect."""
    if flags["resident"].kind != "auto":
        refuse_together("is for --resident auto", "priority")
    if flags["resident"].kind == "all":
        refuse_together("needs a --resident other than all", "placement")
    if flags["expert_slots"] is None:
        refuse_together("needs --expert-slots", "expert_prefetch")


def residency_options(flags: dict[str, Any]) -> ResidencyOptions | None:
    """ResidencyOptions from flags, None for all."""
    return None if flags["resident"].kind == "all" else _options(flags)


def slot_options(flags: dict[str, Any]) -> SlotOptions | None:
    """SlotOptions from flags, None for all experts on the device."""
    amount = flags["expert_slots"]
    if amount is None:
        return None
    from toastkit.experts.experts_options import SlotOptions

    return SlotOptions(amount.kind, int(amount.amount), flags["expert_prefetch"])


def insisted(flags: dict[str, Any]) -> str | None:
    """The setting that a daemon must have to be used, from the command line, as in
    PolicyOptions.resident. None if there is none: environment variables are for models that are
    loaded here, since an answer does not depend on what is resident."""
    layers = _options(flags).setting if given(*RESIDENT_NAMES) else None
    slots = slot_options(flags) if given(*SLOT_NAMES) else None
    return layers if slots is None else f"{layers or 'all'} {slots.setting}"


def _options(flags: dict[str, Any]) -> ResidencyOptions:
    from toastkit.residency.residency_options import ResidencyOptions

    amount = flags["resident"]
    return ResidencyOptions(amount.kind, amount.amount, flags["placement"], flags["priority"])
