"""Opens an engine: a checkpoint and the policies asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from toastkit.engine import device
from toastkit.engine.engine import Engine
from toastkit.holdings.policy import Policy
from toastkit.model.files import ModelFiles
from toastkit.native.starting import NativeOptions
from toastkit.residency.mapping import MappingPolicy
from toastkit.store.store import Store

if TYPE_CHECKING:
    from toastkit.experts.experts_options import ExpertsOptions, SlotOptions
    from toastkit.gears.gear_options import GearOptions
    from toastkit.gears.gear_policy import GearPolicy
    from toastkit.residency.residency_options import ResidencyOptions


def open_engine(
    files: ModelFiles,
    *,
    device_name: str = "auto",
    dtype: str | None = None,
    kv_bits: int | None = None,
    notify: Callable[[str], None] | None = None,
    gear_options: GearOptions | None = None,
    residency: ResidencyOptions | None = None,
    experts: ExpertsOptions | None = None,
    expert_slots: SlotOptions | None = None,
    native: str = "off",
    threads: int | None = None,
    native_exact: bool = False,
    load: bool = True,
) -> Engine:
    """Open the engine of a checkpoint. load: load its first weights at once.

    device_name, dtype, kv_bits, notify: see Engine. gear_options: None disables gears. residency:
    None keeps all layers resident. experts: None leaves K unchanged and counts nothing.
    expert_slots: None keeps all experts resident. native, threads, native_exact: see NativeOptions.
    Raises UsageError, DataError, IOFailure, NoInputError.
    """
    device.start(device_name)
    store = Store(files)
    gears = None if gear_options is None else _gears(store, gear_options, notify)
    policies: list[Policy] = [] if gears is None else [gears]
    if experts is not None:
        from toastkit.experts.experts_policy import ExpertsPolicy

        policies.append(ExpertsPolicy(experts))
    if expert_slots is not None:
        from toastkit.engine.room import room_for_experts
        from toastkit.experts.slot_policy import SlotPolicy

        policies.append(SlotPolicy(expert_slots, room_for_experts(residency), notify))
    if residency is not None and residency.on:
        from toastkit.residency.residency_policy import ResidencyPolicy

        steps = None if gears is None else gears.step_forms
        policies.append(ResidencyPolicy(residency, notify=notify, steps=steps))
        if gears is not None and notify is not None:
            _warn_of_shifts(store, gears, notify)
    if native != "off" and expert_slots is None and not (residency is not None and residency.on):
        policies.append(MappingPolicy())
    engine = Engine(
        store,
        policies,
        device_name=device_name,
        dtype=dtype,
        kv_bits=kv_bits,
        cache_bytes=None if gear_options is None else gear_options.cache_bytes,
        notify=notify,
        native=NativeOptions(native, threads, native_exact),
    )
    if load:
        engine.load()
    return engine


def _warn_of_shifts(store: Store, gears: GearPolicy, notify: Callable[[str], None]) -> None:
    """Warn if streamed layers have to be quantised on every pass."""
    if gears.options.fixed != "high" and not store.has_baked_gears:
        notify(
            f"warning: {store.files.name} has no baked gears: layers that do not stay are "
            "quantised whenever they run in one (toast-model bake --gears makes a file that has "
            "them)"
        )


def _gears(
    store: Store, options: GearOptions, notify: Callable[[str], None] | None
) -> GearPolicy | None:
    from toastkit.gears.gear_policy import gear_policy

    return gear_policy(store, options, notify)
