"""Runs made by hand, and what stages make of them."""

from __future__ import annotations

import numpy as np

from toastkit.frames import End, Head, Logits, Prefilled, Token, Tokens, pack_ids
from toastkit.sampling.host import HostSampler
from toastkit.sampling.sampling_options import SamplingOptions
from toastkit.stages.arrays import from_numpy
from toastkit.stages.run.protocol import Next
from toastkit.stages.sample import DrawOptions, sample

VOCAB = 6
EOS = 5


def head(**fields) -> Head:
    return Head("crumb", "ab" * 16, VOCAB, [EOS], **fields)


def values(best: int, second: int = 0) -> np.ndarray:
    """Logits (VOCAB,) with a most likely id and a second."""
    made = np.zeros(VOCAB, np.float32)
    made[second] += 1
    made[best] += 3
    return made


def step(pos: int, best: int, second: int = 0, **fields) -> Logits:
    return Logits(pos, from_numpy(values(best, second)), **fields)


def answer(*best: int, prompt: tuple[int, ...] = (1, 2)) -> list:
    """A run in which each step wants one token."""
    steps = [step(len(prompt) + n, token) for n, token in enumerate(best)]
    n = len(prompt)
    return [head(), Tokens(pack_ids(prompt)), Prefilled(n, n, 0, 0.0), *steps, End("stop", 0)]


def kinds(frames) -> list[type]:
    return [type(frame) for frame in frames]


class Recorder:
    """A feed that writes down what it is told. gears: those that came with tokens, and the ones
    that were expected."""

    awaited = False

    def __init__(self) -> None:
        self.told: list[tuple] = []
        self.gears: list[tuple] = []

    def begin(self, head: Head) -> None:
        self.told.append(("begin",))

    def send(self, pos: int, following: Next) -> None:
        self.told.append(("send", pos, following.token, following.end))
        self.gears.append((following.gear, following.expected))

    def close(self, reason: str) -> None:
        self.told.append(("close", reason))

    def finish(self) -> None:
        self.told.append(("finish",))

    @property
    def sent(self) -> list[tuple]:
        return [call[1:] for call in self.told if call[0] == "send"]


def draw(stream, feed=None, options: SamplingOptions | None = None, **settings) -> list:
    """What `sample` makes of a stream."""
    chain = options or SamplingOptions()

    def sampler_for(head: Head):
        return HostSampler(chain, head.vocab), DrawOptions(chain, **settings)

    return list(sample(iter(stream), sampler_for, feed or Recorder()))


def drawn(frames) -> list[int]:
    return [frame.id for frame in frames if type(frame) is Token]
