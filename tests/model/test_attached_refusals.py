"""What the daemon refuses of attached programs: these lines may come from any process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model.attached_client import PROMPT, Client
from toastkit.errors import DataError, NoInputError, ToastError, UsageError

# --------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"fingerprint": "0" * 32}, NoInputError, "the daemon runs crumb"),
        ({"device": "gpu"}, NoInputError, "the daemon runs crumb on the cpu"),
        ({"dtype": "float16"}, NoInputError, "the daemon runs crumb in float32"),
        ({"fingerprint": 5}, UsageError, "fingerprint: a number instead of a string"),
        ({"device": []}, UsageError, "device: not one of auto, cpu, gpu"),
        ({"dtype": "int8"}, UsageError, "dtype: neither null nor one of"),
        ({"kv_bits": 16}, NoInputError, "the daemon runs crumb with keys and values in float32"),
        ({"kv_bits": 4}, UsageError, "kv_bits: neither null nor one of 8, 16, 32"),
        ({"kv_bits": True}, UsageError, "kv_bits: neither null nor one of 8, 16, 32"),
        ({"fingerprnt": 5}, UsageError, "attach takes no field 'fingerprnt'"),
    ],
)
def test_what_attach_refuses(client: Client, fields: dict, kind: type, text: str) -> None:
    client = Client(client.service, client.preparer)
    with pytest.raises(ToastError) as raised:
        client.attach(**fields)
    assert type(raised.value) is kind and raised.value.message.startswith(text)
    assert client.channel.connection.store == {}
    if "fingerprint" in fields:
        assert client.loaded == 0  # an unloaded model is not loaded to be refused


READ = [("restore", {"session": None, "source": None, "ids": PROMPT}), ("read", {"ids": PROMPT}),
        ("read", {"ids": PROMPT[9:]})]  # fmt: skip


@pytest.mark.parametrize(
    ("before", "op", "fields", "text"),
    [
        (0, "read", {"ids": [1]}, "read: restore comes first"),
        (0, "step", {"token": 1}, "step: restore comes first"),
        (0, "commit", {}, "commit: restore comes first"),
        (0, "count", {}, "count: restore comes first"),
        (0, "restore", {"session": None, "ids": [1]}, "restore needs the field 'source'"),
        (0, "restore", {"session": 5, "source": None, "ids": [1]}, "session: a number instead of"),
        (0, "restore", {"session": "s", "source": None, "ids": [1]}, "session: 's' is not an abs"),
        (0, "restore", {"session": None, "source": "/\0", "ids": [1]}, "source: '/\\x00' is not"),
        (0, "restore", {"session": None, "source": None, "ids": []}, "ids: an empty list"),
        (0, "restore", {"session": None, "source": None, "ids": "1"}, "ids: a string instead"),
        (0, "restore", {"session": None, "source": None, "ids": [1, 4096]}, "ids: entry 2 is not"),
        (0, "restore", {"session": None, "source": None, "ids": [True]}, "ids: entry 1 is not"),
        (0, "release", {"now": 1}, "release takes no field 'now'"),
        (1, "step", {"token": 1}, "step: the prompt has not been read to its end"),
        (1, "read", {"ids": [1]}, "ids: not those that come next in the prompt"),
        (2, "read", {"ids": [*PROMPT[9:], 1]}, "ids: not those that come next in the prompt"),
        (3, "read", {"ids": [1]}, "read: the prompt has been read"),
        (3, "step", {"token": 4096}, "token: not an id below 4096"),
        (3, "step", {"token": None}, "token: not an id below 4096"),
        (3, "step", {"tokens": 5}, "step takes no field 'tokens'"),
    ],
)
def test_what_an_op_refuses(client: Client, before: int, op: str, fields: dict, text: str) -> None:
    for name, given in READ[:before]:
        client.op(name, **given)
    with pytest.raises(UsageError) as raised:
        client.op(op, **fields)
    assert raised.value.message.startswith(text), raised.value.message
    if op == "step" and "tokens" in fields:
        assert raised.value.hint == "did you mean token?"
    if before == 3:
        assert client.op("step", token=1)["logits"]  # the run goes on


def test_attach_comes_first(client: Client) -> None:
    bare = [(op, {}) for op in ("count", "commit", "release")]
    for op, fields in (*READ, ("step", {"token": 1}), *bare):
        with pytest.raises(UsageError, match="attach comes first"):
            Client(client.service, client.preparer).op(op, **fields)


def test_no_more_than_the_context_holds(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client.restore(PROMPT)
    client.read(PROMPT)
    monkeypatch.setattr(client.service.engine, "context", 11)
    client.op("step", token=1)
    with pytest.raises(DataError, match="context of 11 tokens is full"):
        client.op("step", token=1)


def test_a_session_that_is_not_there(client: Client, tmp_path: Path) -> None:
    with pytest.raises(NoInputError):
        client.restore(PROMPT, source=str(tmp_path / "none"))
    assert client.service.attached == []
