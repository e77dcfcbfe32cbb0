"""Hostile chat templates: no way out of the sandbox, bounded time and memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from toastkit.errors import DataError, UnavailableError
from toastkit.text import template_child
from toastkit.text.chat_template import render
from toastkit.text.messages import user_messages


def ask(template: str) -> str:
    return render(template, user_messages("hi"), special_tokens={})


ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__class__ }}",
    "{{ messages['__class__'] }}",
    "{{ '' | attr('__class__') }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "{{ (messages | map(attribute='content.__class__') | list)[0] }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ self.__init__ }}",
    "{{ loop.__init__ }}{% for x in [1] %}{{ loop.__init__ }}{% endfor %}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{% set ns = namespace(__html__=1) %}",
    "{% set ns = namespace() %}{% set ns.__call__ = 1 %}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_no_way_out(template: str) -> None:
    """What is asked for is refused or, as Jinja has it, not there."""
    try:
        assert ask(template) == ""
    except DataError as error:
        assert "is unsafe" in error.message or "no name like" in error.message


def test_a_way_out_would_lead_nowhere(tmp_path: Path) -> None:
    """The child can open nothing, start nothing and sees no environment."""
    tries = """
from toastkit.text.sandbox import _confine
import os, socket, subprocess
_confine(1 << 30)
for attempt in (lambda: open("/etc/passwd"), lambda: os.pipe(), lambda: bytes(1 << 30),
                lambda: socket.socket(), lambda: os.write(1, b"x" * 9)):
    try:
        attempt()
    except (OSError, MemoryError):
        continue
    raise SystemExit("it could")
"""
    command = [sys.executable, "-I", "-c", f"import sys; sys.path += sys.argv[1:]\n{tries}"]
    with open(tmp_path / "out", "wb") as out:
        roots = template_child.package_roots()
        done = subprocess.run([*command, *roots], stdout=out, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr.decode()


def nested(depth: int, opening: str) -> str:
    """Loops in loops, each over one element."""
    return opening * depth + "x" + "{% endfor %}" * depth


LARGE = {
    "text in loops": "{% for a in range(99999) %}" + "x" * 100_000 + "{% endfor %}",
    "text in a macro": "{% macro m() %}{% for a in range(99999) %}"
    + "x" * 100_000
    + "{% endfor %}{% endmacro %}{{ m() | length }}",
    "huge range": "{{ range(10 ** 12) | list }}",
    "macro without end": "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "deep parentheses": "{{ " + "(" * 500 + "1" + ")" * 500 + " }}",
    "multiplied text": "{{ 'x' * 10 ** 10 }}",
    "multiplied list": "{{ [1] * 10 ** 9 }}",
    "indent": "{{ 'x' | indent(10 ** 10, true) }}",
    "batch": "{{ [1] | batch(10 ** 9, 'x') | list }}",
    "format filter": "{{ '%9999999999d' | format(1) }}",
    "format inner width": "{{ '{:{}}'.format(1, 9999999999) }}",
    "replace": "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "join": "{{ range(100000) | join('x' * 100000) }}",
    "bytes": "{{ (5).to_bytes(10 ** 10, 'big') }}",
}
LONG = {
    "nested loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "sort": "{{ (['x' * 9999 ~ 'y'] * 9999 * 99) | sort | length }}",
    "title": "{{ ('ab ' * 10 ** 7) | title | length }}",
    "cycler": "{% set c = cycler(1, 2) %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% set x = c.next() %}{% endfor %}{% endfor %}",
}


@pytest.mark.parametrize("name", LARGE)
def test_templates_that_want_much_are_stopped(name: str) -> None:
    with pytest.raises(DataError, match="^chat template: (stopped, |Range too big)"):
        ask(LARGE[name])
    assert ask("{{ messages[0].content }}") == "hi"


@pytest.mark.parametrize("name", LONG)
def test_templates_that_run_for_long_are_stopped(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask("x")  # starts a child: that is not what is timed
    monkeypatch.setattr(template_child, "SECONDS", 0.1)
    with pytest.raises(DataError, match=r"^chat template: stopped, it runs for over 0\.1 seconds$"):
        ask(LONG[name])
    monkeypatch.undo()
    assert ask("{{ messages[0].content }}") == "hi"


def test_what_a_busy_machine_takes_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    ask("x")
    monkeypatch.setattr(template_child, "SECONDS", 0.3)
    pid = template_child._child._process.pid
    os.kill(pid, signal.SIGSTOP)
    goes_on = threading.Timer(0.5, os.kill, (pid, signal.SIGCONT))
    goes_on.start()
    assert ask("{{ messages[0].content }}") == "hi"
    monkeypatch.setattr(template_child, "WAIT_SECONDS", 0.2)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(DataError, match=r"^chat template: stopped, it runs for over 0\.3 seconds$"):
        ask("{{ messages[0].content }}")


@pytest.mark.parametrize(
    "opening", ["{% for a in [1] %}", "{% for a in [1] if a %}", "{% for a in [1] recursive %}"]
)
def test_compiling_nested_loops_is_no_work(opening: str) -> None:
    assert ask(nested(15, opening)) == "x"


def test_memory_is_watched_where_the_system_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS. Nothing is taken here; any process has more than no memory."""
    ask("x")
    monkeypatch.setattr(template_child, "LOOKS", True)
    monkeypatch.setattr(template_child, "MEMORY_BYTES", -1)
    with pytest.raises(DataError, match="stopped, it takes too much memory"):
        ask(LONG["nested loops"])


def test_what_a_child_says_is_not_read_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_child, "MAX_BYTES", 1000)
    with pytest.raises(DataError, match="stopped, it writes too much"):
        ask("{{ 'x' * 1000 }}")


def test_the_child_is_used_again_and_replaced_when_it_is_gone(monkeypatch) -> None:
    template_child.end()
    started: list[subprocess.Popen] = []
    begin = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *a, **s: started.append(begin(*a, **s)) or started[-1]
    )
    assert (ask("x"), ask("y")) == ("x", "y")
    (first,) = started
    first.kill()
    first.wait()
    assert ask("z") == "z" and len(started) == 2


def test_several_threads_get_their_own_texts() -> None:
    def work(i: int) -> list[str]:
        return [ask(f"{{{{ {i} * {n} }}}}") for n in range(20)]

    with ThreadPoolExecutor(4) as callers:
        found = list(callers.map(work, range(4)))
    assert found == [[str(i * n) for n in range(20)] for i in range(4)]


def test_no_child_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    template_child.end()
    monkeypatch.setattr(sys, "executable", os.devnull)
    with pytest.raises(UnavailableError, match="cannot start the process that renders templates"):
        ask("x")


def test_a_child_that_does_not_come_up(monkeypatch: pytest.MonkeyPatch) -> None:
    template_child.end()
    monkeypatch.setattr(template_child, "package_roots", list)
    with pytest.raises(UnavailableError, match="cannot start the process that renders templates"):
        ask("x")
