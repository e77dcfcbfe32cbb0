"""Which models are listed, what is fetched, and what may be removed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.unit.test_model_files import checkpoint, hub
from tests.unit.test_model_info import CONFIG, weights
from toastkit.errors import CannotCreateError, NoInputError, UnavailableError, UsageError
from toastkit.model.hub import fetch
from toastkit.model.library import Listed, list_models, removal, remove
from toastkit.model.locate import CRUMB, find

__all__ = ["hub"]  # a fixture


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Toastkit's own folder, empty."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    folder = tmp_path / "data" / "toastkit" / "models"
    folder.mkdir(parents=True)
    return folder


def snapshot(hub: Path, hub_id: str = "org/name", revision: str = "main", commit: str = "c1"):
    """A snapshot as huggingface_hub lays it out: links to blobs."""
    repository = hub / f"models--{hub_id.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / revision).write_text(commit)
    folder = checkpoint(repository / "snapshots" / commit)
    blob = repository / "blobs" / commit
    blob.parent.mkdir(exist_ok=True)
    shutil.move(folder / "model.safetensors", blob)
    (folder / "model.safetensors").symlink_to(Path("..", "..", "blobs", commit))
    return folder


def toast(path: Path) -> Path:
    """A .toast file of one tensor."""
    inside = json.dumps(CONFIG).encode()
    data = weights(**{"__file__.config.json": ("U8", [len(inside)]), "w": ("BF16", [4])})
    path.write_bytes(data[: -len(inside) - 8] + inside + bytes(8))
    return path


def listed() -> tuple[dict[str, Listed], list[str], list[str]]:
    told: list[str] = []
    whispered: list[str] = []
    found = list(list_models(told.append, whispered.append))
    assert len({one.name for one in found}) == len(found)
    return {one.name: one for one in found}, told, whispered


def test_a_list_of_all_three_places(home: Path, hub: Path) -> None:
    checkpoint(home / "directory")
    toast(home / "file.toast")
    path = snapshot(hub)
    found, told, whispered = listed()
    assert list(found) == ["directory", "file", "org/name", "crumb"]
    assert [one.source for one in found.values()] == ["own", "own", "hub", "embedded"]
    assert (told, whispered) == ([], [])
    size = (home / "directory" / "model.safetensors").stat().st_size
    assert found["directory"].size == found["org/name"].size == size > 1000
    assert found["org/name"].where == path and found["org/name"].model_type == "llama"
    for name, one in found.items():
        assert find(name).path == one.where


def test_a_cache_behind_a_link(home: Path, hub: Path, tmp_path: Path, monkeypatch) -> None:
    snapshot(hub)
    (tmp_path / "link").symlink_to(hub.parent)
    monkeypatch.chdir(tmp_path)
    for given in (str(tmp_path / "link"), "hf", "$XDG_DATA_HOME/../hf"):
        monkeypatch.setenv("HF_HOME", given)
        found = listed()[0]
        assert list(found) == ["org/name", "crumb"]
        assert found["org/name"].where.is_absolute()


def test_nothing_but_crumb(home: Path, hub: Path, tmp_path: Path, monkeypatch) -> None:
    home.rmdir()
    home.write_text("x")
    found, told, _ = listed()
    assert list(found) == ["crumb"] and len(told) == 1 and "not a directory" in told[0]
    for name in ("XDG_DATA_HOME", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "missing"))
    assert (list(listed()[0]), listed()[1]) == (["crumb"], [])


def test_a_name_that_means_something_else_is_listed_by_its_path(home: Path, hub: Path) -> None:
    toast(home / "same.toast")
    checkpoint(home / "same")
    toast(home / "crumb.toast")
    checkpoint(home / "with blank")
    found, _, _ = listed()
    assert set(found) == {
        "same", "crumb", str(home / "same"), str(home / "crumb.toast"), str(home / "with blank"),
    }  # fmt: skip
    assert found["same"].where == home / "same.toast" and found["crumb"].where == CRUMB
    for name, one in found.items():
        assert find(name).path == one.where


def test_a_directory_here_does_not_stand_for_the_model_of_the_hub(
    home: Path, hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = snapshot(hub)
    checkpoint(tmp_path / "here" / "org" / "name")
    monkeypatch.chdir(tmp_path / "here")
    found, _, _ = listed()
    assert [one.where for name, one in found.items() if name != "crumb"] == [there]
    assert find("org/name").path != there and "org/name" not in found


def test_broken_entries_are_told_of_and_passed_over(home: Path, hub: Path) -> None:
    checkpoint(home / "good")
    checkpoint(home / "no-weights")
    (home / "no-weights" / "model.safetensors").unlink()
    checkpoint(home / "bad-config", **{"config.json": b"{"})
    (home / "junk.toast").write_bytes(b"nonsense")
    for name in ("empty", ".hidden"):
        (home / name).mkdir()
    (home / "loop").symlink_to("loop")
    (home / "gone").symlink_to("nowhere")
    (home / "notes.txt").write_text("x")
    os.unlink(snapshot(hub, "org/half") / "model.safetensors")
    for name in ("datasets--org--name", "models--odd"):
        (hub / name).mkdir()
    (hub / "version.txt").write_text("1")
    found, told, whispered = listed()
    assert list(found) == ["good", "crumb"]
    assert whispered == ["org/half: no whole model in the Hugging Face cache"]
    for name in ("no-weights", "bad-config", "junk", "empty"):
        assert sum(name in line for line in told) == 1, (name, told)
    assert len(told) == 4 and not any("\n" in line for line in told)


def test_what_is_here_is_not_fetched(home: Path, hub: Path, monkeypatch, tmp_path: Path) -> None:
    """A hub id means the hub, whatever lies in the working directory."""
    monkeypatch.chdir(tmp_path)
    checkpoint(tmp_path / "org" / "name")
    path = snapshot(hub)
    other = snapshot(hub, revision="v2", commit="c2")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch("org/name", None, False) == fetch("org/name", "main", False) == path
    assert fetch("org/name", "v2", False) == fetch("org/name", "c2", False) == other
    with pytest.raises(UnavailableError, match="not in the cache, and HF_HUB_OFFLINE is set"):
        fetch("org/name", "v3", False)
    os.unlink(other / "model.safetensors")
    with pytest.raises(UnavailableError):
        fetch("org/name", "v2", False)


def test_what_is_no_hub_id_and_no_revision(home: Path, hub: Path, tmp_path: Path) -> None:
    for name in ("crumb", "", "a/b/c", "../x", "/x", "a b/c", "x/" + "y" * 300, "a/b.toast"):
        with pytest.raises(UsageError, match="not a hub id"):
            fetch(name, None, False)
    for revision in ("", "-x", "a b", "x\n", "é" * 300):
        with pytest.raises(UsageError, match="not a revision"):
            fetch("org/name", revision, False)
    with pytest.raises(UnavailableError, match="huggingface_hub is not installed"):
        fetch("org/name", None, False)
    snapshot(hub)
    checkpoint(tmp_path / "outside")
    with pytest.raises(UnavailableError):  # nothing leads out of the cache
        fetch("org/name", "main/../../../../../outside", False)


def test_own_models_are_removed(home: Path, hub: Path, tmp_path: Path, monkeypatch) -> None:
    file = toast(home / "file.toast")
    what = removal("file")
    assert (what.paths, what.size) == ((file,), file.stat().st_size)
    assert removal("file.toast").paths == removal(str(file)).paths == (file,)
    remove(what)
    assert not file.exists()
    folder = checkpoint(home / "folder")
    monkeypatch.chdir(home.parent)
    for name in ("folder", "folder/", str(folder), f"{folder}/", "models/folder"):
        assert removal(name).paths == (folder,)
    assert removal("folder").size == sum(f.stat().st_size for f in folder.iterdir())
    remove(removal("folder"))
    remove(what)  # gone already: nothing to do
    assert list(home.iterdir()) == []


def test_broken_ones_can_be_removed_too(home: Path, hub: Path) -> None:
    """A name for two has to be told apart."""
    (home / "empty").mkdir()
    (home / "bad.toast").write_bytes(b"x")
    (home / "loop").symlink_to("loop")
    (hub / "models--org--half" / "blobs").mkdir(parents=True)
    for name in ("empty", "bad", "loop", "org/half"):
        remove(removal(name))
    assert list(home.iterdir()) == [] and list(hub.iterdir()) == []
    toast(home / "same.toast")
    checkpoint(home / "same")
    with pytest.raises(UsageError) as caught:
        removal("same")
    assert caught.value.hint == "say same.toast or same/"
    assert removal("same.toast").paths == (home / "same.toast",)
    assert removal("same/").paths == (home / "same",)


def test_a_link_is_removed_and_not_followed(home: Path, hub: Path, tmp_path: Path) -> None:
    outside = checkpoint(tmp_path / "outside")
    (home / "link").symlink_to(outside)
    checkpoint(home / "folder")
    (home / "folder" / "inner").symlink_to(outside)
    for name in ("link", "link/", "folder"):
        if os.path.lexists(home / name.rstrip("/")):
            remove(removal(name))
    assert list(home.iterdir()) == [] and (outside / "config.json").is_file()
    target = hub.parent / "elsewhere"
    snapshot(target)
    (hub / "models--org--name").symlink_to(target / "models--org--name")
    assert "org/name" in listed()[0]
    remove(removal("org/name"))
    assert list(hub.iterdir()) == [] and list(target.iterdir()) != []


def test_a_hub_model_goes_with_all_its_revisions(home: Path, hub: Path) -> None:
    snapshot(hub)
    snapshot(hub, revision="v2", commit="c2")
    snapshot(hub, "org/other")
    (hub / ".locks" / "models--org--name").mkdir(parents=True)
    what = removal("org/name")
    blobs = sum(p.stat().st_size for p in (hub / "models--org--name" / "blobs").iterdir())
    assert blobs < what.size < blobs + 2000
    remove(what)
    assert sorted(p.name for p in hub.iterdir()) == [".locks", "models--org--other"]
    assert list((hub / ".locks").iterdir()) == []


def test_nothing_else_is_ever_removed(home: Path, hub: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint(tmp_path / "mine")
    snapshot(hub)
    for name in ("crumb", "mine", "./mine", str(tmp_path), str(home), str(hub), "/", ".", "..",
                 f"{home}/..", f"{home}/../models", str(CRUMB), str(hub / "models--org--name"),
                 f"{home}/.", "../data"):  # fmt: skip
        with pytest.raises((UsageError, NoInputError)):
            removal(name)
    for name in ("", "nope", "nope.toast", "org/nope", "a\0b", "x" * 5000, "../models", ".hidden",
                 "a/b/c", "models--org--name"):  # fmt: skip
        with pytest.raises((NoInputError, UsageError)):
            removal(name)
    assert (tmp_path / "mine" / "config.json").is_file() and CRUMB.exists()


def test_what_cannot_be_removed(home: Path, hub: Path, monkeypatch) -> None:
    toast(home / "file.toast")

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(CannotCreateError, match="cannot remove .*file.toast: permission denied"):
        remove(removal("file"))
