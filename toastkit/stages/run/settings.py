"""Settings of the stages, as plain data: what the executables parse their flags into."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple


class ReadOptions(NamedTuple):
    """How a prompt is read into a session.

    chunk: tokens per pass, None for the device's default. require_hit: fail unless all that the
    session holds is reused. fork: session to start from and leave unchanged. progress(done, total):
    called after every pass. report(cached, total): called once, before reading begins.
    """

    chunk: int | None = None
    require_hit: bool = False
    fork: str | None = None
    progress: Callable[[int, int], None] | None = None
    report: Callable[[int, int], None] | None = None


class StepOptions(NamedTuple):
    """How far to decode. max_tokens: sampled tokens, None for as many as the context holds. steps:
    logits frames, None for no limit."""

    max_tokens: int | None = None
    steps: int | None = None


@dataclass
class Outcome:
    """How the runs of a stage ended: the reason of each `End`, and the last one's tokens."""

    tokens: int = 0
    reasons: list[str] = field(default_factory=list)
