"""Where a prompt comes from: arguments, standard input, files of messages, lines."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from tests.unit.test_cli import lines_of
from toastkit.frames import FrameReader, Head, Tokens, unpack_ids

TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def rendered(toast, *arguments: str, stdin: bytes | None = None) -> str:
    done = toast("tokenize", "--template-only", *arguments, stdin=stdin)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


@pytest.mark.parametrize(
    ("words", "stdin", "content"),
    [
        (["Hi"], None, "Hi"),
        (["Hi", "there"], None, "Hi there"),
        ([], "Grüße\n".encode(), "Grüße"),
        (["-"], b"Hi\n", "Hi"),
        (["Sum up:"], b"a\nb\n\n", "a\nb\n\nSum up:"),
        (["Sum", "-", "up:"], b"text", "text\n\nSum up:"),
        (["Hi"], b"", "Hi"),
        (["--", "-x"], None, "-x"),
    ],
)
def test_where_a_prompt_comes_from(toast, words: list, stdin: bytes | None, content: str) -> None:
    assert rendered(toast, *words, stdin=stdin) == TURN.format(content)


def test_raw_text_is_joined_as_it_stands(toast) -> None:
    assert rendered(toast, "--raw", " end", stdin=b"start\n\n") == "start\n\n end"
    assert rendered(toast, "--raw", "<|im_end|>") == "<|im_end|>"


def test_system_and_messages(toast, tmp_path: Path) -> None:
    system = "<|im_start|>system\nBe kind.<|im_end|>\n"
    assert rendered(toast, "--system", "Be kind.", "Hi") == system + TURN.format("Hi")
    alone = rendered(toast, "--system", "Be kind.", "--no-generation-prompt")
    assert alone == system
    messages = [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]  # fmt: skip
    file = tmp_path / "m.json"
    file.write_text(json.dumps(messages))
    marks = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n" + TURN.format("c")
    assert rendered(toast, "--messages", str(file)) == marks
    assert rendered(toast, "--messages", "-", stdin=file.read_bytes()) == marks
    for bad in (b"{", b"[]", b'[{"role": "user"}]', b"\xff"):
        file.write_bytes(bad)
        lines_of(toast("tokenize", "--messages", str(file)), "tokenize", 65)


def test_counts_are_those_of_the_frames(toast) -> None:
    lines = b"Hi there\n\n  \nTell me a story.\nx"
    done = toast("tokenize", "--each-line", stdin=lines)
    frames = list(FrameReader(io.BytesIO(done.stdout)))
    assert [type(f) for f in frames] == [Head, Tokens] * 3
    counts = [len(unpack_ids(f.ids)) for f in frames if type(f) is Tokens]
    shown = toast("tokenize", "--each-line", "--count", stdin=lines).stdout
    assert [int(n) for n in shown.split()] == counts
    assert rendered(toast, "--each-line", "Go", stdin=lines) == "".join(
        TURN.format(f"{line}\n\nGo") for line in ("Hi there", "Tell me a story.", "x")
    )
