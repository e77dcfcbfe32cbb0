"""Follow the entropy of successive runs and choose the gear of the next pass.

The selector's state is kept with the session: if only its tokens have been read since, the next run
continues as if there had been no break.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from toastkit.errors import ToastError
from toastkit.frames import End, Frame, Head, Logits, Prefilled, Token
from toastkit.gears.classifier import Difficulty
from toastkit.gears.gear_options import GearOptions
from toastkit.gears.selector import GearSelector, SelectorOptions
from toastkit.session import gear_state


@dataclass(frozen=True)
class GearRules:
    """How gears are chosen. calibrated: use thresholds stored for a model. explain: called with one
    line each on the thresholds, the prompt's difficulty, and every shift."""

    selector: SelectorOptions = SelectorOptions()
    calibrated: bool = True
    explain: Callable[[str], None] | None = None


@dataclass(frozen=True)
class GearSettings:
    """The gears of a model that answers. options: of its engine. rules: if chosen by entropy."""

    options: GearOptions
    rules: GearRules = GearRules()


def selector_for(head: Head, rules: GearRules) -> GearSelector:
    """The selector of a run: thresholds stored for its model, or the given ones scaled to its
    vocabulary; the start gear from the prompt's difficulty, if the head tells. Raises UsageError,
    DataError."""
    from toastkit.gears.thresholds import monitor_options, origin_of

    options, monitor = rules.selector, rules.selector.monitor
    origin = origin_of(monitor, head.vocab)
    if rules.calibrated:
        monitor, origin = monitor_options(head.fingerprint, head.vocab, monitor)
        options = replace(options, monitor=monitor)
    start = Difficulty.from_map(head.extra.get("difficulty"))
    selector = GearSelector(head.vocab, options, start)
    if rules.explain is not None:
        low, high = selector.monitor.low, selector.monitor.high
        rules.explain(f"thresholds {low:.2f} and {high:.2f} bits: {origin}")
        rules.explain("prompt: not seen" if start is None else f"prompt: {start.explain()}")
    return selector


class Follower:
    """The selector of the current run, and where its state is kept. It is made at the first
    entropy: a decode whose gears come with its tokens needs none."""

    def __init__(self, rules: GearRules):
        self._rules = rules
        self._head: Head | None = None
        self._prefilled: Prefilled | None = None
        self._session: Path | None = None
        self._selector: GearSelector | None = None
        self._position = -1

    def learn(self, frame: Frame) -> None:
        """Learn from a frame where runs begin and end, and which part of a prompt was new."""
        if isinstance(frame, Head):
            self._begin(frame)
        elif isinstance(frame, Prefilled):
            self._prefilled = frame
        elif isinstance(frame, End):
            self.end()

    def _begin(self, head: Head) -> None:
        self._head, self._prefilled, self._selector, self._position = head, None, None, -1
        # A stream from a file names a run that is over, from which nothing is learnt of its
        # session; likewise one of ours that we may not look at.
        live = head.run is None or (isinstance(head.run, str) and os.path.exists(head.run))
        self._session = Path(head.session) if live and head.session is not None else None

    def _start(self, head: Head) -> GearSelector:
        """A selector for the run: the session's stored one, if it covers the prompt and nothing
        else, and followed the same rules."""
        selector = selector_for(head, self._rules)
        frame, session = self._prefilled, self._session
        if frame is None or frame.n_new or session is None:
            return selector
        committed = gear_state.committed(session)
        if committed is None or committed[0] != frame.n_past:
            return selector
        kept = gear_state.load(session, *committed) or {}
        try:
            former, position = GearSelector.from_state(kept["selector"]), kept["position"]
        except (ToastError, KeyError):
            return selector
        valid = type(position) is int and 0 <= position <= frame.n_past
        if not (valid and former.gear is not None and former.goes_on_as(selector)):
            return selector
        self._position = position
        return former

    def annotate(self, frame: Logits | Token, entropy: float) -> None:
        """Fill the frame's fields; entropy: bits, of the logits at its position. Raises UsageError,
        DataError for invalid thresholds."""
        if self._selector is None:
            if self._head is None:
                return
            self._selector = self._start(self._head)
        selector = self._selector
        frame.entropy = round(entropy, 6)  # the frame's value, so that all paths agree
        # A position seen before the last run stopped is not counted twice.
        seen = selector.last if frame.pos <= self._position else None
        decision = seen or selector.update(frame.entropy)
        self._position = max(self._position, frame.pos)
        frame.gear = decision.gear
        if isinstance(frame, Logits):
            frame.mean = round(decision.mean, 6)
            frame.slope = round(decision.slope, 6)
            frame.shifted = decision.shifted
            frame.reason = decision.reason
            frame.expected = decision.expected
        if self._rules.explain is not None and decision.shifted:
            self._rules.explain(f"position {frame.pos}: {decision.gear}, {decision.reason}")

    def end(self) -> None:
        """The run is over and its session, if any, committed."""
        selector, session = self._selector, self._session
        self._head = self._selector = None
        if selector is None or session is None or self._position < 0:
            return
        committed = gear_state.committed(session)
        # Its last token may have been read without emitting logits.
        if committed is None or committed[0] - self._position not in (0, 1):
            return
        state = {"position": self._position, "selector": selector.state()}
        with suppress(ToastError):  # not part of a commit: the next run merely begins anew
            gear_state.save(session, *committed, state)
