"""toast-sample: logits into tokens, and each token back to the waiting decode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from toastkit.commands import cli, options
from toastkit.errors import DataError, NoInputError
from toastkit.frames import Frame, Head

if TYPE_CHECKING:
    from toastkit.stages.run.pipe_feed import PipeFeed


@cli.command("sample")
@options.sampling
@options.max_tokens
@click.option("--no-feed", is_flag=True, help="Tell no decode: only draw, as from a saved stream.")
def sample(**flags) -> int:
    from toastkit.commands.pipes import run_filter
    from toastkit.stages.run.pipe_feed import PipeFeed
    from toastkit.stages.sample import DrawOptions, LateSampler, host_sampler
    from toastkit.stages.sample import sample as stage

    def sampler_for(head: Head) -> tuple[Any, DrawOptions]:
        defaults = _defaults(head)
        options.refuse_idle(flags, defaults)
        chain = options.sampling_options(flags, defaults, _seed(head))
        draw = DrawOptions(chain, flags["top"], flags["max_tokens"], flags["ignore_eos"])
        if not draw.likeliest:
            host_sampler()  # imported now, while the prompt is read
        return LateSampler(host_sampler, chain, head.vocab, _xtc_special_ids(chain, head)), draw

    options.sampling_options(flags, {}, 0)  # refuse bad values before the first frame
    options.refuse_idle(flags, {}, ("xtc_threshold",))
    feed = PipeFeed(send=not flags["no_feed"])
    return run_filter(lambda frames, signals: _ending(stage(frames, sampler_for, feed), feed))


def _ending(frames: Iterator[Frame], feed: PipeFeed) -> Iterator[Frame]:
    """Pass frames on, and end the run if that breaks off: behind tee, decode would not notice."""
    try:
        yield from frames
    except BaseException as error:
        feed.close("stop" if isinstance(error, (BrokenPipeError, GeneratorExit)) else "error")
        raise


def _seed(head: Head) -> int | None:
    """The seed that a recorded stream was sampled with."""
    record = head.extra.get("sampling")
    seed = record.get("seed") if isinstance(record, dict) else None
    return seed if type(seed) is int and 0 <= seed < 2**64 else None


def _defaults(head: Head) -> dict[str, Any]:
    """The checkpoint's own sampling settings; none if the stream came from elsewhere."""
    from toastkit.model.config import sampling_defaults

    files = _checkpoint(head)
    return {} if files is None else sampling_defaults(files)


def _xtc_special_ids(chain, head: Head) -> tuple[int, ...]:
    """Tokens that XTC never removes; only the end-of-turn ones if the model is not here."""
    if chain.xtc_probability == 0:
        return ()
    from toastkit.stages.answer import xtc_special_ids
    from toastkit.text.tokenizer import Tokenizer

    files = _checkpoint(head)
    return tuple(head.eos) if files is None else xtc_special_ids(chain, Tokenizer(files))


def _checkpoint(head: Head):
    """The checkpoint that the head names, None if it is not here or has changed since."""
    from toastkit.model.locate import for_stream

    try:
        return for_stream(None, head.model, head.fingerprint)
    except (NoInputError, DataError):
        return None


def main() -> None:
    cli.run(sample)
