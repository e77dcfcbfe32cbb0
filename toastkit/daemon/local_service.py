"""The daemon's way of answering without a daemon: for one request at a time, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from toastkit.daemon.channel import error_reply
from toastkit.daemon.prepare import Preparer
from toastkit.daemon.requests import make_request
from toastkit.daemon.service import Service, ServiceSettings, last_replies
from toastkit.engine.opening import open_engine
from toastkit.errors import ToastError
from toastkit.model.config import load_config
from toastkit.model.locate import locate
from toastkit.stages.follow import GearSettings


class LocalService:
    """model: as -m takes it. device, dtype, gears: as of toast-decode(1). say: is told a line now
    and then; with quiet, only what went wrong. Raises NoInputError, DataError for the files."""

    def __init__(
        self,
        model: str,
        device: str = "auto",
        dtype: str | None = None,
        say: Callable[[str], None] | None = None,
        quiet: bool = False,
        gears: GearSettings | None = None,
    ):
        files = locate(model)
        self._preparer = Preparer(files, load_config(files))
        self._load = lambda: open_engine(
            files,
            device_name=device,
            dtype=dtype,
            notify=None if quiet else say,
            gear_options=None if gears is None else gears.options,
        )
        self._settings = ServiceSettings(say=say, gears=gears)
        self._service: Service | None = None

    def ask(self, request: dict) -> Iterator[dict]:
        """The replies of toasted(7) to a request, which is an object of it. Closing the iterator
        cancels. What fails is an `error` reply, as from the daemon."""
        channel = _Replies()
        try:
            prepared = self._preparer.prepare(make_request(request))
            if self._service is None:
                yield {"progress": {"loading": self._preparer.files.name}}
                self._service = Service(
                    self._load(), self._preparer, self._settings, lambda c: None
                )
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
        """What was said since the last time."""
        waiting, self._waiting = self._waiting, []
        return waiting
