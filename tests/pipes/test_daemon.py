"""toasted with the model: equal answers, kept conversations, kill -9, bad clients, its life."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.daemons import Answer, Daemon, Refused
from tests.pipes.pipelines import STORY, WHO, WHO_ANSWER, Pipeline
from tests.unit.daemon_front import eventually

GREEDY = {"temperature": 0, "max_tokens": 8, "tokens": True}
SEEDED = {"temperature": 0.8, "top_p": 0.95, "seed": 7, "max_tokens": 8, "tokens": True}
LONG = "Tell me a story about a fox, a river and a mill. " * 12  # some 180 tokens


@pytest.fixture(scope="module")
def daemon(private_home: Path) -> Iterator[Daemon]:
    """Shared by the tests that neither end nor change it."""
    with Daemon("crumb", "--max-queue", "200") as running:
        yield running


@pytest.fixture(scope="module")
def forgetful(private_home: Path) -> Iterator[Daemon]:
    """A daemon that caches no prompts, in memory or on disk."""
    with Daemon("crumb", "--cache", "0", "--spill", "0") as running:
        yield running


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def at_once(*calls: Callable[[], Answer]) -> list[Answer]:
    """What several callers get who ask at the same time."""
    with ThreadPoolExecutor(len(calls)) as callers:
        return list(callers.map(lambda call: call(), calls))


def resident(daemon: Daemon) -> int:
    """Bytes of memory that the daemon's process has."""
    text = Path(f"/proc/{daemon.process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", text).group(1)) << 10


# ------------------------------------------------------------------------------------- same tokens


def test_the_daemon_answers_as_one_process_and_as_the_pipeline(daemon: Daemon, toast) -> None:
    said = daemon.ask(prompt=STORY, options={**SEEDED, "tokens": False})
    flags = ("--temp", "0.8", "--top-p", "0.95", "--seed", "7", "-n", "8")
    alone = toast("decode", "--no-newline", *flags, STORY)
    assert alone.stdout.decode() == said.text
    piped = Pipeline(STORY, {"sample": list(flags)}).finish()
    assert piped.out.decode().removesuffix("\n") == said.text
    client = daemon.toast("toast", "--no-history", *flags, STORY)
    assert client.stdout.decode().removesuffix("\n") == said.text


def test_two_clients_at_once_get_what_each_gets_alone(daemon: Daemon) -> None:
    wanted = [(STORY, GREEDY), ("What is 12 + 30?", SEEDED), (LONG[:200], GREEDY), (WHO, SEEDED)]

    def ask(prompt: str, options: dict) -> Callable[[], Answer]:
        return lambda: daemon.ask(prompt=prompt, options={**options, "max_tokens": 8})

    alone = [ask(*one)() for one in wanted]
    together = at_once(*(ask(*one) for one in wanted))
    assert [said.tokens for said in together] == [said.tokens for said in alone]


@pytest.mark.parametrize(("options", "turns"), [(GREEDY, 5), (SEEDED, 3)], ids=["greedy", "seeded"])
def test_a_chat_is_as_without_a_cache(
    daemon: Daemon, forgetful: Daemon, options: dict, turns: int
) -> None:
    options = {**options, "max_tokens": 4}
    chat: list[dict] = []
    for turn in range(turns):
        chat.append(user(f"Part {turn}?"))
        said = daemon.ask(messages=chat, options=options)
        anew = forgetful.ask(messages=chat, options=options)
        assert said.tokens == anew.tokens and anew.stats["cached"] == 0
        assert turn == 0 or said.stats["cached"] > said.stats["prompt"] - 40, said.stats
        chat.append({"role": "assistant", "content": said.text})
    assert forgetful.control("status")["conversations"]["kept"] == 0


# --------------------------------------------------------------------------------------- surviving


def test_killed_in_mid_answer_a_conversation_goes_on_from_its_last_turn() -> None:
    with Daemon() as daemon:
        chat = [user(LONG)]
        first = daemon.ask(messages=chat, options=GREEDY)
        chat += [{"role": "assistant", "content": first.text}, user("and then?")]
        before = daemon.ask(messages=chat, options=GREEDY)  # also: what comes next
        replies = daemon.replies({"messages": [*chat[:-1], user("and?")], "options": {}})
        assert any("text" in reply for reply in replies)
        daemon.kill()
        daemon.start()
        assert daemon.control("status")["conversations"]["in_memory"] == 0
        after = daemon.ask(messages=chat, options=GREEDY)
        assert after.tokens == before.tokens
        # Savepoints are 32 tokens apart, so a few may be read again.
        assert after.stats["cached"] > before.stats["cached"] - 32 > 130


def test_a_long_prompt_is_not_read_twice_when_its_answer_was_cut_off() -> None:
    prompt = LONG * 2  # worth keeping before its answer ends
    with Daemon() as daemon:
        replies = daemon.replies({"prompt": prompt, "options": {"ignore_eos": True}})
        assert any("text" in reply for reply in replies)
        eventually(lambda: daemon.control("status")["conversations"]["on_disk"])
        daemon.kill()
        daemon.start()
        said = daemon.ask(prompt=prompt, options=GREEDY)
        assert said.stats["cached"] > said.stats["prompt"] - 40


def test_connections_garbage_and_cancelled_requests_leave_no_trace(daemon: Daemon) -> None:
    daemon.ask(prompt=WHO)
    eventually(lambda: daemon.control("status")["connections"] == 1)
    descriptors = Path(f"/proc/{daemon.process.pid}/fd")
    before, memory = len(os.listdir(descriptors)), resident(daemon)
    for _ in range(1000):
        daemon.connect().close()
    for line in (b"{", b"\xff\xfe\n", b"[]\n", b"null\n" * 1000, b'{"prompt": 5}\n', b"\n" * 5000):
        with daemon.connect() as connection:
            connection.sendall(line)
    for number in range(20):
        options = {"ignore_eos": True, "seed": number}
        connection = daemon.send({"prompt": LONG if number % 4 == 0 else STORY, "options": options})
        if number % 10 == 1:
            connection.recv(1)  # in mid-answer, the others wait or are being read
        connection.close()
    assert daemon.ask(prompt=WHO).text + "\n" == WHO_ANSWER.decode()
    eventually(lambda: daemon.control("status")["active"] == 0)
    eventually(lambda: len(os.listdir(descriptors)) <= before + 1)
    assert resident(daemon) < memory + (64 << 20)
    eventually(lambda: "cache" not in daemon.control("status")["ledger"])
    assert daemon.control("status")["waiting"] == 0


def test_a_slow_reader_holds_up_nobody(daemon: Daemon) -> None:
    slow = daemon.send(
        {"prompt": STORY, "options": {"ignore_eos": True, "tokens": True, "top": 50}}
    )
    said = daemon.ask(prompt=WHO)
    assert said.text + "\n" == WHO_ANSWER.decode()
    slow.close()
    eventually(lambda: daemon.control("status")["active"] == 0)


# -------------------------------------------------------------------------------------------- life


def test_term_lets_an_answer_end_and_takes_no_more() -> None:
    with Daemon() as daemon:
        options = {"temperature": 0, "max_tokens": 24}
        replies = daemon.replies({"prompt": STORY, "options": options})
        assert any("text" in reply for reply in replies)
        daemon.process.send_signal(signal.SIGTERM)
        eventually(lambda: not daemon.socket.exists())
        assert list(replies)[-1]["end"]["n"] == 24
        assert daemon.process.wait(30) == 0


def test_in_the_background_and_stopped() -> None:
    with Daemon() as daemon:
        stopped = daemon.toast("toasted", "stop")
        assert (stopped.returncode, stopped.stderr) == (0, b"")
        assert daemon.process.wait(30) == 0
        assert daemon.toast("toasted", "status").returncode == 69
        begun = daemon.toast("toasted", "-v", "--daemon", "--no-audit")
        assert begun.returncode == 0, begun.stderr
        assert daemon.ask(prompt=WHO).text + "\n" == WHO_ANSWER.decode()
        second = daemon.toast("toasted", "--no-audit")
        assert second.returncode == 75 and b"running" in second.stderr
        assert daemon.toast("toasted", "stop").returncode == 0
        failed = daemon.toast("toasted", "--daemon", "-m", "./nowhere")
        assert failed.returncode == 66 and failed.stderr.count(b"\n") <= 2
        (daemon.home / "empty").mkdir()
        here = os.path.relpath(daemon.home / "empty")
        failed = daemon.toast("toasted", "--daemon", "-m", here)
        assert failed.stderr == f"toasted: {here} is not a model: no config.json in it\n".encode()
        # A relative cache is that of the directory in which it was started.
        snapshot = daemon.home / "hf/hub/models--org--odd/snapshots/main"
        snapshot.mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            (snapshot / name).write_text("{")
        daemon.environment["HF_HOME"] = os.path.relpath(daemon.home / "hf")
        failed = daemon.toast("toasted", "--daemon", "-m", "org/odd")
        assert failed.returncode == 65 and b"org/odd: config.json" in failed.stderr


def test_a_named_session_is_the_one_that_the_plumbing_knows(daemon: Daemon) -> None:
    chat = [user(STORY)]
    said = daemon.ask(messages=chat, options=GREEDY, session="shared")
    chat += [{"role": "assistant", "content": said.text}, user("and then?")]
    (daemon.home / "chat.json").write_text(json.dumps(chat))
    arguments = ("--messages", str(daemon.home / "chat.json"), "-v", "-n", "5")
    resumed = daemon.toast("decode", "--session", "shared", "--temp", "0", *arguments)
    cached = int(re.search(rb"(\d+)/\d+ prompt tokens taken", resumed.stderr).group(1))
    assert cached == said.stats["prompt"] + len(said.tokens)
    again = daemon.ask(messages=chat, options=GREEDY, session="shared")
    assert again.text.startswith(resumed.stdout.decode().rstrip("\n"))


def test_hangup_looks_at_the_model_again(tmp_path: Path) -> None:
    from tests.unpack import unpack

    model = unpack(tmp_path / "model")
    with Daemon(model) as daemon:
        daemon.ask(prompt=WHO)
        before = daemon.control("status")["fingerprint"]
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 99}))
        daemon.process.send_signal(signal.SIGHUP)
        eventually(lambda: daemon.control("status")["fingerprint"] != before)
        with pytest.raises(Refused):
            daemon.ask(prompt="one two three four " * 50)
        assert daemon.ask(prompt=WHO).text  # it is loaded: the file is not read any more
        (model / "config.json").write_text("{")
        daemon.process.send_signal(signal.SIGHUP)
        assert daemon.ask(prompt=WHO).text and daemon.control("health")["ok"]
