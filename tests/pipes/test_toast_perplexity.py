"""toast-perplexity as a person runs it: lines, JSON, stdin, what it refuses, how it is stopped."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.conftest import Toast, executable

TEXTS = Path(__file__).parents[1] / "texts"
STORY, CHAT = str(TEXTS / "story.txt"), str(TEXTS / "chat.txt")
TEXT = "The shy fox lived by the river. G\u00fcn\u00fcn \U0001f98a!\n"
LINE = re.compile(
    r"(?P<name>.+): perplexity (?P<perplexity>[\d.]+), entropy (?P<entropy>[\d.]+) bits, "
    r"(?P<tokens>\d+) tokens?, (?P<bits>[\d.]+) bits/byte, [\d.]+ tokens/s"
)


def lines(done: subprocess.CompletedProcess) -> list[dict[str, str]]:
    """The lines of a run that went well, by field."""
    assert (done.returncode, done.stderr) == (0, b"")
    found = [LINE.fullmatch(line) for line in done.stdout.decode().splitlines()]
    assert all(found), done.stdout
    return [match.groupdict() for match in found if match]


def objects(done: subprocess.CompletedProcess) -> list[dict]:
    assert (done.returncode, done.stderr) == (0, b"")
    return [json.loads(line) for line in done.stdout.splitlines()]


def refused(done: subprocess.CompletedProcess, code: int, said: str) -> None:
    text = done.stderr.decode()
    assert (done.returncode, done.stdout) == (code, b""), text
    first, *hint = text.splitlines()
    assert first.startswith("toast-perplexity: ") and said in first, text
    assert len(hint) <= 1 and "Traceback" not in text


def test_files_and_their_total(toast: Toast) -> None:
    arguments = ["--limit", "30", "--context", "16", STORY, CHAT]
    story, chat, total = lines(toast("perplexity", *arguments))
    assert (story["name"], chat["name"], total["name"]) == (STORY, CHAT, "total")
    assert (story["tokens"], chat["tokens"], total["tokens"]) == ("30", "30", "60")
    both = [float(line["perplexity"]) for line in (story, chat)]
    assert float(total["perplexity"]) == pytest.approx(math.sqrt(both[0] * both[1]), abs=1e-3)
    (alone,) = lines(toast("perplexity", *arguments[:-1]))
    assert alone == story


def test_json_sums_to_the_totals(toast: Toast) -> None:
    text = TEXT.encode()
    found = objects(toast("perplexity", "--json", "--context", "8", stdin=text))
    *tokens, total = found
    assert [t["pos"] for t in tokens] == list(range(1, len(tokens) + 1))
    assert all(t["file"] == "-" for t in found) and len(tokens) == total["tokens"]
    loss = -sum(t["logprob"] for t in tokens) / len(tokens)
    assert total["loss"] == pytest.approx(loss) and total["window"] == 8
    assert total["perplexity"] == pytest.approx(math.exp(loss))
    assert total["entropy"] == pytest.approx(sum(t["entropy"] for t in tokens) / len(tokens))
    pieces = "".join(t["text"] for t in tokens)
    assert TEXT.endswith(pieces) and len(pieces.encode()) == total["bytes"]
    assert total["bits_per_byte"] == pytest.approx(
        loss * len(tokens) / math.log(2) / len(pieces.encode())
    )
    (line,) = lines(toast("perplexity", "--context", "8", stdin=text))
    assert float(line["perplexity"]) == pytest.approx(total["perplexity"], abs=1e-4)


def test_json_of_two_texts(toast: Toast, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("Once upon a time")
    found = objects(toast("perplexity", "--json", str(file), "-", stdin=TEXT.encode()))
    totals = [value for value in found if "perplexity" in value]
    assert [(t.get("file"), t.get("files")) for t in totals] == [
        (str(file), None), ("-", None), (None, 2),
    ]  # fmt: skip
    assert totals[2]["tokens"] == totals[0]["tokens"] + totals[1]["tokens"]
    assert totals[2]["bytes"] == totals[0]["bytes"] + totals[1]["bytes"]


def test_a_text_is_taken_as_it_stands(toast: Toast) -> None:
    """No template around it, special tokens are seen, chunks change nothing."""
    text = b"<|im_start|>user\nHi<|im_end|>\n"
    found = objects(toast("perplexity", "--json", stdin=text))
    assert "".join(t.get("text", "") for t in found) == "user\nHi<|im_end|>\n"
    assert 2 in [t.get("id") for t in found]
    again = objects(toast("perplexity", "--json", "--chunk", "3", "-", stdin=text))
    for mine, theirs in zip(again[:-1], found[:-1], strict=True):
        assert mine.pop("logprob") == pytest.approx(theirs.pop("logprob"), abs=1e-4)
        assert mine.pop("entropy") == pytest.approx(theirs.pop("entropy"), abs=1e-4)
        assert mine == theirs


def test_verbose_and_quiet(toast: Toast) -> None:
    done = toast("perplexity", "-v", "--limit", "9", "--context", "4", STORY)
    assert f"{STORY}: 9 tokens, 3 windows of 4" in done.stderr.decode()
    assert b"toast-perplexity: loaded crumb on the " in done.stderr


BAD = [
    (b"", [], 65, "standard input: empty text"),
    (None, [], 65, "standard input: empty text"),
    (b"a", [], 65, "standard input: a text of one token"),
    (b"caf\xe9", [], 65, "standard input is not UTF-8: byte 0xe9 at offset 3"),
    (b"hi", ["missing.txt"], 66, "cannot read missing.txt: no such file or directory"),
    (b"hi", [str(TEXTS)], 66, f"cannot read {TEXTS}: is a directory"),
    (b"hi", [STORY, "missing.txt"], 66, "cannot read missing.txt"),
    (b"hi", ["-", "-"], 64, "- is standard input, which can be read only once"),
    (b"hi", ["--context", "8193"], 64, "--context 8193 is more than the model's context of 8192"),
    (b"hi", ["--context", "0"], 64, "0 is not in the range x>=1"),
    (b"hi", ["--limit", "0"], 64, "0 is not in the range x>=1"),
    (b"hi", ["--chunks", "3"], 64, "no such option '--chunks'"),
    (b"hi", ["-m", "nope"], 66, "no such model: nope"),
]


@pytest.mark.parametrize(("stdin", "arguments", "code", "said"), BAD)
def test_refusals(toast: Toast, stdin: bytes | None, arguments: list, code: int, said: str) -> None:
    refused(toast("perplexity", *arguments, stdin=stdin), code, said)


def test_a_file_that_is_not_utf8(toast: Toast, tmp_path: Path) -> None:
    file = tmp_path / "latin.txt"
    file.write_bytes(b"ab\xff")
    refused(toast("perplexity", str(file)), 65, f"{file} is not UTF-8: byte 0xff at offset 2")


def running(*arguments: str) -> subprocess.Popen:
    """A run over a text that takes a minute, after its first line of JSON."""
    process = subprocess.Popen(
        [executable("perplexity"), "--json", "--chunk", "16", *arguments, STORY],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ,
    )  # fmt: skip
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["pos"] == 1
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_what_there_is(number: int, code: int) -> None:
    process = running()
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    said, line = errors.decode().splitlines()
    match = re.fullmatch(r"toast-perplexity: interrupted at token (\d+) of 21765", said)
    assert match and 16 <= int(match[1]) < 21765
    assert line.startswith(f"{STORY}: perplexity ") and f" {match[1]} tokens," in line
    assert "bits/byte" not in line


def test_a_reader_that_goes_away() -> None:
    process = running()
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=60) == -signal.SIGPIPE
    assert process.stderr.read() == b""
    process.stderr.close()
