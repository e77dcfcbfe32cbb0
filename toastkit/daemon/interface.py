"""What the front and the worker know of each other, and the settings of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from toastkit.daemon.channel import Channel
from toastkit.daemon.requests import Request
from toastkit.stages.follow import GearSettings


class Worker(Protocol):
    """The one who owns the model, and the thread that it lives in.

    failure: what the thread has died of. notify: set by the front; called when it is to look.
    start: loads the model and returns; raises ToastError, and then there is no thread. submit:
    thread-safe, returns at once; raises BusyError, UnavailableError. Replies and done() come later,
    from another thread; the descriptors of an attach op are the worker's from then on. status:
    thread-safe, waits for nothing. drain: takes no more, goes on with what is active; idle: whether
    that is over. cancel_all: ends what is active. reload: loads the model anew, once the active
    requests are done. close: saves what is to be saved and ends the thread.
    """

    failure: BaseException | None
    notify: Callable[[], None]

    def start(self) -> None: ...

    def submit(self, request: Request, channel: Channel) -> None: ...

    def status(self) -> dict[str, Any]: ...

    def drain(self) -> None: ...

    def idle(self) -> bool: ...

    def cancel_all(self) -> None: ...

    def reload(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class WorkerSettings:
    """model: as -m takes it. device, dtype, chunk: as of toast-prefill(1). parallel, batch,
    cache_bytes, spill_bytes, gears: as of ServiceSettings. max_queue: requests that may wait.
    idle_unload: seconds without a request after which the model leaves the memory, None for never.
    audit: gets a record of each request. say: is told what a person should know."""

    model: str = "crumb"
    device: str = "auto"
    dtype: str | None = None
    chunk: int | None = None
    parallel: int = 8
    batch: int = 8
    max_queue: int = 64
    idle_unload: float | None = None
    cache_bytes: int = 2 << 30
    spill_bytes: int = 8 << 30
    audit: Any = None
    debug: bool = False
    say: Callable[[str], None] | None = None
    gears: GearSettings | None = None


@dataclass(frozen=True)
class Limits:
    """connections: at most, at a time. line_bytes: of a request, without its newline. idle_seconds:
    how long a connection may do nothing."""

    connections: int = 256
    line_bytes: int = 16 << 20
    idle_seconds: float = 300.0
