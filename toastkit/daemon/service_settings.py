"""Settings of the daemon: of the model that it serves, and of its front."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toastkit.engine.policy_options import NO_POLICIES, PolicyOptions
from toastkit.native.starting import NativeOptions
from toastkit.stages.follow import GearSettings


@dataclass(frozen=True)
class ServiceSettings:
    """model: as -m takes it. device, dtype, kv_bits, native: as in toast-prefill(1). chunk: tokens
    per prefill pass, None for the device's default. parallel: conversations on the device at once.
    batch: how many of them are stepped together; 1: in turn. max_queue: waiting requests.
    idle_unload: seconds without a request before the model is unloaded, None for never.
    cache_bytes, spill_bytes: for finished conversations, on the device and on disk. audit: gets a
    record per request. debug: include tracebacks. say: called with messages for people. gears,
    policies: of the engine; the former say which gears the latter have."""

    model: str = "crumb"
    device: str = "auto"
    dtype: str | None = None
    kv_bits: int | None = None
    native: NativeOptions = NativeOptions()
    chunk: int | None = None
    parallel: int = 8
    batch: int = 8
    max_queue: int = 64
    idle_unload: float | None = None
    cache_bytes: int = 2 << 30
    spill_bytes: int = 8 << 30
    audit: Any = None
    debug: bool = False
    say: Callable[[str], None] | None = None
    gears: GearSettings | None = None
    policies: PolicyOptions = NO_POLICIES


@dataclass(frozen=True)
class Limits:
    """connections: at most, at a time. line_bytes: of a request, without its newline. idle_seconds:
    before an idle connection is closed."""

    connections: int = 256
    line_bytes: int = 16 << 20
    idle_seconds: float = 300.0
