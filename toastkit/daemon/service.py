"""The scheduler: one loaded model for several conversations, and the states kept afterwards.

A round takes a decode step of every conversation that is answering, batched if possible, then one
prefill pass of one that is reading: a short one while others answer. One thread owns a Service,
because MLX's streams belong to threads: the daemon's worker for many clients (worker.py), or
`LocalService` for one, in the client's own process (local_service.py).
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from toastkit.daemon.conversation import Channel, Conversation
from toastkit.daemon.memory import Memory
from toastkit.daemon.prepare import Prepared, Preparer
from toastkit.daemon.service_settings import ServiceSettings
from toastkit.daemon.spill import CachedState, Spill
from toastkit.daemon.stepper import Stepper
from toastkit.engine.engine import Engine
from toastkit.engine.opening import open_engine
from toastkit.engine.savepoints import always_trimmable
from toastkit.errors import ToastError, as_toast_error, drop_frames
from toastkit.holdings.policy import NO_WISH, warn_of_memory

if TYPE_CHECKING:
    from toastkit.daemon.attached import Attached

SLICE_SECONDS = 0.05  # of prefill, between two steps of others
SHIFTING_SECONDS = 1.0  # instead, if prefill and decode need the weights in different forms
MIN_SLICE, FIRST_SLICE = 16, 32  # tokens
NO_KEY = -1  # no conversation's hash


class Service:
    """A loaded model and its conversations. finished(conversation): called when one is over, and
    failures are told; None: whoever asks looks at the conversation, and tells. attached: runs of
    other processes with their state here, see attached.py. stepper: takes the steps. rate: prefill
    tokens per second, as last measured, or None."""

    def __init__(
        self,
        engine: Engine,
        preparer: Preparer,
        settings: ServiceSettings,
        finished: Callable[[Conversation], None] | None,
    ):
        self.engine = engine
        self.settings = settings
        self.active: list[Conversation] = []
        self.attached: list[Attached] = []
        self.preparer = preparer
        self._finished = finished
        if finished is None:
            engine.leave_warnings()  # every answer comes with its own, see Conversation
        spill = None
        if settings.spill_bytes:
            dtypes = {engine.dtype: None, engine.kv_dtype: None}
            policies = (p.variant for p in engine.policies if p.variant)
            variant = "-".join([*(name or "own" for name in dtypes), *policies])
            spill = Spill(preparer.fingerprint, variant, settings.spill_bytes, settings.say)
        self.memory = Memory(engine.new_cache, settings.cache_bytes, engine.ledger, spill)
        preparer.wants_points = not always_trimmable(engine.new_cache())
        self.stepper = Stepper(engine, settings.batch, settings.say)
        self.rate: float | None = None
        shifting = any(policy.changes_forms and policy.paths for policy in engine.policies)
        self._slice_seconds = SHIFTING_SECONDS if shifting else SLICE_SECONDS
        self._turns = 0

    # ------------------------------------------------------------------------------------- rounds

    def begin(self, prepared: Prepared, channel: Channel) -> Conversation:
        """Begin a conversation for a request."""
        conversation = Conversation(prepared, channel, self)
        self.active.append(conversation)
        return conversation

    @property
    def has_room(self) -> bool:
        return len(self.active) < self.settings.parallel

    @property
    def busy(self) -> bool:
        """True if another turn would do anything."""
        return bool(self.active or self.memory.unsaved)

    def turn(self) -> None:
        """Run one round. A failure that no single conversation causes ends all active ones, so that
        none waits for ever, but not the service."""
        try:
            self._turn()
        except Exception as error:
            for conversation in list(self.active):
                self._fail(conversation, error)

    def _turn(self) -> None:
        for conversation in [c for c in self.active if c.channel.gone]:
            self.give_up(conversation)
        steppers = [c for c in self.active if c.want == "step"]
        if steppers:
            states = [c.runs.state for c in steppers if c.runs.state is not None]
            failed = {id(state): error for state, error in self.stepper.step(states)}
            for conversation in steppers:
                error = failed.get(id(conversation.runs.state))
                if error is None:
                    self._advance(conversation)
                else:
                    self._fail(conversation, error)
        readers = [c for c in self.active if c.reading]
        if readers:
            self._read(readers)
        if self.memory.unsaved:
            self.memory.write_some()

    def give_up(self, conversation: Conversation) -> None:
        """Stop a conversation where it is."""
        self._guarded(conversation, conversation.give_up)
        self._retire(conversation)

    def _read(self, readers: list[Conversation]) -> None:
        """Run a prefill pass for one of the readers: of the highest priority, round-robin among
        equals. One that waits for a common prefix leaves its turn to the conversation that reads
        it; one that has just waited comes first, before that has read on."""
        highest = max(c.prepared.request.priority for c in readers)
        first = [c for c in readers if c.prepared.request.priority == highest]
        leading = [c for c in readers if c.leads]
        leaders = {c: c.leader(leading) for c in first if c.runs.state is None}
        conversation = min(first, key=lambda c: (leaders.get(c, c) is not None, c.last_read))
        self._turns += 1
        conversation.last_read = self._turns
        conversation = leaders.get(conversation) or conversation
        begun, before = conversation.runs.state is not None, conversation.held
        start = time.perf_counter()
        self._advance(conversation)
        read = conversation.held - before
        if begun and conversation.reading and read >= MIN_SLICE:
            self.rate = read / (time.perf_counter() - start)

    def _advance(self, conversation: Conversation) -> None:
        self._guarded(conversation, conversation.advance)
        if conversation.want is None:
            self._retire(conversation)

    def _guarded(self, conversation: Conversation, act: Callable[[], None]) -> None:
        """Confine a bug to the conversation that it occurs in."""
        try:
            act()
        except Exception as error:
            self._abort(conversation, error)

    def _abort(self, conversation: Conversation, error: Exception) -> None:
        conversation.error = as_toast_error(error)
        with suppress(Exception):  # report the first failure
            conversation.abort()
        self._tell(error)
        drop_frames(error)

    def _tell(self, error: Exception) -> None:
        if self.settings.debug:
            import traceback

            traceback.print_exception(error)
        if self._finished is not None and self.settings.say is not None:
            self.settings.say(as_toast_error(error).message)

    def _fail(self, conversation: Conversation, error: Exception) -> None:
        """End a conversation with an error."""
        self._abort(conversation, error)
        self._retire(conversation)

    def _retire(self, conversation: Conversation) -> None:
        self.active.remove(conversation)
        if self._finished is None:
            return
        try:
            self._finished(conversation)
        except Exception as error:
            self._tell(error)

    # --------------------------------------------------------------------------- for conversations

    def unfinished(self) -> list[CachedState]:
        """The states of prompts that are being read, for others to continue from."""
        states = [c.runs.state for c in self.active if c.leads]
        return [
            CachedState(NO_KEY, array("I", state.tokens), state.cache, state.savepoints)
            for state in states
            if state is not None
        ]

    def slice_size(self) -> int | None:
        """Tokens of the next prefill pass: the device's default if nobody waits for a step, else as
        many as fit into a time slice."""
        if not any(c.want == "step" for c in self.active):
            return self.settings.chunk
        rate = self.rate or FIRST_SLICE / SLICE_SECONDS
        size = max(int(rate * self._slice_seconds), MIN_SLICE)
        return size if self.settings.chunk is None else min(size, self.settings.chunk)

    # -------------------------------------------------------------------------------------- upkeep

    def report(self) -> dict[str, Any]:
        """For the status: how the model computes, who uses it, what is in memory, and the counters
        of the policies by name."""
        engine = self.engine
        return {
            "device": engine.device,
            "dtype": engine.dtype,
            "kv_dtype": engine.kv_dtype,
            "native": str(engine.native),
            "active": len(self.active),
            "attached": len(self.attached),
            "conversations": self.memory.summary(),
            "ledger": engine.ledger.by_owner(),
            **{policy.name: policy.report() for policy in engine.policies},
        }

    def memory_warning(self) -> None:
        """Have device memory released before the next pass. For a signal handler, too."""
        warn_of_memory(self.engine.policies)

    def make_room(self) -> None:
        """Release device memory at once."""
        self.memory_warning()
        self.engine.decide(NO_WISH)

    def has_moved(self) -> bool:
        """True if the model's files were replaced, even by identical ones: layers and experts
        cannot be read from them any more."""
        try:
            self.engine.holdings.store.check_files()
        except ToastError:
            return True
        return False

    def probe(self) -> None:
        """Run one step of the model, to check that it still works."""
        mx.eval(self.engine.step(0, self.engine.new_cache()))

    def end_attached(self, why: ToastError) -> None:
        """End the runs of other processes: their next op gets this error."""
        for attached in list(self.attached):
            attached.end(why)

    def unplug_attached(self) -> None:
        """Have the runs of other processes release the weights; they keep their states."""
        for attached in list(self.attached):
            attached.unplug()

    def save_all(self) -> None:
        """Write to disk what is not there yet, retrying what failed before."""
        self.memory.unsaved += [kept for kept in self.memory.kept if kept.refused]
        while self.memory.unsaved:
            self.memory.write_some()

    def close(self) -> dict[str, Any]:
        """Write cached states to disk and release the device; return what is cached now, for the
        status."""
        self.save_all()
        self.unplug_attached()
        self.memory.unload()
        self.engine.close()
        return self.memory.summary()


def open_service(
    preparer: Preparer,
    settings: ServiceSettings,
    notify: Callable[[str], None] | None,
    finished: Callable[[Conversation], None] | None,
) -> Service:
    """Load the model and return its Service. notify: called with the Engine's messages. finished:
    see Service."""
    gears = None if settings.gears is None else settings.gears.options
    policies = settings.policies._replace(gear_options=gears)
    engine = open_engine(
        preparer.files,
        device_name=settings.device,
        dtype=settings.dtype,
        kv_bits=settings.kv_bits,
        notify=notify,
        **settings.native._asdict(),
        **policies._asdict(),
    )
    return Service(engine, preparer, settings, finished)
