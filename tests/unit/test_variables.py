"""Environment variables of options: what they set, and what takes precedence over them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.unit.test_cli import RUN, here, lines_of
from toastkit.frames import dumps


def test_variables_set_options(toast) -> None:
    def count(*arguments: str, **env: str) -> subprocess.CompletedProcess:
        return toast("tokenize", "--count", *arguments, "hi", env=env)

    assert lines_of(count(TOAST_MODEL="nope"), "tokenize", 66)[0] == "no such model: nope"
    assert count("-m", "crumb", TOAST_MODEL="nope").returncode == 0
    assert int(count(TOAST_RAW="1").stdout) < int(count().stdout)
    both = count(TOAST_RAW="1", TOAST_SYSTEM="x")
    assert lines_of(both, "tokenize", 64)[0].startswith("--raw has no messages")
    # One of the other way to run is no error: it is set for all commands at once.
    done = toast("tokenize", "hi", env={"TOAST_MAX_TOKENS": "3", "TOAST_STEPS": "x"})
    assert done.returncode == 0
    done = toast("decode", stdin=dumps(RUN[0]), env={"TOAST_TEMPERATURE": "0.5", "TOAST_RAW": "1"})
    assert lines_of(done, "decode", 65)[0].startswith("the stream names no session")


@pytest.mark.parametrize(
    ("command", "variables", "code"),
    [("tokenize --count --raw hi", "SYSTEM=x TEMPLATE_ARG=a=1 TOOLS=x NO_GENERATION_PROMPT=1", 0),
     ("tokenize --count --system x hi", "RAW=1 MESSAGES=x", 0),
     ("tokenize --count hi", "MESSAGES=x", 0), ("tokenize --template-only hi", "COUNT=1", 0),
     ("toast -x --socket /none/x hi", "JSON=1 CHAT=1", 69),
     ("toast --chat", "EXTRACT=1 TOOLS=x", 66),
     ("toast --usage --socket /none/x hi", "QUIET=1", 69),
     ("toast --socket /none/x hi", "NO_DAEMON=1", 69),
     ("feed --run /none/x 5", "SESSION=x", 66), ("detokenize --frames", "NO_NEWLINE=1", 65),
     ("frames --stat", "VALIDATE=1", 0), ("frames --json --top 3", "STAT=1 ARRAYS=none", 0),
     ("model info --device", "SUPPORTED=1", 0), ("model info crumb", "SUPPORTED=1", 0),
     ("sample", "XTC_THRESHOLD=0.2 PENALTY_CONTEXT=9 MIN_TOKENS_TO_KEEP=2", 65),
     ("perplexity --chunk 8 -m nope", "GEAR=auto EXPERTS=mobile", 66)],
)  # fmt: skip
def test_what_is_typed_wins_over_variables(monkeypatch, command, variables, code) -> None:
    """Over those of options that exclude it, too; and a variable without effect is no error."""
    monkeypatch.setattr("toastkit.session.feed.OPEN_SECONDS", 0)
    for variable in variables.split():
        name, _, value = variable.partition("=")
        monkeypatch.setenv(f"TOAST_{name}", value)
    name, *arguments = command.split()
    done = here(name, *arguments)
    assert done.returncode == code, done.stderr
    assert b"exclude" not in done.stderr and b"--" not in done.stderr


@pytest.mark.parametrize(
    ("command", "variable", "value", "message"),
    [("decode hi", "NATIVE", b"on", "invalid value for 'TOAST_NATIVE': 'on' is not one of 'auto'"),
     ("decode hi", "JSON", b"maybe", "invalid value for 'TOAST_JSON': 'maybe' is neither 1 nor 0"),
     ("sample", "TEMP", b"abc", "invalid value for 'TOAST_TEMP': 'abc' is not a number"),
     ("sample", "LOGIT_BIAS", b"x", "TOAST_LOGIT_BIAS takes ID=B, not 'x'"),
     ("tokenize hi", "TEMPLATE_ARG", b"x", "TOAST_TEMPLATE_ARG takes NAME=VALUE, not 'x'"),
     ("decode hi", "STOP", b"\xe9", "TOAST_STOP is not UTF-8: byte 0xe9 at offset 0"),
     ("frames", "SLICE", b"x", "TOAST_SLICE takes A:B, not 'x'"),
     ("model bake crumb", "OUTPUT", b"x", "TOAST_OUTPUT takes a name that ends in .toast")],
)  # fmt: skip
def test_a_bad_value_is_said_to_be_that_of_the_variable(
    monkeypatch: pytest.MonkeyPatch, command: str, variable: str, value: bytes, message: str
) -> None:
    monkeypatch.setenv(f"TOAST_{variable}", os.fsdecode(value))
    name, *arguments = command.split()
    code = 65 if variable == "STOP" else 64
    assert lines_of(here(name, *arguments), name, code)[0].startswith(message)


def test_no_variable_names_another_model_than_a_stream(toast, tmp_path: Path) -> None:
    """Saved frames come out as they are, whatever the shell's profile exports."""
    env = {"TOAST_MODEL": "nope"}
    frames = toast("tokenize", "-m", "crumb", "--raw", "A fox", stdin=b"").stdout
    assert toast("detokenize", "--echo", stdin=frames, env=env).stdout == b"A fox"
    refused = toast("detokenize", "--echo", "-m", "nope", stdin=frames)
    assert lines_of(refused, "detokenize", 66)[0] == "no such model: nope"
    read = toast("prefill", "--session", str(tmp_path / "own"), stdin=frames, env=env)
    assert read.returncode == 0
    done = toast("decode", "--greedy", "-n", "1", stdin=read.stdout, env=env)
    assert done.returncode == 0


def test_variables_that_exclude_each_other_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = here("tokenize", "hi").stdout
    for name in ("COUNT", "TEMPLATE_ONLY", "GREEDY", "FORCE"):
        monkeypatch.setenv(f"TOAST_{name}", "1")
    for name, stdin, said in (
        ("tokenize", b"hi", "TOAST_COUNT and TOAST_TEMPLATE_ONLY exclude each other"),
        ("decode", sent, "TOAST_GREEDY and TOAST_FORCE exclude each other"),
    ):
        assert lines_of(here(name, stdin=stdin), name, 64)[0] == said
    assert here("tokenize", "--count", "hi").returncode == 0
