"""tokenize and detokenize, and what fits together, as plain generators over frames made by hand."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hand_made import EOS, Recorder, draw, drawn, head, kinds, step

from toastkit.errors import DataError
from toastkit.frames import End, FrameReader, Head, Prefilled, Text, Token, Tokens, dumps, pack_ids
from toastkit.gears.classifier import classify
from toastkit.interrupts import Interrupt
from toastkit.model.config import load_config
from toastkit.model.locate import locate
from toastkit.session.feed import FeedReader
from toastkit.stages.detokenize import TextOptions, detokenize
from toastkit.stages.feed import feed_tokens
from toastkit.stages.follow import GearRules
from toastkit.stages.gear import gear
from toastkit.stages.prefill import prefill
from toastkit.stages.run.pipe_feed import PipeFeed
from toastkit.stages.run.settings import Outcome, ReadOptions
from toastkit.stages.tokenize import Prompt, PromptOptions, PromptTokenizer, difficulty, tokenize
from toastkit.text.messages import user_messages
from toastkit.text.tokenizer import Tokenizer

# ----------------------------------------------------------------------------------------- tokenize


def test_each_head_says_how_hard_its_prompt_looks() -> None:
    """Of raw text, and of the last message; a long history does not make a question harder."""
    files = locate("crumb")
    history = {"role": "assistant", "content": "def f(x): return x + 1  # prove it"}
    prompts = [
        Prompt("Prove that a + b = b + a."),
        Prompt(messages=[history, {"role": "user", "content": "And you?"}]),
        Prompt("Hi"),
    ]
    stage = tokenize(prompts, PromptTokenizer(files, load_config(files), PromptOptions()), "here")
    heads = [frame for frame in stage if type(frame) is Head]
    texts = ("Prove that a + b = b + a.", "And you?", "Hi")
    assert [h.extra for h in heads] == [{"difficulty": classify(t)._asdict()} for t in texts]
    assert [h.extra["difficulty"]["gear"] for h in heads] == ["high", "low", "low"]
    assert all(h.session == "here" and h.vocab == 4096 and h.eos for h in heads)


LISTED = "{% for m in messages %}<{{ m.content[0].text }}|{{ m.content[1].text }}>{% endfor %}"


def prompt_tokenizer(template: str | None, **options) -> PromptTokenizer:
    """Of crumb, with another template."""
    files = locate("crumb")
    tokenizer = Tokenizer(files)
    tokenizer.templates = {} if template is None else {"default": template}
    return PromptTokenizer(files, load_config(files), PromptOptions(**options), tokenizer)


def parts(*texts: str, role: str = "user") -> dict:
    return {"role": role, "content": [{"type": "text", "text": text} for text in texts]}


def test_content_in_parts() -> None:
    """The template gets the parts; what needs a text gets them joined."""
    prompt = Prompt(messages=[parts("Hi ", "you"), parts("Prove that a + b ", "= b + a.")])
    assert prompt_tokenizer(LISTED).render(prompt) == "<Hi |you><Prove that a + b |= b + a.>"
    call = {"role": "assistant", "content": None, "tool_calls": [{}]}
    plain = Prompt(messages=[call, *prompt.messages])
    assert prompt_tokenizer(None).render(plain) == "\n\nHi you\n\nProve that a + b = b + a."
    assert difficulty(prompt) == classify("Prove that a + b = b + a.")._asdict()
    assert difficulty(Prompt(messages=[call])) == classify("")._asdict()


IN_PARTS = (
    "{% for m in messages %}<|im_start|>{% for p in m.content %}"
    "{{ p.text or '[' ~ p.document.data ~ ']' }}{% endfor %}{% endfor %}"
)
SPEC = {"type": "document", "document": {"data": "A bear."}}


def asked(text: str) -> Prompt:
    """About a document."""
    message = parts(text)
    message["content"].insert(0, SPEC)
    return Prompt(messages=[message])


def test_documents_in_content_are_the_templates() -> None:
    prompts = prompt_tokenizer(IN_PARTS, truncate=True, max_tokens=1)
    assert prompts.render(asked("Who?")) == "<|im_start|>[A bear.]Who?"
    assert difficulty(asked("Who?")) == classify("Who?")._asdict()
    cut = prompts.tokenizer.decode(prompts.encode(asked("Hello there " * 5000)))
    assert cut.startswith("[A bear.]")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            "{% for m in messages %}{{ m.content[-1].text }}{% endfor %}",
            "does nothing with documen",
        ),
        ("{{ 'x' + messages[0].content }}", "can only concatenate"),
        (None, "crumb has no chat template for documents"),
    ],
)
def test_documents_are_not_dropped(template: str | None, said: str) -> None:
    """Nor joined with the texts."""
    with pytest.raises(DataError, match=said) as caught:
        prompt_tokenizer(template).render(asked("Who?"))
    assert caught.value.hint.startswith("give documents as text")


def test_turning_points_and_cutting_keep_the_shape_of_content() -> None:
    """A template that takes nothing but parts is asked with parts."""
    template = "{% for m in messages %}<|im_start|>{{ m.content[0].text }}{% endfor %}"
    prompts = prompt_tokenizer(template, truncate=True, max_tokens=1)
    prompt = Prompt(messages=[parts("Hello there"), parts("And you?")])
    ids = prompts.encode(prompt)
    assert len(prompts.turning_points(prompt, ids)) == 1
    long = Prompt(messages=[parts("Hello there " * 5000), parts("And you?")])
    context = load_config(locate("crumb")).context
    assert 0 < len(prompts.encode(long)) < context
    assert prompts.tokenizer.decode(prompts.encode(long)).endswith("And you?")


def test_what_is_not_used_is_told_once() -> None:
    told: list[str] = []
    for template in ("{{ messages[0].content }}", None):
        prompts = prompt_tokenizer(
            template, template_arguments={"a": 1}, tools=[{}], note=told.append
        )
        for _ in range(2):
            prompts.render(Prompt(messages=user_messages("hi")))
    assert told == [
        "the chat template makes no use of 'a'",
        "the chat template makes no use of 'tools'",
        "crumb has no chat template to make use of 'a'",
        "crumb has no chat template to make use of 'tools'",
    ]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ messages[0].content }}", "the chat template makes no use of 'tool_calls' in messages"),
        ("{{ messages[1] | tojson }}", None),
        ("{{ messages[1]['tool_' + 'calls'][0] }}", None),
        (None, "crumb has no chat template to make use of 'tool_calls'"),
    ],
)
def test_calls_that_are_not_used_are_told(template: str | None, said: str | None) -> None:
    told: list[str] = []
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    prompts = prompt_tokenizer(template, note=told.append)
    prompts.render(Prompt(messages=[*user_messages("hi"), call]))
    assert told == ([] if said is None else [said])


# --------------------------------------------------------------------------------------- detokenize


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(locate("crumb"))


def spoken(tokenizer: Tokenizer, text: str, reason: str = "stop", prompt: str = "Hi") -> list:
    """A run that says a text."""
    ids = tokenizer.encode(text, add_special=False)
    tokens = [Token(n, token) for n, token in enumerate(ids)]
    prompt_ids = tokenizer.encode(prompt, add_special=False)
    return [head(), Tokens(pack_ids(prompt_ids)), *tokens, End(reason, len(tokens))]


def write(tokenizer: Tokenizer, stream, feed=None, outcome=None, **settings) -> list:
    return list(
        detokenize(
            iter(stream), lambda head: tokenizer, TextOptions(**settings),
            feed or Recorder(), outcome or Outcome(),
        )
    )  # fmt: skip


def text_of(frames) -> str:
    return "".join(frame.s for frame in frames if type(frame) is Text)


HARD = "A naïve 👩‍👩‍👧‍👦 fox — 狐 — said: “Grüße!”\n"


def test_text_stands_before_the_token_that_makes_it_certain(tokenizer: Tokenizer) -> None:
    stream = spoken(tokenizer, HARD)
    frames = write(tokenizer, stream)
    assert text_of(frames) == HARD
    assert [f for f in frames if type(f) is not Text] == stream
    assert all(f.s for f in frames if type(f) is Text)
    for before, after in zip(frames, frames[1:]):
        assert type(before) is not Text or type(after) in (Token, End)


@pytest.mark.parametrize("reason", ["interrupt", "length", "eos"])
def test_every_end_flushes_what_was_held_back(tokenizer: Tokenizer, reason: str) -> None:
    outcome = Outcome()
    stream = spoken(tokenizer, "the END", reason)
    frames = write(tokenizer, stream, outcome=outcome, stops=["ENDING"])
    assert text_of(frames) == "the END" and frames[-1].reason == reason
    assert (outcome.reasons[-1], outcome.tokens) == (reason, stream[-1].n)


def test_a_stop_string_ends_the_answer_once(tokenizer: Tokenizer) -> None:
    feed, outcome = Recorder(), Outcome()
    stream = spoken(tokenizer, "one two three two one", "length")
    frames = write(tokenizer, stream, feed, outcome, stops=[" thr"])
    assert text_of(frames) == "one two"
    assert feed.told == [("begin",), ("close", "stop"), ("finish",)]
    assert frames[-1].reason == outcome.reasons[-1] == "stop"
    assert frames[-1].n == outcome.tokens == len(drawn(frames)) < len(drawn(stream))


def test_a_stop_string_that_only_the_end_completes(tokenizer: Tokenizer) -> None:
    """A stop string inside what the detokenizer holds back until the end."""
    waiting = spoken(tokenizer, "ab 👍", "length")
    frames = write(tokenizer, waiting, stops=["👍"])
    assert text_of(frames) == "ab " and frames[-1].reason == "stop"
    outcome = Outcome()
    frames = write(tokenizer, spoken(tokenizer, "the END", "length"), outcome=outcome,
                   stops=["END", "ENDING"])  # fmt: skip
    assert text_of(frames) == "the " and outcome.reasons == ["stop"] == [frames[-1].reason]


def test_several_runs_in_one_stream(tokenizer: Tokenizer) -> None:
    outcome = Outcome()
    stream = [
        *spoken(tokenizer, "one two", "eos"), *spoken(tokenizer, "three", "length"),
        *spoken(tokenizer, "a two b", "eos"),
    ]  # fmt: skip
    frames = write(tokenizer, stream, outcome=outcome, stops=["two"])
    assert text_of(frames) == "one threea "
    assert outcome.reasons == ["stop", "length", "stop"]


def test_the_prompt_is_echoed(tokenizer: Tokenizer) -> None:
    frames = write(tokenizer, spoken(tokenizer, "there", prompt="Hi "), echo=True)
    assert text_of(frames) == "Hi there" and kinds(frames[:3]) == [Head, Text, Tokens]


def test_special_tokens_are_printed_on_demand(tokenizer: Tokenizer) -> None:
    mark = tokenizer.encode("<|im_end|>", add_special=False)
    assert len(mark) == 1
    stream = [head(), Token(0, mark[0]), End("eos", 1)]
    assert text_of(write(tokenizer, stream)) == ""
    assert text_of(write(tokenizer, stream, keep_special=True)) == "<|im_end|>"


# ------------------------------------------------------------------------------- what fits together


PROMPT = [head(run="RUN"), Tokens(pack_ids([1, 2]))]
STEPS = [step(2, 3), step(3, EOS)]
DRAWN = [Token(2, 3), Token(3, EOS)]
END = End("eos", 2)
STREAMS: dict[str, list] = {
    "nothing": [],
    "tokenize": [head(), *PROMPT[1:]],
    "prefill": [*PROMPT, Prefilled(2, 2, 0, 0.0)],
    "decode": [*PROMPT, Prefilled(2, 2, 0, 0.0), *STEPS, END],
    "decode, one step": [*PROMPT, STEPS[0], End("length", 0)],
    "decode --greedy": [*PROMPT, STEPS[0], DRAWN[0], STEPS[1], DRAWN[1], END],
    "sample": [*PROMPT, *DRAWN, END],
    "detokenize": [*PROMPT, DRAWN[0], Text("3"), DRAWN[1], END],
    "only text": [*PROMPT, Text("3"), END],
    "interrupted": [*PROMPT, STEPS[0], End("interrupt", 0)],
    "decode --greedy, then sample": [*PROMPT, STEPS[0], DRAWN[0], END, *PROMPT, *DRAWN, END],
}
CUT, NO_LOGITS, NO_TOKENS = "in the middle of a run", "tokens come, but no logits", "but no tokens"
MISFITS = {
    ("nothing", "*"): "no frames on input",
    ("nothing", "feed"): None,
    ("tokenize", "*"): CUT,
    ("tokenize", "prefill"): None,
    ("tokenize", "feed"): "no run to feed",
    ("prefill", "*"): CUT,
    ("prefill", "prefill"): None,
    ("prefill", "feed"): None,
    ("decode", "detokenize"): NO_TOKENS,
    ("decode", "feed"): NO_TOKENS,
    ("decode, one step", "detokenize"): NO_TOKENS,
    ("decode, one step", "feed"): NO_TOKENS,
    ("decode --greedy", "feed"): NO_TOKENS,
    ("interrupted", "feed"): NO_TOKENS,
    ("sample", "entropy-gear"): NO_LOGITS,
    ("sample", "sample"): NO_LOGITS,
    ("decode --greedy, then sample", "entropy-gear"): NO_LOGITS,
    ("decode --greedy, then sample", "feed"): NO_TOKENS,
    ("decode --greedy, then sample", "sample"): NO_LOGITS,
    ("detokenize", "entropy-gear"): NO_LOGITS,
    ("detokenize", "sample"): NO_LOGITS,
    ("only text", "detokenize"): "without its tokens",
    ("only text", "feed"): "without its tokens",
}


class Read(Exception):
    """A prompt has come to where the model is."""


def read_prompt(stream) -> list:
    """prefill, up to the model."""

    def engine_for(head: Head):
        raise Read

    class Runs:
        def begin(self, head: Head) -> Head:
            return head

        def close(self) -> None:
            pass

    try:
        return list(prefill(iter(stream), engine_for, Runs(), ReadOptions(), Interrupt()))
    except Read:
        return []


@pytest.mark.parametrize("sink", ["prefill", "entropy-gear", "sample", "detokenize", "feed"])
@pytest.mark.parametrize("source", STREAMS)
def test_what_can_get_nothing_says_so(
    tokenizer: Tokenizer, run: Path, source: str, sink: str
) -> None:
    """Every stream into every stage: one that lacks what the stage reads is an error, and neither
    waited for nor a success without a result."""
    stages = {
        "prefill": read_prompt,
        "entropy-gear": lambda stream: list(gear(stream, GearRules())),
        "sample": draw,
        "detokenize": lambda stream: write(tokenizer, stream),
        "feed": lambda stream: list(feed_tokens(stream, None, False)),
    }
    stream = list(FrameReader(io.BytesIO(b"".join(map(dumps, STREAMS[source])))))
    for frame in stream:
        if isinstance(frame, Head) and frame.run is not None:
            frame.run = str(run)
    problem = MISFITS.get((source, sink), MISFITS.get((source, "*")))
    reader = FeedReader(run / "feed")
    try:
        if problem is None:
            stages[sink](stream)
        else:
            with pytest.raises(DataError, match=problem) as caught:
                stages[sink](stream)
            assert caught.value.code == 65
    finally:
        reader.close()


def test_a_decode_that_waits_is_not_let_wait(tokenizer: Tokenizer, run: Path) -> None:
    """It has written its first logits, and no token can ever come: no frame after them is read."""

    def live():
        yield from [head(run=str(run)), Tokens(b""), Prefilled(0, 0, 0, 0.0), STEPS[0]]
        pytest.fail("more was waited for")

    reader = FeedReader(run / "feed")
    feed = PipeFeed()
    with pytest.raises(DataError, match=NO_TOKENS) as caught:
        write(tokenizer, live(), feed)
    assert caught.value.hint == "is toast-sample missing?"
    with pytest.raises(DataError, match=NO_TOKENS):
        list(feed_tokens(live(), None, False))
    reader.close()


def test_text_of_another_detokenizer_is_made_again(tokenizer: Tokenizer) -> None:
    once = write(tokenizer, spoken(tokenizer, HARD))
    assert text_of(write(tokenizer, once)) == HARD
