"""A turn: a question, its answer on the way to stdout, and what of both is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from toastkit.client.backend import Backend
from toastkit.client.chats import Chat
from toastkit.client.output import Lines, Output, Progress, Reply, write_text
from toastkit.errors import DataError, ToastError, UnavailableError
from toastkit.interrupts import Signals
from toastkit.text.exact_numbers import counted
from toastkit.wire import remote_error


class Answer:
    """The answer so far. reason: eos, stop or length; "interrupt" if the other side gave up; None
    if it broke off. tokens: their number."""

    def __init__(self) -> None:
        self.text = ""
        self.reason: str | None = None
        self.tokens = 0
        self.stats: dict[str, Any] = {}

    def take(self, reply: Reply) -> None:
        """Record what a reply says about the answer."""
        if "text" in reply:
            self.text += reply["text"]
        elif "stats" in reply:
            self.stats = reply["stats"]
        elif "end" in reply:
            end = reply["end"]
            self.reason = end["reason"]
            self.tokens = end["n"]
            self.text = end["text"]


class TurnSettings(NamedTuple):
    """options: of the request. model, resident, experts, tools: in the request, or None. output:
    makes the sink for a request's replies. progress: shows the prefill's progress, or None.

    keep: write turns to the conversation's file. extract: print only the first fenced block.
    fail_on_length: an answer that was cut off is an error. tell: each is called with the stats of
    an answer. lines: this process's messages, held back until the end of an answer.
    """

    options: dict[str, Any]
    output: Callable[[], Output]
    model: str | None
    resident: str | None
    experts: str | None
    tools: list[dict] | None
    progress: Progress | None
    keep: bool
    extract: bool
    fail_on_length: bool
    tell: tuple[Callable[[dict[str, Any]], object], ...]
    lines: Lines


class Turns:
    """The turns of one conversation."""

    def __init__(self, chat: Chat, backend: Backend, interrupts: Signals, settings: TurnSettings):
        self._chat = chat
        self._backend = backend
        self._interrupts = interrupts
        self._settings = settings

    def ask(self, question: str) -> Answer:
        """Ask, show the answer as it comes, and keep the turn: complete, or what a person had seen
        of it when a signal or a closed pipe ended it.

        Raises the error that came instead, DataError for an answer that is cut off or has no block
        where that matters, BrokenPipeError if nobody reads stdout any more.
        """
        answer = Answer()
        try:
            try:
                self._follow(self._request(question), answer)
            finally:
                self._settings.lines.release()
            self._keep(question, answer)
        except BrokenPipeError:
            self._keep(question, answer)
            raise
        except UnavailableError as error:
            if answer.text:
                error.hint = error.hint or self._continue_hint("the last turn")
            raise
        self._finish(answer)
        return answer

    def _request(self, question: str) -> dict[str, Any]:
        settings = self._settings
        request: dict[str, Any] = {
            "messages": self._chat.asking(question),
            "options": settings.options,
        }
        if self._chat.name is not None and settings.keep:
            request["session"] = self._chat.name
        for name in ("tools", "model", "resident", "experts"):
            if (value := getattr(settings, name)) is not None:
                request[name] = value
        if not settings.keep:
            request["keep"] = False
        return request

    def _follow(self, request: dict[str, Any], answer: Answer) -> None:
        output, progress = self._settings.output(), self._settings.progress
        replies = self._backend.ask(request)
        try:
            for reply in replies:
                _check(reply)
                if progress is not None:
                    progress.put(reply)
                if "text" in reply:
                    self._settings.lines.hold()
                answer.take(reply)
                output.put(reply)
                if "error" in reply:
                    raise remote_error(reply["error"])
        except ToastError:
            output.end(whole=False)  # the error message begins on a line of its own
            raise
        finally:
            replies.close()
            if progress is not None:
                progress.end()
        output.end(whole=answer.reason not in (None, "interrupt"))

    def _keep(self, question: str, answer: Answer) -> None:
        """A turn that broke off before its first word is not kept."""
        if answer.reason is not None or answer.text:
            self._chat.add(question, answer.text)
            if self._settings.keep:
                self._chat.save()

    def _continue_hint(self, where: str) -> str | None:
        """A hint at how to continue the conversation; None if nothing of it is kept."""
        turns = any(message["role"] == "assistant" for message in self._chat.messages)
        if not turns or not self._settings.keep:
            return None
        name = self._chat.name
        return f"toast {'-c' if name is None else f'--session {name!r}'} goes on from {where}"

    def _finish(self, answer: Answer) -> None:
        settings = self._settings
        if answer.stats:
            for tell in settings.tell:
                tell(answer.stats)
        if answer.reason in (None, "interrupt") and not self._interrupts.signal:
            raise UnavailableError(
                f"{self._backend.name} broke the answer off", hint=self._continue_hint("there")
            )
        if settings.extract and answer.reason is not None:
            _print_block(answer.text)
        if settings.fail_on_length and answer.reason == "length":
            raise DataError(f"the answer was cut off after {counted(answer.tokens, 'token')}")


def _check(reply: Reply) -> None:
    """Raise DataError for a reply that toasted(7) does not allow."""
    end = reply.get("end", {"reason": "", "n": 0, "text": ""})
    progress, stats = reply.get("progress", {}), reply.get("stats", {})
    seconds = stats.get("seconds") or {} if isinstance(stats, dict) else None
    good = (
        isinstance(reply.get("text", ""), str)
        and isinstance(progress, dict)
        and all(isinstance(progress.get(n), int) for n in ("done", "total") if "total" in progress)
        and isinstance(seconds, dict)
        and all(isinstance(seconds.get(name) or 0, (int, float)) for name in ("first", "total"))
        and isinstance(stats.get("answer", 0), int)
        and isinstance(end, dict)
        and isinstance(end.get("reason"), str)
        and isinstance(end.get("n"), int)
        and isinstance(end.get("text"), str)
    )
    if not good:
        raise DataError("what the daemon sent is not a reply", hint="is it another version?")


def _print_block(text: str) -> None:
    """Print the first fenced block. Raises DataError if there is none, or nothing in it."""
    from toastkit.client.extract import first_block

    block = first_block(text)
    if not block:
        raise DataError("the answer holds no code block", hint="without -x all of it is printed")
    write_text(block)
