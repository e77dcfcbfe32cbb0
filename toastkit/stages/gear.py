"""entropy-gear: annotates logits with entropy, its rolling mean, and the gear it asks for.

Telemetry: the model's precision does not follow the gear yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from toastkit.frames import Frame, Head, Logits, Token
from toastkit.gears.monitor import EntropyMeter, EntropyMonitor, MonitorOptions
from toastkit.stages.streams import ends_run, whole_runs


def gear(frames: Iterable[Frame], options: MonitorOptions) -> Iterator[Frame]:
    """Fills entropy, mean, slope, gear, shifted and reason of every logits frame."""
    from toastkit.stages.arrays import LogitsReader

    reader = LogitsReader()
    monitor: EntropyMonitor | None = None
    for frame in whole_runs(frames, ends_run):
        if isinstance(frame, Head):
            reader.begin(frame)
            meter = EntropyMeter(frame.vocab)
            monitor = EntropyMonitor(frame.vocab, options)
        elif isinstance(frame, Logits) and monitor is not None:
            _annotate(frame, monitor, meter.bits(reader.read(frame.logits)))
        yield frame


def entropy_on_device(frames: Iterable[Frame]) -> Iterator[Frame]:
    """Puts the entropy of each step into its graph, unread (003, section 3.6)."""
    from toastkit.gears.device import entropy_bits as device_entropy

    for frame in frames:
        if isinstance(frame, Logits):
            frame.entropy = device_entropy(frame.logits)
        yield frame


def gear_of_tokens(frames: Iterable[Frame], options: MonitorOptions) -> Iterator[Frame]:
    """Gives each token the gear that its entropy asks for: `gear`, where entropy is read only with
    the token."""
    monitor: EntropyMonitor | None = None
    for frame in frames:
        if isinstance(frame, Head):
            monitor = EntropyMonitor(frame.vocab, options)
        elif isinstance(frame, Token) and monitor is not None and frame.entropy is not None:
            frame.gear = monitor.update(frame.entropy).gear
        yield frame


def _annotate(frame: Logits, monitor: EntropyMonitor, entropy: float) -> None:
    reading: Any = monitor.update(entropy)
    frame.entropy = round(entropy, 6)
    frame.mean = round(reading.mean, 6)
    frame.slope = round(reading.slope, 6)
    frame.gear = reading.gear
    frame.shifted = reading.shifted
    frame.reason = reading.reason
