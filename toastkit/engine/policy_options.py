"""Who is to decide about a model's weights, as plain data. Who asks a daemon makes one, and loads
nothing for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from toastkit.experts.experts_options import ExpertsOptions
    from toastkit.experts.slot_options import SlotOptions
    from toastkit.gears.gear_options import GearOptions
    from toastkit.residency.residency_options import ResidencyOptions


class PolicyOptions(NamedTuple):
    """The options of each policy, by the names that opening.open_engine has for them; None leaves
    it out."""

    gear_options: GearOptions | None = None
    experts: ExpertsOptions | None = None
    expert_slots: SlotOptions | None = None
    residency: ResidencyOptions | None = None

    @property
    def changes_results(self) -> bool:
        """Whether answers may be others than those of the model as it is."""
        return self.gear_options is not None or self.experts is not None

    @property
    def gives_up(self) -> bool:
        """Whether anything leaves the device when memory is short: a memory warning means
        something."""
        return self.residency is not None or self.expert_slots is not None

    @property
    def resident(self) -> str:
        """What stays on the device, as the command line has it: ResidencyOptions.setting, and
        SlotOptions.setting."""
        from toastkit.residency.residency_options import ResidencyOptions

        layers = (self.residency or ResidencyOptions()).setting
        return layers if self.expert_slots is None else f"{layers} {self.expert_slots.setting}"

    @property
    def chosen_experts(self) -> str:
        """Which experts run, as ExpertsOptions.setting has it."""
        from toastkit.experts.experts_options import ExpertsOptions

        return (self.experts or ExpertsOptions()).setting


NO_POLICIES = PolicyOptions()
