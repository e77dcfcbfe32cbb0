"""--resident with the real executables: what is refused, and daemons with settings of their own."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import pytest

from tests.daemons import Daemon

ASKED = ["--temp", "0", "-n", "8", "Who are you?"]
NAMES = ["decode", "prefill", "toast", "toasted", "perplexity"]


REFUSED = (
    (["--resident", "101%"], "'101%' is more than 100%"),
    (["--resident", "-1"], "'-1' is not all, auto, a number of layers, a share"),
    (["--resident", "1.5"], "'1.5' is not all, auto"),
    (["--resident="], "'' is not all, auto"),
    (["--resident", "auto", "--priority", "fast"], "'fast' is not one of"),
    (["--placement", "last"], "--placement needs a --resident other than all"),
    (["--resident", "3", "--priority", "balanced"], "--priority is for --resident auto"),
)


@pytest.mark.parametrize("name", NAMES)
def test_refusals(refuses, name: str) -> None:
    refuses(name, REFUSED)


def test_an_action_has_no_residency(toast) -> None:
    done = toast("toasted", "--resident", "3", "status")
    assert done.returncode == 64
    assert b"--resident is for the daemon, not for an action" in done.stderr


# ----------------------------------------------------------------------------------------- daemons


@pytest.fixture(scope="module")
def streaming(private_home) -> Iterator[Daemon]:
    with Daemon("crumb", "--resident", "50%", "--placement", "last") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def whole(private_home) -> Iterator[Daemon]:
    with Daemon("crumb") as daemon:
        yield daemon


SAME = ["--resident", "50%", "--placement", "last"]
HAS = "50% --placement last"


def test_a_daemon_with_the_same_settings_is_used(streaming: Daemon, whole: Daemon) -> None:
    for daemon, flags in ((streaming, SAME), (whole, ["--resident", "all"])):
        for name in ("decode", "toast"):
            done = daemon.toast(name, "-v", *flags, *ASKED)
            assert done.returncode == 0, done.stderr
            assert f"daemon at {daemon.socket}\n" in done.stderr.decode()
    status = streaming.control("status")
    assert status["answered"] > 0 and status["resident"] == HAS
    assert whole.control("status")["resident"] == "all"


def test_an_attached_run_tells_what_it_took(streaming: Daemon) -> None:
    """As a local one, of its own passes alone where nobody else asks; of a prompt and of an
    answer."""
    ends = []
    for alone in ([], [], ["--no-daemon"]):
        done = streaming.toast("decode", "-v", "--json", *SAME, *alone, *ASKED)
        ends.append(json.loads(done.stdout.splitlines()[-1]))
        assert b"toast-decode: residency: 4 of 8 layers stay; " in done.stderr
    told = [{**end, "residency": known(end)} for end in ends]
    assert told[0] == told[1] == told[2] and known(ends[0])["passes"] > 0
    frames = streaming.toast("tokenize", "Hi!").stdout
    for alone in ([], ["--no-daemon"]):
        done = streaming.toast("prefill", "-v", *alone, *SAME, stdin=frames)
        assert b"toast-prefill: residency: 4 of 8 layers stay; " in done.stderr
        assert b"; 0 B read" not in done.stderr


def known(end: dict) -> dict:
    """What of an end's residency is the same whenever it is run."""
    return {name: end["residency"][name] for name in ("resident", "layers", "passes", "shed")}


@pytest.mark.parametrize("name", ["decode", "toast"])
def test_a_daemon_with_others_is_refused(streaming: Daemon, whole: Daemon, name: str) -> None:
    for daemon, flags, has, wants in (
        (whole, SAME, "all", HAS),
        (streaming, ["--resident", "all"], HAS, "all"),
        (streaming, ["--resident", "50%"], HAS, "50%"),
    ):
        done = daemon.toast(name, *flags, *ASKED)
        line, hint = done.stderr.decode().splitlines()
        assert done.returncode == 64 and done.stdout == b""
        assert line.endswith(f"runs with --resident {has}, not --resident {wants}")
        assert hint.startswith("  hint: --no-daemon ")
    alone = streaming.toast(name, "--no-daemon", *flags, *ASKED)  # as the hint says
    assert alone.returncode == 0 and alone.stdout, alone.stderr


def test_prefill_holds_a_daemon_to_it_too(whole: Daemon) -> None:
    frames = whole.toast("tokenize", "Hi!").stdout
    done = whole.toast("prefill", "--resident", "0", stdin=frames)
    assert done.returncode == 64
    assert b"runs with --resident all, not --resident 0" in done.stderr
    last = whole.toast("frames", "--json", stdin=done.stdout).stdout.splitlines()[-1]
    assert json.loads(last)["code"] == 64  # it goes down the pipe as well


def test_a_variable_is_for_models_that_are_loaded_here(whole: Daemon, streaming: Daemon) -> None:
    """The answer is the same whichever layers stay, so any daemon will do."""
    answers = set()
    for daemon in (whole, streaming):
        daemon.environment["TOAST_RESIDENT"] = "1"
        try:
            for name in ("decode", "toast"):
                done = daemon.toast(name, "-v", *ASKED)
                assert done.returncode == 0 and b"using the" in done.stderr, done.stderr
                answers.add(done.stdout)
        finally:
            del daemon.environment["TOAST_RESIDENT"]
    assert len(answers) == 1


def test_another_model_than_the_daemons_has_its_own(whole: Daemon, tmp_path) -> None:
    baked = tmp_path / "other.toast"
    assert (
        whole.toast("model", "bake", "crumb", "-q", "--quant", "4", "-o", str(baked)).returncode
        == 0
    )
    for name in ("decode", "toast"):
        done = whole.toast(name, "-v", "-m", str(baked), "--resident", "1", *ASKED)
        assert done.returncode == 0, done.stderr
        assert b"using the weights" not in done.stderr


def test_a_request_names_it_in_words(streaming: Daemon) -> None:
    ask = {"prompt": "Hi!", "options": {"max_tokens": 2}}
    *_, end = streaming.replies({**ask, "resident": HAS})
    assert end["end"]["n"] == 2
    *_, refusal = streaming.replies({**ask, "resident": "x" * 1000})
    assert refusal["error"]["code"] == 64 and len(refusal["error"]["message"]) < 300
    *_, refusal = streaming.replies({**ask, "resident": 5})
    assert "resident: a number instead of a string" in refusal["error"]["message"]


def test_without_streaming_the_signal_is_left_alone(whole: Daemon) -> None:
    """The last test here: it ends that daemon."""
    assert whole.signal(signal.SIGUSR1) == -signal.SIGUSR1
