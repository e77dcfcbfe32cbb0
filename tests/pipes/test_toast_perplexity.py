"""toast-perplexity as a person runs it: lines, JSON, stdin, what it refuses, how it is stopped."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import Toast
from tests.model.published import write_published
from tests.pipes.pipelines import begin, json_lines
from tests.unit.test_cli import lines_of
from toastkit.commands.perplexity import WINDOW, _window

TEXTS = Path(__file__).parents[1] / "texts"
STORY, CHAT = str(TEXTS / "story.txt"), str(TEXTS / "chat.txt")
TEXT = "The shy fox lived by the river. G\u00fcn\u00fcn \U0001f98a!\n"
LINE = re.compile(
    r"(?P<name>.+): perplexity (?P<perplexity>[\d.]+), entropy (?P<entropy>[\d.]+) bits, "
    r"(?P<tokens>\d+) tokens?, (?P<bits>[\d.]+) bits/byte, [\d.]+ tokens/s(, (?P<gears>.+))?"
)
SHORT = ["--limit", "24", "--context", "16"]


def lines(done: subprocess.CompletedProcess) -> list[dict[str, str]]:
    """The lines of a run that went well, by field."""
    assert (done.returncode, done.stderr) == (0, b"")
    found = [LINE.fullmatch(line) for line in done.stdout.decode().splitlines()]
    assert all(found), done.stdout
    return [match.groupdict("") for match in found if match]


def objects(done: subprocess.CompletedProcess) -> list[dict]:
    assert (done.returncode, done.stderr) == (0, b"")
    return json_lines(done.stdout)


def test_files_and_their_total(toast: Toast) -> None:
    arguments = ["--limit", "30", "--context", "16", STORY, CHAT]
    story, chat, total = lines(toast("perplexity", *arguments))
    assert (story["name"], chat["name"], total["name"]) == (STORY, CHAT, "total")
    assert (story["tokens"], chat["tokens"], total["tokens"]) == ("30", "30", "60")
    both = [float(line["perplexity"]) for line in (story, chat)]
    assert float(total["perplexity"]) == pytest.approx(math.sqrt(both[0] * both[1]), abs=1e-3)
    (alone,) = lines(toast("perplexity", *arguments[:-1]))
    assert alone == story


def test_what_a_tokenizer_puts_behind_a_text_is_not_scored(toast: Toast, tmp_path: Path) -> None:
    model = write_published(tmp_path / "m", "llama")
    plain = objects(toast("perplexity", "-m", str(model), "--json", stdin=TEXT.encode()))
    document = json.loads((model / "tokenizer.json").read_text())
    end = document["added_tokens"][0]
    name, text = end["content"], {"Sequence": {"id": "A", "type_id": 0}}
    mark = {"SpecialToken": {"id": name, "type_id": 0}}
    document["post_processor"] = {
        "type": "TemplateProcessing", "single": [text, mark], "pair": [text, mark],
        "special_tokens": {name: {"id": name, "ids": [end["id"]], "tokens": [name]}},
    }  # fmt: skip
    (model / "tokenizer.json").write_text(json.dumps(document))
    for more, count in (([], len(plain) - 1), (["--limit", "5"], 5), (["--limit", "999"], None)):
        arguments = ["perplexity", "-m", str(model), "--json", *more]
        *tokens, total = objects(toast(*arguments, stdin=TEXT.encode()))
        count = count or len(plain) - 1
        assert len(tokens) == total["tokens"] == count
        assert [t["id"] for t in tokens] == [t["id"] for t in plain[:count]]
        assert count < len(plain) - 1 or total["bytes"] == plain[-1]["bytes"]


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


def test_a_name_that_is_no_text(toast: Toast, tmp_path: Path) -> None:
    """JSON is UTF-8: what is none in a name is escaped."""
    file = os.fsencode(tmp_path) + b"/b\xff.txt"
    with open(file, "wb") as stream:
        stream.write(TEXT.encode())
    done = toast("perplexity", "--json", "--limit", "1", os.fsdecode(file))
    assert done.returncode == 0 and b"b\\udcff.txt" in done.stdout
    assert json.loads(done.stdout.decode().splitlines()[0])["file"] == os.fsdecode(file)


def test_a_text_may_begin_and_end_with_a_part_of_a_character(toast: Toast, tmp_path: Path) -> None:
    """crumb has a token for each byte of these: the first is not scored, its byte not counted."""
    texts = {"fox": "\U0001f98a\U0001f43b", "euro": "\u20ac\u20ac", "unknown": "\ufffd\ufffd"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    files = [str(tmp_path / name) for name in texts]
    for more, counts in (([], [7, 5, 5, 17]), (["--limit", "4"], [4, 4, 4, 12])):
        found = objects(toast("perplexity", "--json", *more, *files))
        totals = [total for total in found if "perplexity" in total]
        assert [total["bytes"] for total in totals] == counts
        assert [total["tokens"] for total in totals] == counts
        for total in totals:
            assert total["bits_per_byte"] == pytest.approx(total["loss"] / math.log(2))


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


def test_a_window_is_no_longer_than_what_the_model_reads() -> None:
    assert [_window(None, context) for context in (None, 512, 8192)] == [WINDOW, 512, WINDOW]


def test_verbose_and_quiet(toast: Toast) -> None:
    done = toast("perplexity", "-v", "--limit", "9", "--context", "4", STORY)
    assert f"{STORY}: 9 tokens, 3 windows of 4" in done.stderr.decode()
    assert b"toast-perplexity: loaded crumb on the " in done.stderr


# What of gears is refused by all commands alike: test_gears.py.
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
    (b"hi", ["--chunks", "3"], 64, "no such option '--chunks'"),
    (b"hi", ["-m", "nope"], 66, "no such model: nope"),
    (b"hi", ["--gear", "top"], 64, "'top' is not one of 'auto', 'low', 'mid', 'high', 'off'"),
    (b"hi", ["--gear-scope", "all"], 64, "--gear-scope needs a --gear"),
    (b"hi", ["--gear", "high", "--no-calibration"], 64, "--no-calibration is for --gear auto"),
    (b"hi", ["--gear", "auto", "--chunk", "2"], 64, "--chunk and --gear auto exclude each other"),
    (b"hi", ["--gear", "auto", "--low", "4"], 64, "low 4 is not less than high 3.5"),
    (b"hi", ["--gear", "auto", "missing.txt"], 66, "cannot read missing.txt"),
]


@pytest.mark.parametrize(("stdin", "arguments", "code", "said"), BAD)
def test_refusals(toast: Toast, stdin: bytes | None, arguments: list, code: int, said: str) -> None:
    assert said in lines_of(toast("perplexity", *arguments, stdin=stdin), "perplexity", code)[0]


def test_a_file_that_is_not_utf8(toast: Toast, tmp_path: Path) -> None:
    file = tmp_path / "latin.txt"
    file.write_bytes(b"ab\xff")
    said, _ = lines_of(toast("perplexity", str(file)), "perplexity", 65)
    assert said == f"{file} is not UTF-8: byte 0xff at offset 2"


def test_a_text_that_the_tokenizer_drops(toast: Toast, tmp_path: Path) -> None:
    path = write_published(tmp_path / "model", "llama_tied")
    tokenizer = json.loads((path / "tokenizer.json").read_bytes())
    tokenizer["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    done = toast("perplexity", "-m", path, stdin=b"  ")
    assert lines_of(done, "perplexity", 65)[0].startswith("standard input: a text of no token")


# -------------------------------------------------------------------------------------------- gears


def without_speed(total: dict) -> dict:
    return {k: v for k, v in total.items() if k not in ("seconds", "tokens_per_second")}


def test_high_gear_and_off_are_no_gears(toast: Toast) -> None:
    """The same figures to the last digit; off has not even another field."""
    *tokens, total = objects(toast("perplexity", "--json", *SHORT, STORY))
    off = toast("perplexity", "--json", "--gear", "off", *SHORT, STORY)
    assert [without_speed(t) for t in objects(off)] == [without_speed(t) for t in (*tokens, total)]
    assert list(objects(off)[-1]) == list(total) and "gear" not in "".join(total)
    *high, summary = objects(toast("perplexity", "--json", "--gear", "high", *SHORT, STORY))
    assert high == [{**token, "gear": "high"} for token in tokens]
    assert without_speed(summary) == {
        **without_speed(total), "gear": "high", "gear_scope": "attention", "gear_bits": [4, 8],
        "gears": {"low": 0, "mid": 0, "high": 24}, "shifts": 0, "mean_bits": 16.0,
    }  # fmt: skip


def test_a_fixed_gear(toast: Toast) -> None:
    arguments = ["--gear", "low", "--gear-scope", "all", *SHORT, STORY]
    (line,) = lines(toast("perplexity", *arguments))
    assert line["gears"] == "low gear (4 bits, all)"
    (plain,) = lines(toast("perplexity", *SHORT, STORY))
    assert line["perplexity"] != plain["perplexity"] and plain["gears"] == ""
    # From dequantised copies it is the same but for rounding; so it is in parts of a window.
    more = ["--gear-path", "dequant", "--gear-cache", "0", "--chunk", "5", "--json"]
    *tokens, total = objects(toast("perplexity", *more, *arguments))
    assert total["perplexity"] == pytest.approx(float(line["perplexity"]), abs=1e-3)
    assert {token["gear"] for token in tokens} == {"low"}
    assert (total["gears"]["low"], total["shifts"], total["mean_bits"]) == (24, 0, 4.0)


def test_gears_by_entropy(toast: Toast) -> None:
    options = ["--gear", "auto", "--gear-bits", "6,8", "--window", "2", "--min-duration", "1"]
    arguments = [*options, "--low", "0.3", "--high", "3", "--hysteresis", "0", *SHORT, STORY, CHAT]
    found = objects(toast("perplexity", "--json", *arguments))
    for name, total in ((STORY, found[24]), (CHAT, found[49])):
        gears = [t["gear"] for t in found if "pos" in t and t["file"] == name]
        counts = {gear: gears.count(gear) for gear in ("low", "mid", "high")}
        assert total["gears"] == counts and gears[0] == gears[16] == "high"
        assert total["shifts"] == sum(a != b for a, b in zip(gears, gears[1:])) > 0
        bits = (6 * counts["low"] + 8 * counts["mid"] + 16 * counts["high"]) / 24
        assert total["mean_bits"] == pytest.approx(bits)
        assert (total["gear"], total["gear_bits"], total["window"]) == ("auto", [6, 8], 16)
    # The mean of the last two entropies of the window, held against scaled thresholds.
    entropies = [token["entropy"] for token in found[:15]]
    means = [sum(entropies[max(0, n - 1) : n + 1]) / min(n + 1, 2) for n in range(15)]
    chosen = ["low" if m <= 0.24 else "high" if m >= 2.4 else "mid" for m in means]
    assert [token["gear"] for token in found[1:16]] == chosen
    both = found[-1]
    assert both["gears"] == {g: found[24]["gears"][g] + found[49]["gears"][g] for g in counts}
    assert both["shifts"] == found[24]["shifts"] + found[49]["shifts"]
    told = [line["gears"] for line in lines(toast("perplexity", *arguments))]
    for line, total in zip(told, (found[24], found[49], both), strict=True):
        share = [f"{g} {n / total['tokens']:.0%}" for g, n in total["gears"].items()]
        shifts, mean = total["shifts"], total["mean_bits"]
        assert line == f"gears {' '.join(share)}, {shifts} shifts, mean {mean:.1f} bits"


def test_calibrated_thresholds_count(toast: Toast) -> None:
    from toastkit.gears import thresholds
    from toastkit.gears.calibration import Thresholds
    from toastkit.model.config import fingerprint
    from toastkit.model.locate import locate

    file = thresholds.save(fingerprint(locate("crumb")), Thresholds(11, 12, "prompts", 9, 4096))
    arguments = ["-v", "--gear", "auto", *SHORT, STORY]
    try:
        done = toast("perplexity", *arguments)
        assert b"thresholds 11.00 and 12.00 bits: calibrated (prompts, 9 samples)" in done.stderr
        assert b", gears low 92% mid 0% high 8%, 3 shifts, mean 5.0 bits" in done.stdout
        aside = toast("perplexity", "--no-calibration", *arguments)
        assert b"thresholds 1.44 and 2.80 bits: defaults" in aside.stderr
        file.write_text("{}")
        said, _ = lines_of(toast("perplexity", *arguments), "perplexity", 65)
        assert said.startswith(f"cannot read thresholds {file}")
    finally:
        file.unlink()


def test_an_interrupt_tells_the_gears_so_far() -> None:
    process = running("--gear", "auto", chunk=())
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    said, line = errors.decode().splitlines()
    assert re.search(r"interrupted at token \d+ of 21765", said)
    assert re.search(r", gears low \d+% mid \d+% high \d+%, \d+ shifts?, mean [\d.]+ bits$", line)


# ------------------------------------------------------------------------------------------- ending


def running(*arguments: str, chunk: Sequence[str] = ("--chunk", "16")):
    """A run over a text that takes a minute, after its first line of JSON."""
    process = begin("perplexity", "--json", *chunk, *arguments, STORY)
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
    process.stdout.close()
    assert process.wait(timeout=60) == -signal.SIGPIPE
    assert process.stderr.read() == b""
    process.stderr.close()
