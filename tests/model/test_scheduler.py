"""Several conversations at one device: each gets the answer that it gets alone, in its turn."""

from __future__ import annotations

from typing import Any

import pytest

from tests.model.reference import OLD_MLX_LM
from tests.model.service_driver import Asked, Driver, Engines, FakeChannel, Plain, user
from toastkit.daemon import stepper as stepper_module
from toastkit.daemon.memory import Memory
from toastkit.engine.batch import can_batch
from toastkit.errors import DataError
from toastkit.session.directory import Session
from toastkit.store.ledger import CACHE

pytestmark = pytest.mark.usefixtures("homes")
LONG_CONTEXT = {"max_position_embeddings": 8192}
STORY = "The bear went to the river, and the owl sat in the old tree. "
SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 5}
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    SEEDED,
    {**SEEDED, "max_tokens": 5, "repetition_penalty": 1.5, "presence_penalty": 0.5},
    {"max_tokens": 20, "top": 3},
    {"max_tokens": 9, "tokens": False, "frequency_penalty": 0.7, "temperature": 1.1, "seed": 1},
    {"max_tokens": 1, "temperature": 1, "top_k": 40, "min_p": 0.01, "seed": 9},
)
PROMPTS = ("Who are you?", STORY * 3, "Why?", STORY, "And then? " + STORY * 2, "Bye.")


@pytest.fixture
def llama(engines: Engines) -> tuple[Any, Plain]:
    return engines("llama", **LONG_CONTEXT)


@pytest.fixture
def slow_llama(engines: Engines) -> tuple[Any, Plain]:
    """By MLX alone, which reads so slowly that a prompt takes several slices."""
    return engines("llama", native="off", **LONG_CONTEXT)


def same(asked: Asked, plain: Plain, what: Any, **options: Any) -> None:
    """The answer is the one that it would be alone."""
    assert asked.answer == plain.answer(what, **options)
    pieces = "".join(asked.channel.all_of("text"))
    assert pieces == asked.text == asked.end["text"]
    assert asked.stats["answer"] == asked.end["n"] and asked.channel.is_done
    assert list(asked.channel.replies[-2]) + list(asked.channel.replies[-1]) == ["stats", "end"]


def joined(driver: Driver) -> list[int]:
    """Sizes of the batches that there are."""
    return driver.service.stepper.sizes


# ------------------------------------------------------------------------------------- each alone


@pytest.mark.parametrize(
    ("name", "batch"), [("llama", 8), ("llama", 2), ("llama", 1), ("qwen3_5", 8)]
)
def test_several_at_once_are_each_alone(engines: Engines, name: str, batch: int) -> None:
    """Of many lengths, drawn on the device and on the host, with all that reads the history."""
    engine, plain = engines(name)
    together = batch > 1 and can_batch(engine)  # not with an old mlx_lm
    driver = Driver(engine, batch=batch)
    pairs = list(zip(PROMPTS, OPTIONS))
    asked = [driver.start(prompt, **options) for prompt, options in pairs]
    most = 0
    while not all(one.over for one in asked):
        driver.service.turn()
        most = max([most, *joined(driver)])
        under_way = [one for one in asked if not one.over and one.read]
        assert (engine.ledger.of(CACHE) > 0) == bool(under_way)
    assert (1 < most <= batch) if together else (most == 0)
    for one, (prompt, options) in zip(asked, pairs):
        same(one, plain, prompt, **options)
    assert engine.ledger.of(CACHE) == 0 and not joined(driver)
    assert not driver.said or not together


def test_an_architecture_that_cannot_be_batched_takes_turns(llama, monkeypatch) -> None:
    engine, plain = llama
    monkeypatch.setattr(stepper_module, "can_batch", lambda engine, apart=False: False)
    driver = Driver(engine)
    asked = [driver.start(prompt) for prompt in PROMPTS[:3]]
    driver.finish()
    for one, prompt in zip(asked, PROMPTS):
        same(one, plain, prompt)
    (line,) = driver.said
    assert line.endswith("llama cannot be batched: conversations take their steps in turn")


def test_the_same_question_three_times(llama) -> None:
    engine, plain = llama
    driver = Driver(engine)
    counts = (12, 5, 9)  # the second leaves before the first
    asked = [driver.start("Why?", **{**SEEDED, "max_tokens": n}) for n in counts]
    driver.finish()
    for one, count in zip(asked, counts):
        same(one, plain, "Why?", **{**SEEDED, "max_tokens": count})


@pytest.mark.skipif(OLD_MLX_LM, reason="the old mlx_lm has other batched caches")
def test_a_length_like_no_other_steps_alone(llama, monkeypatch) -> None:
    """In no batch, which it would be copied into and out of at each step; as one more than a batch
    may have, until another leaves."""
    engine, plain = llama
    joins: list[int] = []
    join = stepper_module.Batch.join
    monkeypatch.setattr(stepper_module, "SLACK_TOKENS", 8)
    monkeypatch.setattr(stepper_module, "can_batch", lambda engine, apart=False: not apart)
    monkeypatch.setattr(
        stepper_module.Batch, "join", lambda b, states: joins.append(len(states)) or join(b, states)
    )
    for prompts, batches in (
        (("Bye.", STORY * 9), []), (("Bye.", STORY * 9, "Why?"), [2]), (["Bye."] * 3, [2, 1]),
    ):  # fmt: skip
        driver = Driver(engine, batch=2)
        asked = [driver.start(prompt) for prompt in prompts]
        driver.finish()
        for one, prompt in zip(asked, prompts):
            same(one, plain, prompt)
        assert joins == batches
        joins.clear()


@pytest.mark.skipif(OLD_MLX_LM, reason="the old mlx_lm has other batched caches")
def test_lengths_differ_where_keys_and_values_stay_apart(llama, monkeypatch) -> None:
    """Whoever steps with a longer one, its arrays are never put together."""
    engine, plain = llama
    monkeypatch.setattr(stepper_module, "SLACK_TOKENS", 8)
    driver, sizes, prompts = Driver(engine), set(), ("Bye.", STORY * 9, "Why?")
    asked = [driver.start(prompt, max_tokens=20) for prompt in prompts]
    while not all(one.over for one in asked):
        driver.service.turn()
        sizes.update(joined(driver))
    assert max(sizes) == 3
    for one, prompt in zip(asked, prompts):
        same(one, plain, prompt, max_tokens=20)


@pytest.mark.parametrize("name", ["gemma3_text", "falcon_h1"])
def test_one_that_comes_later(engines: Engines, name: str) -> None:
    """It joins the others in mid-answer, with a prompt that is longer than theirs; one leaves; one
    comes back for its next turn."""
    engine, plain = engines(name)
    driver = Driver(engine)
    first = driver.start("Who are you?", max_tokens=24)
    second = driver.start(PROMPTS[4], max_tokens=14, **SEEDED)
    driver.turns_until(lambda: len(second.ids) == 3)
    third = driver.start(PROMPTS[1], max_tokens=6)
    driver.turns_until(lambda: second.over)
    assert not first.over
    prompt = [*second.prompt, *second.ids, 7, 8, 9]
    fourth = driver.start(prompt, max_tokens=8)
    driver.finish()
    same(first, plain, "Who are you?", max_tokens=24)
    same(second, plain, PROMPTS[4], max_tokens=14, **SEEDED)
    same(third, plain, PROMPTS[1], max_tokens=6)
    same(fourth, plain, prompt, max_tokens=8)
    assert fourth.cached == len(second.prompt) + 13  # as it came out of the batch
    assert engine.ledger.of(CACHE) == 0


@pytest.mark.parametrize("sampling", [{}, SEEDED], ids=["greedy", "seeded"])
def test_stop_strings_in_a_batch(llama, sampling: dict) -> None:
    engine, plain = llama
    driver = Driver(engine)
    text = plain.answer("Who are you?", max_tokens=20, **sampling)[1]
    stopped = {"max_tokens": 20, "stop": [text[len(text) // 2 :][:6]], **sampling}
    one = driver.start("Who are you?", **stopped)
    two = driver.start("Why?", max_tokens=20, **sampling)
    driver.finish()
    same(one, plain, "Who are you?", **stopped)
    same(two, plain, "Why?", max_tokens=20, **sampling)
    assert one.end["reason"] == "stop" and one.text == text[: text.index(stopped["stop"][0])]


def test_what_token_replies_say_in_a_batch(llama) -> None:
    engine, _ = llama
    alone, driver = Driver(engine, batch=1), Driver(engine)
    for sampling in ({}, SEEDED):
        options = {"top": 4, **sampling}
        expected = [alone.ask(prompt, **options).channel.all_of("token") for prompt in PROMPTS[:3]]
        asked = [driver.start(prompt, **options) for prompt in PROMPTS[:3]]
        driver.finish()
        for one, tokens in zip(asked, expected):
            for mine, theirs in zip(one.channel.all_of("token"), tokens, strict=True):
                assert (mine["pos"], mine["id"]) == (theirs["pos"], theirs["id"])
                assert mine["logprob"] == pytest.approx(theirs["logprob"], abs=1e-3)
                assert mine["entropy"] == pytest.approx(theirs["entropy"], abs=1e-3)
                assert [i for i, _ in mine["top"]] == [i for i, _ in theirs["top"]]


# ------------------------------------------------------------------------------------- whose turn


def test_a_long_prompt_does_not_hold_up_an_answer(slow_llama) -> None:
    """Between two passes over the prompt everybody who answers makes a step, and no pass is longer
    than was said."""
    engine, plain = slow_llama
    driver = Driver(engine)
    service, sizes = driver.service, []
    said = service.slice_size
    service.slice_size = lambda: sizes.append(said()) or sizes[-1]
    answering = [driver.start(prompt, max_tokens=400) for prompt in PROMPTS[:2]]
    driver.turns_until(lambda: all(one.conversation.want == "step" for one in answering))
    sizes.clear()
    prompt = [5 + n % 3000 for n in range(800)]
    reader, passes = driver.start(prompt, max_tokens=3), 0
    while reader.conversation.reading:
        before, steps = reader.read, [len(one.ids) for one in answering]
        waiting = [one.conversation.want == "step" for one in answering]
        assert all(waiting)
        service.turn()
        passes += 1
        assert reader.read - before <= sizes[-1] or reader.read == len(prompt)
        assert [len(one.ids) - n for one, n in zip(answering, steps)] == [1, 1]
    assert passes > 4 and all(size is not None and size < 1000 for size in sizes)
    for one in answering:
        one.channel.gone = True
    driver.finish()
    same(reader, plain, prompt, max_tokens=3)
    done = [one["done"] for one in reader.channel.all_of("progress")]
    assert done == sorted(done) and all(0 <= n < len(prompt) for n in done)


def test_a_resumed_prompt_does_not_make_the_slices_long(slow_llama) -> None:
    """What came from the cache was not read, and says nothing of how fast the device reads."""
    engine, _ = slow_llama
    driver = Driver(engine)
    prompt = [5 + n % 3000 for n in range(500)]
    driver.ask(prompt, max_tokens=1)
    answering = driver.start("Why?", max_tokens=100)
    driver.turns_until(lambda: answering.conversation.want == "step")
    driver.service.rate = None
    driver.start([*prompt, *range(9, 300)])
    for _ in range(3):
        before = driver.service.slice_size()
        driver.service.turn()
        assert driver.service.slice_size() < 20 * before
        assert driver.service.slice_size() < 1000
    answering.channel.gone = True
    driver.finish()


def test_nobody_waits_without_a_chunk(engines: Engines) -> None:
    """Alone, a prompt is read in passes as long as the device likes, also where it is to stop for a
    savepoint far ahead."""
    engine, _ = engines("mamba2")
    driver = Driver(engine)
    asked = driver.start([user(STORY * 90), user("Why?")], max_tokens=1)
    assert asked.points[0] > 600
    passes = []
    while asked.conversation.reading:
        before = asked.read
        driver.service.turn()
        passes.append(asked.read - before)
    assert max(passes) <= (256 if engine.device == "cpu" else 2048)
    assert sum(passes[:-1]) + 1 >= len(asked.prompt) - max(passes)


def test_the_more_important_reads_first(llama) -> None:
    engine, plain = llama
    driver = Driver(engine, chunk=20)
    low = driver.start(PROMPTS[1], priority=0)
    low_too = driver.start(STORY * 4, priority=0)
    driver.service.turn()
    driver.service.turn()
    assert low.read and low_too.read  # equals in turn
    high = driver.start(PROMPTS[4], priority=7)
    before = (low.read, low_too.read)
    driver.turns_until(lambda: not high.conversation.reading)
    assert (low.read, low_too.read) == before
    driver.finish()
    for one, prompt in ((low, PROMPTS[1]), (low_too, STORY * 4), (high, PROMPTS[4])):
        same(one, plain, prompt)


# ------------------------------------------------------------------------------ one that goes wrong


class Raising(FakeChannel):
    """Fails once, in the third text that it is told."""

    def reply(self, message: dict) -> None:
        if "text" in message and len(self.all_of("text")) == 2:
            self.replies.append({"text": "..."})
            raise RuntimeError("no such colour")
        super().reply(message)


@pytest.mark.parametrize(("batch", "sampling"), [(8, {}), (1, SEEDED)])
def test_a_bug_ends_one_conversation(llama, sampling: dict, batch: int) -> None:
    engine, plain = llama
    driver = Driver(engine, batch=batch)
    asked = [
        driver.start(prompt, channel=channel, **sampling)
        for prompt, channel in zip(PROMPTS, (FakeChannel(), Raising(), FakeChannel()))
    ]
    driver.finish()
    good, bad, other = asked
    assert bad.error == {"code": 70, "message": "bug: RuntimeError: no such colour", "hint": None}
    assert bad.end is None and bad.stats is None and bad.channel.is_done
    same(good, plain, PROMPTS[0], **sampling)
    same(other, plain, PROMPTS[2], **sampling)
    assert driver.said[-1] == "bug: RuntimeError: no such colour"
    assert engine.ledger.of(CACHE) == 0 and not joined(driver) and not driver.service.active
    same(driver.ask(PROMPTS[1], **sampling), plain, PROMPTS[1], **sampling)


def test_a_bug_in_giving_up_ends_one_conversation(llama, monkeypatch) -> None:
    engine, plain = llama
    driver = Driver(engine)
    one, two = driver.start([9] * 400, max_tokens=50), driver.start("Why?")
    driver.turns_until(lambda: len(one.ids) > 2)

    def fails(*arguments: Any, **settings: Any) -> None:
        raise RuntimeError("no such state")

    with monkeypatch.context() as patch:
        patch.setattr(Memory, "keep", fails)
        one.channel.gone = True
        driver.turns_until(lambda: one.over)
    driver.finish()
    same(two, plain, "Why?")
    assert driver.said == ["bug: RuntimeError: no such state"]
    assert engine.ledger.of(CACHE) == 0 and not driver.service.active


@pytest.mark.parametrize("broken", [False, True])
def test_files_that_change_under_a_batch(llama, tmp_path, monkeypatch, broken: bool) -> None:
    """Sessions hold what was computed, and are free again; also where the batch breaks, and no pass
    can be run any more."""
    engine, _ = llama
    driver, together = Driver(engine), can_batch(engine)
    sessions = [tmp_path / "a", tmp_path / "b"]
    asked = [
        driver.start(prompt, session=path, max_tokens=50) for prompt, path in zip(PROMPTS, sessions)
    ]
    driver.turns_until(lambda: all(len(one.ids) > 5 for one in asked))
    assert joined(driver) == ([2] if together else [])

    def fails(*arguments: Any) -> None:
        raise DataError("its files have changed")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "decide", fails)
        if broken:
            patch.setattr(stepper_module.Batch, "leave", fails)
        driver.finish()
    for one, path in zip(asked, sessions):
        assert one.error == {"code": 65, "message": "its files have changed", "hint": None}
        with Session.open(path, None, create=False, write=True) as session:
            kept = 0 if broken and together else len(one.ids) - 1
            assert len(session.tokens) == len(one.conversation.prepared.ids) + kept
    assert engine.ledger.of(CACHE) == 0 and not joined(driver) and not driver.service.active


def test_one_that_is_cancelled_leaves_the_others(llama) -> None:
    engine, plain = llama
    driver, together = Driver(engine), can_batch(engine)
    asked = [driver.start(prompt, max_tokens=16) for prompt in PROMPTS[:4]]
    driver.turns_until(lambda: len(asked[3].ids) == 4)
    assert joined(driver) == ([4] if together else [])
    asked[1].channel.gone = True
    driver.service.turn()
    assert asked[1].over and joined(driver) == ([3] if together else [])
    driver.finish()
    for n in (0, 2, 3):
        same(asked[n], plain, PROMPTS[n], max_tokens=16)
    assert engine.ledger.of(CACHE) == 0


def test_who_passes_a_window_that_is_not_kept_to_is_told(engines: Engines) -> None:
    """Each who does, and nobody else; the engine says it once."""
    window = {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 0}
    engine, _ = engines("qwen2", **window)
    driver = Driver(engine)
    long, short = driver.ask(STORY * 3), driver.ask("Hi", max_tokens=2)
    assert ["past 40 tokens" in note for note in long.stats["notes"]] == [True]
    assert driver.ask(STORY * 3).stats["notes"] == long.stats["notes"]
    assert short.stats["notes"] == []
