"""The daemon's service without a daemon: in this process, for one request at a time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib import import_module

from toastkit.daemon.channel import error_reply
from toastkit.daemon.prepare import Preparer
from toastkit.daemon.requests import make_request
from toastkit.daemon.service import Service, open_service
from toastkit.daemon.service_settings import ServiceSettings
from toastkit.errors import ToastError
from toastkit.native.building.libraries import find
from toastkit.threads import start_optional


class LocalService:
    """settings: as for the daemon. quiet: say is called for failures only. Raises NoInputError,
    DataError for the files."""

    def __init__(self, settings: ServiceSettings, quiet: bool = False):
        self._preparer = Preparer(settings)
        self._settings = settings
        self._notify = None if quiet else settings.say
        self._service: Service | None = None
        self._warned = False

    def ask(self, request: dict) -> Iterator[dict]:
        """The replies of toasted(7) to a request object. Closing the iterator cancels. Failures are
        `error` replies, as from the daemon."""
        channel = _Replies()
        try:
            prepared = self._preparer.prepare(make_request(request))
            self._give_up_old()
            if self._service is None:
                if prepared.sampling.temperature:  # numpy, while the model is loaded
                    start_optional(partial(import_module, "toastkit.sampling.host"), "numpy")
                yield {"progress": {"loading": self._preparer.files.name}}
                self._service = open_service(self._preparer, self._settings, self._notify, None)
                if self._warned:  # while it was loaded
                    self._service.memory_warning()
            conversation = self._service.begin(prepared, channel)
        except ToastError as error:
            yield error_reply(error)
            return
        try:
            while conversation.want is not None:
                self._service.turn()
                yield from channel.take()
            yield from conversation.last_replies()
        finally:
            channel.gone = True
            while self._service.busy:
                self._service.turn()

    def _give_up_old(self) -> None:
        """Close a model that was loaded while native products were being built, once they are
        there: states that are not on disk are read again, many times as fast."""
        if self._service is not None and self._service.engine.native.awaited and find().path:
            self._service.close()
            self._service = None

    def memory_warning(self) -> None:
        """Have device memory released before the next pass. For a signal handler."""
        self._warned = True
        if self._service is not None:
            self._service.memory_warning()

    def close(self) -> None:
        """Unload the model."""
        self._service = None


class _Replies:
    """An in-process channel."""

    def __init__(self) -> None:
        self.gone = False
        self._waiting: list[dict] = []

    def reply(self, message: dict) -> None:
        self._waiting.append(message)

    def take(self) -> list[dict]:
        """The replies since the last call."""
        waiting, self._waiting = self._waiting, []
        return waiting
