"""Frames: streams of every stage, harmed, through the reader, JSON and back, and every stage. A
stage goes on, or ends with an error that a user may see."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import hand_made
import msgpack
import numpy as np

from tests.conftest import SCRIPTS
from tests.fuzz import CODES, check_error, harm
from tests.hostile import run_hostile
from toastkit.commands.engines import load, open_unloaded
from toastkit.errors import ToastError, from_os_error
from toastkit.frames import (
    End,
    Error,
    Frame,
    FrameReader,
    Head,
    Logits,
    Prefilled,
    Reference,
    Stats,
    Token,
    Tokens,
    Unknown,
    dumps,
    pack_ids,
)  # fmt: skip
from toastkit.interrupts import Interrupt
from toastkit.model.config import load_config
from toastkit.model.locate import for_stream, locate
from toastkit.sampling.host import HostSampler
from toastkit.sampling.sampling_options import SamplingOptions
from toastkit.session.feed import FeedReader
from toastkit.session.names import resolve, sessions_root
from toastkit.session.ring import RingWriter
from toastkit.session.run import RunDirectory, feed_of, ring_of
from toastkit.stages.answer import AnswerOptions, answer
from toastkit.stages.arrays import LogitsReader
from toastkit.stages.decode import decode
from toastkit.stages.detokenize import TextOptions, detokenize
from toastkit.stages.feed import feed_tokens
from toastkit.stages.follow import Follower, GearRules
from toastkit.stages.gear import gear
from toastkit.stages.inspect import Statistics, choose, make_inline
from toastkit.stages.jsonl import from_json, json_frames, to_json
from toastkit.stages.prefill import prefill
from toastkit.stages.run.one_process import LocalRuns
from toastkit.stages.run.own_tokens import ForcedFeed, GreedyFeed
from toastkit.stages.run.pipe_decode import DecodeEnd
from toastkit.stages.run.pipe_feed import PipeFeed
from toastkit.stages.run.pipe_prefill import PrefillEnd
from toastkit.stages.run.settings import Outcome, ReadOptions, StepOptions
from toastkit.stages.sample import DrawOptions, sample
from toastkit.stages.tokenize import Prompt, PromptOptions, PromptTokenizer, tokenize
from toastkit.text.messages import user_messages
from toastkit.text.tokenizer import Tokenizer

CHAINS = (
    SamplingOptions(),
    SamplingOptions(temperature=0.8, top_p=0.9, min_p=0.1, seed=5),
    SamplingOptions(temperature=2, top_k=3, typical_p=0.5, xtc_probability=0.5),
    SamplingOptions(repetition_penalty=1.3, frequency_penalty=0.5, bans=(1,)),
)
FLAGS = {
    "device": "cpu", "dtype": None, "kv_bits": None, "native": "off", "native_exact": False,
    "threads": None, "quiet": True, "verbose": False,
}  # fmt: skip
COMMANDS = (
    "toast-frames", "toast-frames --json", "toast-frames --json --arrays base64",
    "toast-frames --validate", "toast-frames --stat", "toast-frames --inline --kinds logits,end",
    "toast-detokenize", "toast-detokenize --frames --stop x", "toast-sample --no-feed",
    "toast-entropy-gear --explain", "toast-feed", "toast-prefill", "toast-decode --greedy",
    "toast-decode --force - --steps 2", "toast-frames --json | toast-frames --from-json",
    "toast-prefill | toast-decode --steps 3 | toast-sample | toast-detokenize",
)  # fmt: skip

CHEAP = ("gear", "sample", "detokenize", "feed", "frames")
COSTLY = ("prefill", "greedy", "forced", "answer")  # they run the model


class Frames:
    """streams: of our own writers, each a list of its frames as maps."""

    def __init__(self) -> None:
        self.home = sessions_root().parents[2].resolve()
        files = locate("crumb")
        self.text = Tokenizer(files)
        self.prompts = PromptTokenizer(files, load_config(files), PromptOptions(), self.text)
        self.engine = load(open_unloaded(files, FLAGS), FLAGS)
        self.open = contextlib.ExitStack()
        soon = patch("toastkit.session.feed.OPEN_SECONDS", 0.01)  # no decode will come
        self.open.enter_context(soon)
        self.streams = [[msgpack.unpackb(dumps(frame)) for frame in s] for s in self.written()]
        self.kept = Path("kept")
        shutil.copytree(sessions_root(), self.kept)
        self.live = RunDirectory.create(sessions_root() / "live")
        self.feed = FeedReader(feed_of(self.live.path))
        self.streams.append([msgpack.unpackb(dumps(frame)) for frame in self.by_reference()])

        for undo in (self.engine.close, self.live.remove, self.feed.close):
            self.open.callback(undo)

    def written(self) -> Iterator[list[Frame]]:
        """What each stage of a pipeline writes, and streams that are made by hand."""
        yield hand_made.answer(0, 3, 5)
        yield [
            Head("crumb", "ab" * 16, 9, [2], run=["one", "two"]), Tokens(pack_ids([1, 2])),
            Unknown("later", {"x": [1, {"y": None}], "z": b"z", "é": msgpack.ExtType(9, b"")}),
            Stats("toast-x", {"seconds": 1.5}), Token(2, 5, -0.5, [[5, -0.5]], "low", 1.25),
            Error(65, "toast-x", "it failed", "try again"), End("eos", 1),
        ]  # fmt: skip
        stages = self.stages(random.Random(0))
        for name, prompt in (("one", Prompt("2 + 2")), ("two", Prompt(None, user_messages("Hi")))):
            frames = list(tokenize([prompt], self.prompts, name))
            yield frames
            for stage in ("prefill", "greedy", "gear", "sample", "detokenize"):
                frames = list(stages[stage](frames))
                yield frames

    def by_reference(self) -> list[Frame]:
        """A run that is under way: its feed is read, its logits are in the ring."""
        ring = RingWriter(ring_of(self.live.path), self.engine.vocab)
        values = np.zeros(self.engine.vocab, np.float32)
        steps = [Logits(2 + n, ring.write(values)) for n in range(3)]
        head = replace(self.prompts.head(None), run=str(self.live.path))
        prefilled = Prefilled(2, 2, 0, 0.0)
        return [head, Tokens(pack_ids([5, 6])), prefilled, *steps, End("stop", 3)]

    # ----------------------------------------------------------------------------- what reads it

    def engine_for(self, head: Head) -> Any:
        for_stream(None, head.model, head.fingerprint)
        return self.engine

    def stages(self, rng: random.Random) -> dict[str, Callable[[Iterable[Frame]], Iterator[Frame]]]:
        """Every stage, with some of its options."""
        chain, rules, quiet = rng.choice(CHAINS), GearRules(), Interrupt()
        forced, steps = ForcedFeed(rng.choice((None, [3, 4], [5000]))), StepOptions(None, 3)
        draw = DrawOptions(chain, rng.choice((0, 3)), rng.choice((None, 2)))
        runs = LocalRuns(rng.choice((None, "two")), quiet, deferred=rng.random() < 0.5)
        whole = AnswerOptions(step=steps, draw=draw, telemetry=rng.random() < 0.5)

        def decoded(frames: Iterable[Frame], own: Any, inline: bool) -> Iterator[Frame]:
            end = DecodeEnd(quiet, own, inline, Follower(rules))
            return decode(frames, self.engine_for, end, steps, quiet)

        def sampler_for(head: Head) -> tuple[Any, DrawOptions]:
            chain.validate(head.vocab)
            return HostSampler(chain, head.vocab), draw

        def tokenizer_for(head: Head) -> Tokenizer:
            files = for_stream(None, head.model, head.fingerprint)
            return self.text if head.model == "crumb" else Tokenizer(files)

        return {
            "prefill": lambda frames: prefill(
                frames, self.engine_for, PrefillEnd(None), ReadOptions(rng.choice((None, 2))), quiet
            ),
            "greedy": lambda frames: decoded(frames, GreedyFeed(), True),
            "forced": lambda frames: decoded(forced.listen(frames), forced, False),
            "gear": lambda frames: gear(frames, rules),
            "sample": lambda frames: sample(frames, sampler_for, PipeFeed()),
            "detokenize": lambda frames: detokenize(
                frames, tokenizer_for, TextOptions(("x",), echo=True), PipeFeed(), Outcome()
            ),
            "feed": lambda frames: feed_tokens(frames, None, rng.random() < 0.5),
            "answer": lambda frames: answer(
                frames, self.text, self.engine_for, runs, whole, quiet, Outcome()
            ),
            "frames": lambda frames: counted(choose(make_inline(frames), None, 1, 9)),
        }

    # --------------------------------------------------------------------------------- one case

    def case(self, rng: random.Random) -> None:
        """Harms a stream, and gives it to the reader, to JSON and to one stage."""
        maps = [m for _ in range(rng.choice((1, 1, 2))) for m in rng.choice(self.streams)]
        maps = copy.deepcopy(maps)
        times = rng.choice((0, 1, 1, 2, 3, 6))
        for _ in range(times):
            harm.mutate(rng, maps)
        data = whole = b"".join(map(pack, maps))
        if rng.random() < 0.3:
            data = harm.mutate_bytes(rng, data)
        frames: list[Frame] = []
        with shown():
            frames.extend(FrameReader(Pieces(rng, data)))
        untouched = not times and data is whole
        assert not untouched or b"".join(map(dumps, frames)) == data
        self.through_json(rng, frames, untouched)
        if rng.random() < 0.002 and all(map(self.at_home, frames)):
            self.through_commands(rng, data, frames)
        name = rng.choice(COSTLY if rng.random() < 0.15 else CHEAP)
        stage = self.stages(rng)[name]
        if name in COSTLY:
            for session in self.kept.iterdir():
                shutil.rmtree(sessions_root() / session.name, ignore_errors=True)
                shutil.copytree(session, sessions_root() / session.name)
        with shown():
            source: Iterable[Frame] = filter(self.at_home, FrameReader(Pieces(rng, data)))
            if name == "answer":  # it reads what tokenize writes
                source = (f for f in source if not isinstance(f, (Prefilled, Logits, Token)))
            for frame in stage(source):
                if not (name == "answer" and isinstance(frame, Logits)):  # these are on the device
                    assert list(FrameReader(io.BytesIO(dumps(frame))))
        with contextlib.suppress(BlockingIOError):
            os.read(self.feed.fileno(), 1 << 16)

    def at_home(self, frame: Frame) -> bool:
        """Whether all that a head names is in the fuzzer's own directories."""
        if not isinstance(frame, Head):
            return True
        runs = frame.run if isinstance(frame.run, list) else [frame.run]
        named = [frame.session, *runs]
        with contextlib.suppress(ToastError, OSError, ValueError):
            found = [resolve(path).resolve() for path in named if path]
            return all(self.home in path.parents for path in found)
        return True

    def through_json(self, rng: random.Random, frames: list[Frame], exact: bool) -> None:
        """To lines and back, which changes nothing; then lines that are harmed."""
        arrays, lines = LogitsReader(), []
        for frame in arrays.listen(frames):
            how, count = rng.choice(("topk", "base64", "none")), rng.randint(1, 20)
            with shown():
                lines.append(to_json(frame, how, count, arrays.read))
                again = from_json(lines[-1])
                if how == "base64":
                    line = to_json(again, how, count, arrays.read)
                    assert line == lines[-1], f"{line} {lines[-1]}"[:2000]
                    if exact and not isinstance(getattr(frame, "logits", None), Reference):
                        assert dumps(again) == dumps(frame), f"{frame} {again}"[:2000]
        if rng.random() < 0.3:
            maps = [json.loads(line) for line in lines]
            for _ in range(rng.randint(0, 3)):
                harm.mutate(rng, maps, harm.JSON_VALUES)
            text = "\n".join(json.dumps(m, ensure_ascii=False) for m in maps).encode()
            if rng.random() < 0.7:
                text = harm.mutate_bytes(rng, text)
            with shown():
                for frame in json_frames(Pieces(rng, text)):
                    assert dumps(*FrameReader(io.BytesIO(dumps(frame)))) == dumps(frame)

    def through_commands(self, rng: random.Random, data: bytes, frames: list[Frame]) -> None:
        """Through real executables."""
        environment = {**os.environ, "PATH": f"{SCRIPTS}:{os.environ['PATH']}"}
        command = rng.choice(COMMANDS)
        taken = run_hostile(["sh", "-c", command], data, env=environment)
        told = any(isinstance(frame, Error) for frame in frames)
        assert told or taken.code in (0, *CODES), f"{command}: {taken.code}: {taken.error}"
        assert taken.error.replace("\n", "").isprintable(), repr(taken.error)
        assert "Warning" not in taken.error, taken.error


@contextlib.contextmanager
def frames(repeats: bool) -> Iterator[Callable[[random.Random], None]]:
    """A case is one stream, harmed, through the reader, JSON and a stage."""
    made = Frames()
    with made.open:
        yield made.case


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """What may go wrong, as `run_filter` takes it."""
    try:
        yield
    except ToastError as error:
        check_error(error)
    except OSError as error:
        check_error(from_os_error(error, "i/o"))


def counted(frames: Iterable[Frame]) -> Iterator[Frame]:
    """The frames, which are counted."""
    statistics = Statistics()
    for frame in frames:
        statistics.add(frame)
        yield frame
    json.dumps(statistics.summary())


def pack(value: Any) -> bytes:
    """A frame's map, or what has become of one; deeper than the packer goes is cut."""
    try:
        return msgpack.packb(value)
    except (ValueError, OverflowError):
        return b"\x91" * 600


class Pieces:
    """A pipe that gives as much as it likes at a time."""

    def __init__(self, rng: random.Random, data: bytes) -> None:
        self.rng, self.source = rng, io.BytesIO(data)

    def read1(self, size: int) -> bytes:
        return self.source.read(min(size, self.rng.choice((1, 7, 300, 1 << 16, 1 << 16))))
