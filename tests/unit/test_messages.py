"""Messages from JSON: the OpenAI-style list, or one clear error."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toastkit.errors import DataError
from toastkit.text.messages import (
    MAX_VALUES,
    content_text,
    load_messages,
    load_tools,
    user_messages,
    with_text,
)


def test_messages_are_read() -> None:
    assert load_messages('[{"role": "user", "content": "ü"}]') == user_messages("ü")
    wrapped = '{"messages": [{"role": "user", "content": "ü"}]}'.encode("utf-8-sig")
    assert load_messages(wrapped) == user_messages("ü")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    given = [{"role": "user", "content": parts, "name": None}, call]
    given.append({"role": "assistant", "tool_calls": [{}]})
    assert load_messages(json.dumps(given)) == given
    assert [content_text(message) for message in given] == ["ab", "", ""]
    assert with_text(given[0], "x")["content"] == [{"type": "text", "text": "x"}]
    assert with_text(call, "x") == {**call, "content": "x"}
    assert user_messages("a", "s")[0] == {"role": "system", "content": "s"}


ONE = '{"role": "user", "content": "x"}'


@pytest.mark.parametrize(
    ("data", "message"),
    [("", "not JSON: line 1 column 1"), ("[{]", "not JSON"), (b"\xff", "not UTF-8 at byte 0"),
     ("3", "a number instead of a list"), ("null", "null instead of a list"),
     ("[]", "the list is empty"), ('{"messages": []}', "the list is empty"),
     ('{"model": "x"}', "no field 'messages'"),
     (f'{{"messages": [{ONE}], "tools": []}}', "unexpected field 'tools'"),
     (f'{{"messages": [{ONE}], "documents": []}}', "unexpected field 'documents'"),
     (f"[{ONE}, 3]", "message 2: a number instead of an object"),
     ('[{"content": "x"}]', "message 1: no role"),
     ('[{"role": 1, "content": "x"}]', "message 1: the role is a number"),
     ('[{"role": "user"}]', "message 1: no content"),
     ('[{"role": "user", "content": 5}]', "message 1: the content is a number"),
     ('[{"role": "user", "content": [5]}]', "message 1: part 1: a number"),
     ('[{"role": "user", "content": [{}]}]', "message 1: part 1: no type"),
     (f'[{ONE}, {{"role": "user", "content": [{{"type": "image_url"}}]}}]', "message 2: part 1"),
     ('[{"role": "user", "content": [{"type": "text"}]}]', "the text is null"),
     ('[{"role": "user", "content": "\\ud800"}]', "lone surrogate"),
     ("[" * 200_000, "nested too deep"), ("[" + "9" * 5000 + "]", "a number"),
     (f'[{ONE[:-1]}, "x": {"[" * 120}{"]" * 120}}}]', "messages: nested deeper than 100")],
)  # fmt: skip
def test_bad_messages(data: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match="^message") as caught:
        load_messages(data)
    assert message in caught.value.message
    assert "\n" not in caught.value.message


def test_tools_are_read() -> None:
    tools = [{"type": "function", "function": {"name": "ü"}}, {}]
    assert load_tools(json.dumps(tools)) == tools
    assert load_tools(json.dumps({"tools": tools}).encode()) == tools
    assert load_tools("[]") == []


@pytest.mark.parametrize(
    ("data", "message"),
    [('{"name": "f"}', "tools: the object has no field 'tools'"),
     ('{"tools": [], "messages": []}', "tools: unexpected field 'messages' beside 'tools'"),
     ("3", "tools: a number instead of a list"),
     ('[{}, "f"]', "tool 2: a string instead of an object"), ("[{]", "tools: not JSON: line 1"),
     ('[{"x": NaN}]', "tools: not JSON: NaN is not a number"),
     ('[{"x": ' + "[" * 120 + "]" * 120 + "}]", "tools: nested deeper than 100"),
     ("[" + "{}," * MAX_VALUES + "{}]", f"tools: over {MAX_VALUES} values")],
)  # fmt: skip
def test_bad_tools(data: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        load_tools(data)
    assert message in caught.value.message


@given(st.text() | st.binary())
def test_any_input_is_messages_or_one_error(data: str | bytes) -> None:
    try:
        assert load_messages(data)
    except DataError as error:
        assert error.message.startswith("message")
