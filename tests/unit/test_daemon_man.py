"""toasted(7) and the unit files, held against the code; the examples run."""

from __future__ import annotations

import configparser
import json
import os
import plistlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tests.unit.daemon_front import Front, front
from tests.unit.mdoc import MAN, Page, fields, literal_blocks
from toastkit.commands.toasted import toasted
from toastkit.daemon import activation, channel, connection, requests, server
from toastkit.daemon.service_settings import Limits

PAGE = Page(MAN / "man7" / "toasted.7")
EXAMPLES = MAN.parent / "examples"
SHELL, WIRE, PYTHON = literal_blocks(PAGE.part("EXAMPLES"))


def listed(source: str) -> list[str]:
    return re.findall(r"^\.It Li (\w+)$", source, re.MULTILINE)


def test_the_fields_and_options() -> None:
    assert list(fields(PAGE.part("REQUESTS", "Fields"))) == list(requests.FIELDS)
    assert list(fields(PAGE.part("REQUESTS", "Options"))) == list(requests.OPTIONS)
    others = listed(PAGE.part("REQUESTS", "Requests that are not for the model"))
    assert sorted(others) == sorted(requests.CONTROL_OPS)
    assert listed(PAGE.part("RUNS OF OTHER PROCESSES")) == list(requests.ATTACH_OPS)


def test_the_numbers() -> None:
    words = PAGE.words()
    for said in (
        f"than {channel.UNSENT_LIMIT >> 20} MiB waits",
        f"after {Limits().idle_seconds:g} seconds",
        f"At most {requests.MAX_ID_BYTES:,} bytes",
        f"From -{requests.MAX_PRIORITY} to {requests.MAX_PRIORITY}",
        f"up to {requests.MAX_TOP:,}",
        f"limit, {Limits().line_bytes >> 20} MiB unless",
        f"At most {connection.MAX_FDS} descriptors",
    ):
        assert said in words, said
    assert server.GOODBYE_SECONDS == 2 and "thrown away for two seconds" in words
    defaults = toasted.make_context("toasted", []).params
    assert defaults["max_connections"] == Limits().connections
    assert defaults["max_line"] == Limits().line_bytes


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[Front]:
    """A front where the examples look for it."""
    with front() as made:
        home = made.path.parent
        (home / "toastkit").mkdir()
        (home / "toastkit" / "toasted.sock").symlink_to(made.path)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(home))
        yield made


def test_what_goes_over_the_wire(running: Front) -> None:
    """The first request is one, the second is answered as it stands there."""
    first, *_, second, refusal = WIRE.splitlines()
    client = running.client()
    assert "end" in client.send(first[2:].encode() + b"\n").replies()[-1]
    request = running.worker.requests[0]
    assert (request.id, request.options.max_tokens) == (7, 2)
    assert client.ask(second[2:].encode() + b"\n") == json.loads(refusal)


def output_of(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_client_in_python(running: Front) -> None:
    assert output_of(sys.executable, "-c", PYTHON) == "Who are you?"


@pytest.mark.parametrize("program", ["nc", "socat"])
def test_the_client_in_the_shell(running: Front, program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"no {program} here")
    first, *lines = SHELL.splitlines()
    (line,) = [line for line in lines if f"| {program} " in line]
    reply = json.loads(output_of("sh", "-c", f"{first}\n{line}").splitlines()[-1])
    assert {"end", "status"} & set(reply)


def unit(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((EXAMPLES / name).read_text())
    return parser


def test_the_units_of_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket is where clients look for it, and as private as our own would be."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")
    from toastkit.daemon.paths import socket_path

    listens = unit("toasted.socket")["Socket"]
    assert listens["ListenStream"].replace("%t", "/run/user/1") == socket_path()
    assert (listens["DirectoryMode"], listens["SocketMode"]) == ("0700", "0600")
    service = unit("toasted.service")["Service"]
    assert service["Type"] == "notify"
    program, *arguments = shlex.split(service["ExecStart"])
    assert program.endswith("/toasted")
    assert toasted.make_context("toasted", arguments).params["quiet"] is True
    limit = int(service["LimitNOFILE"])
    assert limit > 2 * Limits().connections + connection.MAX_FDS * Limits().connections


def test_the_property_list_of_launchd() -> None:
    with open(EXAMPLES / "org.toastkit.toasted.plist", "rb") as file:
        job = plistlib.load(file)
    assert list(job["Sockets"]) == [activation.LAUNCHD_NAME]
    (key,) = job["Sockets"][activation.LAUNCHD_NAME].values()
    socket_option = next(p for p in toasted.params if p.name == "socket")
    assert isinstance(socket_option, click.Option) and key in (socket_option.envvar or [])
    assert job["ProgramArguments"][-1].startswith("exec toasted")
    assert Path(EXAMPLES / f"{job['Label']}.plist").is_file() and os.sep not in job["Label"]
