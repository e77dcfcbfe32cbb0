"""This process as a backend: the model is loaded at the first request and kept for the next."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from toastkit.interrupts import Signals, held

if TYPE_CHECKING:
    from toastkit.client.backend import Wanted


class LocalBackend:
    """A model in this process. wanted: which one, on which device. interrupts, watch: as in
    wire.Wire, for the replies."""

    name = "this process"

    def __init__(self, wanted: Wanted, interrupts: Signals | None = None, watch: int | None = None):
        self._wanted = wanted
        self._interrupts = interrupts
        self._watch = watch
        self._service: Any = None

    def ask(self, request: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The replies to a request, whose fields on the model are ignored."""
        from toastkit.descriptors import reader_gone

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
