"""The options of all policies together, for a command that runs a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toastkit.commands import expert_flags, gear_flags, resident_flags
from toastkit.commands.options import model_name, native_options, together

if TYPE_CHECKING:
    from toastkit.engine.policy_options import PolicyOptions

policies = together(
    gear_flags.gears, gear_flags.telemetry, expert_flags.experts, resident_flags.residency
)
scoring_policies = together(
    gear_flags.gears, gear_flags.telemetry, expert_flags.step_experts, resident_flags.residency
)
prompt_policies = together(expert_flags.prompt_experts, resident_flags.residency)
POLICY_NAMES = (
    "gear", *gear_flags.GEAR_NAMES, *gear_flags.TELEMETRY_NAMES, *resident_flags.RESIDENT_NAMES,
    *expert_flags.EXPERT_NAMES, *resident_flags.SLOT_NAMES,
)  # fmt: skip


def reject_unused(flags: dict[str, Any]) -> None:
    """Raise UsageError for options without effect."""
    if "gear" in flags:
        gear_flags.reject_unused(flags)
    expert_flags.reject_unused(flags)
    resident_flags.reject_unused(flags)


def policy_options(flags: dict[str, Any]) -> PolicyOptions:
    """The options of each policy, from flags."""
    from toastkit.engine.policy_options import PolicyOptions

    return PolicyOptions(
        gear_flags.gear_options(flags) if "gear" in flags else None,
        expert_flags.expert_options(flags),
        resident_flags.slot_options(flags),
        resident_flags.residency_options(flags),
    )


def service_settings(flags: dict[str, Any]) -> dict[str, Any]:
    """The fields of ServiceSettings on which model is run, and how. Raises UsageError."""
    return {
        "model": model_name(flags),
        **{name: flags[name] for name in ("device", "dtype", "kv_bits")},
        "gears": gear_flags.gear_settings(flags),
        "policies": policy_options(flags),
        "native": native_options(flags),
    }
