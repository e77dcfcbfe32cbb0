"""The worker's thread: a queue with a bound, a model that comes and goes, what is told of it."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from pathlib import Path

import mlx.core as mx
import pytest

from tests.model.service_driver import FakeChannel, Plain, user
from tests.model.worker_driver import PROMPT, Running, answer_of, done
from tests.unit.daemon_front import PATIENCE, eventually
from toastkit.daemon import slack, worker
from toastkit.daemon.prepare import Prepared, Preparer
from toastkit.daemon.requests import Request, make_request
from toastkit.daemon.service import Service
from toastkit.daemon.service_settings import ServiceSettings
from toastkit.daemon.spill import FINGERPRINT_DIGITS, conversations_root
from toastkit.errors import BusyError, NoInputError, UnavailableError
from toastkit.model.config import fingerprint
from toastkit.model.locate import locate
from toastkit.private_files import make_private_directories
from toastkit.session.directory import Session
from toastkit.text.tokenizer import Tokenizer
from toastkit.text.turns import MIN_PART

pytestmark = pytest.mark.usefixtures("homes")
STATUS = {
    "model", "fingerprint", "loaded", "device", "dtype", "active", "attached", "waiting",
    "answered", "tokens", "conversations", "ledger",
}  # fmt: skip


# ---------------------------------------------------------------------------------------- requests


def test_many_ask_at_once(start, plain: Plain) -> None:
    running = start(parallel=3)
    prompts = [f"{n}. {PROMPT}" for n in range(5)]
    channels = [running.ask(prompt) for prompt in prompts]
    done(*channels)
    for channel, prompt in zip(channels, prompts):
        assert answer_of(channel) == plain.answer(prompt)
    assert running.worker.served == 5 and not running.said and running.worker.failure is None


def test_a_request_that_cannot_be(start, model: Path) -> None:
    running = start()
    for request, code, word in (
        ({"prompt": "bear " * 700}, 65, "context"),
        ({"tokens": [4096]}, 65, "vocabulary"),
        ({"prompt": "x", "model": "crumb"}, 66, "the daemon runs"),
        ({"prompt": "x", "options": {"ban": [5000]}}, 64, "5000"),
    ):
        channel = running.submit(**request)
        done(channel)
        error = channel.one("error")
        assert error["code"] == code and word in error["message"]
        assert channel.one("end") is None
        assert running.audit.records[-1][0]["error"] == error["message"]
    assert running.answer()[3] == 8 and running.worker.status()["answered"] == 1
    other = running.submit(prompt=PROMPT, model=str(model), options={"max_tokens": 2})
    done(other)
    assert other.one("end")["n"] == 2


def test_the_queue_has_a_bound(start, plain: Plain) -> None:
    running = start(parallel=1, max_queue=2)
    first = running.hold()
    waiting = [running.ask(), running.ask("Why?")]
    with pytest.raises(BusyError, match="2 requests are waiting") as caught:
        running.ask()
    assert caught.value.code == 75 and caught.value.hint
    eventually(lambda: running.worker.status()["waiting"] == 2 and not running.worker.preparing)
    assert running.worker.status()["active"] == 1
    waiting[0].gone = True  # it does not count any more
    third = running.ask("Bye.")
    done(waiting[0])
    assert waiting[0].replies == []
    first.gone = True
    done(first, waiting[1], third)
    assert answer_of(waiting[1]) == plain.answer("Why?")
    assert answer_of(third) == plain.answer("Bye.")
    assert first.one("end") == {**first.one("end"), "reason": "interrupt"}


def test_with_free_places_nobody_waits(start, plain: Plain) -> None:
    running = start(parallel=2, max_queue=0)
    running.hold()
    second = running.ask()
    with pytest.raises(BusyError, match="busy: 1 request is waiting|busy: none may wait"):
        running.ask("Why?")
    done(second)
    assert answer_of(second) == plain.answer(PROMPT)


def test_where_none_may_wait(start) -> None:
    running = start(parallel=1, max_queue=0)
    running.hold()
    with pytest.raises(BusyError, match="busy: none may wait"):
        running.ask("Why?")


def test_the_more_important_come_first(start) -> None:
    running = start(parallel=1)
    first, order = running.hold(), []
    channels = [running.ask(priority=n, max_tokens=2) for n in (0, 5, -5, 5)]
    for n, channel in enumerate(channels):
        channel.done = lambda n=n, end=channel.done: (order.append(n), end())
    eventually(lambda: running.worker.status()["waiting"] == 4 and not running.worker.preparing)
    first.gone = True
    done(*channels)
    assert order == [1, 3, 0, 2]


def test_health_runs_the_model(start, monkeypatch) -> None:
    running, probes = start(), []
    probe = Service.probe
    monkeypatch.setattr(Service, "probe", lambda service: probes.append(probe(service)))
    channel = running.submit(op="health")
    done(channel)
    health = channel.one("health")
    assert health["ok"] is True and health["loaded"] is True and health["seconds"] >= 0
    assert len(probes) == 1
    busy = running.hold()
    done(running.submit(op="health"))  # also while others are answered
    assert not busy.is_done
    busy.gone = True


def test_who_is_refused_leaves_nothing(start) -> None:
    """Not even until Python's collector comes: a prompt may be long."""
    running, channel = start(), FakeChannel()
    request = make_request({"prompt": "bear " * 700})
    there = weakref.ref(request)
    gc.disable()
    try:
        running.worker.submit(request, channel)
        del request
        done(channel)
        assert channel.one("error")["code"] == 65
        eventually(lambda: there() is None)
    finally:
        gc.enable()


# ------------------------------------------------------------------------------------ what is told


def test_the_status(start, model: Path) -> None:
    running = start()
    status = running.worker.status()
    assert set(status) >= STATUS
    assert (
        status["loaded"] and (status["active"], status["waiting"], status["answered"]) == (0,) * 3
    )
    assert status["fingerprint"] == fingerprint(locate(str(model)))
    assert status["dtype"] == "float32" and status["device"] in ("cpu", "gpu")
    assert "cache" not in status["ledger"] and status["ledger"]["embedding"] > 0
    channel = running.ask()
    done(channel)
    again = running.ask()
    done(again)
    status, stats = running.worker.status(), again.one("stats")
    assert status["answered"] == 2
    count = stats["prompt"]
    assert status["tokens"] == {"prompt": 2 * count, "cached": count - 1, "answer": 16}
    assert status["conversations"]["kept"] == 1
    assert status["ledger"]["sessions"] == status["conversations"]["bytes"] > 0
    busy = running.hold()
    status = running.worker.status()
    assert status["active"] == 1 and status["ledger"]["cache"] > 0
    busy.gone = True
    done(busy)
    eventually(lambda: "cache" not in running.worker.status()["ledger"])


def test_the_audit_records(start, plain: Plain) -> None:
    running = start()
    channel = running.submit(
        messages=[{"role": "user", "content": PROMPT}],
        options={"max_tokens": 8, "seed": 3},
        stream=False,
    )
    done(channel)
    assert not channel.all_of("text")
    ((record, texts),) = running.audit.records
    text = plain.answer([{"role": "user", "content": PROMPT}])[1]
    assert texts == {"messages": [{"role": "user", "content": PROMPT}], "text": text}
    assert text not in str(record) and PROMPT not in str(record)
    assert (record["uid"], record["pid"], record["op"]) == (1000, 4321, "generate")
    assert (record["answer"], record["cached"], record["end"]) == (8, 0, "length")
    assert record["prompt"] == channel.one("stats")["prompt"] and record["error"] is None
    assert record["session"] is None and record["model"].endswith("llama")
    assert int(record["hash"], 16) and set(record["seconds"]) >= {"queued", "first", "total"}
    assert 0 <= record["seconds"]["queued"] <= record["seconds"]["first"]
    assert record["seconds"]["first"] <= record["seconds"]["total"] < PATIENCE
    busy = running.hold()
    busy.gone = True
    done(busy)
    eventually(lambda: len(running.audit.records) == 2)
    assert running.audit.records[-1][0]["end"] == "cancelled"


# --------------------------------------------------------------------------------- coming and going


def test_a_drain_ends_what_has_begun_and_nothing_else(start) -> None:
    running = start(parallel=1)
    first, second = running.ask(max_tokens=50, ignore_eos=True), None
    eventually(lambda: first.all_of("token"))
    second = running.ask()
    eventually(lambda: not running.worker.preparing)
    assert not running.worker.idle()
    running.worker.drain()
    done(second)
    assert second.one("error")["code"] == 69 and "shutting down" in second.one("error")["message"]
    with pytest.raises(UnavailableError, match="shutting down"):
        running.ask()
    with pytest.raises(UnavailableError):
        running.submit(op="health")
    done(first)
    assert first.one("end")["n"] == 50
    eventually(running.worker.idle)


def test_a_prompt_that_is_still_read_at_a_drain_is_refused(start, monkeypatch) -> None:
    """It would begin after everything has been cancelled, and nothing would end it."""
    running, read = start(), threading.Event()
    prepare = Preparer.prepare

    def later(self: Preparer, request: Request) -> Prepared:
        assert read.wait(PATIENCE)
        return prepare(self, request)

    monkeypatch.setattr(Preparer, "prepare", later)
    channel = running.ask(max_tokens=50, ignore_eos=True)
    running.worker.drain()
    running.worker.cancel_all()
    read.set()
    done(channel)
    assert channel.one("error")["code"] == 69
    eventually(running.worker.idle)


def test_all_can_be_cancelled(start) -> None:
    running = start()
    channels = [running.hold(), running.hold()]
    running.worker.drain()
    running.worker.cancel_all()
    done(*channels)
    assert {channel.one("end")["reason"] for channel in channels} == {"interrupt"}
    eventually(running.worker.idle)
    running.worker.close()
    running.worker.close()  # may be called again
    assert running.worker.failure is None


def test_closing_saves_what_was_said(start, plain: Plain) -> None:
    running = start(cache_bytes=1 << 30)
    assert running.answer() == plain.answer(PROMPT)
    running.worker.close()
    again = start()
    assert again.worker.status()["conversations"]["on_disk"] == 1
    channel = again.ask()
    done(channel)
    stats = channel.one("stats")
    assert stats["cached"] == stats["prompt"] - 1 and answer_of(channel) == plain.answer(PROMPT)


def test_an_idle_model_leaves_the_memory(start, plain: Plain) -> None:
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    running = start(idle_unload=0.3)
    loaded = mx.get_active_memory() - before
    assert loaded > 1_000_000
    assert running.answer() == plain.answer(PROMPT)
    eventually(lambda: not running.worker.status()["loaded"])
    eventually(lambda: mx.get_active_memory() - before < loaded / 20)
    status = running.worker.status()
    assert set(status) >= STATUS and status["ledger"] == {} and status["device"] is None
    assert status["conversations"] == {**status["conversations"], "bytes": 0, "on_disk": 1}
    health = running.submit(op="health")
    done(health)
    assert health.one("health")["loaded"] is False
    channel = running.ask()
    done(channel)
    assert channel.replies[0]["progress"]["loading"].endswith("llama")
    assert answer_of(channel) == plain.answer(PROMPT)
    stats = channel.one("stats")
    assert stats["cached"] == stats["prompt"] - 1
    assert running.worker.failure is None


def test_memory_goes_back_once_nobody_asks(start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once after the last request, and when the model has left."""
    running = start()
    loaded: list[bool] = []
    monkeypatch.setattr(worker, "IDLE_SECONDS", 0.1)

    def note() -> None:
        loaded.append(running.worker.status()["loaded"])

    monkeypatch.setattr(slack, "give_memory_back", note)
    monkeypatch.setattr(worker, "give_memory_back", note)
    done(running.ask(max_tokens=60, ignore_eos=True))
    eventually(lambda: loaded == [True])
    running.worker.close()
    assert loaded == [True, False]


def test_memory_goes_back_though_somebody_always_asks(start, monkeypatch) -> None:
    """Now and then, and without what would be a pause."""
    monkeypatch.setattr(slack, "BUSY_SECONDS", 0.05)
    collected: list[bool] = []
    monkeypatch.setattr(slack, "give_memory_back", lambda collect=True: collected.append(collect))
    running = start()
    until = time.monotonic() + 10
    while len(collected) < 3 and time.monotonic() < until:
        done(running.ask(max_tokens=8, ignore_eos=True))
    assert collected[:3] == [False] * 3


def test_a_model_in_use_does_not_leave(start) -> None:
    """Once it has begun to answer: before that it may have been idle."""
    running = start(idle_unload=0.01)
    channel = running.ask(max_tokens=60, ignore_eos=True)
    done(channel)
    assert channel.one("end")["n"] == 60
    kinds = ["loading" if "loading" in r.get("progress", ()) else [*r][0] for r in channel.replies]
    assert "loading" not in kinds[kinds.index("token") :]


# ---------------------------------------------------------------------------------------- failures


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    running = Running(tmp_path / "none")
    with pytest.raises(NoInputError):
        running.worker.start()
    running.worker.close()


def test_a_model_that_cannot_be_loaded(model: Path) -> None:
    for file in model.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-100])
    running = Running(model)
    with pytest.raises(Exception) as caught:
        running.worker.start()
    assert caught.value is running.worker.failure or running.worker.failure is None
    assert getattr(caught.value, "code", 70) in (65, 74)
    running.worker.close()


def test_a_thread_that_dies_says_so(start, monkeypatch) -> None:
    running, told = start(), threading.Event()
    running.worker.notify = told.set

    def fails(service: Service) -> None:
        raise RuntimeError("the device has gone")

    monkeypatch.setattr(Service, "turn", fails)
    running.ask()
    assert told.wait(PATIENCE)
    assert isinstance(running.worker.failure, RuntimeError)
    assert running.worker.status()["active"] == 1  # the front tells its clients


def test_what_goes_on_is_tokenised_before_anybody_asks(monkeypatch) -> None:
    """After a start the conversations on disk are, so that their next turn is not all new."""
    asked = [user("a fox " * 1000)]
    more = [*asked, {"role": "assistant", "content": "Yes."}, user("thanks")]
    before, after = Preparer(ServiceSettings()), Preparer(ServiceSettings())
    ids = before.prepare(Request(messages=asked)).ids
    path = conversations_root() / f"{before.fingerprint[:FINGERPRINT_DIGITS]}-own" / "0"
    make_private_directories(path.parent)
    with Session.open(path, before.fingerprint) as session:
        session.commit(ids, [], None)
    (path.parent / "broken").mkdir()
    after.recall()
    seen: list[str] = []
    real = Tokenizer._encode_all

    def encode(self: Tokenizer, texts: list[str], *rest) -> list[list[int]]:
        seen.extend(texts)
        return real(self, texts, *rest)

    monkeypatch.setattr(Tokenizer, "_encode_all", encode)
    found = after.prepare(Request(messages=more)).ids
    assert seen and all(len(text) < MIN_PART for text in seen)
    assert found == before.prepare(Request(messages=more)).ids
