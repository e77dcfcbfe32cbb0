"""THE seam: a request goes in, replies come out, both as in toasted(7). The caller does not know
whether a daemon, this process or, one day, a remote provider answers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from toastkit.descriptors import is_pipe, reader_gone
from toastkit.errors import CannotCreateError, NoInputError, UnavailableError
from toastkit.interrupts import Signals, held

STDOUT = 1

Replies = Generator[dict[str, Any], None, None]


class Backend(Protocol):
    """Answers requests. name: in messages, as "the daemon at PATH".

    ask(request) yields the replies as they come, the last one being `end` or `error`; after a
    signal it stops without them. Closing it cancels the request. It may be called again once the
    previous replies have ended. memory_warning() may be called by a signal handler: this process
    should release memory.
    """

    @property
    def name(self) -> str: ...

    def ask(self, request: dict[str, Any]) -> Replies: ...

    def memory_warning(self) -> None: ...

    def close(self) -> None: ...


class Wanted(NamedTuple):
    """The flags that choose a backend.

    model: as -m had it, or None. settings: fields of daemon.service_settings.ServiceSettings, for a
    model in this process. here: use no daemon. socket: where it listens, None for the default.
    insist: require a daemon. say: writes a line to stderr. silent: tells that the daemon at a path
    does not answer, None if that is not to be told. verbose, quiet: as the flags.
    """

    model: str | None = None
    settings: Mapping[str, Any] = MappingProxyType({})
    here: bool = False
    socket: str | None = None
    insist: bool = False
    say: Callable[[str], None] = print
    silent: Callable[[str], None] | None = None
    verbose: bool = False
    quiet: bool = False


def choose_backend(wanted: Wanted, interrupts: Signals | None = None) -> Backend:
    """The backend for these flags: a daemon if one answers, else this process.

    Raises UnavailableError if a daemon is required and none answers.
    """
    if wanted.here:
        if wanted.verbose:
            wanted.say("running in this process")
        return _this_process(wanted, interrupts)
    daemon = _daemon(wanted, interrupts)
    if daemon is None:
        return _this_process(wanted, interrupts)
    if wanted.verbose:
        wanted.say(f"using {daemon.name}")
    if wanted.model is None:
        return daemon
    return OtherModel(daemon, wanted, interrupts)


def _daemon(wanted: Wanted, interrupts: Signals | None) -> Backend | None:
    from toastkit.client.socket_backend import connect
    from toastkit.daemon.paths import socket_path

    try:
        path = socket_path(wanted.socket)
        silent = None if wanted.silent is None else partial(wanted.silent, path)
        found = connect(path, interrupts, _watched_stdout(), silent)
    except CannotCreateError as error:
        # The default directory is somebody else's: no daemon of ours can be there.
        if wanted.verbose:
            wanted.say(f"{error.message}: running in this process")
        return None
    if found is None and wanted.insist:
        raise UnavailableError(f"no daemon answers at {path}")
    if found is None and wanted.verbose:
        wanted.say(f"no daemon at {path}: running in this process")
    return found


def _this_process(wanted: Wanted, interrupts: Signals | None) -> Backend:
    return LocalBackend(wanted, interrupts, _watched_stdout())


def _watched_stdout() -> int | None:
    """stdout, if its reader can go away."""
    return STDOUT if is_pipe(STDOUT) else None


class LocalBackend:
    """A model in this process, loaded at the first request and kept for the next. wanted: which
    one, on which device. interrupts, watch: as in wire.Waiter, for the replies."""

    name = "this process"

    def __init__(self, wanted: Wanted, interrupts: Signals | None = None, watch: int | None = None):
        self._wanted = wanted
        self._interrupts = interrupts
        self._watch = watch
        self._service: Any = None

    def ask(self, request: dict[str, Any]) -> Replies:
        """The replies to a request, whose fields on the model are ignored."""
        if self._interrupts is not None:
            self._interrupts.graceful = False
        of_model = ("model", "resident", "experts")
        request = {name: value for name, value in request.items() if name not in of_model}
        with closing(self._loaded().ask(request)) as replies:
            for reply in replies:
                if self._watch is not None and reader_gone(self._watch):
                    raise BrokenPipeError
                yield reply
                if self._interrupts is not None:
                    # While the model loads there is nothing to keep: a signal ends us at once.
                    self._interrupts.graceful = "loading" not in (reply.get("progress") or ())
                    if self._interrupts.signal:
                        return

    def memory_warning(self) -> None:
        if self._service is not None:
            self._service.memory_warning()

    def close(self) -> None:
        if self._service is not None:
            self._service.close()
            self._service = None

    def _loaded(self) -> Any:
        if self._service is None:
            with held():
                from toastkit.daemon.local_service import LocalService
                from toastkit.daemon.service_settings import ServiceSettings
            wanted = self._wanted
            settings = ServiceSettings(say=wanted.say, **wanted.settings)
            self._service = LocalService(settings, wanted.quiet)
        return self._service


class OtherModel:
    """A daemon for as long as it runs the requested model, and this process from the first request
    on that it refuses because it runs another."""

    def __init__(self, daemon: Backend, wanted: Wanted, interrupts: Signals | None):
        self._backend = daemon
        self._wanted = wanted
        self._interrupts = interrupts
        self._refused = False

    @property
    def name(self) -> str:
        return self._backend.name

    def ask(self, request: dict[str, Any]) -> Replies:
        """The replies of one or the other, without the daemon's refusal."""
        if not self._refused:
            with closing(self._backend.ask(request)) as replies:
                for reply in replies:
                    if _code(reply) == NoInputError.code:
                        self._refused = True
                        break
                    yield reply
                else:
                    return
            self._move()
        yield from self._backend.ask(request)

    def _move(self) -> None:
        if self._wanted.verbose:
            self._wanted.say(f"{self.name} runs another model: running in this process")
        self._backend.close()
        self._backend = _this_process(self._wanted, self._interrupts)

    def memory_warning(self) -> None:
        self._backend.memory_warning()

    def close(self) -> None:
        self._backend.close()


def _code(reply: dict[str, Any]) -> int | None:
    error = reply.get("error")
    return error.get("code") if isinstance(error, dict) else None
