"""Requests of toasted(7): what is taken, and how everything else is refused."""

from __future__ import annotations

import dataclasses
import gc
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toastkit.daemon.requests import (
    FIELDS,
    OPTIONS,
    SAMPLING_NAMES,
    GenerateOptions,
    Request,
    make_request,
    parse_object,
)
from toastkit.errors import DataError, ToastError, UsageError
from toastkit.sampling.sampling_options import SamplingOptions


def parse_request(line: bytes, fds: Iterable[int] = ()) -> Request:
    """As the server reads a line."""
    return make_request(parse_object(line), fds)


def parse(**fields: Any) -> Request:
    return parse_request(json.dumps(fields).encode())


def options(**given: Any) -> GenerateOptions:
    return parse(prompt="x", options=given).options


def test_the_least_request() -> None:
    request = parse_request(b'{"prompt": "\xc3\xbc"}')
    assert (request.op, request.id, request.prompt) == ("generate", None, "ü")
    assert (request.messages, request.tokens, request.session, request.model) == (None,) * 4
    assert (request.stream, request.priority, request.fds) == (True, 0, [])
    assert request.options == GenerateOptions()


def test_every_field_arrives(state_home: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "talk").mkdir()  # a name is never a directory where the daemon runs
    (tmp_path / "talk" / "session.msgpack").touch()
    monkeypatch.chdir(tmp_path)
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    request = parse(
        id="a", messages=messages, stream=False, session="talk", priority=-100, model="org/name",
        tools=[{"name": "f"}], options={"template": {"thinking": False}, "max_tokens": 5},
    )  # fmt: skip
    assert (request.id, request.stream, request.priority) == ("a", False, -100)
    assert request.messages == messages
    assert request.tools == [{"name": "f"}] and parse(prompt="x").tools is None
    assert request.session == str(state_home / "talk") and request.model == "org/name"
    assert request.options.template == {"thinking": False} and request.options.max_tokens == 5
    assert parse(tokens=[0, 2**32 - 1]).tokens == [0, 2**32 - 1]
    assert parse(prompt="x", session="/a/b").session == "/a/b"
    assert parse(id=7, prompt="\n", options={"raw": True}).id == 7


def test_every_option_arrives() -> None:
    chain = {name: SamplingOptions._field_defaults[name] for name in SAMPLING_NAMES}
    assert options(**chain).sampling == chain
    others = options(
        seed=2**64 - 1, stop="END", ignore_eos=True, logit_bias={"5": -1.5, "6": 2}, ban=[7],
        top=3, raw=True, keep_special=True, tokens=True,
    )  # fmt: skip
    assert others == GenerateOptions(
        seed=2**64 - 1, stop=("END",), ignore_eos=True, logit_bias=((5, -1.5), (6, 2)), ban=(7,),
        top=3, raw=True, keep_special=True, tokens=True,
    )  # fmt: skip
    assert options(logit_bias={"4294967295": 1}).logit_bias == ((2**32 - 1, 1),)
    assert options(max_tokens=1).max_tokens == 1
    assert options(stop=["a", "b"]).stop == ("a", "b")
    named = {field.name for field in dataclasses.fields(GenerateOptions)} - {"sampling"}
    assert named | set(SAMPLING_NAMES) == set(OPTIONS)


USAGE: list[tuple[dict, str, str]] = [
    ({}, "no prompt", ""), ({"prompt": "x", "tokens": [1]}, "prompt and tokens", ""),
    ({"tokens": [1], "tools": []}, "tools: tokens go through no chat template", ""),
    ({"prompt": "x", "tools": [], "options": {"raw": True}}, "tools: a raw prompt goes", ""),
    ({"prompt": "x", "tools": [], "options": {"template": {"tools": 1}}}, "given twice", ""),
    ({"prompt": "x", "promt": "x"}, "unknown field 'promt'", "did you mean prompt?"),
    ({"prompt": "x", "zzzzzz": 1}, "unknown field 'zzzzzz'", "fields are id, op"),
    ({"prompt": "x", "temperature": 1}, "unknown field 'temperature'", "object options"),
    ({"prompt": "x", "system": "x"}, "unknown field 'system'", "role system"),
    ({"op": "statsu"}, "unknown 'statsu'", "did you mean status?"),
    ({"op": 3}, "op: a number", ""),
    ({"op": "stop", "prompt": "x"}, "stop takes no field 'prompt'", ""),
    ({"op": "step", "tokn": 1}, "step takes no field 'tokn'", "did you mean token?"),
    ({"id": None, "prompt": "x"}, "id: null", ""),
    ({"id": True, "prompt": "x"}, "id: a boolean", ""),
    ({"id": 1.5, "prompt": "x"}, "id: a number", ""),
    ({"id": "x" * 2000, "prompt": "x"}, "id: longer", ""), ({"prompt": 3}, "prompt: a number", ""),
    ({"prompt": None}, "prompt: null", ""), ({"tokens": "x"}, "tokens: a string", ""),
    ({"tokens": [1, -1]}, "tokens: entry 2: -1", ""),
    ({"tokens": [1.0]}, "tokens: entry 1: 1.0", ""), ({"tokens": [2**32]}, "tokens: entry 1", ""),
    ({"tokens": [True]}, "tokens: entry 1: a boolean", ""),
    ({"prompt": "x", "stream": 1}, "stream: a number", ""),
    ({"prompt": "x", "priority": 101}, "priority: 101 is not in [-100, 100]", ""),
    ({"prompt": "x", "priority": "1"}, "priority: a string", ""),
    ({"prompt": "x", "session": "./a"}, "neither a name nor an absolute path", "directory"),
    ({"prompt": "x", "session": "-a"}, "invalid session name", ""),
    ({"prompt": "x", "session": ""}, "invalid session name", ""),
    ({"prompt": "x", "session": 3}, "session: a number", ""),
    ({"prompt": "x", "model": ""}, "model: ''", ""),
    ({"prompt": "x", "model": "a\0b"}, "model: 'a\\x00b' is no model", ""),
    ({"prompt": "x", "options": []}, "options: a list", ""),
    ({"tokens": [1], "options": {"raw": True}}, "raw: it is for a prompt", ""),
    ({"messages": [{"role": "user", "content": "x"}], "options": {"raw": True}}, "raw: it is", ""),
]  # fmt: skip
OPTION: list[tuple[dict, str, str]] = [
    ({"temprature": 1}, "unknown option 'temprature'", "did you mean temperature?"),
    ({"temperature": "1"}, "temperature: a string instead of a number", ""),
    ({"temperature": True}, "temperature: a boolean", ""),
    ({"temperature": 10**400}, "temperature: the number is too large", ""),
    ({"top_p": 1.5}, "invalid top-p: 1.5", ""), ({"top_k": 1.5}, "invalid top-k: 1.5", ""),
    ({"seed": -1}, "seed: -1 is not in [0, 18446744073709551615]", ""),
    ({"seed": 1.5}, "seed: 1.5", ""), ({"seed": 10**300}, "seed: a long number", ""),
    ({"max_tokens": 0}, "max_tokens: 0", ""), ({"stop": 3}, "stop: neither", ""),
    ({"stop": ["a", 3]}, "stop: neither", ""), ({"stop": ""}, "stop: a stop string is empty", ""),
    ({"ignore_eos": "yes"}, "ignore_eos: a string", ""),
    ({"logit_bias": [[5, 1]]}, "logit_bias: a list", ""),
    ({"logit_bias": {"x": 1}}, "logit_bias: 'x'", ""),
    ({"logit_bias": {"4294967296": 1}}, "logit_bias: '4294967296'", ""),
    ({"logit_bias": {"99999999999": 1}}, "logit_bias: '99999999999'", ""),
    ({"logit_bias": {"5": 2**63}}, "logit_bias: id 5: the number is too large", ""),
    ({"logit_bias": {"5": None}}, "logit_bias: id 5: null", ""),
    ({"logit_bias": {"5": 1e9}}, "invalid logit bias", ""),
    ({"logit_bias": {"5": 1, "05": 2}}, "id 5 is given twice", ""),
    ({"ban": 5}, "ban: a number", ""), ({"ban": ["5"]}, "ban: entry 1: a string", ""),
    ({"top": 1001, "tokens": True}, "top: 1001", ""),
    ({"top": 3}, "top: it is for token replies", "tokens"),
    ({"template": {"a b": 1}}, "template: 'a b'", ""),
    ({"template": {"messages": 1}}, "template: 'messages'", ""),
    ({"template": {"a": 1}, "raw": True}, "template: a raw prompt", ""),
    ({"tokens": 1}, "tokens: a number", ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "message", "hint"),
    USAGE + [({"prompt": "x", "options": given}, *texts) for given, *texts in OPTION],
)
def test_usage(fields: dict, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(**fields)
    assert message in caught.value.message and "\n" not in caught.value.message
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("line", "message"),
    [(b"", "not JSON: line 1 column 1: expecting value"),
     (b'{"prompt": "x"', "not JSON: line 1 column 15"),
     (b"\xff", "not UTF-8 at byte 0"), (b"[]", "a list instead of an object"),
     (b"null", "null instead of an object"), (b'{"prompt": NaN}', "NaN is not a number"),
     (b'{"prompt": "\\ud800"}', "lone surrogate"), (b'{"\\udfff": 1}', "lone surrogate"),
     (b"[" * 100_000, "nested too deep"), (b'{"id": ' + b"9" * 5000 + b"}", "a number too long"),
     (b'{"messages": []}', "the list is empty"),
     (b'{"messages": "x"}', "a string instead of a list"),
     (b'{"messages": [{"role": "user"}]}', "message 1: no content"),
     (b'{"tokens": []}', "tokens: the list is empty"), (b'{"prompt": ""}', "empty prompt"),
     (b'{"prompt": "\\n"}', "empty prompt"),
     (b'{"prompt": "", "options": {"raw": true}}', "empty prompt")],
)  # fmt: skip
def test_data(line: bytes, message: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_request(line)
    assert message in caught.value.message and "\n" not in caught.value.message
    assert gc.isenabled()


def test_attach_ops_are_passed_through() -> None:
    line = b'{"op": "step", "id": 3, "token": "not checked"}'
    request = parse_request(line, fds=[5, 6])
    assert (request.op, request.id, request.fds) == ("step", 3, [5, 6])
    assert request.raw == json.loads(line)
    assert parse_request(b'{"op": "health"}', fds=[5]).fds == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from([*FIELDS, "x"]), JSON, max_size=4),
    st.dictionaries(st.sampled_from([*OPTIONS, "x"]), JSON, max_size=4),
)
def test_whatever_it_holds_it_is_a_request_or_an_error(fields: dict, given: dict) -> None:
    fields.setdefault("options", given)
    fields.setdefault("prompt", "x")
    try:
        request = parse(**fields)
    except ToastError as error:
        assert error.code in (64, 65) and "\n" not in error.message and len(error.message) < 500
    else:
        assert request.op == "generate" and isinstance(request.prompt, str)
