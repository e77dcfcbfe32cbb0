"""toast-model plan as a person runs it: the table, JSON, a bandwidth, what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import Toast


def told(done: subprocess.CompletedProcess) -> list[str]:
    """The lines of a run that went well."""
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout.decode().splitlines()


def planned(toast: Toast, *arguments: object, env: dict | None = None) -> dict:
    (line,) = told(toast("model", "plan", "--gears", "--json", *arguments, env=env))
    return json.loads(line)


def test_the_table(toast: Toast) -> None:
    head, *rows, share, shift = told(toast("model", "plan", "--gears", "--dtype", "bfloat16"))
    assert head.split() == ["GEAR", "BITS", "DEVICE", "MANAGED", "TOKEN", "RATIO", "SPEEDUP"]
    assert [row.split()[:2] for row in rows] == [["high", "16"], ["mid", "8"], ["low", "4"]]
    assert {len(line) for line in (head, *rows)} == {len(head)}  # all flush right
    assert rows[0].endswith("15.4 MB  3.16 MB  8.36 MB  1.000     1.00")
    assert rows[2].endswith("13.2 MB   878 kB  6.07 MB  0.727     1.38")
    assert share.startswith("26 matrices, 1.58 M parameters change gear: 37.8% of the bytes of a ")
    assert share.endswith(" token, with weights in bfloat16")
    assert shift == "the first shift moves 4.04 MB into low, 4.83 MB into mid, 6.33 MB into high"


def test_a_bandwidth_tells_times(toast: Toast) -> None:
    arguments = ["--gear-scope", "all", "--bandwidth", "10G"]
    head, *rows, _, _ = told(toast("model", "plan", "--gears", *arguments))
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


def test_json_has_what_the_table_has(toast: Toast) -> None:
    found = planned(toast, "crumb", "--gear-bits", "2,6", env={"TOAST_DTYPE": "float16"})
    assert list(found) == [
        "name", "scope", "dtype", "modules", "parameters", "share", "gears", "note", "bandwidth",
    ]  # fmt: skip
    assert (found["name"], found["scope"], found["dtype"]) == ("crumb", "attention", "float16")
    assert (found["note"], found["bandwidth"]) == (None, None)
    assert [gear["bits"] for gear in found["gears"]] == [16, 6, 2]
    assert all(isinstance(gear["token"], int) for gear in found["gears"])
    again = planned(toast, "crumb", env={"TOAST_GEAR_SCOPE": "all", "TOAST_GEAR_BITS": "4,6"})
    assert (again["scope"], again["gears"][1]["bits"]) == ("all", 6)
    assert planned(toast, env={"TOAST_GEARS": "low,mid"}) == planned(toast)


def test_a_quantised_model_stays_in_high_gear(toast: Toast, tmp_path: Path) -> None:
    path = tmp_path / "quantised.toast"
    assert toast("model", "bake", "crumb", "--quant", "4", "-o", path).returncode == 0
    lines = told(toast("model", "plan", path, "--gears", "--bandwidth", "1G"))
    assert [re.split(r"\s+", line)[0] for line in lines[:2]] == ["GEAR", "high"]
    assert lines[2:] == ["it is quantised already: gears are told, and nothing is replaced"]
    assert planned(toast, path)["share"] == 0


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 64, "nothing to plan: give --gears"),
        (["--gears", "--gear-bits", "8,4"], 64, "no such gear bits: 8,4 (each of 2, 4, 6, 8; "),
        (["--gears", "--gear-bits", "four"], 64, "'four' is not two numbers, such as 4,8"),
        (["--gears", "--gear-scope", "mlp"], 64, "'mlp' is not one of "),
        (["--gears", "--bandwidth", "0"], 64, "'0' is less than 1 bytes"),
        (["--gears", "nope"], 66, "no such model: nope"),
        (["--gears", "org/name"], 66, "no such model here: org/name"),
    ],
)
def test_what_it_refuses(toast: Toast, arguments: list[str], code: int, said: str) -> None:
    done = toast("model", "plan", *arguments)
    first, *hint = done.stderr.decode().splitlines()
    assert (done.returncode, done.stdout) == (code, b"")
    assert first.startswith("toast-model: ") and said in first and len(hint) <= 1
