"""What has been downloaded is held against what the hub says of it; a download that stands still is
noticed."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.test_model_files import checkpoint
from tests.unit.test_safetensors import GOOD, put
from toastkit.errors import (
    CannotCreateError,
    DataError,
    IOFailure,
    NoInputError,
    ToastError,
    UnavailableError,
)
from toastkit.model.download import _Watch, check_file, fetch, what_failed


def snapshot(path: Path, name: str, tag: str, data: bytes) -> Path:
    """A file of a snapshot as huggingface_hub lays it out: a link to a blob."""
    blob = path / "blobs" / tag
    blob.parent.mkdir()
    blob.write_bytes(data)
    link = path / name
    link.symlink_to(blob.relative_to(path))
    return link


@pytest.mark.parametrize("hash_of", [
    lambda data: hashlib.sha256(data).hexdigest(),
    lambda data: hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(),
    lambda data: hashlib.sha1(data).hexdigest(),
], ids=["large", "git", "mirror"])  # fmt: skip
def test_a_file_has_to_be_what_its_name_promises(tmp_path: Path, hash_of) -> None:
    data = bytes(range(256)) * 9000
    seen: list[int] = []
    file = snapshot(tmp_path, "tokenizer.json", hash_of(data), data)
    check_file(file, "m", seen.append)
    assert sum(seen) == len(data)
    file.resolve().write_bytes(data[:-1] + b"x")
    with pytest.raises(IOFailure, match=r"tokenizer\.json came damaged") as caught:
        check_file(file, "m")
    assert "run it again" in (caught.value.hint or "")
    assert list(tmp_path.iterdir()) == [tmp_path / "blobs"]
    assert list((tmp_path / "blobs").iterdir()) == []


def test_without_a_hash_the_header_counts(tmp_path: Path) -> None:
    whole = put(tmp_path / "whole", GOOD).read_bytes()
    check_file(snapshot(tmp_path, "a.safetensors", "W-1", whole), "m")
    (tmp_path / "b.safetensors").write_bytes(whole[:-1])
    with pytest.raises(DataError, match="truncated"):
        check_file(tmp_path / "b.safetensors", "m")
    assert not (tmp_path / "b.safetensors").exists()


def test_a_download_that_goes_round_in_a_circle_stands_still() -> None:
    gave_up = threading.Event()
    watch = _Watch(0.1, gave_up.set)
    with watch:
        while not gave_up.wait(0.01):
            watch.add(100)
            watch.add(-100)
    patient = threading.Event()
    watch = _Watch(30, patient.set)
    with watch:
        watch.add(1)
    assert not patient.is_set()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A huggingface_hub without a download."""

    class Bar:
        def __init__(self, **settings: object) -> None: ...
        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *rest: object) -> None: ...
        def update(self, n: float | None = 1) -> None: ...

    kinds = ("GatedRepoError", "RevisionNotFoundError", "RepositoryNotFoundError")
    parts = {
        "errors": SimpleNamespace(**{kind: type(kind, (Exception,), {}) for kind in kinds}),
        "utils": SimpleNamespace(tqdm=Bar),
        "constants": SimpleNamespace(HF_HUB_DOWNLOAD_TIMEOUT=10),
    }
    made = SimpleNamespace(**parts)
    monkeypatch.setitem(sys.modules, "huggingface_hub", made)
    for name, part in parts.items():
        monkeypatch.setitem(sys.modules, f"huggingface_hub.{name}", part)
    return made


def never(**answer: object) -> None:
    raise AssertionError(answer)


def test_only_what_is_needed_is_asked_for_and_the_config_last(tmp_path: Path, library) -> None:
    calls = []

    def download(hub_id: str, **settings) -> str:
        calls.append((hub_id, settings))
        return str(path)

    path = checkpoint(tmp_path / "c1")
    library.snapshot_download = download
    assert fetch("org/name", "", never) == path
    (first, settings), (_, templates), (second, last) = calls
    assert (first, settings["revision"]) == ("org/name", None)
    assert settings["allow_patterns"] == ["*.json", "*.safetensors", "*.jinja"]
    assert settings["ignore_patterns"] == ["*/*", "consolidated*", "config.json"]
    assert templates["allow_patterns"] == ["additional_chat_templates/*.jinja"]
    assert templates["ignore_patterns"] == ["additional_chat_templates/*/*"]
    assert (second, last["revision"]) == ("org/name", "c1")  # main may have moved on
    assert (last["allow_patterns"], last["ignore_patterns"]) == (["config.json"], [])


@pytest.mark.parametrize(
    ("missing", "kind", "said"),
    [("model.safetensors", NoInputError, "no model.*safetensors"),
     ("config.json", DataError, "no config.json"), (".", DataError, "org/name is not a model")],
)  # fmt: skip
def test_a_repository_that_is_no_model(
    tmp_path: Path, library, missing: str, kind: type[ToastError], said: str
) -> None:
    path = checkpoint(tmp_path / "c1")
    if missing == ".":
        shutil.rmtree(path)
    else:
        (path / missing).unlink()
    library.snapshot_download = lambda hub_id, **settings: str(path)
    with pytest.raises(kind, match=said):
        fetch("org/name", "", never)


ConnectError, ReadTimeout = (type(n, (Exception,), {}) for n in ("ConnectError", "ReadTimeout"))


@pytest.mark.parametrize(
    ("raised", "kind", "said"),
    [("GatedRepoError", UnavailableError, "its licence has to be accepted first"),
     ("RevisionNotFoundError", NoInputError, "no such revision on the hub: org/name at v1"),
     ("RepositoryNotFoundError", NoInputError, "no such model on the hub: org/name"),
     (ConnectError("x"), UnavailableError, "the hub cannot be reached"),
     (ReadTimeout("x"), UnavailableError, "the hub stopped answering"),
     (OSError(28, "No space left on device"), IOFailure, "no space left on device"),
     (OSError(13, "Permission denied", "f"), CannotCreateError, "permission denied"),
     (ValueError("first line.\nsecond"), UnavailableError, "cannot fetch org/name: first line"),
     (ValueError(""), UnavailableError, "cannot fetch org/name: ValueError"),
     (ImportError("no x"), UnavailableError, "huggingface_hub is broken: no x")],
)  # fmt: skip
def test_errors_of_the_hub(library, raised, kind: type[ToastError], said: str) -> None:
    error = getattr(library.errors, raised)("x") if isinstance(raised, str) else raised
    told = what_failed("org/name", "v1", error)
    assert type(told) is kind and said in told.message
    assert "\n" not in told.message and not told.message.endswith(".")


def test_a_cause_behind_others_is_found(library) -> None:
    error = RuntimeError("a paragraph\nof advice")
    error.__cause__ = ConnectError("refused")
    assert "the hub cannot be reached" in what_failed("org/name", "", error).message
    with pytest.raises(ValueError) as caught:
        json.loads("<html>")
    told = what_failed("org/name", "", caught.value)
    assert told.message == "cannot fetch org/name: what came is not from a hub"


@pytest.mark.parametrize(
    ("status", "said", "hint"),
    [(401, "401 Unauthorized", "hf auth login"), (403, "403 Forbidden", "hf auth login"),
     (404, "404 Not Found", None), (429, "429 Too Many Requests", "run it again later"),
     (503, "503 Service Unavailable", "run it again later"), (599, "599", "run it again later")],
)  # fmt: skip
def test_the_status_of_an_answer_is_told(library, status: int, said: str, hint: str | None) -> None:
    answer = OSError("Client error for url http://somewhere")
    answer.response = SimpleNamespace(status_code=status)  # type: ignore[attr-defined]
    error = FileNotFoundError("An error happened. Please check your connection.")
    error.__cause__ = answer
    told = what_failed("org/name", "", error)
    assert type(told) is UnavailableError
    assert told.message == f"cannot fetch org/name: the hub answered {said}"
    assert hint in told.hint if hint and told.hint else told.hint is hint
