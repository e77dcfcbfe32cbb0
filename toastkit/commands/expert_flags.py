"""Options of the experts: how many per token, in decode steps and in prefill."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from toastkit.commands import completion
from toastkit.commands.cli import given, refuse_together
from toastkit.commands.options import together
from toastkit.commands.sizes import Word, is_number

if TYPE_CHECKING:
    from toastkit.experts.experts_options import ExpertsOptions, LittleK

MODES = ("big", "little", "mobile")


class Chosen(NamedTuple):
    """The value of --experts: mode of ExpertsOptions, and its gamma if given."""

    mode: str
    gamma: float | None = None


class Experts(Word):
    """big, little, or mobile with a gamma of its own."""

    name = "experts"

    def parse(self, word: str) -> Chosen:
        """The mode and gamma. ExpertsOptions checks the gamma."""
        mode, colon, gamma = word.strip().lower().partition(":")
        if mode in MODES and not colon:
            return Chosen(mode)
        if mode == "mobile" and is_number(gamma):
            return Chosen(mode, float(gamma))
        raise ValueError(
            f"{word[:40]!r} is not big, little, mobile, or mobile with a gamma such as mobile:0.7"
        )

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str):
        """The three words."""
        return completion.beginning(incomplete, MODES)


class Little(Word):
    """A number of experts, or a percentage."""

    name = "little-k"

    def parse(self, word: str) -> LittleK:
        """The number or share. ExpertsOptions checks its range."""
        from toastkit.experts.experts_options import LittleK

        if re.fullmatch(r"[0-9]{1,9}", word.strip()):
            return LittleK(int(word))
        if found := re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)%", word.strip()):
            return LittleK(float(found[1]), True)
        raise ValueError(
            f"{word[:40]!r} is not a number of experts, or a share of them such as 50%"
        )


little_k = click.option(
    "--little-k", type=Little(), metavar="N|P%",
    help="Experts a token in the little model (default: half of the model's own, rounded up).",
)  # fmt: skip
step_experts = together(
    click.option(
        "--experts", type=Experts(), metavar="big|little|mobile[:GAMMA]",
        help="Model of a step: the whole one, one with fewer experts a token, or that one where "
        "its likeliest token is likelier than GAMMA (default: big; GAMMA: 0.7).",
    ),
    little_k,
)  # fmt: skip
prefill_experts = click.option(
    "--prefill-experts", type=click.Choice(["big", "little"]),
    help="Model that reads the prompt (default: big).",
)  # fmt: skip
experts = together(step_experts, prefill_experts)
prompt_experts = together(prefill_experts, little_k)
EXPERT_NAMES = ("experts", "little_k", "prefill_experts")


def reject_unused(flags: dict[str, Any]) -> None:
    """Raise UsageError for expert options without effect, or that make no sense."""
    options = expert_options(flags)
    if options is None or not options.runs_little:
        wanted = [
            f"--{name.replace('_', '-')} {words}"
            for name, words in (
                ("experts", "little or mobile"), ("prefill_experts", "little"),
            )
            if name in flags
        ]  # fmt: skip
        refuse_together(f"needs {' or '.join(wanted)}", "little_k")


def expert_options(flags: dict[str, Any]) -> ExpertsOptions | None:
    """ExpertsOptions from flags, None if no flag concerns a model. Raises UsageError."""
    chosen, prompt, little = (
        flags.get(name) for name in ("experts", "prefill_experts", "little_k")
    )
    if chosen is None and prompt is None and little is None:
        return None
    from toastkit.experts.experts_options import GAMMA, ExpertsOptions

    mode, gamma = chosen or Chosen("big")
    options = ExpertsOptions(mode, GAMMA if gamma is None else gamma, little, prompt or "big")
    if options.runs_little:
        return options
    return None if chosen is None else ExpertsOptions(mode)  # --little-k is from a variable


def insisted(flags: dict[str, Any]) -> str | None:
    """The setting that a daemon must have to be used, from the command line. None if there is none:
    environment variables are for models that are loaded here."""
    if not given(*EXPERT_NAMES):
        return None
    options = expert_options(flags)
    return "big" if options is None else options.setting
