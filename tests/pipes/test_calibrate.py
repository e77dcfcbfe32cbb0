"""toast-entropy-gear --calibrate and --explain as they are used, and what stored thresholds do."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.native_library import own_cache
from tests.pipes.pipelines import begin, json_lines
from tests.unit.test_cli import lines_of
from toastkit.descriptors import unread_bytes
from toastkit.gears import thresholds
from toastkit.gears.calibration import Thresholds
from toastkit.model.config import fingerprint
from toastkit.model.locate import locate

PROMPT = "Tell me a story."
MARK = fingerprint(locate("crumb"))
# Far from the defaults, so that it shows: all that is not certain is high.
TIGHT = Thresholds(0.001, 0.002, "prompts", 81, 4096)
CALIBRATED = "thresholds 0.00 and 0.00 bits: calibrated (prompts, 81 samples)"
DEFAULTS = "thresholds 1.44 and 2.80 bits: defaults for 32,768 ids, scaled to 4,096"


@pytest.fixture
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stored thresholds of this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(own_cache(tmp_path)))
    return tmp_path


@pytest.fixture(scope="module")
def frames(pipeline) -> bytes:
    """A greedy run of 12 tokens, its logits in the stream."""
    stages = (
        ["tokenize", PROMPT], ["prefill"], ["decode", "--greedy", "-n", "12", "--inline"],
    )  # fmt: skip
    done = pipeline(*stages)
    assert done.codes == [0, 0, 0], done.errors
    return done.out


@pytest.fixture
def calibrate(toast, cache_home: Path) -> Callable[..., subprocess.CompletedProcess]:
    """calibrate(*arguments, stdin=None): toast-entropy-gear --calibrate."""

    def run(*arguments: str, stdin: bytes | None = None) -> subprocess.CompletedProcess:
        return toast("entropy-gear", "--calibrate", *arguments, stdin=stdin)

    return run


def gears_of(out: bytes, kind: str | None = None) -> list[str]:
    """The gears in JSON lines: of frames of a kind, or of the tokens that toast-decode writes."""
    lines = json_lines(out)
    return [line["gear"] for line in lines if "gear" in line and line.get("k") == kind]


# ------------------------------------------------------------------------------------- calibration


def test_the_built_in_prompts(calibrate, cache_home: Path) -> None:
    done = calibrate("prompts", "--explain")
    stored = thresholds.load(MARK)
    assert done.returncode == 0 and stored is not None and stored.strategy == "prompts"
    assert done.stdout.decode() == (
        f"crumb: low {stored.low:.2f}, high {stored.high:.2f} bits "
        f"(prompts, {stored.samples} samples)\n"
    )
    assert 0 < stored.low < stored.high < 12 and 20 < stored.samples <= 3 * 48
    answers, rule, where = done.stderr.decode().splitlines()
    quantiles = re.findall(r"p(\d+) ([\d.]+)", answers)
    assert [int(percent) for percent, _ in quantiles] == [10, 30, 50, 60, 80, 90]
    assert f"answers: {stored.samples} entropies" in answers
    assert dict(quantiles)["50"] == f"{stored.low:.2f}" and "rule: low is the median" in rule
    assert where == f"toast-entropy-gear: stored in {thresholds.path(MARK)}"
    assert thresholds.path(MARK).is_relative_to(cache_home)


def test_a_prompt_with_and_without_a_template(calibrate, toast) -> None:
    """Its tokens are those of toast-tokenize; one entropy each."""
    text = "What is 24 * 17? Show every step.\n"
    for flags in ([], ["--raw"]):
        count = toast("tokenize", "--count", *flags, stdin=text.encode()).stdout.decode().strip()
        done = calibrate("prefill", "--explain", *flags, stdin=text.encode())
        assert f"prompt: {count} entropies" in done.stderr.decode(), done.stderr
        stored = thresholds.load(MARK)
        assert stored is not None and stored.strategy == "prefill"
        assert 5 <= stored.samples <= int(count) and stored.high <= 0.12 * 12
        assert f"high {stored.high:.2f} bits (prefill, " in done.stdout.decode()


def test_prompts_of_a_file(calibrate, tmp_path: Path) -> None:
    """For crumb, a question that it knows is the harder one: that is said, and the file stored."""
    file = tmp_path / "prompts.json"
    file.write_text('\ufeff{"easy": ["Describe a harbour."], "hard": ["Who are you?"]}')
    done = calibrate(str(file))
    stored = thresholds.load(MARK)
    assert stored is not None and stored.overlap and stored.strategy == "file"
    assert f"(file, {stored.samples} samples)" in done.stdout.decode()
    assert done.stderr == (
        b"toast-entropy-gear: warning: the hard prompts are no harder than the easy ones for this "
        b"model\n"
    )


BAD = {
    "no model": (["prompts", "-m", "nosuch"], b"", 66, "no such model: nosuch"),
    "empty stdin": (["prefill"], b"", 65, "empty prompt"),
    "blank stdin": (["prefill"], b"\n\n", 65, "empty prompt"),
    "no text": (["prefill"], b"\xff\xfe", 65, "the prompt is not UTF-8"),
    "no file": (["promts"], b"", 66, "cannot read promts: no such file"),
    "a directory": (["."], b"", 66, "cannot read ."),
    "no JSON": (["-"], b"easy", 65, "cannot read calibration prompts: not JSON"),
    "no UTF-8": (
        ["-"],
        b"\xef\xbb\xbfa\xff",
        65,
        "cannot read calibration prompts: not UTF-8: byte 0xff",
    ),  # fmt: skip
    "frames": (["prompts", "--low", "1"], b"", 64, "--low is for frames"),
    "raw": (["prompts", "--raw"], b"", 64, "--raw is for --calibrate prefill"),
    "nothing to compute": (["off", "--threads", "1"], b"", 64, "--threads is for measuring"),
    "no name": ([""], b"", 66, "cannot read '': no such file"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_calibrated(calibrate, name: str) -> None:
    """One line and perhaps a hint on stderr; nothing on stdout, where no stage waits for frames."""
    arguments, stdin, code, message = BAD[name]
    done = calibrate(*arguments, stdin=stdin)
    said, hint = lines_of(done, "entropy-gear", code)
    assert said.startswith(message) and not done.stdout
    assert hint == "did you mean prompts?" or name != "no file"
    assert thresholds.load(MARK) is None


def test_too_short_a_prompt(calibrate) -> None:
    done = calibrate("prefill", "--raw", stdin=b"Hi")
    assert (done.returncode, done.stdout) == (65, b"")
    assert b"a prompt needs 5 positive entropies" in done.stderr


def test_options_of_a_calibration_need_one(toast) -> None:
    for option in (["-m", "crumb"], ["--raw"], ["--device", "cpu"], ["--dtype", "float32"]):
        done = toast("entropy-gear", *option, stdin=b"")
        assert done.returncode == 64 and b" needs --calibrate\n" in done.stderr


def test_an_interrupted_calibration_stores_nothing(cache_home: Path) -> None:
    thresholds.save(MARK, TIGHT)
    process = begin("entropy-gear", "--calibrate", "prefill", stdin=subprocess.PIPE)
    process.stdin.write(b"The first half of a prompt ")
    process.stdin.flush()
    deadline = time.monotonic() + 60
    while unread_bytes(process.stdin.fileno()):  # then it catches signals, and waits for the rest
        assert time.monotonic() < deadline, "it never read"
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"")
    assert thresholds.load(MARK) == TIGHT


# --------------------------------------------------------------------------------- what it is for


def test_stored_thresholds_are_followed(toast, frames: bytes, cache_home: Path) -> None:
    """In the pipeline and in one process, and in neither with --no-calibration."""
    plain = toast("entropy-gear", "--explain", stdin=frames)
    thresholds.save(MARK, TIGHT)
    tight = toast("entropy-gear", "--explain", stdin=frames)
    aside = toast("entropy-gear", "--explain", "--no-calibration", stdin=frames)
    assert f"toast-entropy-gear: {DEFAULTS}\n" in plain.stderr.decode()
    assert f"toast-entropy-gear: {CALIBRATED}\n" in tight.stderr.decode()
    assert (aside.stdout, aside.stderr) == (plain.stdout, plain.stderr) != (tight.stdout, b"")
    shown = toast("frames", "--json", "--arrays", "none", stdin=tight.stdout)
    pipeline_gears = gears_of(shown.stdout, "logits")
    assert pipeline_gears[:4] == ["low"] * 4 and set(pipeline_gears[4:]) == {"high"}

    arguments = ["--gear", "auto", "--json", "--temp", "0", "-n", "12", "--ignore-eos", PROMPT]
    assert gears_of(toast("decode", *arguments).stdout) == pipeline_gears
    aside_gears = gears_of(toast("decode", "--no-calibration", *arguments).stdout)
    assert len(aside_gears) == 12 and "high" not in aside_gears[:5]


def test_thresholds_given_by_hand_come_first(toast, frames: bytes, cache_home: Path) -> None:
    thresholds.save(MARK, TIGHT)
    done = toast("entropy-gear", "-q", "--explain", "--low", "2", stdin=frames)
    first, prompt, *shifts, last = done.stderr.decode().splitlines()
    assert first == (
        "toast-entropy-gear: thresholds 1.60 and 2.80 bits: given for 32,768 ids, scaled to 4,096"
    )
    assert prompt == (
        "toast-entropy-gear: prompt: score 0.024 = 2 x 0 math + 1.5 x 0 code "
        "+ 0.3 x min(4/50, 3) + 0 -> low"
    )
    summary = re.search(
        r"gears: low (\d+), mid (\d+), high (\d+) of 12 tokens; (\d+) shifts?; "
        r"mean entropy \d\.\d\d bits$",
        last,
    )
    *spread, moved = map(int, summary.groups())
    assert sum(spread) == 12 and moved == len(shifts)
    assert all(re.search(r": position \d+: (low|mid|high), ", line) for line in shifts)


def test_broken_thresholds(toast, calibrate, frames: bytes, cache_home: Path) -> None:
    """One line, until they are removed; --no-calibration does without them."""
    file = thresholds.save(MARK, TIGHT)
    file.write_text("{}")
    for done in (
        toast("entropy-gear", stdin=frames),
        toast("decode", "--gear", "auto", "-n", "2", "Hi"),
    ):
        message, hint = done.stderr.decode().splitlines()
        assert done.returncode == 65 and f"cannot read thresholds {file}: " in message
        assert hint == "  hint: remove it, or calibrate again"
    assert toast("entropy-gear", "--no-calibration", stdin=frames).returncode == 0
    done = calibrate("off", "--explain")
    assert (done.returncode, done.stdout) == (0, b"crumb: thresholds removed\n")
    assert done.stderr.decode() == f"toast-entropy-gear: removed {file}\n" and not file.exists()
    assert calibrate("off").stdout == b"crumb: no thresholds are stored\n"
    assert toast("entropy-gear", stdin=frames).returncode == 0
    file.mkdir()
    done = calibrate("off")
    assert done.returncode == 73 and f"cannot remove {file}: " in done.stderr.decode()
