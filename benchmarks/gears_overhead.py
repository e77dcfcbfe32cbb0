"""What following the entropy costs: microseconds of the monitor, milliseconds of a decode."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import count as count_up
from pathlib import Path
from statistics import median

import mlx.core as mx
import numpy as np
from gears_report import say, table, title
from measure import in_turn, spread
from pipeline import make_wide

from toastkit.engine import device
from toastkit.engine.engine import Engine
from toastkit.engine.opening import open_engine
from toastkit.frames import Head, Logits, Token, Tokens, pack_ids
from toastkit.gears.entropy_graph import entropy_bits
from toastkit.gears.gear_options import GearOptions
from toastkit.gears.monitor import EntropyMeter
from toastkit.gears.selector import GearSelector
from toastkit.interrupts import Interrupt
from toastkit.model.config import fingerprint
from toastkit.model.locate import locate
from toastkit.sampling.sampling_options import SamplingOptions
from toastkit.stages.answer import AnswerOptions, answer
from toastkit.stages.follow import Follower, GearRules, GearSettings
from toastkit.stages.run.one_process import LocalRuns
from toastkit.stages.run.settings import Outcome
from toastkit.stages.sample import DrawOptions
from toastkit.text.tokenizer import Tokenizer

VOCABULARIES = (4096, 32768, 151936)
PROMPT = "Tell me a story about a fox and a river."
PLAIN, AGAIN = "off", "off again"


def overhead(rounds: int, tokens: int) -> None:
    """The monitor alone, then decodes with and without it in turn."""
    title(
        "Overhead of the monitor",
        "Without --gear and without telemetry no module is replaced, no entropy computed and no",
        "selector made: the path is the one from before there were gears (tests/model/",
        "test_gears_loop.py holds it to that), so there is nothing to measure. What follows is",
        f"what asking for gears costs. {rounds} rounds, cases in turn; medians (least .. most).",
    )
    say("the monitor alone")
    device.start()
    _monitor(rounds, 40 if tokens < 50 else 200)
    with tempfile.TemporaryDirectory() as folder:
        make_wide(Path(folder))
        for name, model, prompt in (
            ("embedded model, 4,096 ids", "crumb", PROMPT),
            ("small random model, 151,936 ids", folder, "w1 w2 w3"),
        ):
            say(f"decodes of the {name}")
            _decodes(name, model, prompt, rounds, tokens)


def _monitor(rounds: int, count: int) -> None:
    """Microseconds of each part, on the host."""
    rows = []
    for vocab in VOCABULARIES:
        results = in_turn(_parts(vocab, count), rounds)
        whole = [a + b for a, b in zip(results["meter"], results["annotate"])]
        cells = [spread(values, 1e-6, 1) for values in (*results.values(), whole)]
        rows.append([f"{vocab:,}", *cells])
    print("Microseconds a token on the host: EntropyMeter on the logits; GearSelector; the frame")
    print("annotated, selector included; meter and annotation together. device: the entropy alone")
    print("as an MLX graph, waited for.\n")
    table(("ids", "meter", "selector", "annotate", "device", "together"), rows)


def _parts(vocab: int, count: int) -> dict[str, Callable[[], float]]:
    """What is done for each token, in parts; seconds of one."""
    generator = np.random.default_rng(vocab)
    logits = [generator.normal(0, 3, vocab).astype(np.float32) for _ in range(8)]
    on_device = [mx.array(one) for one in logits]
    mx.eval(on_device)
    meter, selector = EntropyMeter(vocab), GearSelector(vocab)
    entropies = [meter.bits(one) for one in logits]
    follower = Follower(GearRules(calibrated=False))
    follower.learn(Head("random", "0" * 64, vocab, []))
    positions = count_up()

    def annotate(n: int) -> None:
        follower.annotate(Logits(next(positions), None), entropies[n % 8])

    return {
        "meter": partial(_each, count, lambda n: meter.bits(logits[n % 8])),
        "selector": partial(_each, count, lambda n: selector.update(entropies[n % 8])),
        "annotate": partial(_each, count, annotate),
        "device": partial(_each, count, lambda n: entropy_bits(on_device[n % 8]).item()),
    }


def _each(count: int, work: Callable[[int], object]) -> float:
    """Seconds of one piece of work."""
    start = time.perf_counter()
    for number in range(count):
        work(number)
    return (time.perf_counter() - start) / count


def _decodes(name: str, model: str, prompt: str, rounds: int, tokens: int) -> None:
    """Milliseconds a token, without anything, with the entropy told, and with the loop that
    shifts, held in high gear: the same products, so that all the rest is the difference."""
    files = locate(model)
    tokenizer = Tokenizer(files)
    ids = tokenizer.encode(prompt, False)
    plain = open_engine(files)
    shifting = open_engine(files, gear_options=GearOptions("high", "all"))
    rows = []
    for drawn, deferred in (("on the device", True), ("on the host", False)):
        run = partial(_answer, tokenizer=tokenizer, ids=ids, deferred=deferred)
        draw = DrawOptions(SamplingOptions(), max_tokens=tokens, ignore_eos=True)
        off, told = AnswerOptions(draw), AnswerOptions(draw, telemetry=True)
        gears = GearSettings(GearOptions("auto"), GearRules(calibrated=False))
        held = AnswerOptions(draw, gears=gears)
        cases: dict[str, Callable[[], float]] = {
            PLAIN: partial(run, plain, off),
            "entropy told": partial(run, plain, told),
            "shifting loop, high": partial(run, shifting, held),
            AGAIN: partial(run, plain, off),
        }
        results = in_turn(cases, rounds)
        for case, values in results.items():
            added = [a - b for a, b in zip(values, results[PLAIN])]
            share = 100 * median(added) / median(results[PLAIN])
            rows.append([
                drawn, case, spread(values, 1e-3), spread(added, 1e-6, 0), f"{share:+.2f}%",
            ])  # fmt: skip
    print(f"Decodes of the {name}, {tokens} greedy tokens. Tokens drawn on the device have their")
    print("entropy computed there too, in the step's graph, and read with the token; drawn on the")
    print(f"host, by the meter. added: to `{PLAIN}`, round by round; `{AGAIN}` shows the noise.\n")
    table(("tokens drawn", "", "ms a token", "added, microseconds", "added"), rows, left=2)


def _answer(
    engine: Engine, options: AnswerOptions, tokenizer: Tokenizer, ids: list[int], deferred: bool
) -> float:
    """Seconds a token of an answer, but for its first tokens: the case before was another model."""
    head = Head(engine.files.name, fingerprint(engine.files), engine.vocab, [])
    frames = answer(
        [head, Tokens(pack_ids(ids))], tokenizer, lambda _: engine,
        LocalRuns(None, Interrupt(), deferred=deferred), options,
        Interrupt(), Outcome(),
    )  # fmt: skip
    marks = [time.perf_counter() for frame in frames if isinstance(frame, Token)]
    first = len(marks) // 5
    return (marks[-1] - marks[first]) / (len(marks) - 1 - first)
