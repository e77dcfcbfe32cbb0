"""The daemon's way of answering without a daemon: for one request at a time, in this process."""

from __future__ import annotations

from collections.abc import Iterator

from toastkit.daemon.channel import error_reply
from toastkit.daemon.prepare import find_model
from toastkit.daemon.requests import make_request
from toastkit.daemon.service import Service, last_replies, open_service
from toastkit.daemon.service_settings import ServiceSettings
from toastkit.errors import ToastError
from toastkit.native.building.libraries import find


class LocalService:
    """settings: as of the daemon. quiet: say is told only what went wrong, not what happens. Raises
    NoInputError, DataError for the files."""

    def __init__(self, settings: ServiceSettings, quiet: bool = False):
        self._preparer = find_model(settings.model)
        self._settings = settings
        self._notify = None if quiet else settings.say
        self._service: Service | None = None
        self._warned = False

    def ask(self, request: dict) -> Iterator[dict]:
        """The replies of toasted(7) to a request, which is an object of it. Closing the iterator
        cancels. What fails is an `error` reply, as from the daemon."""
        channel = _Replies()
        try:
            prepared = self._preparer.prepare(make_request(request))
            self._give_up_old()
            if self._service is None:
                yield {"progress": {"loading": self._preparer.files.name}}
                self._service = open_service(
                    self._preparer, self._settings, self._notify, lambda conversation: None
                )
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
            yield from last_replies(conversation, self._preparer.files.name)
        finally:
            channel.gone = True
            while self._service.busy:
                self._service.turn()

    def _give_up_old(self) -> None:
        """Closes a model that was loaded while native products were being built, once they are
        there: what is remembered and not on disk is read again, many times as fast."""
        if self._service is not None and self._service.engine.native.awaited and find().path:
            self._service.close()
            self._service = None

    def memory_warning(self) -> None:
        """Has what may leave the device do so before the next pass. For a signal handler."""
        self._warned = True
        if self._service is not None:
            self._service.memory_warning()

    def close(self) -> None:
        """Lets the model go."""
        self._service = None


class _Replies:
    """A channel to this process."""

    def __init__(self) -> None:
        self.gone = False
        self._waiting: list[dict] = []

    def reply(self, message: dict) -> None:
        self._waiting.append(message)

    def done(self) -> None:
        """Nothing: the one who asks sees the end by itself."""

    def take(self) -> list[dict]:
        """The replies since the last call."""
        waiting, self._waiting = self._waiting, []
        return waiting
