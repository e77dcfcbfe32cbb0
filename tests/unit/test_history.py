"""The key of a conversation: the published hash, one spelling of a message, the next turn's key."""

from __future__ import annotations

from hashlib import blake2b
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toastkit.daemon.history import OFFSET_BASIS, conversation_hash, fnv1a64
from toastkit.daemon.prepare import Prepared
from toastkit.daemon.requests import make_request

# From the test suite that its authors publish (Fowler, Noll, Vo: test_fnv.c).
VECTORS = {
    b"": 0xCBF29CE484222325, b"a": 0xAF63DC4C8601EC8C, b"b": 0xAF63DF4C8601F1A5,
    b"c": 0xAF63DE4C8601EFF2, b"fo": 0x08985907B541D342, b"foo": 0xDCB27518FED9D577,
    b"foob": 0xDD120E790C2512AF, b"fooba": 0xCAC165AFA2FEF40A, b"foobar": 0x85944171F73967E8,
    b"\0": 0xAF63BD4C8601B7DF, b"chongo was here!\n": 0x46810940EFF5F915,
}  # fmt: skip
HELLO = {"role": "user", "content": "Hello"}
HI = {"role": "assistant", "content": "Hi there."}

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["", " ", "\n a \t"]
)
ROLES = st.sampled_from(["system", "user", "assistant", "tool"])
MESSAGES = st.lists(st.builds(lambda r, c: {"role": r, "content": c}, ROLES, TEXTS), min_size=1)


def save_key(request: dict, answer: str) -> int:
    """The name under which a request and its answer are kept."""
    return Prepared.save_key(SimpleNamespace(request=make_request(request)), answer)


def test_the_hash_is_fnv_1a() -> None:
    assert {data: fnv1a64(data) for data in VECTORS} == VECTORS
    assert conversation_hash([]) == OFFSET_BASIS


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_a_hash_goes_on_where_one_ended(a: bytes, b: bytes) -> None:
    assert fnv1a64(b, fnv1a64(a)) == fnv1a64(a + b)


def test_the_hash_stays_what_it_is() -> None:
    """It names directories that another version of toastkit is to find."""
    spelled = b"user\x1fHello\x1f\x1eassistant\x1fHi there.\x1f\x1e"
    assert conversation_hash([HELLO, HI]) == fnv1a64(spelled)
    spelled = b'tool\x1f12\x1f{"name": "clock", "x": [1, null]}\x1e'
    message = {"x": [1, None], "name": "clock", "content": "12", "role": "tool"}
    assert conversation_hash([message]) == fnv1a64(spelled)


def test_a_long_message_goes_through_a_digest() -> None:
    """FNV-1a goes byte by byte, in Python: fifteen megabytes would take it ten seconds."""
    long = {"role": "user", "content": "x" * 15_000_000}
    data = b"user\x1f" + b"x" * 15_000_000 + b"\x1f\x1e"
    assert conversation_hash([HI, long]) == fnv1a64(blake2b(data).digest(), conversation_hash([HI]))


PARTS = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]


@pytest.mark.parametrize(
    "same",
    [{"role": "user", "content": "  Hello\n"}, {"content": "Hello", "role": "user"},
     {"role": "user", "content": "Hello", "name": None}, {**HELLO, "content": PARTS}],
)  # fmt: skip
def test_what_makes_no_other_conversation(same: dict) -> None:
    assert conversation_hash([same, HI]) == conversation_hash([HELLO, HI])


@pytest.mark.parametrize(
    "other",
    [[], [HI], [HI, HELLO], [HELLO, HI, HELLO], [{**HELLO, "role": "system"}, HI],
     [{**HELLO, "content": "hello"}, HI], [{**HELLO, "content": "Hel lo"}, HI],
     [{**HELLO, "name": "Fox"}, HI], [{**HELLO, "name": ""}, HI],
     [{"role": "user", "content": "HelloassistantHi there."}]],
)  # fmt: skip
def test_what_makes_another(other: list) -> None:
    assert conversation_hash(other) != conversation_hash([HELLO, HI])


def test_tools_and_other_fields_make_another_conversation() -> None:
    """In whatever order the fields are."""
    plain, tools = conversation_hash([HELLO]), [{"name": "f"}]
    assert conversation_hash([HELLO], None) == conversation_hash([HELLO], []) == plain
    assert conversation_hash([HELLO], tools) != plain
    saved = save_key({"messages": [HELLO], "tools": tools}, "Hi there.")
    assert saved == conversation_hash([HELLO, HI], tools)
    one = {**HI, "tool_calls": [{"id": "1", "name": "clock"}], "name": "Fox"}
    two = {"name": "Fox", "tool_calls": [{"name": "clock", "id": "1"}], **HI}
    assert conversation_hash([one]) == conversation_hash([two]) != conversation_hash([HI])
    assert conversation_hash([{**one, "name": "Wolf"}]) != conversation_hash([one])


@given(MESSAGES, TEXTS, TEXTS, st.sampled_from(["", " ", "\n\n"]))
def test_what_is_saved_is_what_the_next_turn_looks_for(
    messages: list[dict], answer: str, question: str, space: str
) -> None:
    """Also where the client trims the answer, or does not. This is how the seed builds the key."""
    saved = save_key({"messages": messages}, answer + space)
    following = [*messages, {"role": "assistant", "content": answer}]
    request = make_request({"messages": [*following, {"role": "user", "content": question}]})
    assert request.messages is not None
    assert conversation_hash(request.messages[:-1]) == saved
    other = [*messages, {"role": "assistant", "content": answer + "."}]
    assert conversation_hash(other) != saved


def test_a_prompt_is_one_user_turn_but_raw_text_and_tokens_are_none() -> None:
    assert save_key({"prompt": "Hello"}, "Hi there.") == conversation_hash([HELLO, HI])
    raw = {"prompt": "[1, 2]", "options": {"raw": True}}
    requests = ({"prompt": "[1, 2]"}, raw, {"tokens": [1, 2]}, {"tokens": [1, 3]})
    assert len({save_key(request, "Hi") for request in requests}) == 4
