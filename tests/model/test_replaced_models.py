"""A model whose files are replaced while a daemon serves it: what is asked next gets what they hold
now, without a reload or with one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import mlx.core as mx
import pytest

from tests.model.checkpoints import baked, open_model
from tests.model.service_driver import THINKING, Plain
from tests.model.worker_driver import PROMPT, answer_of, done
from tests.unit.daemon_front import eventually
from toastkit.daemon import worker
from toastkit.errors import DataError
from toastkit.model.config import fingerprint
from toastkit.model.locate import locate


def turned(model: Path) -> None:
    """Another model of the same names, shapes and sizes, put in its place as commands do."""
    path = model / "model-00001-of-00002.safetensors"
    weights = mx.load(str(path))
    mx.save_safetensors(str(model / "new.safetensors"), {k: -v for k, v in weights.items()})
    os.replace(model / "new.safetensors", path)


def expected(model: Path):
    """What a process of its own answers."""
    return Plain(open_model(model)).answer(PROMPT)


def test_a_replaced_model_is_taken_by_the_next_request(start, model: Path, plain: Plain) -> None:
    running = start(parallel=2)
    assert running.answer() == plain.answer(PROMPT)
    first = running.ask(max_tokens=60, ignore_eos=True)
    eventually(lambda: first.all_of("token"))
    turned(model)
    second = running.ask()
    done(first, second)
    assert first.one("end")["n"] == 60  # it ends with what it has begun with
    assert answer_of(second) == expected(model) != plain.answer(PROMPT)
    assert second.one("stats")["cached"] == 0
    assert running.said == [f"reloaded {model}"]


def test_settings_are_the_files_too(start, model: Path) -> None:
    """The model is the same, and so is what is remembered of it."""
    running = start()
    running.answer()
    (model / "generation_config.json").write_text('{"do_sample": true, "temperature": 4.0}')
    others = [running.ask(seed=seed) for seed in range(3)]
    done(*others)
    assert len({str(answer_of(other)) for other in others}) == 3
    assert running.said == [f"{model} has not changed"]


def test_a_legacy_template_is_part_of_the_model(model: Path) -> None:
    before = fingerprint(locate(str(model)))
    (model / "chat_template.json").write_text(json.dumps({"chat_template": "{{ 1 }}"}))
    assert fingerprint(locate(str(model))) != before


def test_a_replacement_that_cannot_be_read_is_told(start, model: Path, plain: Plain) -> None:
    """The model in memory answers, and says so, until there is another that can be read."""
    running, config = start(), (model / "config.json").read_text()
    (model / "config.json").write_text("{")
    for _ in range(2):
        channel = running.ask()
        done(channel)
        assert answer_of(channel) == plain.answer(PROMPT)
        (note,) = channel.one("stats")["notes"]
        assert note.startswith("answered by the model as it was: ") and "config.json" in note
    assert len(running.said) == 1
    (model / "config.json").write_text(config)
    channel = running.ask()
    done(channel)
    assert channel.one("stats")["notes"] == []
    turned(model)
    assert running.answer() == expected(model)


def test_a_file_that_becomes_no_model_is_told(start, model: Path, tmp_path: Path) -> None:
    model = baked(model, tmp_path / "m.toast")
    whole, running = model.read_bytes(), start(model=model)
    answer = running.answer()
    for size in (1000, 2000):
        (tmp_path / "new").write_bytes(whole[:size])
        (tmp_path / "new").rename(model)
        channel = running.ask()
        done(channel)
        assert answer_of(channel) == answer
        (note,) = channel.one("stats")["notes"]
        assert "m.toast" in note
    assert len(running.said) == 1
    (tmp_path / "new").write_bytes(whole)
    (tmp_path / "new").rename(model)
    assert running.answer() == answer and running.said[1:] == [f"reloaded {model}"]


def test_a_model_that_is_gone_answers_from_memory(start, model: Path, plain: Plain) -> None:
    running = start()
    model.rename(model.with_name("away"))
    channel = running.ask()
    done(channel)
    assert answer_of(channel) == plain.answer(PROMPT)
    assert channel.one("stats")["notes"] == running.said == []


def test_a_reload_takes_what_has_changed(start, model: Path) -> None:
    running = start(parallel=1)
    old = running.worker.status()["fingerprint"]
    running.worker.reload()
    eventually(lambda: running.said)
    assert running.said == [f"{model} has not changed"]
    first = running.ask(max_tokens=60, ignore_eos=True)
    eventually(lambda: first.all_of("token"))
    (model / "chat_template.jinja").write_text(THINKING)
    running.worker.reload()
    waiting = running.ask()  # prepared for the old template, perhaps
    done(first)
    assert first.one("end")["n"] == 60  # it ends with what it has begun with
    eventually(lambda: len(running.said) == 2)
    assert running.said[1] == f"reloaded {model}"
    done(waiting)
    assert answer_of(waiting) == running.answer() == expected(model)
    assert running.worker.status()["fingerprint"] == fingerprint(locate(str(model))) != old


def test_a_reload_that_fails_changes_nothing(start, model: Path, plain: Plain, monkeypatch) -> None:
    running = start()
    config = (model / "config.json").read_text()
    (model / "config.json").write_text("{")
    with pytest.raises(DataError):
        running.worker.reload()
    monkeypatch.setattr(worker, "Preparer", lambda settings: None)  # it was whole then
    running.worker.reload()
    eventually(lambda: running.said)
    assert running.said[0].startswith("cannot reload: ")
    assert running.answer() == plain.answer(PROMPT)
    (model / "config.json").write_text(config)
    running.worker.reload()
    eventually(lambda: len(running.said) == 2)
    assert running.said[1].endswith("has not changed")
