"""The six processes, joined by real pipes, against the reference and against the one process."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("mlx.core")

from tests.hostile import run_without_privileges
from tests.model.published import write_published
from tests.native_library import own_cache
from tests.pipes.pipelines import json_lines
from toastkit.frames import (
    End,
    Error,
    FrameReader,
    Head,
    Logits,
    Prefilled,
    Text,
    Token,
    Tokens,
    dumps,
    pack_ids,
)
from toastkit.model.config import fingerprint, load_config
from toastkit.model.locate import locate
from toastkit.session.feed import FeedReader
from toastkit.text.vocabulary import MIN_BYTES

PROMPTS = json.loads((Path(__file__).parent.parent / "reference.json").read_bytes())["prompts"]
FLOAT32 = ["--dtype", "float32"]
TOLERANCE = 2e-3


def frames_of(data: bytes) -> list:
    return list(FrameReader(io.BytesIO(data)))


def runs_of(data: bytes) -> list[list]:
    """The frames of each run, its head first."""
    runs: list[list] = []
    for frame in frames_of(data):
        if type(frame) is Head:
            runs.append([])
        runs[-1].append(frame)
    return runs


def only(kind: type, frames: list) -> list:
    return [frame for frame in frames if type(frame) is kind]


def prompt_frames(prompts: list[dict]) -> bytes:
    """Each prompt as a run of its own: what toast-tokenize would write."""
    files = locate("crumb")
    head = Head("crumb", fingerprint(files), load_config(files).vocab, [2, 0])
    return b"".join(dumps(head) + dumps(Tokens(pack_ids(p["token_ids"]))) for p in prompts)


def test_the_reference(pipeline) -> None:
    chosen = PROMPTS[2::3]  # the others: tests/model/test_reference.py
    done = pipeline(
        ["prefill", *FLOAT32],
        ["decode", *FLOAT32],
        ["entropy-gear"],
        ["sample", "--temp", "0", "--ignore-eos", "-n", "48", "--top", "20"],
        ["detokenize", "--frames"],
        stdin=prompt_frames(chosen),
    )
    assert done.codes == [0] * 5, done.errors
    runs = runs_of(done.out)
    assert len(runs) == len(chosen)
    for prompt, run in zip(chosen, runs):
        tokens = only(Token, run)
        assert [t.id for t in tokens] == prompt["greedy"], prompt["name"]
        start = len(prompt["token_ids"])
        assert [t.pos for t in tokens] == list(range(start, start + 48))
        assert run[-1] == End("length", 48)
        check_first(tokens[0], prompt)
        (read,) = only(Prefilled, run)
        assert (read.n_past, read.n_new, read.n_cached) == (start, start, 0)
        assert "".join(t.s for t in only(Text, run)) == greedy_text(prompt)


def test_a_large_vocabulary_is_read_from_its_table(pipeline, tmp_path: Path) -> None:
    """The first commands make it in the background; all answer the same."""
    model = write_published(tmp_path / "model", "llama")
    with open(model / "tokenizer.json", "ab") as file:
        file.write(b" " * MIN_BYTES)  # which makes it another file, and a large one
    cache = own_cache(tmp_path / "cache")
    stages = ["prefill"], ["decode"], ["sample", "--temp", "0", "-n", "9"], ["detokenize"]

    def answer() -> bytes:
        first = ["tokenize", "-m", str(model), "Who are you, Zoë? <|im_end|>"]
        done = pipeline(first, *stages, env={"XDG_CACHE_HOME": str(cache)})
        assert done.codes == [0] * 5, done.errors
        return done.out

    whole = answer()
    assert whole
    deadline = time.monotonic() + 60
    while not (made := list(cache.glob("toastkit/tokenizers/*.bpe"))):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert answer() == whole and len(made) == 1


def check_first(token: Token, prompt: dict) -> None:
    """The first token's alternatives are the 20 of the record; the last may be another."""
    found, expected = dict(token.top), dict(prompt["top20"])
    shared = set(found) & set(expected)
    assert len(token.top) == 20 and len(shared) >= 19
    assert max(abs(found[i] - expected[i]) for i in shared) < TOLERANCE
    assert token.logprob == found[token.id]
    assert token.entropy == pytest.approx(prompt["entropy_bits"], abs=TOLERANCE)
    assert token.gear in ("low", "mid", "high")


def greedy_text(prompt: dict) -> str:
    from toastkit.text.tokenizer import Tokenizer

    return Tokenizer(locate("crumb")).decode(prompt["greedy"], keep_special=False)


def test_greedy_without_a_sampler(pipeline) -> None:
    """decode feeds itself: its logits, in the frames, are the record's."""
    prompts = [p for p in PROMPTS if len(p["token_ids"]) < 100][:4]
    done = pipeline(
        ["prefill", *FLOAT32],
        ["decode", *FLOAT32, "--greedy", "--steps", "3", "--inline"],
        stdin=prompt_frames(prompts),
    )
    assert done.codes == [0, 0], done.errors
    runs = runs_of(done.out)
    assert len(runs) == len(prompts)
    for prompt, run in zip(prompts, runs):
        assert [t.id for t in only(Token, run)] == prompt["greedy"][:3]
        assert only(End, run)[0].n == 3
        values = memoryview(only(Logits, run)[0].logits.data).cast("f")
        peak = max(values)
        total = peak + math.log(sum(math.exp(v - peak) for v in values))
        assert max(abs(values[i] - total - p) for i, p in prompt["top20"]) < TOLERANCE


NOT_EXAMINED = """
import sys
from toastkit.commands import decode, perplexity
from toastkit.engine.last_token import LastToken
LastToken.examine = lambda *_: sys.exit("examined")
for command, *arguments in (decode, "--greedy", "-n", "1"), (perplexity, sys.argv[1]):
    sys.argv[1:] = arguments
    try:
        command.main()
    except SystemExit as end:
        if end.code:
            raise
"""


def test_commands_that_read_no_prompt_spare_its_preparation(toast, tmp_path: Path) -> None:
    """Examining the model for its prompts' last token is a sixth of what loading crumb takes."""
    session, text = tmp_path / "session", tmp_path / "text"
    text.write_text("One fox")
    prompt = toast("tokenize", "Hi").stdout
    read = toast("prefill", "--session", session, stdin=prompt)
    command = [sys.executable, "-c", NOT_EXAMINED, str(text)]
    done = subprocess.run(command, input=read.stdout, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.endswith(b" tokens/s\n")


# ------------------------------------------------------------------------------- sampled answers

LINES = ["Tell me a story about a fox and a river.", "What is 12 + 30?"]
STDIN = "\n".join(LINES).encode()
CHAINS = {
    "penalties": ["--temp", "0.9", "--top-p", "0.9", "--repetition-penalty", "1.3",
                  "--presence-penalty", "0.2", "--frequency-penalty", "0.3",
                  "--repeat-last-n", "12"],
    "min-p": ["--temp", "1.3", "--min-p", "0.05", "--top-k", "40", "--logit-bias", "723=-2",
              "--ban", "261"],
    "xtc": ["--temp", "1", "--typical-p", "0.8", "--xtc-probability", "0.6",
            "--xtc-threshold", "0.05"],
}  # fmt: skip


def one_process(toast, *arguments: str) -> list[dict]:
    done = toast(
        "decode", "--each-line", "--json", "-n", "6", *FLOAT32, *arguments, stdin=STDIN
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json_lines(done.stdout)


def six_processes(pipeline, *arguments: str) -> tuple[list[Token], list[End], str]:
    done = pipeline(
        ["tokenize", "--each-line"],
        ["prefill", *FLOAT32],
        ["decode", *FLOAT32],
        ["entropy-gear"],
        ["sample", "-n", "6", *arguments],
        ["detokenize", "--frames"],
        stdin=STDIN,
    )
    assert done.codes == [0] * 6, done.errors
    frames = frames_of(done.out)
    text = "".join(frame.s for frame in only(Text, frames))
    return only(Token, frames), only(End, frames), text


@pytest.mark.parametrize("name", CHAINS)
def test_one_seed_gives_one_answer(name: str, pipeline, toast) -> None:
    arguments = [*CHAINS[name], "--seed", "42", "--top", "3"]
    lines = one_process(toast, *arguments)
    tokens, ends, text = six_processes(pipeline, *arguments)
    drawn = [line for line in lines if "id" in line]
    assert [(t.pos, t.id) for t in tokens] == [(line["pos"], line["id"]) for line in drawn]
    assert [(e.reason, e.n) for e in ends] == [
        (line["end"], line["n"]) for line in lines if "end" in line
    ]
    assert text == "".join(line["text"] for line in lines)
    assert len(ends) == len(LINES)
    for token, line in zip(tokens, drawn):
        assert token.gear is not None and "gear" not in line  # entropy-gear's word, and nobody's
        assert token.entropy == pytest.approx(line["entropy"], abs=1e-4)
        assert token.logprob == pytest.approx(line["logprob"], abs=1e-4)
        assert [i for i, _ in token.top] == [i for i, _ in line["top"]]
    if name == "min-p":
        other = one_process(toast, *CHAINS[name], "--seed", "43", "--top", "3")
        assert [line.get("id") for line in other] != [line.get("id") for line in lines]


@pytest.fixture(scope="module")
def saved(pipeline) -> bytes:
    """A run saved between decode and sample. It took the most likely tokens, so that its logits do
    not hang on what is drawn from them later."""
    done = pipeline(
        ["tokenize", LINES[0]],
        ["prefill", *FLOAT32],
        ["decode", *FLOAT32, "--greedy", "-n", "12", "--inline"],
    )
    assert done.codes == [0] * 3, done.errors
    return done.out


def drawn(toast, saved: bytes, *arguments: str) -> list:
    done = toast("sample", *arguments, stdin=saved)
    assert done.returncode == 0, done.stderr
    return frames_of(done.stdout)


def test_a_saved_run_is_drawn_again_without_the_model(toast, saved: bytes) -> None:
    hot = ["--temp", "1.4", "--seed", "5"]
    first, again, other = (
        [t.id for t in only(Token, drawn(toast, saved, *chain))]
        for chain in (hot, hot, ["--temp", "0"])
    )
    assert len(first) == 12 and first == again != other
    assert other == [t.id for t in only(Token, frames_of(saved))]


def test_a_seed_of_its_own_choice_is_in_the_stream(toast, saved: bytes) -> None:
    """Without --seed a new one is drawn; what was drawn with it is drawn with it again."""
    first, second = (drawn(toast, saved, "--temp", "1.5") for _ in range(2))
    record = first[0].extra["sampling"]
    assert record["temperature"] == 1.5
    assert record["seed"] != second[0].extra["sampling"]["seed"]
    again = drawn(toast, saved, "--temp", "1.5", "--seed", str(record["seed"]))
    assert only(Token, again) == only(Token, first)


@pytest.mark.parametrize("name", ["entropy-gear", "sample", "detokenize"])
def test_a_saved_run_from_where_we_may_not_look(saved: bytes, tmp_path: Path, name: str) -> None:
    closed = tmp_path / "another's"
    closed.mkdir(mode=0)
    head, *others = frames_of(saved)
    head = replace(head, session=str(closed / "session"), run=str(closed / "session/runs/1"))
    done = run_without_privileges(name, stdin=b"".join(map(dumps, (head, *others))))
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout


# ---------------------------------------------------------------------- errors travel downstream


def test_an_error_at_the_head_ends_every_stage_with_its_code(pipeline) -> None:
    done = pipeline(
        ["tokenize", "-m", "crum", "Hi"],
        ["prefill"],
        ["decode"],
        ["entropy-gear"],
        ["sample"],
        ["detokenize"],
    )
    assert done.codes[0] == 66 and done.out == b""
    assert "toast-tokenize: no such model: crum\n" in done.errors[0]
    assert all(code in (65, 66) for code in done.codes[1:])


def test_a_session_is_not_a_fork_of_itself(toast, tmp_path: Path) -> None:
    """It would be written, which --fork is not to do."""
    session = tmp_path / "s"
    prompt = toast("tokenize", "--session", session, "Hi").stdout
    assert toast("prefill", stdin=prompt).returncode == 0
    before = (session / "session.msgpack").read_bytes()
    decoded = toast("decode", "--session", session, "--fork", session, "Hi there")
    for done in (decoded, toast("prefill", "--fork", session, stdin=prompt)):
        assert done.returncode == 64
        assert b"--fork and --session name the same session\n" in done.stderr
    assert (session / "session.msgpack").read_bytes() == before


def test_an_error_in_the_middle_is_told_once(pipeline) -> None:
    """A frame says what the first stage choked on, and nobody after it does."""
    wrong = dumps(Head("crumb", "00" * 16, 4096, [2])) + dumps(Tokens(pack_ids([1, 2])))
    done = pipeline(
        ["prefill"], ["decode"], ["entropy-gear"], ["detokenize", "--frames"], stdin=wrong,
        forked=False,  # decode, if it is as early, makes the same complaint
    )  # fmt: skip
    assert done.codes == [65] * 4
    assert "is not the model that this stream was tokenised for" in done.errors[0]
    assert done.errors[1:] == [""] * 3
    last = frames_of(done.out)[-1]
    assert type(last) is Error and (last.code, last.stage) == (65, "toast-prefill")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "empty prompt"),
        ([1, 4096], "token 4096 is outside the vocabulary of 4096"),
        ([1] * 8193, "the prompt has 8193 tokens, the model's context is 8192"),
    ],
    ids=["empty", "foreign token", "too long"],
)
def test_prompts_that_cannot_be_read(toast, ids: list[int], message: str) -> None:
    head = Head("crumb", fingerprint(locate("crumb")), 4096, [2])
    done = toast("prefill", stdin=dumps(head) + dumps(Tokens(pack_ids(ids))))
    assert done.returncode == 65 and f"toast-prefill: {message}\n" in done.stderr.decode()
    last = frames_of(done.stdout)[-1]
    assert type(last) is Error and (last.code, last.message) == (65, message)


@pytest.mark.parametrize(
    "text", [b"43 565", b"\n 43\n\n565\n", b'\n {"k": "token", "pos": 3, "id": 43}']
)
def test_what_is_fed_may_begin_with_blanks(toast, run: Path, text: bytes) -> None:
    reader = FeedReader(run / "feed")
    assert toast("feed", "--run", str(run), stdin=text).returncode == 0
    ids = [message.id for message in reader.read_available() if message.id is not None]
    reader.close()
    assert ids == ([43] if b"k" in text else [43, 565])
