"""What the daemon saves: the table of the toasted memo, in one run on the embedded model.

    python benchmarks/daemon.py [--history 20000] [--contexts 1000,8000,28000,68000] [--rounds 5]
                                [--clients 1,2,4,8] [--document 2000]
                                [--only history,turns,contexts,clients,shared,start]

history   seconds to the first word with so much history: read anew, remembered, and remembered by
          a daemon that was killed (kill -9) and started again.
turns     states and bytes that are kept of a chat of 11 turns, beside one state of its length.
contexts  seconds a token at a length of history, relative to the shortest.
clients   tokens a second of so many clients at once, stepping together and in turn.
shared    tokens read, and seconds to the first token of each, where as many clients as are given
          last send the same prompt at once, of as many tokens as --document says.
start     milliseconds from the start of `toast` to its request at the daemon.

The model's context is stretched for this. All times are seen from outside the daemon.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from measure import BIN, in_turn, machine, ratio, spread
from served import Answer, Daemon, stretched_crumb

STORY = Path(__file__).parents[1] / "tests" / "texts" / "story.txt"
CHARACTERS_A_TOKEN = 4.3  # of that text, with the embedded model's tokenizer
TURNS = 11


def long_text(tokens: int, start: int = 0) -> str:
    """Some text of about so many tokens."""
    text = STORY.read_text()
    size = int(tokens * CHARACTERS_A_TOKEN)
    return (text[start:] + text * (size // len(text) + 1))[:size]


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


def history(model: Path, tokens: int, rounds: int) -> None:
    """Time to the first word: cold, on a hit, on a hit after kill -9 and a restart."""
    cold, hits, restarted = [], [], []
    short = {"max_tokens": 8, "temperature": 0}
    with Daemon(model) as daemon:
        for attempt in range(min(rounds, 2)):
            chat = [user(f"{attempt}. " + long_text(tokens, attempt * 1000))]
            said = daemon.ask(messages=chat, options=short)
            cold.append(said.first)
            total = said.stats["prompt"]
            for _ in range(rounds):
                chat += [assistant(said.text), user("thanks")]
                said = daemon.ask(messages=chat, options=short)
                check(said, total)
                hits.append(said.first)
            time.sleep(0.5)  # until the last turn is on disk
            daemon.kill()
            daemon.start()
            chat += [assistant(said.text), user("thanks")]
            said = daemon.ask(messages=chat, options=short)
            check(said, total)
            restarted.append(said.first)
    print(f"first word after {total} tokens of history, seconds: median (min .. max)")
    print(f"  {'read anew':28} {spread(cold, digits=3)}")
    for name, values in (("remembered", hits), ("remembered, after kill -9", restarted)):
        times = statistics.median(cold) / statistics.median(values)
        print(f"  {name:28} {spread(values, digits=3):28} {times:.0f} times sooner")


def check(said: Answer, least: int) -> None:
    """What was remembered must really have been."""
    if said.stats["cached"] < least:
        raise SystemExit(f"not a hit: {said.stats}")


def turns(model: Path) -> None:
    """What a chat of 11 turns leaves in memory."""
    limits = {"max_tokens": 48, "temperature": 0, "ignore_eos": True}
    with Daemon(model) as daemon:
        chat: list[dict] = []
        read = 0
        for turn in range(TURNS):
            chat.append(user(f"Tell me about a fox, part {turn}."))
            said = daemon.ask(messages=chat, options=limits)
            chat.append(assistant(said.text))
            read += said.stats["prompt"] + said.stats["answer"]
        kept = daemon.control("status")["conversations"]
    length = said.stats["prompt"] + said.stats["answer"]
    with Daemon(model) as daemon:  # one state of that length, that has no turns
        daemon.ask(tokens=[5 + i % 4000 for i in range(length - 1)], options={"max_tokens": 1})
        one = daemon.control("status")["conversations"]
    print(f"a chat of {TURNS} turns, {length} tokens")
    print(f"  {'states kept':28} {kept['kept']}")
    share = kept["bytes"] / one["bytes"]
    print(f"  {'bytes':28} {kept['bytes']:,}: {share:.2f} times one state of that length")
    print(f"  {'a state a turn would be':28} {read / length:.1f} times its tokens")


def contexts(model: Path, lengths: list[int], rounds: int) -> None:
    """What a token costs after a history. The caches are filled with noise, in an instant: what a
    step costs does not depend on what is in them, and all lengths can be timed in turn."""
    from toastkit.engine.opening import open_engine
    from toastkit.model.locate import locate

    engine = open_engine(locate(str(model)), native="auto")
    states = {length: noisy_state(engine, length) for length in lengths}
    cases = {f"{n:,} tokens": partial(token_cost, engine, states[n]) for n in lengths}
    results = in_turn(cases, rounds)
    shortest = next(iter(results.values()))
    print("a token after a history, milliseconds: median (min .. max), and speed relative to the "
          "shortest")  # fmt: skip
    for name, values in results.items():
        print(f"  {name:>15} {spread(values, 1e-3):>26} {ratio(shortest, values):>26}")


def noisy_state(engine: Any, length: int) -> Any:
    """A state whose attention layers hold so many rows."""
    import mlx.core as mx

    from toastkit.engine.state import ModelState

    ids = [5 + i % 4000 for i in range(64)]
    cache = engine.new_cache()
    logits = engine.prefill(ids, cache)
    for layer in cache:
        if hasattr(layer, "keys"):
            batch, heads, _, size = layer.keys.shape
            layer.keys = mx.random.normal((batch, heads, length, size)).astype(layer.keys.dtype)
            layer.values = mx.random.normal((batch, heads, length, size)).astype(layer.values.dtype)
            layer.offset = length
    mx.eval([layer.state for layer in cache])
    return ModelState(cache, ids, logits)


def token_cost(engine: Any, state: Any, count: int = 32) -> float:
    """Seconds a token, as the daemon takes steps for one client."""
    start = time.perf_counter()
    for _ in range(count):
        token = int(np.argmax(state.values()))
        engine.consume(state, token)
        state.submit()
        engine.look_ahead(state)
    state.values()
    return (time.perf_counter() - start) / count


def clients(model: Path, counts: list[int], rounds: int) -> None:
    """Tokens a second of several clients at once."""
    rows: dict[tuple[str, int], list[float]] = {}
    with Daemon(model) as together, Daemon(model, "--batch", "1") as in_turn:
        daemons = {"together": together, "in turn": in_turn}
        for _ in range(rounds):
            for name, daemon in daemons.items():
                for count in counts:
                    rows.setdefault((name, count), []).append(throughput(daemon, count))
    print("clients at once, tokens a second of all: median (min .. max), and relative to one")
    for name in daemons:
        for count in counts:
            values = rows[name, count]
            alone = rows[name, counts[0]]
            print(
                f"  {name:10} {count:>3} {spread(values, digits=0):>24} {ratio(values, alone):>26}"
            )
    most = counts[-1]
    better = ratio(rows["together", most], rows["in turn", most])
    print(f"  together / in turn, {most} clients: {better}")


def throughput(daemon: Daemon, count: int) -> float:
    tokens = 64
    options = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}

    def one(number: int) -> None:
        daemon.ask(prompt=f"{time.time_ns()}: tell me story {number}.", options=options)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(count)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return count * tokens / (time.perf_counter() - start)


def shared(model: Path, count: int, tokens: int, rounds: int) -> None:
    """What a prompt costs that several clients send at once."""
    rows: list[list[Answer]] = []
    options = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with Daemon(model) as daemon, ThreadPoolExecutor(count) as threads:
        for attempt in range(rounds):
            text = f"{attempt}. " + long_text(tokens, attempt * 1000)
            asked = [threads.submit(daemon.ask, prompt=text, options=options) for _ in range(count)]
            rows.append(sorted((one.result() for one in asked), key=lambda said: said.first))
    length = rows[0][0].stats["prompt"]
    read = [sum(said.stats["prompt"] - said.stats["cached"] for said in row) for row in rows]
    print(f"{count} clients with the same {length:,} tokens at once: median (min .. max)")
    print(f"  {'tokens read':28} {spread(read, digits=0)}")
    for place in range(count):
        name = f"first token of the {place + 1}., s"
        print(f"  {name:28} {spread([row[place].first for row in rows], digits=3)}")


def start(rounds: int) -> None:
    """From the start of the process until its request has arrived whole."""
    values, bare = [], []
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        path = os.path.join(folder, "s")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()
        environment = {**os.environ, "TOAST_SOCKET": path, "XDG_STATE_HOME": folder}
        for _ in range(4 * rounds + 1):
            begin = time.perf_counter()
            asking = subprocess.Popen(
                [str(BIN / "toast"), "Who are you?"], env=environment, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )  # fmt: skip
            connection, _ = listener.accept()
            stream = connection.makefile("rb")
            request = json.loads(stream.readline())
            values.append(time.perf_counter() - begin)
            connection.sendall(json.dumps(
                {"end": {"reason": "eos", "n": 1, "text": "x"}, "id": request.get("id")}
            ).encode() + b"\n")  # fmt: skip
            asking.wait()
            stream.close()
            connection.close()
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-c", "pass"], check=True)
            bare.append(time.perf_counter() - begin)
    values, bare = values[1:], bare[1:]
    print("start of `toast` until its request has arrived, milliseconds: median (min .. max)")
    print(f"  {'toast':28} {spread(values, 1e-3, 1)}")
    print(f"  {'python -c pass, whole':28} {spread(bare, 1e-3, 1)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--history", type=int, default=20_000)
    parser.add_argument("--contexts", default="1000,8000,28000,68000")
    parser.add_argument("--clients", default="1,2,4,8")
    parser.add_argument("--document", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="start,clients,shared,turns,history,contexts")
    given = parser.parse_args()
    lengths = [int(n) for n in given.contexts.split(",")]
    counts = [int(n) for n in given.clients.split(",")]
    print(f"{machine()}\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model = stretched_crumb(Path(folder), 2 * max(given.history, *lengths))
        parts = {
            "start": lambda: start(given.rounds),
            "clients": lambda: clients(model, counts, given.rounds),
            "shared": lambda: shared(model, counts[-1], given.document, given.rounds),
            "turns": lambda: turns(model),
            "history": lambda: history(model, given.history, given.rounds),
            "contexts": lambda: contexts(model, lengths, given.rounds),
        }
        wanted = given.only.split(",")
        if unknown := {*wanted} - {*parts}:
            parser.error(f"--only: no {', '.join(unknown)} (but {', '.join(parts)})")
        for name in wanted:
            parts[name]()
            print(flush=True)


if __name__ == "__main__":
    main()
