"""The thread that owns the device: it loads the model, serves requests, and keeps states.

Requests are prepared on other threads, which need no device, wait in a bounded queue, and are
admitted as others end. If the thread dies, `failure` says why, and the daemon ends: without a
worker its clients would wait for ever.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from toastkit.daemon.channel import error_reply
from toastkit.daemon.connection import close_all
from toastkit.daemon.prepare import Prepared, Preparer, current_model, messages_of
from toastkit.daemon.requests import ATTACH_OPS, Request
from toastkit.daemon.service_settings import ServiceSettings
from toastkit.daemon.slack import IDLE_SECONDS, Slack
from toastkit.engine.device import give_memory_back, wait_for_end
from toastkit.errors import BusyError, ToastError, UnavailableError, as_toast_error
from toastkit.native.building.libraries import find
from toastkit.text.exact_numbers import are, counted

if TYPE_CHECKING:
    from toastkit.daemon.channel import Channel
    from toastkit.daemon.conversation import Conversation
    from toastkit.daemon.service import Service

PREPARERS = 2  # threads: a long prompt does not delay a short one
NATIVE_SECONDS = 3.0  # between checks for native products that are being built


class Worker:
    """The thread and its queue. notify: called from its threads when something has changed.
    preparing: requests whose prompts are being tokenised."""

    def __init__(self, settings: ServiceSettings):
        self.settings = settings
        self._say: Callable[[str], None] = settings.say or (lambda line: None)
        self.failure: BaseException | None = None
        self.notify: Callable[[], None] = lambda: None
        self.served = self.preparing = 0
        self._condition = threading.Condition()
        self._waiting: list[tuple[int, int, Prepared, Channel]] = []
        self._order = itertools.count()
        self._jobs: deque[Callable[[], None]] = deque()
        self._draining = self._closing = self._reloading = False
        self._slack = Slack()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, name="worker", daemon=True)
        self._readers = ThreadPoolExecutor(PREPARERS, "preparer")
        self._service: Service | None = None
        self._last_used = time.monotonic()
        self._memory_summary: dict[str, Any] = {}
        self._next_look: float | None = None
        self._counts = Counter({"prompt": 0, "cached": 0, "answer": 0})

    # ------------------------------------------------------------------------- of any other thread

    def start(self) -> None:
        """Load the model, and return when it is ready for requests. Raises what loading raises."""
        self._preparer = current_model(self.settings, self._readers)
        self._thread.start()
        self._ready.wait()
        if self.failure is not None:
            raise self.failure

    def submit(self, request: Request, channel: Channel) -> None:
        """Accept a request, and the descriptors of an attach op; replies go to the channel. Raises
        BusyError if the queue is full, UnavailableError while the daemon shuts down."""
        with self._condition:
            # An attached run continues to its end, like every other.
            if self._draining and (request.op not in ATTACH_OPS or request.op == "attach"):
                raise UnavailableError("the daemon is shutting down")
            if request.op == "generate":
                self._check_room()
                self.preparing += 1
                order = next(self._order)
        if request.op == "generate":
            self._readers.submit(self._prepare, request, channel, order)
        else:
            act = self._health if request.op == "health" else self._attached
            self._do(lambda: self._answer(act, request, channel))

    def _check_room(self) -> None:
        """Raise BusyError if too many requests wait for others; those of gone clients do not."""
        active = len(self._service.active) if self._service else 0
        most = self.settings.max_queue + max(self.settings.parallel - active, 0)
        if self.preparing + len(self._waiting) < most:
            return
        for _, _, prepared, channel in self._waiting:
            if channel.gone:
                self._refuse(prepared.request, channel, None)
        self._waiting = [entry for entry in self._waiting if not entry[-1].gone]
        heapq.heapify(self._waiting)
        if (count := self.preparing + len(self._waiting)) >= most:
            some = f"{counted(count, 'request')} {are(count)} waiting" if count else "none may wait"
            raise BusyError(f"busy: {some}", hint="try again later")

    def _do(self, job: Callable[[], None]) -> None:
        with self._condition:
            self._jobs.append(job)
            self._condition.notify()

    def _prepare(self, request: Request, channel: Channel, order: int) -> None:
        """Tokenise the prompt, on a preparing thread. Whatever happens, the client gets a reply and
        the slot is released."""
        prepared: Prepared | None = None
        error: ToastError | None = None
        try:
            if not channel.gone:
                prepared = self._preparer.prepare(request)
        except BaseException as failure:  # threads of the pool are not interrupted
            error = as_toast_error(failure)
        with self._condition:
            self._last_used = time.monotonic()
            self.preparing -= 1
            if prepared is not None and self._draining:  # it waits, like those in the queue
                prepared, error = None, UnavailableError("the daemon is shutting down")
            elif prepared is not None:
                heapq.heappush(self._waiting, (-request.priority, order, prepared, channel))
            self._condition.notify()
        if prepared is None:
            self._refuse(request, channel, error)
            error = None  # its traceback holds this frame, and the prompt

    def _refuse(self, request: Request, channel: Channel, error: ToastError | None) -> None:
        """End a request that has not begun; without an error if its client has gone."""
        if error is not None:
            channel.reply(error_reply(error))
        self._record(request, channel, {"error": error.message} if error else {"end": "cancelled"})
        channel.done()

    def status(self) -> dict[str, Any]:
        """The worker's current status."""
        service = self._service
        idle: dict[str, Any] = dict.fromkeys(("device", "dtype", "kv_dtype", "native"))
        idle |= {"active": 0, "attached": 0, "conversations": self._memory_summary, "ledger": {}}
        return {
            "model": self._preparer.files.name,
            "fingerprint": self._preparer.fingerprint,
            "loaded": service is not None,
            "resident": self.settings.policies.resident,
            "waiting": self.preparing + len(self._waiting),
            "answered": self.served,
            "tokens": dict(self._counts),
            **(service.report() if service else idle),
        }

    def drain(self) -> None:
        """Accept nothing more; refuse those in the queue, let active ones end."""
        with self._condition:
            self._draining = True
            waiting, self._waiting = self._waiting, []
            self._condition.notify()
        error = UnavailableError("the daemon is shutting down")
        for *_, prepared, channel in waiting:
            self._refuse(prepared.request, channel, error)

    def idle(self) -> bool:
        """Drained, and nothing active."""
        busy = self._service is not None and (self._service.busy or self._service.attached)
        return self._draining and not (busy or self.preparing or self._waiting or self._jobs)

    def cancel_all(self) -> None:
        """Have the worker's thread end everything active."""
        self._do(self._give_up_all)

    def reload(self) -> None:
        """Check the model's files again once active requests have ended. Raises NoInputError,
        DataError if there is no such model now; what else fails later is logged."""
        Preparer(self.settings)
        with self._condition:
            self._reloading = True
            self._condition.notify()

    def memory_warning(self) -> None:
        """Have layers released from the device before the next pass, at once if none runs."""
        self._do(self._make_room)

    def close(self) -> None:
        """End the thread, with every conversation on disk."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        if self._thread.ident is not None:
            self._thread.join()
            wait_for_end(self._thread)
        self._readers.shutdown()

    # ---------------------------------------------------------------------------- of the worker's

    def _main(self) -> None:
        try:
            self._load()
            self._ready.set()
            while not self._closing:
                self._round()
            self._give_up_all()
            self._unload()
        except BaseException as error:
            self.failure = error
            self._ready.set()
            with suppress(Exception):  # report the first failure
                if self._service is not None:
                    self._service.save_all()
        self.notify()

    def _load(self) -> Service:
        from toastkit.daemon.service import open_service  # and MLX: prompts are prepared meanwhile

        service = open_service(self._preparer, self.settings, self.settings.say, self._finished)
        self._service, self._last_used = service, time.monotonic()
        looks = service.engine.native.awaited
        self._next_look = self._last_used + NATIVE_SECONDS if looks else None
        return service

    def _loaded(self) -> Service:
        return self._service or self._load()

    def _unload(self) -> None:
        """Write cached states to disk and release the memory."""
        service, self._service = self._service, None
        if service is not None:
            self._memory_summary = service.close()
            del service
            give_memory_back()

    def _round(self) -> None:
        """One round of the worker's thread: wait for work, and do some."""
        with self._condition:
            work = self._jobs or self._waiting or self._closing or self._reloading
            if not (work or (self._service and self._service.busy)):
                self._condition.wait(self._wait_seconds())
            job = self._jobs.popleft() if self._jobs else None
        if job is not None:
            self._guarded(job)
        if self._reloading and not (self._service is not None and self._service.active):
            self._reload()
        while not self._reloading and (self._service is None or self._service.has_room):
            with self._condition:
                if not self._waiting or self._outdated():
                    break
                *_, prepared, channel = heapq.heappop(self._waiting)
            self._begin(prepared, channel)
        if self._service is not None and self._service.busy:
            self._service.turn()
            self._last_used, self._slack.any = time.monotonic(), True
        elif self._wait_seconds() == 0:
            self._guarded(self._idle_work)
        self._guarded(self._slack.give_some)

    def _guarded(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:
            self._say(as_toast_error(error).message)

    def _wait_seconds(self) -> float | None:
        """Seconds until there is something to do unprompted."""
        if self._service is None or self.preparing:
            return None
        due = [] if self._next_look is None else [self._next_look]
        rests = self.settings.idle_unload, IDLE_SECONDS if self._slack.any else None
        due += [self._last_used + rest for rest in rests if rest is not None]
        return max(min(due) - time.monotonic(), 0) if due else None

    def _idle_work(self) -> None:
        """Unload the model, trim memory, or reload the model for native products since built."""
        unload, now = self.settings.idle_unload, time.monotonic()
        if unload is not None and now >= self._last_used + unload:
            return self._unload()
        if self._slack.any and now >= self._last_used + IDLE_SECONDS:
            return self._slack.give_all()
        found = find()
        self._next_look = now + NATIVE_SECONDS if found.path or found.pending else None
        if found.path and self._service is not None and not self._service.attached:
            self._load_again(current_model(self.settings, self._readers, self._preparer))

    def _begin(self, prepared: Prepared, channel: Channel) -> None:
        if channel.gone:
            return self._refuse(prepared.request, channel, None)
        try:
            self._check_files()
            if not self._preparer.prepared_alike(prepared):  # reloaded while it waited
                prepared = self._preparer.prepare(prepared.request)
            if self._service is None:
                channel.reply({"progress": {"loading": self._preparer.files.name}})
            self._loaded().begin(prepared, channel)
        except Exception as error:
            self._refuse(prepared.request, channel, as_toast_error(error))

    def _finished(self, conversation: Conversation) -> None:
        """Send the last replies of a request, write its record, update the status."""
        channel: Any = conversation.channel  # as it was begun with
        request = conversation.prepared.request
        try:
            for message in conversation.last_replies():
                channel.reply(message)
            stats = conversation.stats()
            self._counts.update({name: stats[name] for name in self._counts})
            self.served += 1
            facts = conversation.audit_facts(stats)
        except Exception as error:
            channel.reply(error_reply(as_toast_error(error)))
            raise
        finally:
            channel.done()
        self._record(request, channel, facts, conversation.text)

    def _record(self, request: Request, channel: Channel, facts: dict, text: str = "") -> None:
        """Write a line of the audit log, which leaves the texts out itself."""
        if self.settings.audit is None:
            return
        about = {"op": request.op, "model": self._preparer.files.name, "session": request.session}
        asked = request.op == "generate"
        texts = {"messages": messages_of(request), "text": text} if asked else None
        self.settings.audit.write({**channel.connection.peer._asdict(), **about, **facts}, texts)

    def _health(self, request: Request, channel: Channel) -> None:
        start, loaded = time.perf_counter(), self._service is not None
        if self._service is not None:
            self._service.probe()
        seconds = round(time.perf_counter() - start, 6)
        channel.reply({"health": {"ok": True, "loaded": loaded, "seconds": seconds}})

    def _give_up_all(self) -> None:
        if self._service is not None:
            for conversation in list(self._service.active):
                self._service.give_up(conversation)
            self._service.end_attached(UnavailableError("the daemon is shutting down"))

    def _make_room(self) -> None:
        if self._service is not None:
            self._service.make_room()

    def _reload(self) -> None:
        """Replace the model if its files have changed. What fails before that keeps the old one."""
        self._reloading = False
        self._preparer.changed()  # from now on
        try:
            preparer = current_model(self.settings, self._readers, self._preparer)
            if preparer is self._preparer and not (self._service and self._service.has_moved()):
                self._say(f"{preparer.files.name} has not changed")
                return
            if self._service is not None:
                self._service.end_attached(UnavailableError("the daemon loads its model again"))
            self._load_again(preparer)
        except Exception as error:
            if self._service is not None:
                self._preparer.stay(as_toast_error(error).message)
            self._say(f"cannot reload: {as_toast_error(error).message}")

    def _check_files(self) -> None:
        """While the model is unloaded, take it as its files are now."""
        if self._service is None:
            self._preparer = current_model(self.settings, self._readers, self._preparer)

    def _outdated(self) -> bool:
        """Whether to reload before anything new begins: the model's files have changed."""
        service = self._service  # an attached run goes on with the old model, if that is in memory
        if service and (not service.attached or service.has_moved()) and self._preparer.changed():
            self._reloading = True
        return self._reloading

    def _load_again(self, preparer: Preparer) -> None:
        self._unload()
        self._preparer = preparer
        self._load()
        self._say(f"reloaded {preparer.files.name}")

    def _attached(self, request: Request, channel: Channel) -> None:
        """Perform an op of toast-prefill or toast-decode, whose own run uses this model."""
        from toastkit.daemon.attached import serve

        try:
            if self._service is not None and not self._service.active and self._outdated():
                self._reload()
            self._check_files()
            serve(self._loaded, self._preparer, request, channel, self._do)
            if request.op == "attach":
                self._record(request, channel, {})
        finally:
            close_all(request.fds)
            self._last_used, self._slack.any = time.monotonic(), True

    def _answer(self, act: Callable[..., None], request: Request, channel: Channel) -> None:
        """Handle a request that is no conversation, confining its bugs."""
        try:
            act(request, channel)
        except Exception as error:
            channel.reply(error_reply(as_toast_error(error)))
        channel.done()
