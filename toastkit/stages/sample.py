"""sample: sample a token from each step's logits and tell decode which one.

The end of an answer is decided here (end-of-turn token, or length); decode commits and answers with
the run's `end`, which is passed on with the number of sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from toastkit.frames import End, Frame, Head, Logits, Token, Tokens, unpack_ids
from toastkit.sampling.draws import Draw
from toastkit.sampling.sampling_options import SamplingOptions
from toastkit.stages.run.protocol import Feed, Next
from toastkit.stages.streams import ends_run, whole_runs, with_logits

if TYPE_CHECKING:
    from toastkit.sampling.host import HostSampler
    from toastkit.stages.follow import Follower


class DrawOptions(NamedTuple):
    """sampling: the chain. top: alternatives listed in a token frame. max_tokens: to sample, None
    for no limit. ignore_eos: end-of-turn tokens do not end the answer. want_logprob: somebody reads
    them."""

    sampling: SamplingOptions
    top: int = 0
    max_tokens: int | None = None
    ignore_eos: bool = False
    want_logprob: bool = True

    @property
    def likeliest(self) -> bool:
        """True if every token is the likeliest, and nothing is wanted of the others."""
        return self.sampling.greedy and not self.top


def host_sampler() -> type[HostSampler]:
    """The class, which imports numpy: in 50 ms or more."""
    from toastkit.sampling.host import HostSampler

    return HostSampler


class LateSampler:
    """A HostSampler that is made for the first logits that it has to read; greedily, where decode
    has found the likeliest token, for none. imported: gives, or waits for, its class. Raises as
    SamplingOptions.validate."""

    def __init__(
        self,
        imported: Callable[[], type[HostSampler]],
        options: SamplingOptions,
        vocab: int,
        special: Sequence[int],
    ):
        options.validate(vocab)
        self._imported, self._arguments = imported, (options, vocab, special)

    @cached_property
    def _sampler(self) -> HostSampler:
        return self._imported()(*self._arguments)

    def choose(self, *arguments: Any) -> int:
        """As HostSampler.choose."""
        return self._sampler.choose(*arguments)

    def describe(self, *arguments: Any) -> Draw:
        """As HostSampler.describe."""
        return self._sampler.describe(*arguments)


def sample(
    frames: Iterable[Frame], sampler_for: Callable[[Head], tuple[Any, DrawOptions]], feed: Feed
) -> Iterator[Frame]:
    """Sample on the host: each token is known, sent and passed on before the next frame is read.

    sampler_for(head): a HostSampler for that vocabulary, and the options to sample with.
    """
    from toastkit.stages.arrays import LogitsReader

    reader = LogitsReader()
    run: _Run | None = None
    for frame in with_logits(whole_runs(frames, ends_run), "is toast-sample there already?"):
        if isinstance(frame, Head):
            reader.begin(frame)
            feed.begin(frame)
            sampler, options = sampler_for(frame)
            run, likeliest = _Run(frame, options), options.likeliest
            yield _with_sampling(frame, options)
        elif run is None:
            yield frame
        elif isinstance(frame, Logits):
            if run.ended is not None:
                continue  # a replayed stream continues beyond the end of this answer
            known = reader.summary(frame.logits) if likeliest else None
            if known is None:
                token = sampler.choose(reader.read(frame.logits), frame.pos, run.history)
            else:  # decode has found it
                token = known.likeliest
            run.advance(token)
            feed.send(frame.pos, Next(token, run.ended, frame.gear, frame.expected))
            # Everything else about it is computed while decode takes the next step.
            if known is None:
                drawn = sampler.describe(options.top, options.want_logprob)
            else:
                drawn = Draw(token, known.logprob)
            yield run.token(frame, drawn)
        elif isinstance(frame, Token):
            continue  # of an earlier sampling, in a replayed stream
        elif isinstance(frame, End):
            feed.finish()
            yield run.end(frame)
        else:
            run.note(frame)
            yield frame


def sample_deferred(
    frames: Iterable[Frame],
    sampler_for: Callable[[Head], tuple[Any, DrawOptions]],
    feed: Feed,
    follower: Follower | None = None,
) -> Iterator[Frame]:
    """Sample on the device: the token goes back unread, the next step is submitted, and only then
    is the token read, so that the device never waits for the host (as mlx_lm.generate_step does).

    sampler_for(head): a DeviceSampler for that vocabulary, and the options to sample with.
    follower: chooses the gear of the next pass; the token is then read first, together with the
    entropy that the choice depends on, in the one synchronisation per token (003, section 3.6).
    """
    import mlx.core as mx

    run: _Run | None = None
    waiting: tuple[Logits, Any] | None = None
    recent: Any = None
    for frame in whole_runs(frames, ends_run):
        if isinstance(frame, Head):
            feed.begin(frame)
            sampler, options = sampler_for(frame)
            run, waiting, recent = _Run(frame, options), None, None
            yield _with_sampling(frame, options)
        elif run is None:
            yield frame
        elif isinstance(frame, Logits):
            if options.sampling.needs_history:
                size = options.sampling.penalty_context
                if waiting is None:
                    recent = mx.array(run.history[-size:], mx.uint32)
                else:  # on the device: the newest is not read yet
                    recent = mx.concatenate([recent, waiting[1].id.reshape(1)])[-size:]
            drawn = sampler.draw(frame.logits, frame.pos, recent, options.top, options.want_logprob)
            extra = [] if frame.entropy is None else [frame.entropy]
            mx.async_eval(*drawn.arrays(), *extra)
            if follower is not None:
                value = drawn.read()
                follower.annotate(frame, frame.entropy.item())
                run.advance(value.id)
                feed.send(frame.pos, Next(value.id, run.ended, frame.gear, frame.expected))
                yield run.token(frame, value)
                continue
            count = run.drawn + (1 if waiting is None else 2)
            last = count == options.max_tokens
            feed.send(frame.pos, Next(drawn.id, "length" if last else None))
            if waiting is not None:
                yield from _read(run, waiting, feed)
            waiting = (frame, drawn)
        elif isinstance(frame, End):
            if waiting is not None:
                yield from _read(run, waiting, feed)
            waiting = None
            feed.finish()
            yield run.end(frame)
        else:
            run.note(frame)
            yield frame


def _read(run: _Run, waiting: tuple[Logits, Any], feed: Feed) -> Iterator[Frame]:
    """Wait for a sampled token: the one synchronisation per token."""
    if run.ended is not None:
        return
    frame, drawn = waiting
    value = drawn.read()
    if frame.entropy is not None:
        frame.entropy = round(frame.entropy.item(), 6)
    run.advance(value.id)
    if run.ended == "eos":
        feed.close("eos")
    yield run.token(frame, value)


def _with_sampling(head: Head, options: DrawOptions) -> Head:
    """The head with what it takes to reproduce the tokens."""
    chain = options.sampling
    record = {"temperature": chain.temperature, "seed": chain.seed}
    return replace(head, extra={**head.extra, "sampling": record})


@dataclass
class _Run:
    """One answer in progress. ended: the reason, once known."""

    head: Head
    options: DrawOptions
    history: list[int] = field(default_factory=list)
    drawn: int = 0
    ended: str | None = None

    def note(self, frame: Frame) -> None:
        """Add prompt tokens to the history for the penalties."""
        if isinstance(frame, Tokens) and self.options.sampling.needs_history:
            self.history += unpack_ids(frame.ids)

    def advance(self, token: int) -> None:
        """Count a sampled token; detect the end of the answer."""
        self.drawn += 1
        if self.options.sampling.needs_history:
            self.history.append(token)
        if token in self.head.eos and not self.options.ignore_eos:
            self.ended = "eos"
        elif self.drawn == self.options.max_tokens:
            self.ended = "length"

    def token(self, frame: Logits, drawn: Any) -> Token:
        """The frame of a sampled token."""
        logprob = round(drawn.logprob, 6) if self.options.want_logprob else None
        top = drawn.top and [[token, round(value, 6)] for token, value in drawn.top]
        return Token(frame.pos, drawn.id, logprob, top, frame.gear, frame.entropy)

    def end(self, frame: End) -> End:
        """decode's end, with our own count and, if the answer ended here, our own reason."""
        return replace(frame, reason=self.ended or frame.reason, n=self.drawn)
