"""The policies that decide about a model's weights, as plain data: a daemon's client makes it
without importing any of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from toastkit.experts.experts_options import ExpertsOptions, SlotOptions
    from toastkit.gears.gear_options import GearOptions
    from toastkit.residency.residency_options import ResidencyOptions


class PolicyOptions(NamedTuple):
    """The options of each policy, named as in opening.open_engine; None leaves it out."""

    gear_options: GearOptions | None = None
    experts: ExpertsOptions | None = None
    expert_slots: SlotOptions | None = None
    residency: ResidencyOptions | None = None

    @property
    def changes_results(self) -> bool:
        """True if answers may differ from those of the unmodified model."""
        return self.gear_options is not None or self.experts is not None

    @property
    def gives_up(self) -> bool:
        """True if anything leaves the device when memory is short, so that memory warnings
        matter."""
        return self.residency is not None or self.expert_slots is not None

    @property
    def resident(self) -> str:
        """What stays on the device, as the command line spells it: ResidencyOptions.setting and
        SlotOptions.setting."""
        from toastkit.residency.residency_options import ResidencyOptions

        layers = (self.residency or ResidencyOptions()).setting
        return layers if self.expert_slots is None else f"{layers} {self.expert_slots.setting}"

    @property
    def chosen_experts(self) -> str:
        """Which experts run, as ExpertsOptions.setting spells it."""
        from toastkit.experts.experts_options import ExpertsOptions

        return (self.experts or ExpertsOptions()).setting


NO_POLICIES = PolicyOptions()
