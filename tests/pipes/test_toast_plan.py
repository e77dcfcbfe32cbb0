"""toast-model plan as a person runs it: what fits, the times, the table of the gears, JSON, a
bandwidth, what it refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import Toast
from tests.model.checkpoints import SIZES, write_random
from tests.model.published import write_published
from tests.pipes.conftest import MEASURED
from tests.unit.test_cli import lines_of
from toastkit.commands import plan_residency
from toastkit.commands.model import model
from toastkit.engine import calibrating
from toastkit.residency.calibration import SCHEMA_VERSION

GEARS = ("model", "plan", "--gears", "--no-calibration")
TABLE = 8  # lines before it, and of what is in slots as many more:
SLOTS = 3


@pytest.fixture(autouse=True)
def not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests have measured is not here. Sizes are those of float32."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "not measured"))
    monkeypatch.setenv("TOAST_NATIVE", "off")


def told(done: subprocess.CompletedProcess) -> list[str]:
    """The lines of a run that went well."""
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout.decode().splitlines()


def planned(toast: Toast, *arguments: object, env: dict | None = None) -> dict:
    (line,) = told(toast(*GEARS, "--json", *arguments, env=env))
    return json.loads(line)


def fits(toast: Toast, *arguments: object, env: dict | None = None) -> dict:
    """What is said of the residency, and no times."""
    (line,) = told(toast("model", "plan", "--no-calibration", "--json", *arguments, env=env))
    return json.loads(line)["residency"]


# --------------------------------------------------------------------------------- what fits, times


def said(lines: list[str]) -> dict[str, str]:
    return {line[:18].strip(): line[19:] for line in lines}


def test_what_fits(toast: Toast, tmp_path: Path) -> None:
    arguments = ("model", "plan", "--mem", "15M", "--context", "600", "--no-calibration")
    found = said(told(toast(*arguments)))
    assert list(found) == [
        "model", "memory", "outside layers", "layers", "cache", "resident", "expert slots",
        "missing experts", "on the device",
    ]  # fmt: skip
    assert found["memory"].startswith("15.7 MB given, ") and found["cache"].endswith(" 600 tokens")
    assert found["resident"] == "2 of 8 layers, interleaved; the others are read as they run"
    assert found["layers"] == "8, 8.86 MB, but for experts"
    assert found["expert slots"] == "4 of 16 in each of 8 layers, 4.72 MB: --expert-slots 4"
    assert found["missing experts"] == "147 kB each; a token chooses 4 in a layer"
    all_stay = told(toast("model", "plan", "--no-calibration"))
    assert "all 8 layers" in all_stay[5] and "available now" in all_stay[1]
    llama = write_published(tmp_path / "llama", "llama")
    one = ("--mem", "5M", "--context", "1", "--no-calibration")
    dense = said(told(toast("model", "plan", *one, llama)))
    assert dense["cache"].endswith(" for 1 token")
    assert list(dense) == [name for name in found if "experts" not in name and "slot" not in name]


def test_as_many_stay_as_it_says(toast: Toast) -> None:
    """With --resident SIZE and --expert-slots auto, and the number of a refusal is one that
    works."""
    ask = ("decode", "-n", "2", "--json", "--no-daemon", "--expert-slots", "auto", "Hi")
    for size in ("14M", "15M", "24M", "80M"):
        end = json.loads(told(toast(*ask, "--resident", size))[-1])
        for context in ((), ("--context", "10")):  # no run keeps less room than without
            found = fits(toast, "--mem", size, *context)
            assert found["resident"] == end["residency"]["resident"]
            slots = found["slots"] or {"slots": 16, "experts": 16}
            assert (slots["slots"], slots["experts"]) == (end["slots"]["slots"], 16)
    done = toast("model", "plan", "--mem", "2M")
    assert (done.returncode, done.stdout) == (64, b"")
    found = re.search(rb"--mem 2M: crumb needs ([0-9]+)M at least, with 1,024 tokens", done.stderr)
    assert found is not None
    size = f"{int(found[1])}M"
    assert fits(toast, "--mem", size)["resident"] == 0
    assert toast(*ask[:-3], "Hi", "--resident", size).returncode == 0


def test_slots_are_as_many_as_fit(toast: Toast, tmp_path: Path) -> None:
    """Beside all else, and a context that must fit; a slot in low gear is smaller. Of a model with
    many layers the least slots need less than two whole layers; of one with few layers more, and
    then they are done without."""
    found = fits(toast, "--mem", "24M")
    slots, experts = found["slots"], 16
    assert slots["size"] == slots["slots"] * 8 * slots["miss"]
    beside = found["outside"] - slots["size"] + found["layers_size"] + found["reserve"]
    room = found["memory"] - beside
    assert slots["slots"] == room // (8 * slots["miss"]) and slots["room"] == room
    longer = fits(toast, "--mem", "24M", "--context", "2000")
    assert longer["resident"] == 8 and longer["filled"] == 8
    assert longer["slots"]["slots"] < slots["slots"]
    geared = planned(toast, "--mem", "18M", "--gear-scope", "all")["residency"]
    assert geared["slots"]["slots"] == 4 < geared["geared_slots"]["mid"]
    assert geared["geared_slots"]["low"] == experts
    attention = planned(toast, "--mem", "18M")["residency"]
    assert attention["geared_slots"] == {"mid": 4, "low": 4}
    olmoe = write_published(tmp_path / "olmoe", "olmoe")
    done = toast("model", "plan", olmoe, "--mem", "1K")
    assert done.returncode == 64 and b"olmoe needs 3M at least" in done.stderr
    assert b"hint: that is with 2 slots for experts in each layer\n" in done.stderr
    few = fits(toast, olmoe, "--mem", "3M")
    assert few["slots"]["slots"] in (2, 3) and few["slots"]["experts"] == 8


def test_a_model_that_cannot_run_has_no_plan(toast: Toast, tmp_path: Path) -> None:
    config = write_published(tmp_path / "olmoe", "olmoe") / "config.json"
    config.write_text(config.read_text().replace('_per_tok": 2', '_per_tok": null'))
    done = toast("model", "plan", config.parent)
    assert done.returncode == 65 and b"mlx_lm cannot run a model with this config" in done.stderr


def test_layers_that_cannot_be_streamed_have_no_times(toast: Toast, tmp_path: Path) -> None:
    config = {"model_type": "iquestloopcoder", **SIZES}
    done = toast("model", "plan", write_random(tmp_path / "loop", config))
    warned = b"toast-model: warning: no times are told: no layer can be streamed\n"
    assert (done.returncode, done.stderr) == (0, warned)


def test_times_are_measured_once(toast: Toast, tmp_path: Path) -> None:
    """On a device of one core crumb takes 18 s of processor, and this model 2."""
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    model = write_published(tmp_path / "olmoe", "olmoe")
    arguments = ("model", "plan", "--json", "--mem", "3M", model)
    first = toast(*arguments, env=env)
    assert (first.returncode, first.stderr) == (
        0, b"toast-model: measuring olmoe on this device, once\n",
    )  # fmt: skip
    (file,) = (tmp_path / "cache" / "toastkit" / "residency").iterdir()
    assert os.stat(file).st_mode & 0o777 == 0o600
    (again,) = told(toast(*arguments, env=env))
    found = json.loads(again)["residency"]["prediction"]
    assert json.loads(first.stdout)["residency"]["prediction"] == found
    assert found["tokens_per_second"] == pytest.approx(1 / found["token_seconds"])
    assert found["prompt_tokens"] == 512 and found["prompt_tokens_per_second"] > 0
    slow, quick = found["token_seconds"], found["computing_seconds"]
    assert max(found["reading_seconds"], quick) <= slow * 1.001
    missed = found["missed"]
    assert 0 < missed["tokens_per_second"] < found["tokens_per_second"]
    assert missed["prompt_seconds"] > found["prompt_seconds"]


def test_times_are_told(monkeypatch, capsys) -> None:
    monkeypatch.setattr(calibrating, "measure", lambda opened, tell: MEASURED)
    model.main(["plan", "--mem", "18M"], standalone_mode=False)
    *_, decode, prefill = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"decode +[0-9.]+ to [0-9.]+ tokens a second: all experts missing, read from cached files, "
        r"to none; .* of computing for each",
        decode,
    )
    assert re.fullmatch(r"prefill +[0-9.]+ to [0-9.]+ tokens a second, a prompt of 1,024", prefill)
    model.main(["plan", "--mem", "80M"], standalone_mode=False)
    *_, decode, prefill = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"decode +[0-9.]+ tokens a second", decode)


@pytest.mark.parametrize(
    ("number", "told"),
    [(0.4351, "0.435"), (12.34, "12.3"), (4462.0, "4,460"), (1.5e6, "1,500,000")],
)
def test_speeds_have_three_digits(number: float, told: str) -> None:
    assert plan_residency._three_digits(number) == told


def test_they_are_measured_anew(monkeypatch, capsys) -> None:
    """Where the file is broken, and where somebody says so; measuring takes no time here."""
    monkeypatch.setattr(calibrating, "measure", lambda opened, tell: MEASURED)

    def measures(*flags: str) -> bool:
        model.main(["plan", "--json", *flags], standalone_mode=False)
        out, said = capsys.readouterr()
        predicted = json.loads(out)["residency"]["prediction"]
        assert (predicted is None) == ("--no-calibration" in flags)
        return "measuring crumb on this device" in said

    assert measures() and not measures()
    assert measures("--calibrate") and not measures()
    (file,) = Path(os.environ["XDG_CACHE_HOME"], "toastkit", "residency").iterdir()
    file.write_text("{")  # broken: as if there were none
    assert not measures("--no-calibration") and measures()
    assert json.loads(file.read_text())["schema"] == SCHEMA_VERSION


# --------------------------------------------------------------------------------------- the gears


def test_the_table(toast: Toast) -> None:
    lines = told(toast(*GEARS, "--mem", "14M", "--context", "100"))
    head, *rows, share, shift = lines[TABLE + SLOTS + 1 :]
    assert lines[TABLE + SLOTS] == ""
    assert re.search(r"resident in gears +\d in mid gear, \d in low gear", lines[9])
    assert re.search(r"slots in gears +\d in mid gear, \d in low gear", lines[10])
    assert head.split() == ["GEAR", "BITS", "DEVICE", "MANAGED", "TOKEN", "RATIO", "SPEEDUP"]
    assert [row.split()[:2] for row in rows] == [["high", "32"], ["mid", "8"], ["low", "4"]]
    assert {len(line) for line in (head, *rows)} == {len(head)}  # all flush right
    assert rows[0].endswith("30.9 MB  6.33 MB  16.7 MB  1.000     1.00")
    assert rows[2].endswith("25.5 MB   964 kB  11.4 MB  0.679     1.47")
    assert share.startswith("26 matrices, 1.58 M parameters change gear: 37.8% of the bytes of a ")
    assert share.endswith(" token, with weights in float32")
    assert shift == "the first shift moves 7.29 MB into low, 8.08 MB into mid, 9.49 MB into high"


def test_a_bandwidth_tells_times(toast: Toast) -> None:
    arguments = ["--gear-scope", "all", "--bandwidth", "10G"]
    head, *rows, _, _ = told(toast(*GEARS, *arguments))[TABLE + 1 :]
    assert head.split()[-2:] == ["SECONDS", "BREAK-EVEN"]
    assert rows[0].split()[-1] == "-"
    found = planned(toast, *arguments)
    assert found["bandwidth"] == 10 << 30
    for row, gear in zip(rows, found["gears"], strict=True):
        assert gear["seconds"] == gear["token"] / (10 << 30)
        assert float(row.split()[-2]) == pytest.approx(gear["seconds"], rel=1e-2)
    high, mid, low = found["gears"]
    assert high["break_even_tokens"] is None
    for gear in (mid, low):
        tokens = gear["shift"] / (high["token"] - gear["token"])
        assert gear["break_even_tokens"] == pytest.approx(tokens)


def test_json_has_what_the_table_has(toast: Toast, tmp_path: Path) -> None:
    llama = write_published(tmp_path / "llama", "llama")
    found = planned(toast, llama, "--gear-bits", "2,6", env={"TOAST_DTYPE": "float16"})
    assert list(found) == [
        "name", "scope", "dtype", "narrow", "modules", "parameters", "share", "gears", "note",
        "bandwidth", "residency",
    ]  # fmt: skip
    assert (found["name"], found["scope"], found["dtype"]) == (str(llama), "attention", "float16")
    assert (found["note"], found["bandwidth"]) == (None, None)
    assert [gear["bits"] for gear in found["gears"]] == [16, 6, 2]
    assert all(isinstance(gear["token"], int) for gear in found["gears"])
    again = planned(toast, "crumb", env={"TOAST_GEAR_SCOPE": "all", "TOAST_GEAR_BITS": "4,6"})
    assert (again["scope"], again["gears"][1]["bits"]) == ("all", 6)
    size = ("--mem", "20M")
    assert planned(toast, *size, env={"TOAST_GEARS": "low,mid"}) == planned(toast, *size)


def test_a_quantised_model_stays_in_high_gear(toast: Toast, tmp_path: Path) -> None:
    path = tmp_path / "quantised.toast"
    assert toast("model", "bake", "crumb", "--quant", "4", "-o", path).returncode == 0
    lines = told(toast(*GEARS, path, "--bandwidth", "1G"))[TABLE:]
    assert [re.split(r"\s+", line)[0] for line in lines[:2]] == ["GEAR", "high"]
    assert lines[2:] == ["it is quantised already: gears are told, and nothing is replaced"]
    assert planned(toast, path)["share"] == 0
    # Nor do the layers of one whose attention is in 16 bits: it is quantised all the same.
    done = toast(*GEARS, write_published(tmp_path / "gpt_oss", "gpt_oss"), "--gear-scope", "all")
    assert "in gears" not in done.stdout.decode() and done.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--bandwidth", "1G"], 64, "--bandwidth needs --gears"),
        (["--gear-scope", "all"], 64, "--gear-scope needs --gears"),
        (["--calibrate", "--no-calibration"], 64, "exclude each other"),
        (["--mem", "1M", "--priority", "max-context"], 64, "--mem 1M: crumb needs "),
        (["--mem", "some"], 64, "'some' is not a size"),
        (["--dtype", "bfloat16"], 64, "MLX computes experts in float32 only"),
        (["--context", "0"], 64, "0 is not in the range"),
        (["--context", "1000000"], 64, "--context 1000000: crumb reads 8,192"),
        (["--gears", "--gear-bits", "8,4"], 64, "no such gear bits: 8,4 (each of 2, 4, 6, 8; "),
        (["--gears", "--gear-bits", "four"], 64, "'four' is not two numbers, such as 4,8"),
        (["--gears", "--gear-scope", "mlp"], 64, "'mlp' is not one of "),
        (["--gears", "--bandwidth", "0"], 64, "'0' is less than 1B"),
        (["--gears", "nope"], 66, "no such model: nope"),
        (["--gears", "org/name"], 66, "no such model here: org/name"),
    ],
)
def test_what_it_refuses(toast: Toast, arguments: list[str], code: int, said: str) -> None:
    done = toast("model", "plan", *arguments)
    assert said in lines_of(done, "model", code)[0] and not done.stdout
