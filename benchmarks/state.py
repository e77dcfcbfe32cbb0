"""A session's state on disk: saved, resumed in place and by copying, and what the next tokens take.

    python benchmarks/state.py [--positions 21000] [--model small] [--rounds 5] [--synced]
        [--keep DIR] [--pipeline]

Keys and values are random and not computed: a token takes as long with them. In place: cache.bin is
mapped. Copied: it is read and checked, as where it cannot be mapped. Both in one process, in turn,
with the file in the system's cache; both have to give the tokens of a state that was never saved.
Written ahead: as a prompt's passes leave it, but that nothing is computed between them.
--pipeline: instead, `toast-prefill --session | toast-decode` as a user runs them, with a prompt of
which the session holds all but four tokens, beside one of a few hundred tokens in turn; until the
first logits have come, and until the first that decode has computed. The state goes from disk to
prefill and from there to decode; what both lengths cost, starting above all, is in neither
difference.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np
from measure import BIN, in_turn, machine, spread
from native_models import checkpoint

from toastkit.engine.opening import open_engine
from toastkit.frames import FrameReader, Head, Logits, Tokens, dumps, pack_ids
from toastkit.model.locate import locate
from toastkit.native.kv_caches import as_kept
from toastkit.session.directory import Session

MODEL = "ab" * 32
TOKENS = 8
LOGITS = np.zeros(4096, np.float32)
BLOCK = 256  # positions, of a pass too


def piped(engine: Any, folder: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each round until the logits of a pipeline have come, by the state's size; and MB,
    of the larger one."""
    model = stretched((options.keep or folder) / options.model, folder, 2 * options.positions)
    tokenize = [BIN / "toast-tokenize", "-m", model, "--raw", "a"]
    with subprocess.Popen(tokenize, stdout=subprocess.PIPE) as process:
        head = next(frame for frame in FrameReader(process.stdout) if isinstance(frame, Head))
    cases, results = {}, {}
    for name, count in (("a few positions", BLOCK), ("all", options.positions)):
        path = folder / name.replace(" ", "-")
        ids = [5] * count
        with Session.open(path, head.fingerprint, durable=False) as session:
            session.commit(ids, filled(engine, count), np.zeros(head.vocab, np.float32))
        results["MB"] = [(path / "cache.bin").stat().st_size / 1e6]
        cases[name] = partial(turn, head, ids, path, options)
    times: dict[str, list[float]] = {}
    for name, rounds in in_turn(cases, options.rounds).items():
        for which, column in zip(("prefill's logits", "decode's first"), zip(*rounds)):
            times[f"{name}: {which}"] = list(column)
    return results | times


def stretched(model: Path, folder: Path, context: int) -> Path:
    """The same checkpoint with a context of so many tokens."""
    made = folder / "stretched"
    made.mkdir()
    for file in model.iterdir():
        (made / file.name).symlink_to(file)
    config = json.loads((model / "config.json").read_text())
    (made / "config.json").unlink()
    (made / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context}))
    return made


def turn(head: Head, ids: list[int], path: Path, options: argparse.Namespace) -> tuple[float, ...]:
    """Seconds from the start of a pipeline that reads four tokens more of a session until each of
    the first two logits have come; appends the four to `ids`."""
    ids += [6, 7, 8, 9]
    flags = ["--native", "require"]
    flags += ["--kv-bits", str(options.kv_bits)] if options.kv_bits else []
    start, pipe = time.perf_counter(), subprocess.PIPE
    prefill = [BIN / "toast-prefill", "--session", path, *flags]
    decode = [BIN / "toast-decode", "--greedy", *flags]
    with (
        subprocess.Popen(prefill, stdin=pipe, stdout=pipe) as first,
        subprocess.Popen(decode, stdin=first.stdout, stdout=pipe) as second,
    ):
        first.stdout.close()  # decode's alone
        first.stdin.write(dumps(head) + dumps(Tokens(pack_ids(ids))))
        first.stdin.close()
        frames = (frame for frame in FrameReader(second.stdout) if isinstance(frame, Logits))
        times = [time.perf_counter() - start for _ in zip(range(2), frames)]
        second.stdout.close()  # which ends both, their session committed
    if len(times) < 2:
        raise SystemExit("no logits have come")
    return tuple(times)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what it gives."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def filled(engine: Any, positions: int) -> list:
    """Caches that seem to have read so many tokens."""
    caches = engine.new_cache()
    engine.prefill([5, 6], caches)
    for layer in caches:
        room = -(-positions // BLOCK) * BLOCK
        batch, heads, _, size = layer.keys_and_values()[0].shape  # as they are used
        for name in ("keys", "values"):
            array = as_kept(
                mx.random.normal((batch, heads, room, size)), getattr(layer, name).dtype
            )
            mx.eval(array)
            setattr(layer, name, array)
        layer.offset = positions
    return caches


def tokens_after(engine: Any, caches: list) -> tuple[float, float, list[int]]:
    """Seconds that the first token takes, and the median of the next; the tokens."""
    token, times, said = mx.array(7), [], []
    for _ in range(TOKENS):
        start = time.perf_counter()
        token = mx.argmax(engine.step(token, caches))
        said.append(int(token.item()))
        times.append(time.perf_counter() - start)
    return times[0], median(times[1:]), said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--positions", type=int, default=21000)
    parser.add_argument("--model", default="small")
    parser.add_argument("--kv-bits", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--synced", action="store_true", help="commits are to outlive a power cut")
    parser.add_argument("--pipeline", action="store_true", help="through prefill and decode")
    parser.add_argument("--keep", type=Path, help="make the model here, use it again")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.keep) as temporary:
        path = checkpoint(options.keep or Path(temporary), options.model)
        engine = open_engine(
            locate(str(path)), device_name="cpu", native="require", kv_bits=options.kv_bits
        )
        run = piped if options.pipeline else measured
        results = run(engine, Path(temporary), options)
    print(
        f"{machine()}; {options.model}, {options.positions:,} positions, "
        f"{results.pop('MB')[0]:,.0f} MB; {options.rounds} rounds; ms, median (min .. max)"
    )
    for name, values in results.items():
        print(f"| {name} | {spread(values, 1e-3, 1)} |")


def measured(engine: Any, folder: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each round, by what was done; and MB, of the state."""
    count, path = options.positions, folder / "session"
    caches, ids = filled(engine, count), [5] * options.positions
    results: dict[str, list[float]] = {}
    for folder_name, ahead in (("session", True), ("once", False)):
        os.sync()  # what others have written is not to be waited for
        with Session.open(folder / folder_name, MODEL, durable=options.synced) as session:
            for what, seconds in saved(session, ids, caches, ahead).items():
                results.setdefault(what, []).append(seconds)
    results["MB"] = [(path / "cache.bin").stat().st_size / 1e6]
    wanted = tokens_after(engine, caches)[2]
    del caches
    for _ in range(options.rounds):
        for name, least in (("in place", 1 << 18), ("copied", 1 << 62)):
            with patch("toastkit.session.mapped.MIN_BYTES", least):
                times, said = once(engine, path, ids)
            if said != wanted:
                raise SystemExit(f"{name}: other tokens: {said}, not {wanted}")
            for what, seconds in times.items():
                results.setdefault(f"{name}: {what}", []).append(seconds)
        for name in ("copied by the system", "written"):
            for what, seconds in forked(engine, path, ids, name != "written").items():
                results.setdefault(f"a fork, {name}: {what}", []).append(seconds)
    return results


def forked(engine: Any, path: Path, ids: list[int], copies: bool) -> dict[str, float]:
    """Resumes a session in another one, and commits it there; seconds."""
    times, fork = {}, path.parent / "fork"
    with Session.open(fork, MODEL, durable=False) as session:
        with Session.open(path, MODEL, write=False) as source:
            times["resumed"], caches = timed(partial(source.restore, len(ids), engine.new_cache))
            if copies:
                session.goes_on_from(source, len(ids), len(ids))
        times["first commit"], _ = timed(partial(session.commit, ids, caches, LOGITS))
    shutil.rmtree(fork)
    return times


def saved(session: Session, ids: list[int], caches: list, ahead: bool) -> dict[str, float]:
    """Commits a state for the first time, at once or as a prompt is read; seconds."""
    if not ahead:
        return {"saved at once": timed(partial(session.commit, ids, caches, LOGITS))[0]}
    passes = []
    for count in range(BLOCK, len(ids), BLOCK):
        for layer in caches:
            layer.offset = count
        passes.append(timed(partial(session.write_ahead, ids[:count], caches, len(ids)))[0])
    for layer in caches:
        layer.offset = len(ids)
    committed, _ = timed(partial(session.commit, ids, caches, LOGITS))
    return {
        "written ahead, all passes": sum(passes), "of which one takes": median(passes),
        "and the commit then": committed,
    }  # fmt: skip


def once(engine: Any, path: Path, ids: list[int]) -> tuple[dict[str, float], list[int]]:
    """Resumes a session, goes on, commits that, and leaves it as it was; seconds, and tokens."""
    with Session.open(path, MODEL, durable=False) as session:
        times = {}
        times["resumed"], caches = timed(partial(session.restore, len(ids), engine.new_cache))
        times["first token"], times["each after it"], said = tokens_after(engine, caches)
        after = [*ids, 7, *said[:-1]]
        times["committed"], _ = timed(partial(session.commit, after, caches, LOGITS))
        for layer in caches:
            layer.trim(layer.offset - len(ids))
        session.commit(ids, caches, LOGITS)
    return times, said


if __name__ == "__main__":
    main()
