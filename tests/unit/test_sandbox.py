"""Hostile chat templates: no way out of the sandbox, bounded work and memory."""

from __future__ import annotations

import tracemalloc

import pytest

from toastkit.errors import DataError
from toastkit.text import budget
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
    "{{ messages | map(attribute='content.__class__') | list }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ self.__init__ }}",
    "{{ loop.__init__ }}{% for x in [1] %}{{ loop.__init__ }}{% endfor %}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ dict.update(messages[0], {'role': 'x'}) }}",
    "{{ (5).to_bytes(10 ** 10, 'big') }}",
    "{{ 'a'.encode() }}",
    "{% set ns = namespace(__html__=1) %}",
    "{% set ns = namespace() %}{% set ns.__call__ = 1 %}",
    "{{ lipsum(1000) }}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_no_way_out(template: str) -> None:
    messages = user_messages("hi")
    reasons = "is not safe|is unsafe|no name like|'lipsum' is undefined"
    with pytest.raises(DataError, match=f"^chat template: .*({reasons})"):
        render(template, messages, special_tokens={})
    assert messages == user_messages("hi")


GROW = (
    "{% set ns = namespace(x=START) %}{% for i in range(100000) %}{% set ns.x = STEP %}{% endfor %}"
)


def grow(start: str, step: str, end: str = "{{ ns.x }}") -> str:
    """A template that puts `step` into ns.x again and again."""
    return GROW.replace("START", start).replace("STEP", step) + end


HUGE = {
    "nested loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "loop test": "{% for a in range(9999) %}{% for b in range(9999) if b < 0 %}{% endfor %}"
    "{% endfor %}",
    "text in loops": "{% for a in range(99999) %}" + "x" * 100_000 + "{% endfor %}",
    "text in a macro": "{% macro m() %}{% for a in range(99999) %}"
    + "x" * 100_000
    + "{% endfor %}{% endmacro %}{{ m() | length }}",
    "huge range": "{{ range(10 ** 12) | list }}",
    "macro without end": "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "block without end": "{% block a %}{{ self.a() }}{% endblock %}",
    "loop without end": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "deep parentheses": "{{ " + "(" * 500 + "1" + ")" * 500 + " }}",
    "not not not": "{{ " + "not " * 5000 + "1 }}",
    "multiplied text": "{{ 'x' * 10 ** 10 }}",
    "multiplied list": "{{ [1] * 10 ** 9 }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "squared": grow("3", "ns.x * ns.x"),
    "doubled by ~": grow("'xxxx'", "ns.x ~ ns.x"),
    "doubled by +": grow("'xxxx'", "ns.x + ns.x"),
    "doubled by join": grow("'xxxx'", "[ns.x, ns.x] | join"),
    "doubled by replace": grow("'xxxx'", "ns.x.replace('x', 'xx')"),
    "doubled by format": grow("'xxxx'", "'%s%s' % (ns.x, ns.x)"),
    "doubled by a block": GROW.replace("START", "'xx'").replace(
        "{% set ns.x = STEP %}", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"
    ),
    "doubled list": grow("[1]", "[ns.x, ns.x]"),
    "doubled dict": grow("[1]", "{'a': ns.x, 'b': ns.x}", "{{ ns.x | tojson }}"),
    "doubled tuple": grow("(1,)", "(ns.x, ns.x)", "{{ {ns.x: 1} }}"),
    "deep list": grow("[1]", "[ns.x]"),
    "deep dict": grow("1", "dict(x=ns.x)"),
    "center": "{{ 'x' | center(10 ** 10) }}",
    "ljust": "{{ 'x'.ljust(10 ** 10) }}",
    "indent": "{{ 'x' | indent(10 ** 10, true) }}",
    "indent by text": "{{ ('a\n' * 100000) | indent('x' * 9999) }}",
    "batch": "{{ [1] | batch(10 ** 9, 'x') | list }}",
    "slice": "{{ [1] | slice(10 ** 9) | list }}",
    "round": "{{ 1.5 | round(10 ** 9) }}",
    "percent width": "{{ '%9999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (9999999999, 1) }}",
    "format filter": "{{ '%9999999999d' | format(1) }}",
    "format width": "{{ '{:9999999999}'.format(1) }}",
    "format inner width": "{{ '{:{}}'.format(1, 9999999999) }}",
    "format repeated": "{{ ('{0}' * 100000).format('x' * 100000) }}",
    "replace": "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "join": "{{ range(100000) | join('x' * 100000) }}",
    "join method": "{{ ('x' * 100000).join(('a' * 100000) | list) }}",
    "sum of lists": "{{ ([[1]] * 100000) | sum(start=[]) }}",
    "tojson indent": "{{ messages | tojson(indent=10 ** 9) }}",
    "tojson separator": "{{ messages | tojson(separators=('x' * 100000, '')) }}",
    "list of text": "{{ ('é' * 8000000) | list | length }}",
    "split": "{{ ('é ' * 4000000).split() | length }}",
    "slow rfind": "{{ ('a' * 4000000).rfind('b' ~ 'a' * 2000000) }}",
    "slow strip": "{{ ('a' * 4000000).strip('b' * 2000000 ~ 'a') }}",
    "slow trim": "{{ ('a' * 4000000) | trim('b' * 2000000 ~ 'a') }}",
    "copies": "{% set a = 'a' * 8000000 %}{% for i in range(999) %}{% set b = a[1:] %}{% endfor %}",
    "too long": "x" * 300_000,
}


@pytest.mark.parametrize("name", HUGE)
def test_too_costly_templates_are_stopped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed; a smaller allowance only makes the test fast."""
    monkeypatch.setattr(budget, "BASE_WORK", 1 << 24)
    reasons = "stopped, |Range too big|the start of a sum"
    with pytest.raises(DataError, match=f"^chat template: ({reasons})"):
        ask(HUGE[name])


@pytest.mark.parametrize("name", ["doubled by ~", "doubled by join", "text in a macro", "replace"])
def test_memory_is_bounded(name: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(DataError):
            ask(HUGE[name])
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("step", ["ns.x | map('upper')", "namespace(y=ns.x)", "[ns.x] | reverse"])
def test_long_chains_do_not_overflow_the_stack(step: str) -> None:
    """Ends, rightly or with an error; a crash of the interpreter would end the test run."""
    try:
        assert isinstance(ask(grow("[1]", step, "{{ ns.x is defined }}")), str)
    except DataError as error:
        assert error.message.startswith("chat template: ")


def test_a_slow_template_meets_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "SECONDS", 0.0)
    with pytest.raises(DataError, match="it runs for over 0 seconds"):
        ask("{% for i in range(100) %}{% endfor %}")
