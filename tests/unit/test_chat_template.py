"""Chat templates: what Hugging Face renders, and broken ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.unit.chat_templates import record
from toastkit.errors import DataError, UsageError
from toastkit.text.chat_template import render
from toastkit.text.messages import user_messages

RECORDS = Path(record.__file__).parent


CONVERSATION = [
    {"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Größe <b> & 'x'?\n"},
    {"role": "assistant", "content": "<think>hm</think>\nTwo", "tool_calls": [{"name": "f"}]},
    {"role": "tool", "content": '{"a": [1, 2.5, null, true]}'}, {"role": "user", "content": "👍"},
]  # fmt: skip
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"properties": {"b": {"type": "string"}}}},
    }
]
TEMPLATES = {
    "chatml": """{%- for message in messages %}
        {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
    {%- endfor %}
    {%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "blocks are trimmed": "{% if true %}\n  {% if true %}\na\n    {% endif %}\n{% endif %}\nb\n",
    "system apart": """{{ bos_token }}{% if messages[0].role == 'system' %}
        {%- set system, rest = messages[0].content | trim, messages[1:] %}
    {%- else %}{% set rest = messages %}{% endif %}
    {%- for m in rest %}[{{ loop.index0 }}/{{ loop.length }}{{ m.role | upper }}:
        {{- (system ~ '\\n\\n' if loop.first else '') ~ m.content }}{{ eos_token if loop.last }}]
    {%- endfor %}""",
    "namespace": """{% set ns = namespace(last=-1, seen=[]) %}
    {%- for m in messages[::-1] %}{% set index = (messages | length - 1) - loop.index0 %}
        {%- if ns.last < 0 and m.role == 'user' %}{% set ns.last = index %}{% endif %}
        {%- set ns.seen = ns.seen + [m.role] %}{% endfor %}{{ ns.last }} {{ ns.seen }}""",
    "think": """{% for m in messages if m.role == 'assistant' %}
        {%- set parts = m.content.split('</think>') %}
        {{- parts[0].split('<think>')[-1].strip('\\n') }}|{{ parts[-1].lstrip('\\n') }}
        {%- if m.tool_calls is defined and m.tool_calls is iterable %}{{ m.tool_calls[0].name }}
        {%- endif %}{% else %}none{% endfor %}""",
    "tools": """{% for tool in tools %}{{ tool | tojson }}{{ tool.function | tojson(indent=2) }}
        {%- for k, v in tool.function.parameters.properties | dictsort %}{{ k }}={{ v.type }}
        {%- endfor %}{% for k, v in tool.items() %}{{ k }}{% endfor %}{% endfor %}
        {{- messages | tojson(separators=(',', ':'), sort_keys=true) }}""",
    "macro": """{% macro tree(x, depth=0) %}{% if x is mapping %}{% for k, v in x | items %}
        {{- '-' * depth }}{{ k }}{{ tree(v, depth + 1) }}{% endfor %}{% elif x is string %}
        {{- '%s!' | format(x) }}{% endif %}{% endmacro %}{{ tree(tools[0]) }}""",
    "filters": """{{ messages | map(attribute='role') | unique | join('+') }}
        {{- messages | selectattr('role', 'equalto', 'user') | list | length }}
        {{- messages | rejectattr('role', 'in', ['user']) | map(attribute='content') | first }}
        {{- 'a,b'.split(',') | join(' ') | replace('a', 'ä') | title }}{{ [3, 1] | sort | last }}
        {{- [1, 2, 3] | batch(2) | list }}{{ 'x\\ny' | indent(3) }}{{ 7 | string ~ 1.5 | round }}
        {{- missing | default('d') }}{{ 10 // 3 }}{{ 2 ** 5 % 7 }}{{ -1 | abs }}
        {{- [1, 2] | sum }}""",
    "loop controls": """{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}
        {%- if i > 4 %}{% break %}{% endif %}{{ i }}{{ loop.cycle('a', 'b') }}{% endfor %}""",
    "call and set blocks": """{% macro wrap() %}[{{ caller() }}]{% endmacro %}
        {%- call wrap() %}in{{ 1 }}{% endcall %}{% set s %}s{{ 2 }}{% endset %}{{ s + s }}
        {%- filter upper %}up{% endfilter %}{% block b %}B{{ self is defined }}{% endblock %}""",
    "recursive loop": """{% for x in [{'n': 1, 'c': [{'n': 2, 'c': []}]}] recursive %}{{ x.n }}
        {{- loop(x.c) }}{% endfor %}""",
    "kinds": "{{ none }}{{ true }}{{ 1.0 }}{{ [1, 'a', {'b': ()}] }}{{ missing }}{{ {}.items() }}",
    "is defined": "{{ raise_exception is defined }}{{ strftime_now is defined }}{{ x is defined }}",
    "chained": "{{ 1 < 2 < 3 }}{{ 'a' in 'ab' and 'x' not in ['y'] }}{{ tools[0].type[2:4] }}",
    "safe and escaped": "{{ '<b>' | safe ~ '<i>' }}{{ '<b>' | e }}{{ '{}{x}'.format(1, x='y') }}",
}


def plain(template: str, **variables: Any) -> str:
    """The oracle: Jinja's own sandbox, set up as transformers does."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals.update(raise_exception=print, strftime_now=print)

    def tojson(x: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, **options)

    environment.filters["tojson"] = tojson
    return environment.from_string(template).render(**variables)


def ask(template: str, **options: Any) -> str:
    return render(template, user_messages("hi"), special_tokens={}, **options)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("generation", [True, False])
def test_renders_as_hugging_face_does(name: str, generation: bool) -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    given: dict[str, Any] = {"tools": TOOLS, "add_generation_prompt": generation}
    expected = plain(TEMPLATES[name], messages=CONVERSATION, **given, **special)
    assert expected
    assert render(TEMPLATES[name], CONVERSATION, special_tokens=special, **given) == expected


CASES = record.cases()
RECORDED = json.loads((RECORDS / "rendered.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", RECORDED)
def test_renders_as_transformers_did(name: str) -> None:
    """The messages go to the template as they are, tools too; recorded by chat_templates/record.py.
    Content in parts is joined only where transformers gave up on it."""
    expected, notes = RECORDED[name], []
    try:
        text = render(**CASES[name], special_tokens=record.SPECIAL, note=notes.append)
    except DataError:
        assert expected is None
    else:
        parts = "the chat template takes no content in parts: they are joined"
        assert (text, parts in notes) == (expected, False) or (expected is None and parts in notes)


def test_null_is_as_good_as_absent_but_for_content() -> None:
    """Null content is left out, or made empty, only for a template that fails with it."""
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": None}], "name": None}
    harmony = "{% if 'content' in messages[0] %}{{ 'x' in messages[0].content }}{% endif %}calls"
    kept = '{"role": "assistant", "content": null, "tool_calls": [{"id": null}]}'
    for template, text in (
        ("{{ messages[0] | tojson }}", kept), (harmony, "calls"),
        ("{{ messages[0].content + '!' }}", "!"),
    ):  # fmt: skip
        assert render(template, [message], special_tokens={}) == text
    both = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, message]
    template = "{% for m in messages %}{{ m.content + '!' }}{% endfor %}"
    told: list[str] = []
    assert render(template, both, special_tokens={}, note=told.append) == "hi!!"
    unused = "the chat template makes no use of 'tool_calls' in messages"
    assert told == ["the chat template takes no content in parts: they are joined", unused]


@pytest.mark.parametrize("text", ["m.content + '!'", "m.content | trim", "m.content.upper()"])
def test_what_is_ignored_beside_null_content_is_found_out(text: str) -> None:
    """The content of a message of tool calls is null in most conversations."""
    template = f"{{% for m in messages %}}{{{{ {text} }}}}{{% endfor %}}"
    calls = {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}
    told: list[str] = []
    render(template, [calls], special_tokens={}, note=told.append)
    assert told == ["the chat template makes no use of 'tool_calls' in messages"]
    document = {"role": "user", "content": [{"type": "document", "document": "x"}]}
    template = f"{{% for m in messages if m.role == 'assistant' %}}{{{{ {text} }}}}{{% endfor %}}"
    with pytest.raises(DataError, match="does nothing with documents"):
        render(template, [calls, document], special_tokens={})


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages %}{{ m.content | trim }}|{% endfor %}", "|None|hi|"),
        ("{% for m in messages %}{{ m.content or 'a' }}|{% endfor %}", "a|None|hi|"),
        ("{{ messages[0].content is none }}None", "TrueNone"),
        ("{{ messages[0].content | trim }}{{ messages[2].content.upper() }}", "HI"),
    ],
)
def test_null_content_is_never_written_out(template: str, text: str) -> None:
    """As Llama 3 and GLM 4.6 do with the content of a message of tool calls."""
    calls = {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}
    messages = [calls, {"role": "user", "content": "None"}, {"role": "user", "content": "hi"}]
    assert render(template, messages, special_tokens={}) == text
    messages[2]["content"] = [{"type": "text", "text": "hi"}]
    if "upper" in template:  # which fails with parts
        assert render(template, messages, special_tokens={}) == text


def test_what_a_template_makes_no_use_of_is_said() -> None:
    notes: list[str] = []
    template = (
        "{% set mine = 1 %}{% set on = enable_thinking | default(true) %}{{ on }}{{ mine }}"
        "{% if late is not defined %}{% set late = 3 %}{% endif %}{{ late }}"
    )
    arguments = {
        "enable_thinking": False, "mine": 2, "late": 4, "enable_thinkin": False, "self": 1
    }  # fmt: skip
    assert ask(template, arguments=arguments, tools=TOOLS, note=notes.append) == "False14"
    assert notes == [
        "the chat template makes no use of 'mine'",
        "the chat template makes no use of 'enable_thinkin'; did you mean enable_thinking?",
        "the chat template makes no use of 'self'",
        "the chat template makes no use of 'tools'",
    ]


@pytest.mark.parametrize(
    ("template", "value", "text"),
    [("{% if x is defined and x is false %}off{% else %}on{% endif %}", 0, None),
     ("{% if x is true %}on{% else %}off{% endif %}", 1, None),
     ("{% set y = x if x is defined else true %}{{ y is sameas false }}", 0, None),
     ("{% if x %}on{% else %}off{% endif %}", 0, "off"),
     ("{% if x is false %}off{% else %}on{% endif %}", 1, "on"),
     ("{% if x is defined %}{{ x }} steps{% endif %}", 0, "0 steps")],
)  # fmt: skip
def test_a_number_that_was_to_be_a_truth_value(template: str, value: int, text: str) -> None:
    if text is not None:
        assert ask(template, arguments={"x": value}) == text
        return
    with pytest.raises(DataError, match=f"'x': the chat template does nothing with {value}") as it:
        ask(template, arguments={"x": value})
    assert it.value.hint == f"give x={'true' if value else 'false'}"


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=4))
def test_content_comes_through_unchanged(contents: list[str]) -> None:
    messages = [{"role": "user", "content": content} for content in contents]
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    expected = "".join(f"<{content}>" for content in contents)
    assert render(template, messages, special_tokens={}) == expected


def test_date_arguments_and_the_generation_tag() -> None:
    assert len(ask("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert ask("{{ enable_thinking }}", arguments={"enable_thinking": False}) == "False"
    with pytest.raises(UsageError, match="template argument 'messages'"):
        ask("x", arguments={"messages": []})
    with pytest.raises(UsageError, match="template argument 'tools'"):
        ask("x", arguments={"tools": []}, tools=[])
    tag = "{% for m in messages %}{% generation %}a{{ m.role }}\n{% endgeneration %}{% endfor %}"
    assert ask(tag) == "auser\n"


def test_messages_are_not_templates() -> None:
    """Nor is the sandbox of a Jinja with known ways out of it, which it had before 3.1.6."""
    messages = user_messages("{{ 1 + 1 }}{% for %}", system="{{ x }}")
    text = render("{{ messages[0].content }}{{ messages[1].content }}", messages, special_tokens={})
    assert text == "{{ x }}{{ 1 + 1 }}{% for %}"
    assert tuple(map(int, jinja2.__version__.split(".")[:3])) >= (3, 1, 6)


def test_raise_exception_gives_its_message_in_one_line() -> None:
    with pytest.raises(DataError) as caught:
        ask("{{ raise_exception('roles must\n alternate') }}")
    assert caught.value.message == "chat template: roles must alternate"
    with pytest.raises(DataError) as caught:
        ask("{{ raise_exception('x' * 100000) }}")
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("template", "message"),
    [("a\n{% if %}", "line 2: "), ("{{ x.y }}", "'x' is undefined"),
     ("{{ 1 / 0 }}", "division by zero"), ("{{ 'a' + 1 }}", "chat template: "),
     ("{% include '/etc/passwd' %}", "no loader"), ("{% import 'os' as os %}", "no loader"),
     ("{% extends 'x' %}", "no loader"), ("{{ x | nothing }}", "nothing"),
     ("{{ '\\ud800' }}", "surrogate"), ("{{ [range] | tojson }}", "not JSON serializable"),
     ("x" * 1_100_000, "characters long")],
)  # fmt: skip
def test_broken_templates(template: str, message: str) -> None:
    with pytest.raises(DataError, match="^chat template: ") as caught:
        ask(template)
    assert message in caught.value.message
    assert "\n" not in caught.value.message


def test_a_large_conversation_is_within_the_budget() -> None:
    messages = [{"role": "user", "content": "x" * 1000}] * 2000
    text = render(TEMPLATES["chatml"], messages, special_tokens={})
    assert len(text) > 2_000_000 and ask("{{ messages[0].content }}") == "hi"
    long = user_messages("y" * 5_000_000)
    assert len(render(TEMPLATES["chatml"], long, special_tokens={})) > 5_000_000
