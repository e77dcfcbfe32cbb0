"""The settings of the daemon: of the model that it serves, and of its front."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toastkit.engine.policy_options import NO_POLICIES, PolicyOptions
from toastkit.native.starting import NativeOptions
from toastkit.stages.follow import GearSettings


@dataclass(frozen=True)
class ServiceSettings:
    """model: as -m takes it. device, dtype, kv_bits, native: as of toast-prefill(1). chunk: tokens
    of a prefill pass, None for the device's default. parallel: conversations at the device at once.
    batch: of them, how many take their steps together; 1: in turn. max_queue: requests that wait.
    idle_unload: seconds without a request after which the model leaves the memory, None for never.
    cache_bytes, spill_bytes: for finished conversations, on the device and on disk. audit: gets a
    record of each request. debug: with tracebacks. say: is told what a person should know.
    gears, policies: of the engine; the former say which gears the latter have."""

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
    how long a connection may do nothing."""

    connections: int = 256
    line_bytes: int = 16 << 20
    idle_seconds: float = 300.0
