"""What the daemon remembers: every answer is the one without a cache, and little is read twice."""

from __future__ import annotations

from array import array
from pathlib import Path

import mlx.core as mx
import pytest

from tests.model.service_driver import (
    COUNTING,
    OFFERING,
    THINKING,
    Asked,
    Driver,
    Engines,
    assistant,
    common,
    system,
    usable,
    user,
    words,
)
from toastkit.daemon.memory import WORTH_A_WORD, Memory
from toastkit.daemon.scheduled_runs import MAX_SAVEPOINTS, MIN_APART
from toastkit.daemon.spill import CachedState
from toastkit.engine.savepoints import thinned
from toastkit.native.kv_caches import leaves
from toastkit.session.savepoints import Savepoint
from toastkit.store.ledger import SESSIONS, Ledger

pytestmark = pytest.mark.usefixtures("homes")
SYSTEM = system(
    "You are a kind fox who lives by the river and who likes to tell stories to children about "
    "the animals of the wood."
)
QUESTIONS = (
    "Who are you?",
    "What is a river?",
    "And then what did the fox do, and where did it go after that?",
    "Thanks.",
    "Tell me of the bear who lost his hat, and of the owl who found it in the old tree.",
    "Why?",
    "  Hello again!\n",
    "Bye.",
)
LONG = "The bear went to the river, and the owl sat in the old tree. " * 3 + "What then?"
SAMPLINGS = ({"temperature": 0}, {"temperature": 0.8, "top_p": 0.95, "seed": 7})
GREEDY, SEEDED = SAMPLINGS
# Attention alone; a window that slides; recurrent layers, alone and beside attention in a layer;
# experts. The embedded model is recurrent, has experts, and gives answers of words.
CHATS = {
    "crumb": GREEDY, "llama": SEEDED, "gemma3_text": SEEDED, "mamba2": GREEDY,
    "falcon_h1": SEEDED, "qwen3_moe": GREEDY,
}  # fmt: skip


def ask(engines: Engines, driver: Driver, messages: list, name: str = "crumb", **options) -> Asked:
    """Asks, holds the answer against the one without a cache, and what was cached against what the
    kept states have in common with the prompt; adds the answer to the messages."""
    before = list(driver.kept)
    options = {"max_tokens": 6, **options}
    asked = driver.ask(messages, **options)
    assert asked.answer == engines(name)[1].answer(messages, **options)
    assert asked.cached == max((usable(kept, asked.prompt) for kept in before), default=0)
    assert asked.stats["prompt"] == len(asked.prompt)
    messages.append(assistant(asked.text))
    return asked


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next"])
def test_a_branch_holds_its_own_rows(engines: Engines, name: str) -> None:
    """Not those of the long conversation that begins with the same system prompt."""
    engine, plain = engines(name, max_position_embeddings=4096)
    driver, short = Driver(engine), [SYSTEM, user("Why?")]
    driver.ask([SYSTEM, user(LONG * 10)], max_tokens=2)
    asked = driver.ask(short, max_tokens=2)
    assert asked.cached > WORTH_A_WORD and asked.answer == plain.answer(short, max_tokens=2)
    long, branch = driver.kept
    rows = -(-len(branch.tokens) // 256) * 256
    assert len(branch.tokens) < rows < len(long.tokens)
    kept = [leaf.keys for leaf in leaves(branch.cache) if hasattr(leaf, "keys")]
    assert kept and all(keys.shape[2] <= rows for keys in kept)


def test_of_states_alike_the_named_sessions_counts_or_the_last_used() -> None:
    def state(place: str, used: int, ids: range = range(40), **more) -> CachedState:
        return CachedState(0, array("I", ids), None, path=Path(place), used=used, **more)

    memory = Memory(list, 0, Ledger(), None)
    memory.kept += state("a", 1), state("b", 3), state("c", 2)
    memory.kept.append(state("longer", 4, range(50), points=[30]))  # resumed there, or at its end
    ids = range(45)
    assert [memory.find(1, ids, p).kept.path.name for p in (None, Path("a"))] == ["b", "a"]
    memory.kept.pop(1)
    assert memory.find(1, ids).kept.path.name == "c"


def test_a_conversation_that_goes_on_in_two_states_is_one() -> None:
    """As where it is asked twice at once."""
    memory = Memory(list, 1 << 20, Ledger(), None)
    for _ in range(2):
        last = memory.keep(5, range(20), [], [], parent=None)
    assert memory.kept == [last]


# ---------------------------------------------------------------------------------------- one chat


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_is_the_same_without_a_cache(engines: Engines, name: str) -> None:
    driver, agreed = Driver(engines(name)[0]), 0
    messages = [system("You are a bear.") if name == "crumb" else SYSTEM]
    for turn, question in enumerate(QUESTIONS[2 : 5 if name == "crumb" else 7]):
        held = driver.kept[-1].tokens.tolist() if driver.kept else []
        messages.append(user(question))
        asked = ask(engines, driver, messages, name, max_tokens=5, **CHATS[name])
        if turn == 0:
            assert asked.cached == 0 and asked.why == "nothing is kept"
            continue
        assert asked.cached > 0
        if asked.prompt[: len(held)] == held:
            agreed += 1
            assert asked.cached == len(held) and asked.why == "the rest is new"
        else:  # a text has many tokenisations, and a random model writes odd ones
            assert name != "crumb" and "the rest is new" not in asked.why
        assert len(driver.kept) == 1
    assert name != "crumb" or agreed == 2
    assert not driver.said


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_eleven_turns_of_a_chat_are_one_state(engines: Engines, name: str) -> None:
    engine, _ = engines(name)
    driver, messages = Driver(engine), [SYSTEM]
    for turn in range(11):
        messages.append(user(f"Question {turn}: where is the bear?"))
        messages.append(assistant(driver.ask(messages, max_tokens=4).text))
    (kept,) = driver.kept
    assert len(kept.savepoints) <= MAX_SAVEPOINTS
    alone = engine.new_cache()
    engine.prefill(kept.tokens.tolist(), alone)
    recurrent = sum(layer.nbytes for layer in alone if not layer.is_trimmable())
    expected = sum(layer.nbytes for layer in alone) + len(kept.savepoints) * recurrent
    assert engine.ledger.of(SESSIONS) == kept.nbytes == pytest.approx(expected, rel=0.05)
    assert (recurrent > 0) == (name == "qwen3_next") == bool(kept.savepoints)
    assert driver.service.memory.summary() == {
        "kept": 1, "in_memory": 1, "bytes": kept.nbytes, "budget": 2 << 30, "on_disk": 1,
    }  # fmt: skip


def test_the_last_two_savepoints_stay_and_of_the_others_those_far_apart() -> None:
    points = [Savepoint(count, []) for count in (330, 90, 110, 300, 320)]
    assert [point.count for point in thinned(points, 4)] == [90, 300, 320, 330]
    assert [point.count for point in thinned(points, 3)] == [300, 320, 330]
    assert [point.count for point in thinned(points, 1)] == [330]


def test_the_ledger_counts_what_is_really_there(engines: Engines) -> None:
    engine, _ = engines("qwen3_5")
    driver = Driver(engine, spill_bytes=0)
    driver.ask([user("Hello " + LONG * 5)], max_tokens=4)
    mx.clear_cache()
    with_it, counted = mx.get_active_memory(), engine.ledger.of(SESSIONS)
    driver.service.memory.unload()
    mx.clear_cache()
    freed = with_it - mx.get_active_memory()
    assert engine.ledger.of(SESSIONS) == 0 and not driver.kept
    assert counted > 100_000
    assert abs(freed - counted) < 0.05 * counted


def test_two_chats_are_two_states(engines: Engines) -> None:
    driver = Driver(engines("qwen3_5")[0])
    one, two = [user("Who are you?")], [user("What is a river?")]
    for question in ("Why?", "And then?", "Bye."):
        for messages in (one, two):
            asked = ask(engines, driver, messages, "qwen3_5", **words(driver))
            messages.append(user(question))
            if question != "Why?":
                assert asked.why == "the rest is new"
    assert len(driver.kept) == 2


# ---------------------------------------------------------------------------------------- branches


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_branch_keeps_both(engines: Engines, name: str) -> None:
    driver, trunk = Driver(engines(name)[0]), [SYSTEM, user("Who are you? " + LONG)]
    options = words(driver)
    ask(engines, driver, trunk, name, **options)
    end = len(driver.kept[0].tokens)
    left, right = [*trunk, user("What is a river? " + LONG)], [*trunk, user("Why? " + LONG)]
    first = ask(engines, driver, left, name, **options)
    second = ask(engines, driver, right, name, **options)
    assert first.cached == end  # all that was kept
    if name == "llama":
        assert second.cached == common(first.prompt, second.prompt)
        assert second.why == f"from token {second.cached} on it is another conversation"
    else:
        assert end - MIN_APART < second.cached <= end
        assert second.why.startswith("it differs from token")
    assert len(driver.kept) == 2
    for messages, kept in zip((left, right), list(driver.kept)):
        messages.append(user("Bye."))
        asked = ask(engines, driver, messages, name, **options)
        assert asked.cached == len(kept.tokens) > len(first.prompt)
        assert asked.why == "the rest is new"
        assert len(driver.kept) == 2


@pytest.mark.parametrize(
    ("name", "sampling"),
    [("llama", GREEDY), ("llama", SEEDED), ("qwen3_5", SEEDED), ("mamba2", GREEDY)],
    ids=["llama", "llama, other seed", "qwen3_5, other seed", "mamba2"],
)
def test_a_turn_asked_again_resumes_late(engines: Engines, name: str, sampling: dict) -> None:
    driver, messages = Driver(engines(name)[0]), [SYSTEM, user("Who are you?")]
    ask(engines, driver, messages, name)
    messages.append(user(LONG))
    ask(engines, driver, messages, name)
    answer = messages.pop()
    again = ask(engines, driver, messages, name, **sampling)
    if name == "llama":
        assert again.cached == len(again.prompt) - 1
        assert again.why == "all of it is kept; the last token is run for its logits"
    else:
        assert again.cached == again.points[-1] > len(again.prompt) - 5
        which = "a recurrent state or a full sliding window"
        assert again.why.startswith(f"it was read further than this prompt goes, and {which} can")
    same = messages[-1] == answer
    assert same == (sampling["temperature"] == 0)
    assert len(driver.kept) == (1 if same else 2)
    for chosen in (answer, messages[-1]):  # whichever the person goes on with
        ask(engines, driver, [*messages[:-1], chosen, user("Bye.")], name)


@pytest.mark.parametrize("name", ["llama", "mamba2", "gemma3_text"])
def test_the_end_of_a_long_system_prompt_is_shared(engines: Engines, name: str) -> None:
    driver = Driver(engines(name)[0])
    shared = system(SYSTEM["content"] + " " + LONG)
    first = ask(engines, driver, [shared, user("Who are you?")], name)
    second = ask(engines, driver, [shared, user("What is a river?")], name)
    apart = common(first.prompt, second.prompt)
    assert len(driver.kept) == 2 and apart > 70
    if name == "llama":
        assert second.cached == apart
        assert second.why == f"from token {apart} on it is another conversation"
    else:
        assert second.cached == first.points[0] > apart - 4
        assert second.why.startswith(f"it differs from token {apart} on, and a recurrent")


# ------------------------------------------------------------------ what is written another way


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_a_template_that_drops_thoughts(engines: Engines, name: str) -> None:
    """The answer is opened with a tag that later turns do not have: what was read before it counts,
    and nothing after it."""
    engine, plain = engines(name, THINKING)
    driver, messages, before = Driver(engine), [SYSTEM], []
    for turn, question in enumerate((QUESTIONS[4], LONG, "Why?", LONG, "Bye.")):
        messages.append(user(question))
        asked = driver.ask(messages, max_tokens=6)
        assert asked.answer == plain.answer(messages, max_tokens=6)
        if turn:
            apart = common(before, asked.prompt)
            assert before[apart:] and len(before) - apart < 8  # "<think>\n"
            assert "the rest is new" not in asked.why
            if name == "llama":
                assert asked.cached == apart
            else:
                assert apart - MIN_APART - 4 < asked.cached <= apart
        thought = "" if turn % 2 else "The river is long.</think>"
        messages.append(assistant(thought + asked.text))
        before = asked.prompt
    assert len(driver.kept) <= 3  # a client's thoughts are another text than the answer's


@pytest.mark.parametrize("name", ["llama", "mamba2"])
def test_a_template_that_rewrites_the_beginning(engines: Engines, name: str) -> None:
    engine, plain = engines(name, COUNTING)
    driver, messages = Driver(engine), []
    for question in QUESTIONS[2:5]:
        messages.append(user(question))
        asked = driver.ask(messages, max_tokens=6)
        assert asked.answer == plain.answer(messages, max_tokens=6)
        assert asked.cached < 8 if name == "llama" else asked.cached == 0
        messages.append(assistant(asked.text))
    assert asked.why in (
        "no conversation that begins like this is kept",
        f"from token {asked.cached} on it is another conversation",
    )
    assert len(driver.kept) == 1


def test_tools_are_a_part_of_the_prompt(engines: Engines) -> None:
    """Turns with the same tools go on from each other, a turn with others begins anew; what the
    template makes no use of is told with the answer."""
    engine, plain = engines("llama", OFFERING)
    driver, messages, tools = Driver(engine), [user(QUESTIONS[2])], [{"name": "look"}]
    first = driver.ask(messages, tools=tools, template={"mood": 1})
    assert first.stats["notes"] == ["the chat template makes no use of 'mood'"]
    messages += [assistant(first.text), user("Why?")]
    second = driver.ask(messages, tools=tools)
    other = driver.ask(messages, tools=[{"name": "jump"}])
    assert second.cached >= len(first.prompt) and second.stats["notes"] == []
    assert other.cached < 16
    assert second.answer == plain.answer(messages, tools=tools)
    assert other.answer == plain.answer(messages, tools=[{"name": "jump"}])


def split_token(driver: Driver) -> int:
    """A token that, written many times over, comes back as others."""
    tokenizer = driver.preparer.tokenizer
    for token in range(3, 400):
        text = tokenizer.decode([token] * 12)
        again = tokenizer.encode(text, add_special=False)
        if text.strip() == text and again[0] != token and "\ufffd" not in text:
            return token
    raise AssertionError("no such token")


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_an_answer_that_is_tokenised_otherwise(engines: Engines, name: str) -> None:
    """The same text and other tokens: what comes before the answer is taken, not the answer."""
    driver, messages = Driver(engines(name)[0]), [SYSTEM, user(LONG)]
    forced = {"logit_bias": {str(split_token(driver)): 1e5}}
    first = ask(engines, driver, messages, name, **forced)
    assert len(set(first.ids)) == 1
    messages.append(user("Bye."))
    second = ask(engines, driver, messages, name)
    apart = common(second.prompt, first.prompt + first.ids)
    assert len(first.prompt) <= apart < len(first.prompt) + 11
    assert second.cached == (apart if name == "llama" else first.points[-1])
    assert len(driver.kept) == 1


@pytest.mark.parametrize(
    ("name", "change"),
    [("llama", "strip"), ("llama", "edit"), ("llama", "shorten"), ("mamba2", "strip"),
     ("mamba2", "edit")],
)  # fmt: skip
def test_an_answer_that_the_client_has_changed(engines: Engines, name: str, change: str) -> None:
    driver, messages = Driver(engines(name)[0]), [SYSTEM, user(LONG)]
    space = str(driver.preparer.tokenizer.encode(" the", add_special=False)[0])
    first = ask(engines, driver, messages, name, logit_bias={space: 20}, seed=1, temperature=2)
    text = messages.pop()["content"]
    changed = {"strip": text.strip(), "edit": "No. " + text, "shorten": text[: len(text) // 2]}
    assert changed[change] != text
    messages += [assistant(changed[change]), user("Bye.")]
    second = ask(engines, driver, messages, name)
    assert first.points[-1:] == [] or second.cached >= first.points[-1]
    assert second.cached >= len(first.prompt) - 5
    # Space at the ends makes no other conversation, so the state goes on; a changed answer does.
    assert len(driver.kept) == (1 if change == "strip" else 2)
