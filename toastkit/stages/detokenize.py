"""detokenize: token frames into text, in whole characters, without stop strings or parts of
them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from toastkit.frames import End, Frame, Head, Text, Token, Tokens, unpack_ids
from toastkit.stages.run.protocol import Feed
from toastkit.stages.run.settings import Outcome
from toastkit.stages.streams import ends_run, whole_runs, with_tokens
from toastkit.text.detokenizer import StreamingDetokenizer
from toastkit.text.stops import StopStrings
from toastkit.text.tokenizer import Tokenizer


class TextOptions(NamedTuple):
    """stops: strings that end the answer and are not printed. keep_special: print special tokens as
    written. echo: print the prompt first."""

    stops: Sequence[str] = ()
    keep_special: bool = False
    echo: bool = False


def detokenize(
    frames: Iterable[Frame],
    tokenizer_for: Callable[[Head], Tokenizer],
    options: TextOptions,
    feed: Feed,
    outcome: Outcome,
) -> Iterator[Frame]:
    """Insert a `text` frame before each token that makes new text certain; pass the rest on.

    tokenizer_for(head): the tokenizer of that head's model. feed: told when a stop string is found.
    outcome: told how each run ends.
    """
    writer: _Writer | None = None
    for frame in with_tokens(whole_runs(frames, ends_run), lambda: feed.awaited):
        if isinstance(frame, Head):
            feed.begin(frame)
            writer = _Writer(tokenizer_for(frame), options, frame.vocab)
        elif writer is None:
            pass
        elif isinstance(frame, Text):
            continue  # from another detokenizer: it is made anew
        elif isinstance(frame, Tokens) and options.echo:
            yield Text(writer.tokenizer.decode(unpack_ids(frame.ids), keep_special=True))
        elif isinstance(frame, Token):
            if writer.stopped:
                continue  # sampled before decode heard of the stop
            piece = writer.add(frame.id)
            if piece:
                yield Text(piece)
            if writer.stopped:
                feed.close("stop")
        elif isinstance(frame, End):
            piece = writer.finish()
            if piece:
                yield Text(piece)
            if writer.stopped:
                frame.reason, frame.n = "stop", writer.taken
            feed.finish()
            outcome.reasons.append(frame.reason)
            outcome.tokens = frame.n
        yield frame


class _Writer:
    """The text of one answer. taken: number of its tokens."""

    def __init__(self, tokenizer: Tokenizer, options: TextOptions, vocab: int):
        self.tokenizer = tokenizer
        self._pieces = StreamingDetokenizer(tokenizer, options.keep_special, vocab)
        self._stops = StopStrings(options.stops)
        self.stopped = False
        self.taken = 0

    def add(self, token: int) -> str:
        self.taken += 1
        piece, self.stopped = self._stops.add(self._pieces.add(token))
        return piece

    def finish(self) -> str:
        if self.stopped:
            return ""
        piece, _ = self._stops.add(self._pieces.finish())
        piece += self._stops.finish()
        self.stopped = self._stops.stopped is not None
        return piece
