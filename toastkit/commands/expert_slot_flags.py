"""Options of the expert slots: how many experts are on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from toastkit.commands.cli import given, refuse_together
from toastkit.commands.options import together
from toastkit.commands.sizes import HowMany

if TYPE_CHECKING:
    from toastkit.experts.slot_options import SlotOptions


SLOTS = HowMany(("auto",), "slots", "auto, a number of slots a layer, or a size such as 6G")
expert_slots = together(
    click.option(
        "--expert-slots", type=SLOTS, metavar="auto|N|SIZE",
        help="Experts of a layer that are on the device (default: all).",
    ),
    click.option(
        "--expert-prefetch", type=click.Choice(["off", "auto", "1", "2", "3"]), default="off",
        show_default=True, help="Layers ahead that experts are foreseen and read.",
    ),
)  # fmt: skip
SLOT_NAMES = ("expert_slots", "expert_prefetch")


def reject_unused(flags: dict[str, Any]) -> None:
    """Raise UsageError for slot options without effect."""
    if flags["expert_slots"] is None:
        refuse_together("needs --expert-slots", "expert_prefetch")


def slot_options(flags: dict[str, Any]) -> SlotOptions | None:
    """SlotOptions from flags, None for all experts on the device."""
    amount = flags["expert_slots"]
    if amount is None:
        return None
    from toastkit.experts.slot_options import SlotOptions

    return SlotOptions(amount.kind, int(amount.amount), flags["expert_prefetch"])


def insisted(flags: dict[str, Any], resident: str | None) -> str | None:
    """The setting that a daemon must have to be used, from these options and those of the residency
    (resident_flags.insisted). None if the command line has none."""
    slots = slot_options(flags) if given(*SLOT_NAMES) else None
    return resident if slots is None else f"{resident or 'all'} {slots.setting}"
