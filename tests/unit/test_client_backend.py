"""Backends: this process or the daemon, the choice between them, and errors of a daemon."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.fake_daemon import FakeDaemon, answer, failure
from toastkit import errors
from toastkit.client.backend import LocalBackend, OtherModel, Wanted, choose_backend
from toastkit.client.socket_backend import SocketBackend
from toastkit.daemon.service_settings import ServiceSettings
from toastkit.engine.policy_options import PolicyOptions
from toastkit.errors import NoInputError, ToastError, UnavailableError, UsageError
from toastkit.interrupts import Signals
from toastkit.residency.residency_options import ResidencyOptions
from toastkit.wire import remote_error

ASK = {"messages": [{"role": "user", "content": "Hi!"}], "options": {}}


@pytest.fixture(autouse=True)
def no_daemon_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TOAST_SOCKET", "XDG_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("code", [64, 65, 66, 69, 70, 73, 74, 75, 130])
def test_errors_keep_their_code(code: int) -> None:
    error = remote_error({"code": code, "message": "no", "hint": "yes"})
    assert (error.code, error.message, error.hint) == (code, "no", "yes")
    kinds = {errors.UsageError: 64, errors.DataError: 65, errors.BusyError: 75}
    assert all(isinstance(error, kind) == (code == kinds[kind]) for kind in kinds)


def test_errors_without_a_message_or_of_an_unknown_kind() -> None:
    for error in (None, "no", {}, {"code": 64}, {"message": 5}):
        told = remote_error(error)
        assert told.code == 70 and "without saying why" in told.message
    for code in (None, "64", 999, [1], -1):
        assert remote_error({"code": code, "message": "no", "hint": 5}).code == 70


class FakeService:
    """Stands for toastkit.daemon.local_service.LocalService. made: all of them. replies: what
    each ask gives; asked: with what."""

    made: list[FakeService] = []
    replies: list[Any] = []

    def __init__(self, settings: ServiceSettings, quiet: bool):
        self.settings, self.quiet = settings, quiet
        self.asked: list[dict] = []
        self.closed = self.cancelled = False
        self.warnings = 0
        FakeService.made.append(self)

    def ask(self, request: dict) -> Iterator[dict]:
        self.asked.append(request)
        try:
            for reply in FakeService.replies:
                if callable(reply):
                    reply()
                else:
                    yield reply
        except GeneratorExit:
            self.cancelled = True
            raise

    def memory_warning(self) -> None:
        self.warnings += 1

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> type[FakeService]:
    module = SimpleNamespace(LocalService=FakeService)
    monkeypatch.setitem(sys.modules, "toastkit.daemon.local_service", module)
    monkeypatch.setattr(FakeService, "made", [])
    monkeypatch.setattr(FakeService, "replies", answer("here"))
    return FakeService


def test_this_process_loads_at_the_first_request(service: type[FakeService]) -> None:
    settings = {"model": "m", "device": "cpu", "dtype": "float16"}
    backend = LocalBackend(Wanted(settings=settings, quiet=True))
    assert service.made == []
    assert list(backend.ask({**ASK, "model": "absolute m"})) == answer("here")
    assert list(backend.ask(ASK)) == answer("here")
    (made,) = service.made
    assert made.asked == [ASK, ASK]
    assert made.settings == ServiceSettings("m", "cpu", "float16", say=print) and made.quiet
    backend.close()
    assert made.closed
    list(LocalBackend(Wanted()).ask(ASK))
    default = service.made[1].settings
    assert (default.model, default.device, default.dtype) == ("crumb", "auto", None)


def test_the_residency_is_that_of_this_process(service: type[FakeService]) -> None:
    """What a daemon would be held to is no part of the request here."""
    wanted = ResidencyOptions("layers", 3)
    backend = LocalBackend(Wanted(settings={"policies": PolicyOptions(residency=wanted)}))
    backend.memory_warning()  # there is nothing yet that could leave
    assert list(backend.ask({**ASK, "resident": "3"})) == answer("here")
    (made,) = service.made
    assert made.asked == [ASK] and made.settings.policies.residency == wanted
    assert made.settings.policies.resident == "3" and ServiceSettings().policies.resident == "all"
    backend.memory_warning()
    assert made.warnings == 1


def test_leaving_cancels_in_this_process(service: type[FakeService]) -> None:
    """Or that nobody reads what it writes."""
    replies = LocalBackend(Wanted()).ask(ASK)
    next(replies)
    replies.close()  # type: ignore[attr-defined]
    read, write = os.pipe()
    replies = LocalBackend(Wanted(), watch=write).ask(ASK)
    next(replies)
    os.close(read)
    with pytest.raises(BrokenPipeError):
        next(replies)
    assert [made.cancelled for made in service.made] == [True, True]
    os.close(write)


def test_a_signal_during_the_load_ends_at_once(service, signals: Signals) -> None:
    signals.graceful = True
    loading = {"progress": {"loading": "m"}}
    service.replies = [loading, lambda: signal.raise_signal(signal.SIGINT), *answer("never")]
    with pytest.raises(KeyboardInterrupt):
        list(LocalBackend(Wanted(), signals).ask(ASK))


def test_a_signal_in_mid_answer_is_noted(service: type[FakeService], signals: Signals) -> None:
    service.replies = [{"text": "a"}, lambda: signal.raise_signal(signal.SIGINT), {"text": "b"}, 5]
    seen = list(LocalBackend(Wanted(), signals).ask(ASK))
    assert seen == [{"text": "a"}, {"text": "b"}] and signals.code == 130
    assert service.made[0].cancelled


def test_the_daemon_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    with FakeDaemon() as daemon:
        monkeypatch.setenv("TOAST_SOCKET", daemon.path)
        backend = choose_backend(Wanted(say=said.append, verbose=True))
        assert isinstance(backend, SocketBackend)
        assert said == [f"using the daemon at {daemon.path}"]
        backend = choose_backend(Wanted(say=said.append, socket=daemon.path, insist=True))
        assert isinstance(backend, SocketBackend) and len(said) == 1
        here = choose_backend(Wanted(here=True, say=said.append, verbose=True))
        assert isinstance(here, LocalBackend) and said[1:] == ["running in this process"]


def test_without_a_daemon_it_is_this_process(tmp_path: Path) -> None:
    said: list[str] = []
    path = str(tmp_path / "s")
    backend = choose_backend(Wanted(say=said.append, verbose=True, socket=path))
    assert isinstance(backend, LocalBackend)
    assert said == [f"no daemon at {path}: running in this process"]
    assert isinstance(choose_backend(Wanted(say=said.append, socket=path)), LocalBackend)
    assert len(said) == 1
    with pytest.raises(UnavailableError, match=f"no daemon answers at {path}"):
        choose_backend(Wanted(socket=path, insist=True))


def test_a_directory_that_is_not_ours_holds_no_daemon(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / f"toastkit-{os.geteuid()}").mkdir(mode=0o755)
    said: list[str] = []
    assert isinstance(choose_backend(Wanted(say=said.append, verbose=True)), LocalBackend)
    assert len(said) == 1 and said[0].endswith(": running in this process")
    with pytest.raises(UsageError, match="the socket's path has"):
        choose_backend(Wanted(socket=str(tmp_path / ("x" * 200))))


def test_a_daemon_with_another_model_is_left_for_this_process(service: type[FakeService]) -> None:
    said: list[str] = []
    with FakeDaemon(failure(66, "this daemon runs crumb, not m")) as daemon:
        settings = {"model": "m"}
        wanted = Wanted("m", settings, say=said.append, verbose=True, socket=daemon.path)
        backend = choose_backend(wanted)
        assert isinstance(backend, OtherModel)
        asked = {**ASK, "model": "m"}
        assert list(backend.ask(asked)) == answer("here")
        assert backend.name == "this process" and daemon.request == asked
        assert list(backend.ask(asked)) == answer("here")
        assert len(daemon.requests) == 1, "it is not asked again"
    assert len(service.made) == 1 and service.made[0].settings.model == "m"
    assert said[1:] == [f"the daemon at {daemon.path} runs another model: running in this process"]


def test_a_daemon_with_this_model_is_kept(service: type[FakeService]) -> None:
    with FakeDaemon(answer("there"), failure(75, "busy")) as daemon:
        backend = choose_backend(Wanted(model="m", socket=daemon.path))
        assert list(backend.ask(ASK)) == answer("there")
        assert list(backend.ask(ASK)) == failure(75, "busy")
    # Without -m, any refusal is one.
    with FakeDaemon(failure(66, "no such session")) as daemon:
        replies = list(choose_backend(Wanted(socket=daemon.path)).ask(ASK))
    assert replies == failure(66, "no such session") and service.made == []
    assert isinstance(remote_error(replies[0]["error"]), NoInputError)


def test_backends_can_be_closed_at_any_time(service: type[FakeService]) -> None:
    with FakeDaemon() as daemon:
        for backend in (choose_backend(Wanted(socket=daemon.path)), LocalBackend(Wanted())):
            backend.close()
            backend.close()
    with pytest.raises(ToastError):
        list(SocketBackend(daemon.path).ask(ASK))
