"""A request in progress: the frames of its stages become replies to the client."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from toastkit.daemon.channel import error_reply
from toastkit.daemon.history import conversation_hash
from toastkit.daemon.prepare import Prepared, messages_of
from toastkit.daemon.scheduled_runs import MIN_APART, ScheduledRuns
from toastkit.daemon.spill import CachedState
from toastkit.engine.savepoints import copy_caches
from toastkit.errors import ToastError, drop_frames
from toastkit.frames import End, Frame, Prefilled, Text, Token, Tokens, pack_ids
from toastkit.interrupts import Interrupt
from toastkit.prefix import common_prefix
from toastkit.stages.answer import AnswerOptions, answer, draws_on_device
from toastkit.stages.detokenize import TextOptions
from toastkit.stages.run.protocol import Pause
from toastkit.stages.run.settings import Outcome, ReadOptions
from toastkit.stages.sample import DrawOptions

if TYPE_CHECKING:
    from toastkit.daemon.service import Service

WORTH_KEEPING = 256  # tokens read; shorter unfinished states are not kept for a retry
PROGRESS_SECONDS = 0.1  # between progress replies


class Channel(Protocol):
    """Where replies go: see channel.Channel."""

    @property
    def gone(self) -> bool:
        """True if nobody reads any more."""

    def reply(self, message: dict) -> None: ...


class Conversation:
    """A request that has been admitted to the device.

    want: what it waits for: "read" (a prefill pass), "step" (a decode step), or None once it is
    over.
    """

    def __init__(self, prepared: Prepared, channel: Channel, service: Service):
        self.prepared = prepared
        self.channel = channel
        self._service = service
        self.want: str | None = "read"
        self.last_read = 0  # the scheduler's pass counter at its last pass
        self.end: End | None = None
        self.error: ToastError | None = None
        self._text: list[str] = []
        self._began = time.perf_counter()
        self._read: float | None = None
        self._first: float | None = None
        self._told = 0.0
        self._early: CachedState | None = None
        self._damaged: str | None = None  # a warning
        self._gears = service.settings.gears
        self._gear_tokens: Counter[str] = Counter()
        options, experts = self._options(), service.settings.policies.experts
        deferred = draws_on_device(service.engine.device, options, experts)
        self.runs = ScheduledRuns(service, prepared, deferred)
        head = replace(service.preparer.head, extra=dict(prepared.extra))
        frames: list[Frame] = [head, Tokens(pack_ids(prepared.ids))]
        self._frames: Iterator[Any] = answer(
            frames, service.preparer.tokenizer, lambda head: service.engine, self.runs,
            options, Interrupt(), Outcome(),
        )  # fmt: skip

    def _options(self) -> AnswerOptions:
        wanted, sampling = self.prepared.request.options, self.prepared.sampling
        most = wanted.max_tokens
        return AnswerOptions(
            read=ReadOptions(chunk=self._service.settings.chunk, progress=self._progress),
            draw=DrawOptions(sampling, wanted.top, most, wanted.ignore_eos, wanted.tokens),
            text=TextOptions(wanted.stop, wanted.keep_special),
            telemetry=wanted.tokens,
            gears=self._gears,
        )

    # ---------------------------------------------------------------------------------- its course

    @property
    def reading(self) -> bool:
        return self.want == "read"

    @property
    def held(self) -> int:
        """Tokens that its state has read; 0 until it has begun."""
        return 0 if self.runs.state is None else len(self.runs.state.tokens)

    @property
    def leads(self) -> bool:
        """Whether others may continue from its state while it reads."""
        return self.reading and self.runs.state is not None and self.prepared.request.keep

    def leader(self, others: Iterable[Conversation]) -> Conversation | None:
        """Before it has begun: the conversation to wait for, because that is about to read what
        they have in common and is not kept yet. It is asked to stop where they part."""
        ids, best, where = self.prepared.ids, None, 0
        for other in others:
            theirs = other.prepared.ids
            apart = min(common_prefix(ids, theirs), len(ids) - 1, len(theirs) - 1)
            if apart > where and apart - other.held >= MIN_APART and other.held >= self._known:
                best, where = other, apart
        if best is not None:
            best.runs.stop_at(where)
            self._progress(best.held, len(ids))
        return best

    @cached_property
    def _known(self) -> int:
        return self.runs.known(self.prepared.ids)

    def advance(self) -> None:
        """Run until it needs the device again, or is over."""
        try:
            if self.channel.gone:
                return self.give_up()
            for frame in self._frames:
                if isinstance(frame, Pause):
                    self.want = frame.want
                    if self.want == "step" and self._early is None:
                        self._keep_prompt()
                    return None
                self._tell(frame)
            self._keep()
        except ToastError as error:
            self.error = error
            drop_frames(error)
        self._close()
        self.want = None
        return None

    def give_up(self) -> None:
        """Stop where it is, because nobody waits for it, and keep what was read."""
        self.want = None
        try:
            self._frames.close()  # type: ignore[attr-defined]
            self._keep()
        except ToastError as error:
            self.error = error
            drop_frames(error)
        self._close()

    def abort(self) -> None:
        """Release everything after an internal failure."""
        self.want = None
        with suppress(Exception):  # report the first failure
            self._frames.close()  # type: ignore[attr-defined]
        self._close()

    def _close(self) -> None:
        """Release the state and any named session, whatever happened."""
        state, self.runs.state = self.runs.state, None
        if state is not None:
            self._service.stepper.drop(state)
            state.cache, state.savepoints = [], []
        if (named := self.runs.session()) is not None:
            named.close()

    def _keep_prompt(self) -> None:
        """Keep a long prompt as soon as it is read: the daemon may be killed while it answers."""
        state = self.runs.state
        assert state is not None  # it is about to step
        read = len(self.prepared.ids) - self.runs.cached
        wanted = self.prepared.request.keep and self.runs.session() is None
        if wanted and read >= WORTH_KEEPING:
            request = self.prepared.request
            key = conversation_hash(messages_of(request), request.tools)
            # The caches hold exactly the prompt, as the first step has not been taken. Arrays are
            # shared (copy on write).
            self._early = self._service.memory.keep(
                key, self.prepared.ids, copy_caches(state.cache), state.savepoints,
                self.runs.parent, self.prepared.key,
            )  # fmt: skip

    def _keep(self) -> None:
        """Keep the state for the next turn, unless little was read and nothing answered."""
        state, named = self.runs.state, self.runs.session()
        if not self.prepared.request.keep:
            if named is not None:
                self._service.memory.has_moved_on(named.path)
            return
        if state is None or not state.tokens:
            return
        if self.end is None and len(state.tokens) - self.runs.cached < WORTH_KEEPING:
            return
        self._service.stepper.leave(state)
        state.take_back()
        if named is not None and named.tokens != state.read_tokens():
            named = None  # not committed
        self._service.memory.keep(
            self.prepared.save_key(self.text), state.read_tokens(), state.cache, state.savepoints,
            self._early or self.runs.parent, self.prepared.key, named,
        )  # fmt: skip

    # ------------------------------------------------------------------------------- what is said

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self._text)

    def _progress(self, done: int, total: int) -> None:
        """Tell the client how many tokens of its prompt have been read, but not too often."""
        now = time.perf_counter()
        if done < total and now - self._told >= PROGRESS_SECONDS:
            self._told = now
            progress = {"done": done, "total": total, "cached": self.runs.cached}
            self.channel.reply({"progress": progress})

    def _tell(self, frame: Frame) -> None:
        request = self.prepared.request
        if isinstance(frame, (Text, Token)) and self._first is None:
            self._first = time.perf_counter()
        if isinstance(frame, Prefilled):
            self._read = time.perf_counter()
            state = self.runs.state
            if state is not None and state.logits is not None:
                self._damaged = self._service.engine.nan_warning(state.logits)
        elif isinstance(frame, Text):
            self._text.append(frame.s)
            if request.stream:
                self.channel.reply({"text": frame.s})
        elif isinstance(frame, Token):
            if frame.gear is not None:
                self._gear_tokens[frame.gear] += 1
            if not request.options.tokens:
                return
            told: dict[str, Any] = {"pos": frame.pos, "id": frame.id, "logprob": frame.logprob,
                    "entropy": frame.entropy}  # fmt: skip
            if frame.gear is not None:
                told["gear"] = frame.gear
            self.channel.reply({"token": {**told, **({"top": frame.top} if frame.top else {})}})
        elif isinstance(frame, End):
            self.end = frame

    def _notes(self) -> list[str]:
        count = len(self.prepared.ids) + (0 if self.end is None else self.end.n)
        warnings = (self._service.engine.window_warning(count), self._damaged)
        return [*self.prepared.notes, *(f"warning: {line}" for line in warnings if line)]

    def _reports(self) -> dict[str, Any]:
        """What was streamed and fetched since the answer began, for other conversations too, and
        the number of experts used for this one."""
        extra = {} if self.end is None else self.end.extra
        return {name: extra[name] for name in ("residency", "experts", "slots") if name in extra}

    def last_replies(self) -> Iterator[dict]:
        """The replies that end the request: stats and end, or error."""
        if self.error is not None:
            yield error_reply(self.error)
            return
        yield {"stats": self.stats()}
        reason, count = ("interrupt", 0) if self.end is None else (self.end.reason, self.end.n)
        yield {"end": {"reason": reason, "n": count, "text": self.text}}

    def stats(self) -> dict[str, Any]:
        """The `stats` reply: the cost of the request."""
        received = self.prepared.request.received

        def since(moment: float | None) -> float | None:
            return None if moment is None else round(moment - received, 6)

        return {
            "model": self._service.preparer.files.name,
            "prompt": len(self.prepared.ids),
            "cached": self.runs.cached,
            "why": self.runs.why,
            "answer": self.end.n if self.end is not None else 0,
            "seed": self.prepared.sampling.seed,
            "notes": self._notes(),
            **({"gears": dict(self._gear_tokens)} if self._gears is not None else {}),
            **self._reports(),
            "seconds": {
                "queued": since(self._began),
                "prefill": since(self._read),
                "first": since(self._first),
                "total": since(time.perf_counter()),
            },
        }

    def audit_facts(self, stats: Mapping[str, Any]) -> dict[str, Any]:
        """What the audit log says of the request, besides who made it. stats: as from `stats`."""
        return {
            **{name: stats[name] for name in ("prompt", "cached", "answer", "seconds")},
            "end": "cancelled" if self.channel.gone or self.end is None else self.end.reason,
            "hash": f"{self.prepared.save_key(self.text):016x}",
            "error": self.error.message if self.error is not None else None,
        }
