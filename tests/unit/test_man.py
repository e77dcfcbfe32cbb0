"""The manual pages against the commands: names, options, defaults, exit statuses."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest

from tests.unit.mdoc import COMMON, MAN, Page, items, literal_blocks, pages, plain
from toastkit import errors
from toastkit.commands import COMMANDS
from toastkit.gears.monitor import MonitorOptions
from toastkit.sampling.sampling_options import SamplingOptions
from toastkit.stages.tokenize import ANSWER_ROOM

ROOT = MAN.parent
TOOLS = pages(1)
ALL = TOOLS + pages(5) + pages(7)
ORDER = ["NAME", "SYNOPSIS", "DESCRIPTION", "ENVIRONMENT", "FILES", "EXIT STATUS", "EXAMPLES",
         "SEE ALSO", "CAVEATS"]  # fmt: skip
OPTIONAL = {"FILES", "CAVEATS"}
MAY_BE_BUSY = ("toast", "toasted", "toast-prefill", "toast-decode", "toast-model")
COMMON_OPTIONS = {"-v", "-q", "--debug", "--man", "--version", "--completion", "-h"}

each_tool = pytest.mark.parametrize("page", TOOLS, ids=lambda page: page.name)
each_page = pytest.mark.parametrize("page", ALL, ids=lambda page: page.path.name)


def command_of(page: Page) -> click.Command:
    """The click command that a page is about."""
    name = page.name.removeprefix("toast-").replace("-", "_")
    module = importlib.import_module(f"toastkit.commands.{name}")
    return next(v for v in vars(module).values() if isinstance(v, click.Command))


def commands_of(page: Page) -> list[click.Command]:
    """The command that a page is about, or the subcommands of a group."""
    command = command_of(page)
    return list(command.commands.values()) if isinstance(command, click.Group) else [command]


def options_of(page: Page, common: bool) -> list[click.Option]:
    """A command's options in the order of --help: its own, or those that all commands have. A
    group's own are those of its subcommands."""
    parameters: list[click.Parameter] = []
    for command in [command_of(page)] if common else commands_of(page):
        parameters += command.get_params(click.Context(command, **command.context_settings))
    found = [p for p in parameters if isinstance(p, click.Option)]
    return [p for p in found if bool(COMMON_OPTIONS.intersection(p.opts)) == common]


def documented(page: Page) -> list:
    """The items of the list of a command's own options."""
    found = [item for item in items(page.part("DESCRIPTION")) if item.head.startswith("Fl ")]
    common = items(page.part("DESCRIPTION", COMMON))
    return found[: len(found) - len(common)]


def test_every_command_has_a_page_and_every_page_a_command() -> None:
    assert sorted(page.name for page in TOOLS) == sorted(c.program for c in COMMANDS)
    assert [page.name for page in pages(7)] == ["toasted"]
    assert [page.name for page in pages(5)] == ["toast-file", "toast-frames", "toast-session"]


@each_tool
def test_name_and_sections(page: Page) -> None:
    summaries = {c.program: c.summary for c in COMMANDS}
    assert page.part("NAME") == f".Nm {page.name}\n.Nd {summaries[page.name]}\n"
    assert page.sections == [s for s in ORDER if s in page.sections]
    assert set(ORDER) - OPTIONAL <= set(page.sections)


@each_page
def test_title_lines_and_references(page: Page) -> None:
    lines = page.source.splitlines()
    assert lines[1] == f".Dt {page.name.upper()} {page.section}"
    assert [n for n, line in enumerate(lines, 1) if len(line) > 100 or line != line.rstrip()] == []
    assert page.source.isascii()
    found = re.findall(r"^\.Xr (\S+) (\d)", page.source, re.MULTILINE)
    ours = {(name, int(section)) for name, section in found if name.startswith("toast-")}
    assert ours <= {(p.name, p.section) for p in ALL}
    assert (page.name, page.section) not in re.findall(r"\.Xr (\S+) (\d)", page.part("SEE ALSO"))
    listed = re.findall(r"^\.Xr (\S+) (\d)", page.part("SEE ALSO"), re.MULTILINE)
    assert listed == sorted(set(listed), key=lambda pair: (pair[1], pair[0]))


@each_page
def test_a_macro_takes_in_no_more_than_it_should(page: Page) -> None:
    """Fl puts a hyphen before each of its words, and a quotation ends with its line."""
    assert re.findall(r"^\.(?:It )?Fl \S+ [0-9a-z]\S*.*", page.source, re.MULTILINE) == []
    assert re.findall(r"^\..* [SD]q \S+ [.,;:] .*", page.source, re.MULTILINE) == []


def test_mandoc_finds_nothing_to_warn_of() -> None:
    if shutil.which("mandoc") is None:
        assert not os.environ.get("CI"), "mandoc is not installed"
        pytest.skip("mandoc is not installed")
    paths = [str(page.path) for page in ALL]
    result = subprocess.run(
        ["mandoc", "-T", "lint", "-W", "warning", *paths], capture_output=True, text=True
    )
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


def test_man_finds_the_pages_of_a_checkout(tmp_path: Path) -> None:
    """What make installs beside the commands, man looks for there."""
    command = ["make", "-s", "-C", str(ROOT), "pages", f"VENV={tmp_path}"]
    subprocess.run(command, check=True, timeout=60)
    for page in ALL:
        linked = tmp_path / "share" / "man" / f"man{page.section}" / page.path.name
        assert linked.read_text() == page.source
    (tmp_path / "bin").mkdir()
    if shutil.which("man"):
        environment = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
        environment.pop("MANPATH", None)
        found = subprocess.run(
            ["man", "-w", "toast"], capture_output=True, text=True, env=environment, timeout=60
        )
        assert found.stdout.strip().endswith("man1/toast.1"), found.stderr


@each_page
def test_examples_can_be_copied_from_the_page(page: Page) -> None:
    """Hyphens and quotes that roff would turn into others are escaped in what one may copy."""
    source = page.part("EXAMPLES")
    for block in re.findall(r"^\.Bd -literal[^\n]*\n(.*?)^\.Ed$", source, re.M | re.S):
        if page.section == 1:
            assert not re.search(r"(?<!\\)-|['`^~]", block), block
    if shutil.which("mandoc"):
        shown = subprocess.run(
            ["mandoc", "-T", "utf8", "-O", "width=200", str(page.path)],
            capture_output=True, check=True, encoding="utf-8",
        ).stdout  # fmt: skip
        shown = re.sub(".\b", "", shown)
        for line in "".join(literal_blocks(source)).splitlines():
            assert line.strip() in shown


@each_tool
def test_options_are_those_of_the_command(page: Page) -> None:
    expected = [option.opts for option in options_of(page, common=False)]
    assert [item.options for item in documented(page)] == expected
    part = page.part("DESCRIPTION", COMMON)
    assert part == TOOLS[0].part("DESCRIPTION", COMMON)
    expected = [sorted(option.opts, key=len) for option in options_of(page, common=True)]
    assert [item.options for item in items(part)] == expected
    for item, option in zip(documented(page), options_of(page, common=False), strict=True):
        assert ("Ar " in item.head) == (not option.is_flag), item.head
        if isinstance(option.type, click.Choice):
            assert f"Ar {' | '.join(option.type.choices)}" in item.head
        assert (", repeatable" in item.text or "; repeatable" in item.text) == option.multiple


@each_tool
def test_where_native_products_are_kept_is_said(page: Page) -> None:
    has = any(option.name == "native" for option in options_of(page, common=False))
    assert has == (".It Pa $XDG_CACHE_HOME/toastkit/native/\n" in page.source)


SETTLED_ELSEWHERE = {
    *SamplingOptions._fields, *(field.name for field in dataclasses.fields(MonitorOptions)),
} - {"seed"}  # fmt: skip


def default_of(option: click.Option) -> Any:
    """What the page has to give as the default; None for an option that is off without a value."""
    sampling = SamplingOptions._field_defaults
    monitor = {f.name: f.default for f in dataclasses.fields(MonitorOptions)}
    if option.multiple or option.is_flag:
        return None
    if option.name in ("model", "seed", "dtype", "max_tokens"):
        return ""
    if option.name == "chunk":
        return f"{_chunk()['cpu']} on the CPU, {_chunk()['gpu']}"
    if option.name in sampling or option.name in monitor:
        value = {**sampling, **monitor}[option.name]
        return f"{value:g}"
    return option.default if isinstance(option.default, (str, int)) else None


def _chunk() -> dict[str, int]:
    """CHUNK of the engine, read without importing MLX."""
    tree = ast.parse((ROOT / "toastkit" / "engine" / "engine.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CHUNK":
            return ast.literal_eval(node.value)
    raise AssertionError("the engine has no CHUNK")


@each_tool
def test_defaults(page: Page) -> None:
    for item, option in zip(documented(page), options_of(page, common=False), strict=True):
        default = default_of(option)
        if (page.name, option.name) == ("toast-tokenize", "max_tokens"):
            continue  # there it is a part of --truncate, whose text has the number
        if default is not None:
            source = "the checkpoint's, or " if "the checkpoint's, or" in option.help else ""
            assert f"The default is {source}{default}" in plain(item.text), item.head
        if default and not option.show_default and option.name in SETTLED_ELSEWHERE:
            assert re.search(rf"\(default: (.*, or )?{default}\)\.$", option.help)
        if option.name == "truncate":
            assert f"the default is {ANSWER_ROOM}" in item.text


def test_shared_options_are_described_alike() -> None:
    """Sampling, prompt, reading and engine options have one text wherever they appear."""
    seen: dict[str, tuple[str, str]] = {}
    apart = {"--model", "--session", "--max-tokens", "--inline", "--json", "--top", "--seed",
             "--no-newline", "--fail-on-length", "--ignore-eos", "--stop", "--chunk"}  # fmt: skip
    for page in TOOLS:
        if isinstance(command_of(page), click.Group):
            continue  # subcommands do other things
        for item in documented(page):
            name = item.options[-1]
            if name not in apart:
                assert seen.setdefault(name, (item.head, item.text)) == (item.head, item.text)


@each_tool
def test_synopsis(page: Page) -> None:
    """Options are summed up, arguments and subcommands are named."""
    synopsis = page.part("SYNOPSIS")
    forms = synopsis.count(".Nm\n")
    assert forms and synopsis.count(".Op Ar option ...\n") == forms
    for command in commands_of(page):
        if command is not command_of(page):
            assert f".Cm {command.name}\n" in synopsis
        for parameter in command.params:
            if isinstance(parameter, click.Argument):
                name = (parameter.name or "").removesuffix("s")
                assert f"Ar {name}" + (" ..." if parameter.nargs < 0 else "\n") in synopsis


@each_tool
def test_environment(page: Page) -> None:
    rule = page.part("ENVIRONMENT").partition(".Bl")[0]
    assert rule.startswith(TOOLS[0].part("ENVIRONMENT").partition("The command line wins.")[0])
    named = [item.head for item in items(page.part("ENVIRONMENT"))]
    assert len(named) == len(set(named))
    for option in options_of(page, common=False):
        long_names = {name[2:] for name in option.opts if name.startswith("--")}
        variables = {"TOAST_" + name.replace("-", "_").upper() for name in long_names}
        assert set(option.envvar or ()) == (variables if option.allow_from_autoenv else set())
        assert option.allow_from_autoenv or f".Fl {option.opts[-1][1:]}" in rule


@each_tool
def test_exit_statuses(page: Page) -> None:
    listed = [int(n) for n in re.findall(r"^\.It (\d+)$", page.part("EXIT STATUS"), re.MULTILINE)]
    codes = {c.code for c in vars(errors).values() if inspect.isclass(c) and hasattr(c, "code")}
    assert listed == sorted(set(listed))
    assert {0, 64, 65, 70, 74, 130} <= set(listed) <= {0, *codes}
    assert (75 in listed) == (page.name in MAY_BE_BUSY)
