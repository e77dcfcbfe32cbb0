"""The executables at the command line: refusals and their wording, environment variables."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from tests.forked import executable
from tests.unit.fake_daemon import signals_put_back
from toastkit import __version__
from toastkit.commands import COMMANDS, cli, program_name
from toastkit.frames import End, Error, FrameReader, Head, Stats, Token, Tokens, dumps, pack_ids
from toastkit.model.locate import locate

ROOT = Path(__file__).parents[2]
NAMES = [command.name for command in COMMANDS]
RUN = [
    Head("crumb", "ab" * 16, 4096, [2]), Tokens(pack_ids([1, 316])),
    Token(2, 723, -0.5, None, "low"), Stats("x", {"seconds": 1}), End("eos", 1),
]  # fmt: skip
STREAM = b"".join(map(dumps, RUN))


def here(name: str, *arguments: str, stdin: bytes | None = None) -> subprocess.CompletedProcess:
    """What a command writes and ends with, run in this process, which is quicker: for those that
    fail, or are done, before they begin to compute. stdin: None is /dev/null."""
    entry = import_module(f"toastkit.commands.{name.replace('-', '_')}")
    code = 0
    with ExitStack() as stack, signals_put_back(), pytest.MonkeyPatch.context() as patch:
        source, out, err = (stack.enter_context(TemporaryFile()) for _ in range(3))
        source.write(stdin or b"")
        source.seek(0)
        if stdin is None:
            source = stack.enter_context(open(os.devnull, "rb"))
        patch.setattr(sys, "argv", [program_name(name), *arguments])
        patch.setattr("toastkit.commands.stdin._first", None)
        for number, file in enumerate((source, out, err)):
            kept = os.dup(number)
            stack.callback(os.close, kept)
            stack.callback(os.dup2, kept, number)
            os.dup2(file.fileno(), number)
            stream = open(number, "w" if number else "r", closefd=False)
            patch.setattr(sys, ("stdin", "stdout", "stderr")[number], stream)
            stack.callback(stream.close)
        code = cli._outcome(getattr(entry, name.replace("-", "_")), program_name(name), set())
        sys.stdout.flush()
        sys.stderr.flush()
        written = [os.pread(file.fileno(), 1 << 20, 0) for file in (out, err)]
    return subprocess.CompletedProcess([name, *arguments], code, *written)


def lines_of(done: subprocess.CompletedProcess, name: str, code: int) -> tuple[str, str]:
    """The message and the hint of a failed command, checked for form."""
    text = done.stderr.decode()
    assert done.returncode == code, text
    first, *rest = text.splitlines()
    assert first.startswith(f"{program_name(name)}: ") and len(rest) <= 1, text
    assert not first.endswith(".") and "Traceback" not in text
    message = first[len(f"{program_name(name)}: ") :]
    assert not message[0].isupper() or message.startswith("TOAST_")
    assert not rest or rest[0].startswith("  hint: ")
    assert not done.stdout or type(list(FrameReader(io.BytesIO(done.stdout)))[-1]) is Error
    return message, rest[0][len("  hint: ") :] if rest else ""


MISSPELT = [
    ("decode", "--tmp", "--temp"), ("decode", "--temperatur", "--temperature"),
    ("decode", "--max", "--max-tokens"), ("decode", "--no", "--no-generation-prompt"),
    ("sample", "--top-pp", "--top-p"), ("prefill", "--sesion", "--session"),
    ("entropy-gear", "--hysterisis", "--hysteresis"),
    ("detokenize", "--fail-on-lenght", "--fail-on-length"), ("frames", "--from-jsn", "--from-json"),
    ("feed", "--ignore-oes", "--ignore-eos"), ("tokenize", "--templat-only", "--template-only"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "option", "nearest"), MISSPELT)
def test_the_nearest_option(name: str, option: str, nearest: str) -> None:
    hint = f"did you mean {nearest}? or see {program_name(name)} --help"
    said = lines_of(here(name, option, "1"), name, 64)
    assert said == (f"no such option '{option}'", hint)


USAGE = [
    ("decode", ["-x"], "no such option '-x'"),
    ("decode", ["-n"], "option '-n' requires an argument"),
    ("decode", ["--temp", "abc", "hi"], "^invalid value for '--temp': 'abc' is not a number$"),
    ("decode", ["-n", "abc", "hi"], "^invalid value for '-n': 'abc' is not a whole number$"),
    *((name, ["-q", "--verbose"], "--verbose and --quiet exclude each other") for name in NAMES),
    ("decode", ["--temp", "-1", "hi"], r"invalid temperature: -1.0 is not in \[0, 1e\+06\]"),
    ("sample", ["--temp", "nan"], "invalid temperature: nan"),
    ("sample", ["--top-p", "2"], r"invalid top-p: 2.0 is not in \[0, 1\]"),
    ("sample", ["--top-k", "-3"], "invalid top-k: -3"),
    ("sample", ["--min-p", "1.5"], "invalid min-p"),
    ("sample", ["--repetition-penalty", "0"], "invalid repetition-penalty"),
    *(
        (name, ["--xtc-threshold", "0.2", *more], "^--xtc-threshold needs --xtc-probability$")
        for name, more in (
            ("sample", []),
            ("sample", ["--xtc-probability", "0"]),
            ("decode", ["hi"]),
            ("toast", ["hi"]),
        )
    ),
    ("decode", ["--min-tokens-to-keep", "2", "hi"], "^--min-tokens-to-keep needs --min-p$"),
    ("decode", ["--repeat-last-n", "9", "hi"], "^--repeat-last-n needs --repetition-penalty or --"),
    ("decode", ["-n", "0", "hi"], "0 is not in the range x>=1"),
    ("decode", ["--seed", "-1", "hi"], "-1 is not in the range"),
    ("decode", ["--logit-bias", "x", "hi"], "--logit-bias takes ID=B, not 'x'"),
    ("decode", ["--logit-bias", "1_0=2", "hi"], "--logit-bias takes ID=B, not '1_0=2'"),
    ("decode", ["--logit-bias", "1=2_0", "hi"], "--logit-bias takes ID=B, not '1=2_0'"),
    ("sample", ["--logit-bias", "1=nan"], "invalid logit bias: nan for id 1"),
    ("decode", ["--ban", "4096", "hi"], r"id 4096 is not in \[0, 4095\]"),
    ("decode", ["--device", "tpu", "hi"], "'tpu' is not one of 'auto', 'cpu', 'gpu'"),
    ("decode", ["--dtype", "int8", "hi"], "'int8' is not one of"),
    ("decode", ["--template-arg", "5", "hi"], "--template-arg takes NAME=VALUE, not '5'"),
    ("decode", ["--template-arg", "a=no", "hi"], "a: 'no' is neither true nor false to a template"),
    ("tokenize", ["--template-arg", "a=1", "--template-arg", "a=2", "hi"], "a is given twice"),
    ("tokenize", ["--raw", "--template-arg", "a=1", "hi"], "--raw has no template"),
    ("tokenize", ["--raw", "--tools", "x", "hi"], "--raw has no template"),
    ("tokenize", ["--raw", "--no-generation-prompt", "hi"], "--raw opens no turn"),
    ("tokenize", ["-m", "", "hi"], "-m: an empty name is no model"),
    *(
        (name, [*given, "--tools", "-"], f"^{given[0]} and --tools cannot both be standard input")
        for given in (["--messages", "-"], ["--each-line"])
        for name in ("tokenize", "decode")
    ),
    *(
        (name, [*given, "-"], said)
        for given, said in (
            (["--tools", "-"], "^the prompt and --tools cannot both be standard input"),
            (["--messages", "-"], "^--messages is the whole conversation: no PROMPT"),
            (["-"], "^- is standard input, which can be read only once"),
        )
        for name in ("tokenize", "decode")
    ),
    ("decode", ["--session", "", "hi"], "invalid session name '': it is empty"),
    ("prefill", ["--session", ".x"], "invalid session name '.x'"),
    ("tokenize", ["--session", "-x", "hi"], "invalid session name '-x'"),
    ("decode", ["--gear", "low", "--gear-bits", "9" * 5000 + ",8", "hi"], "is not two numbers"),
    ("tokenize", ["-n3", "hi"], "^-n is only for --truncate here"),
    ("tokenize", ["--count", "--template-only", "hi"], "exclude each other"),
    ("tokenize", ["--count", "--session", "x", "hi"], "^--session is for frames, not with --count"),
    *(
        (
            "tokenize",
            [*option, "--template-only", "hi"],
            f"^{option[0]} is for tokens, not with --t",
        )
        for option in (["--session", "x"], ["--truncate"])
    ),
    ("tokenize", ["--raw", "--system", "x", "hi"], "--raw has no messages"),
    ("decode", ["--messages", "x", "hi"], "--messages is the whole conversation"),
    ("entropy-gear", ["--low", "5", "--high", "2"], "low 5 is not less than high 2"),
    ("entropy-gear", ["--window", "0"], "invalid window: 0"),
    ("detokenize", ["--frames", "--no-newline"], "--no-newline is for text"),
    ("sample", ["extra"], "got unexpected extra argument"),
    ("feed", ["5"], "which run"),
    ("feed", ["--run", "x", "--session", "y", "5"], "exclude each other"),
    ("feed", ["--run", "x", "--ignore-eos", "5"], "--ignore-eos is for what standard input holds"),
    ("decode", ["--require-hit", "hi"], "--require-hit needs"),
    ("decode", ["--top", "3", "hi"], "--top needs --json, which shows them"),
    ("decode", ["--json", "--no-newline", "hi"], "--no-newline is for text, not with --json"),
    # Options of the other way to run.
    ("decode", ["--steps", "3", "hi"], "--steps is for frames, but there are none on stdin"),
    ("decode", ["--greedy", "hi"], "--greedy is for frames"),
    ("decode", ["--force", "x", "hi"], "--force is for frames"),
    ("decode", ["--inline", "hi"], "--inline is for frames"),
]


@pytest.mark.parametrize(("name", "arguments", "message"), USAGE)
def test_usage(name: str, arguments: list[str], message: str) -> None:
    assert re.search(message, lines_of(here(name, *arguments), name, 64)[0])


@pytest.mark.parametrize(
    "flag",
    ["--temp=0", "--temperature=0", "--seed=1", "--session=x", "--raw", "--system=x", "--top-p=1",
     "--ban=1", "--echo", "--stop=x", "--json", "--each-line", "--chunk=8", "--top=3",
     "--ignore-eos", "--fork=x", "--no-newline", "--truncate", "--fail-on-length",
     "--template-arg=a=1", "--tools=x"],
)  # fmt: skip
def test_options_for_text_are_refused_with_frames(flag: str) -> None:
    message, _ = lines_of(here("decode", flag, stdin=STREAM), "decode", 64)
    assert message == f"{flag.split('=')[0]} is for text, but stdin holds frames"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [(["hi"], 64, "stdin holds frames: there is no room for a prompt"),
     (["--greedy", "--force", "x"], 64, "--greedy and --force exclude each other"),
     (["--top=3"], 64, "--top is for text"), (["--force", "nowhere"], 66, "cannot read nowhere")],
)  # fmt: skip
def test_what_fails_before_the_run_travels_too(arguments: list[str], code: int, said: str) -> None:
    """Or those behind it would look for a missing toast-tokenize."""
    done = here("decode", *arguments, stdin=STREAM)
    (error,) = FrameReader(io.BytesIO(done.stdout))
    assert (done.returncode, error.code, error.stage) == (code, code, "toast-decode")
    assert done.stderr.decode().splitlines()[0] == f"toast-decode: {error.message}"
    assert error.message.startswith(said)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [("decode", ["-m", "nope", "hi"], "no such model: nope"),
     ("tokenize", ["-m", "nope", "hi"], "no such model: nope"),
     ("tokenize", ["-m", "nobody/none", "hi"], "no such model: nobody/none is not in the cache"),
     ("tokenize", ["-m", "tests", "hi"], "tests is not a model: no config.json in it"),
     ("decode", ["--messages", "missing.json"], "cannot read missing.json: no such file"),
     ("decode", ["-q", "--fork", "nope", "hi"], "no such session: nope")],
)  # fmt: skip
def test_missing_inputs(toast, name: str, arguments: list[str], message: str) -> None:
    run = toast if "--fork" in arguments else here  # MLX would be started here
    assert lines_of(run(name, *arguments), name, 66)[0].startswith(message)


@pytest.mark.parametrize(
    ("name", "nearest"), [("crmb", "crumb"), ("smal", "small"), ("some/lama", None), ("lost", None)]
)
def test_the_nearest_model(tmp_path: Path, monkeypatch, name: str, nearest: str | None) -> None:
    from toastkit.errors import NoInputError
    from toastkit.model.locate import locate

    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    (tmp_path / "toastkit" / "models" / "lost").mkdir(parents=True)  # no model
    (tmp_path / "toastkit" / "models" / "small.toast").touch()
    with pytest.raises(NoInputError) as caught:
        locate(name)
    assert ("did you mean" in (caught.value.hint or "")) == (nearest is not None)
    assert nearest is None or nearest in caught.value.hint


NO_UTF8 = "is not UTF-8: byte 0x"
DATA = [
    *((name, [], stdin, "empty prompt") for name, stdin in
      (("tokenize", None), ("tokenize", b""), ("tokenize", b"\n\n"), ("decode", None),
       ("decode", b""), ("toast", b""))),
    ("decode", ["-"], b"\n", "empty prompt"),
    ("decode", ["--each-line"], b"\n \n", "no prompts: --each-line"),
    ("tokenize", ["--each-line"], b"", "no prompts: --each-line"),
    # The line that is no prompt is named; blank ones count.
    ("tokenize", ["--each-line"], b"Hi\n\n\xff", "line 3: the prompt is not UTF-8"),
    ("tokenize", ["--each-line"], b"Hi\n\n" + b"a " * 9000, "line 3: the prompt has 9"),
    *((name, [], b"ab\xff", f"the prompt {NO_UTF8}ff at offset 2")
      for name in ("tokenize", "toast")),
    *((name, arguments, None, said) for name in ("decode", "toast") for arguments, said in (
        ([b"un caf\xe9"], f"the prompt {NO_UTF8}e9 at offset 6"),
        (["--stop", "ü".encode() + b"\xff", "hi"], f"--stop {NO_UTF8}ff at offset 2"),
        (["--template-arg", b"a=\xe9", "hi"], f"--template-arg {NO_UTF8}e9 at offset 2"),
        (["--system", b"\xe9", "hi"], f"--system {NO_UTF8}e9 at offset 0"),
    )),
    *((name, [], stdin, said) for name in ("prefill", "sample", "detokenize", "entropy-gear")
      for stdin, said in ((b"", "no frames on input"),
                          (b"plain text\n", "cannot read frame 1 at byte 0: "))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "stdin", "message"), DATA)
def test_bad_data(toast, name: str, arguments: list, stdin: bytes | None, message: str) -> None:
    run = toast if name == "decode" and stdin else here  # MLX would be started here
    done = run(name, *map(os.fsdecode, arguments), stdin=stdin)
    said, hint = lines_of(done, name, 65)
    assert said.startswith(message)
    assert said != "no frames on input" or "toast-tokenize" in hint
    assert said != "empty prompt" or (stdin == b"") == ("ended without a byte" in hint)


@pytest.mark.parametrize(
    ("name", "words", "stdin"),
    [
        ("decode", ["--bogus"], b"frames"), ("decode", ["--gear", "x"], b"frames"),
        ("decode", ["--greedy", "--force", "x"], b"frames"),
        ("decode", ["--json"], b"frames"), ("frames", ["--slice", "5:2"], b"frames"),
        ("decode", ["--bogus"], b"text"), ("decode", ["--bogus"], b""),
        ("frames", ["--slice", "5:2", "--json"], b"frames"), ("frames", ["--bogus"], b'{"t": 1}'),
    ],
)  # fmt: skip
def test_a_refusal_amid_frames_is_sent_on(toast, name: str, words: list[str], stdin: bytes) -> None:
    """So that the stages behind it end with its code, and say nothing. Text gets none."""
    sent = stdin == b"frames" and not (name == "frames" and "--json" in words)
    if stdin == b"frames":
        stdin = toast("tokenize", "hi").stdout
    done = toast(name, *words, stdin=stdin)
    message, _ = lines_of(done, name, 64)
    found = list(FrameReader(io.BytesIO(done.stdout)))
    assert [(error.code, error.message) for error in found] == [(64, message)] * sent


def test_the_line_that_the_template_refuses_is_named(toast, tmp_path: Path) -> None:
    crumb = locate("crumb")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes(crumb.read(name) or b"")
    refuses = "{% if messages[0].content == 'b' %}{{ raise_exception('no b') }}{% endif %}x"
    (tmp_path / "chat_template.jinja").write_text(refuses)
    for what in ("--template-only", "--count"):
        done = toast("tokenize", "--each-line", what, "-m", str(tmp_path), stdin=b"a\nb\n")
        assert done.returncode == 65 and b"no b" in done.stderr
        assert done.stderr.startswith(b"toast-tokenize: line 2: ")


def test_a_traceback_only_on_demand() -> None:
    done = here("tokenize", "--debug", "-m", "nope", "hi")
    assert done.returncode == 66 and b"Traceback" in done.stderr
    assert done.stderr.endswith(b"shows\n")


@pytest.mark.parametrize(("value", "frames"), [("1", False), ("yes", False), ("no", True)])
def test_text_that_a_variable_asks_for_has_no_error_frame(monkeypatch, value, frames) -> None:
    monkeypatch.setenv("TOAST_COUNT", value)
    assert bool(here("tokenize", "").stdout) == frames


def test_a_directory_that_was_removed(tmp_path: Path) -> None:
    script = 'cd "$0" && rmdir "$0" && exec "$@"'
    words = [str(tmp_path), executable("feed"), "--session", "./s", "5"]
    done = subprocess.run(["sh", "-c", script, *words], stderr=subprocess.PIPE)
    message = b"toast-feed: the current directory: no such file or directory\n"
    assert (done.returncode, done.stderr) == (66, message)


def test_ctrl_c_while_it_imports(tmp_path: Path) -> None:
    """Nobody can have caught it yet. Another's process that imports a command is left as it is."""
    interrupting = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    (tmp_path / "click.py").write_text(interrupting)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    for name, caught in (("toast-frames", b""), ("another", b"KeyboardInterrupt")):
        code = f"import sys; sys.argv[0] = '/x/{name}'; import toastkit.commands.frames"
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True)
        assert done.returncode == -signal.SIGINT
        assert caught in done.stderr and bool(caught) == bool(done.stderr)


def test_version() -> None:
    for name in NAMES:
        done = here(name, "--version")
        assert done.returncode == 0
        assert done.stdout.decode() == f"{program_name(name)} {__version__}\n"


def options() -> list[tuple[str, object]]:
    found = []
    for name in NAMES:
        module = import_module(f"toastkit.commands.{name.replace('-', '_')}")
        command = getattr(module, name.replace("-", "_"))
        for one in (command, *getattr(command, "commands", {}).values()):
            found += [(name, p) for p in one.params if p.param_type_name == "option"]
    return found


def test_variables_are_called_like_the_options() -> None:
    """TOAST_ and the longest name in capitals, as the manual says; but for what has to be typed."""
    import click

    wrong = []
    for name, option in options():
        longest = max(option.opts, key=len).lstrip("-").replace("-", "_").upper()
        context = click.Context(click.Command(name), auto_envvar_prefix="TOAST")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(f"TOAST_{longest}", "1")
            found = option.resolve_envvar_value(context) == "1"
            if option.expose_value and found != option.allow_from_autoenv:
                wrong.append(f"{name}: TOAST_{longest}")
    assert not wrong


@pytest.mark.parametrize(
    ("given", "number"),
    [(" 5 ", 5), ("+5", 5), ("1_0", None), ("\uff15", None), ("\u0665", None), ("5.", None),
     ("0x5", None), ("9" * 5000, None), ("", None)],
)  # fmt: skip
def test_numbers_are_digits(given: str, number: int | None) -> None:
    """Not what Python takes for them; and no option is of a type that asks Python."""
    import click

    from toastkit.commands.sizes import Float, Integer, IntegerRange

    for kind, high in ((Integer(), None), (IntegerRange(0, 9), None), (Float(), 5.0)):
        read = high if given == "5." else number
        if read is None:
            with pytest.raises(click.BadParameter, match="is not a (whole )?number") as said:
                kind.convert(given, None, None)
            assert len(said.value.message) < 100
        else:
            assert kind.convert(given, None, None) == read
    kinds = {type(option.type).__name__ for _, option in options()}
    assert not kinds & {"IntRange", "IntParamType", "FloatRange", "FloatParamType"}
