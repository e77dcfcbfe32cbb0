"""The tokenizer: ids of the reference, ends of turn, special tokens, broken files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from toastkit.errors import DataError, NoInputError
from toastkit.model.files import TEMPLATES_FOLDER, ModelFiles
from toastkit.model.locate import locate
from toastkit.text.chat_template import choose
from toastkit.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
CRUMB = locate("crumb")
REFERENCE = json.loads((ROOT / "tests" / "reference.json").read_text())


class Files:
    """A checkpoint's files, some of them replaced: name -> bytes, JSON, or None for absent."""

    def __init__(self, files: ModelFiles | None = CRUMB, name: str = "crumb", **changed: object):
        self.name = name
        self._files = files
        self._changed = {name.replace("__", "."): value for name, value in changed.items()}

    def read(self, name: str) -> bytes | None:
        if name in self._changed:
            value = self._changed[name]
            return (
                value if value is None or isinstance(value, bytes) else json.dumps(value).encode()
            )
        return self._files.read(name) if self._files else None

    def additional_templates(self) -> list[str]:
        return [name for name in self._changed if name.startswith(TEMPLATES_FOLDER)]


def made_of(tokenizer: Any, name: str = "made", **files: object) -> Files:
    """The files of a checkpoint that is a tokenizer, with others if given, and nothing else."""
    return Files(None, name, tokenizer__json=tokenizer.to_str().encode(), **files)


@pytest.fixture(scope="module")
def crumb() -> Tokenizer:
    return Tokenizer(Files())


def llama_like(**settings: object) -> Tokenizer:
    """A tokenizer whose post-processor adds <s> and </s>, and that truncates and pads."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "hi": 3, "yo": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9)
    settings.setdefault("tokenizer_config__json", {"bos_token": {"content": "<s>"}})
    return Tokenizer(made_of(tokenizer, **settings))


@pytest.mark.parametrize("prompt", REFERENCE["prompts"], ids=lambda prompt: prompt["name"])
def test_ids_of_the_reference(crumb: Tokenizer, prompt: dict) -> None:
    assert crumb.encode(prompt["text"], add_special=False) == prompt["token_ids"]
    assert crumb.encode_prompt(prompt["text"], templated=True) == prompt["token_ids"]
    assert crumb.decode(prompt["token_ids"], keep_special=True) == prompt["text"]


def test_crumb(crumb: Tokenizer) -> None:
    assert crumb.vocab_size == 4096
    assert crumb.eos_ids == [0, 2]
    assert crumb.special_ids == {0, 1, 2}
    assert crumb.special_tokens["eos_token"] == "<|im_end|>"
    assert crumb.bos_id is None
    assert "<|im_start|>" in crumb.templates["default"]


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_round_trip(crumb: Tokenizer, text: str) -> None:
    assert crumb.decode(crumb.encode(text, add_special=False), keep_special=True) == text


def test_special_text_in_a_raw_prompt_is_recognised(crumb: Tokenizer) -> None:
    ids = crumb.encode_prompt("<|im_start|>user\nhi<|im_end|>", templated=False)
    assert ids[0] == 1 and ids[-1] == 2
    assert crumb.decode(ids) == "user\nhi"


def test_truncation_and_padding_are_off() -> None:
    assert llama_like().encode("hi yo hi yo hi", add_special=False) == [3, 4, 3, 4, 3]
    assert llama_like().encode("hi", add_special=False) == [3]


def test_bos_is_added_once() -> None:
    tokenizer = llama_like()
    assert tokenizer.bos_id == 1
    assert tokenizer.encode_prompt("hi", templated=False) == [1, 3, 2]
    assert tokenizer.encode_prompt("<s>hi", templated=False) == [1, 3, 2]
    assert tokenizer.encode_prompt("<s><s>hi", templated=False) == [1, 1, 3, 2]
    assert tokenizer.encode_prompt("", templated=False) == [1, 2]
    assert tokenizer.encode_prompt("<s>hi", templated=True) == [1, 3]


def test_eos_is_the_union_of_all_places() -> None:
    tokenizer = llama_like(
        config__json={"eos_token_id": 7, "text_config": {"eos_token_id": [9]}},
        generation_config__json={"eos_token_id": [2, 8]},
        tokenizer_config__json={"eos_token": "</s>"},
    )
    assert tokenizer.eos_ids == [2, 7, 8, 9]
    assert llama_like(config__json={"eos_token_id": None}).eos_ids == []
    assert llama_like(config__json={"eos_token_id": True}).eos_ids == []
    assert llama_like(config__json={"eos_token_id": [2, -1, 1 << 32, 1 << 64]}).eos_ids == [2]


def test_a_special_token_that_is_no_text() -> None:
    with pytest.raises(DataError, match="bos_token: half of a character"):
        llama_like(tokenizer_config__json={"bos_token": "\ud800"})


def test_special_tokens_have_names_of_the_checkpoints_own() -> None:
    """Of a tokenizer_config.json that transformers 5.24 gives these variables for."""
    settings = {
        "bos_token": {"__type": "AddedToken", "content": "<s>"}, "eos_token": "</s>",
        "add_bos_token": True, "pad_token": None, "image_token": "<image>", "image_id": "x",
        "extra_special_tokens": {"boi_token": {"content": "<boi>"}}, "model_max_length": 9,
    }  # fmt: skip
    assert llama_like(tokenizer_config__json=settings).special_tokens == {
        "bos_token": "<s>", "eos_token": "</s>", "image_token": "<image>", "boi_token": "<boi>",
    }  # fmt: skip
    listed = {"extra_special_tokens": ["<a>"], "additional_special_tokens": ["<b>"]}
    assert llama_like(tokenizer_config__json=listed).special_tokens == {}


def end_of_turn(template: str, special: list[str], plain: list[str]) -> list[str]:
    """The tokens that end a turn, of a tokenizer with these tokens and this template."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)
    loaded = Tokenizer(made_of(tokenizer, tokenizer_config__json={"chat_template": template}))
    return [loaded.token(i) for i in loaded.eos_ids]


def test_end_of_turn_markers_of_the_template() -> None:
    markers = ["<|im_end|>", "<|eot_id|>", "<end_of_turn>"]
    assert end_of_turn("x<|eot_id|>", markers, []) == ["<|eot_id|>"]
    assert end_of_turn("x<|eot_id|>", [], markers) == []
    assert end_of_turn("x", markers, []) == []
    assert end_of_turn("<|end|>", ["<|end|>", "<|return|>"], []) == ["<|end|>"]
    assert end_of_turn("<|end|><|return|>", ["<|end|>", "<|return|>"], []) == ["<|return|>"]


def test_chat_template_places() -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    settings = {"tokenizer_config__json": {"chat_template": named}}
    in_json = {"chat_template__json": {"chat_template": "j"}}
    assert Tokenizer(Files(**settings)).templates == {"tool_use": "t", "default": "d"}
    assert Tokenizer(Files(**settings, **in_json)).templates == {"default": "j"}
    in_file = {"chat_template__jinja": "ü".encode()}
    assert Tokenizer(Files(**settings, **in_json, **in_file)).templates == {"default": "ü"}
    beside = {f"{TEMPLATES_FOLDER}/{name}__jinja": name.encode() for name in ("rag", "tool_use")}
    named = {"rag": "rag", "tool_use": "tool_use"}
    found = Tokenizer(Files(**settings, **in_json, **in_file, **beside)).templates
    assert found == {"default": "ü", **named}
    assert Tokenizer(Files(**settings, **beside)).templates == named  # as transformers has it
    assert Tokenizer(Files(tokenizer_config__json={"chat_template": named})).templates == named
    assert Tokenizer(Files(tokenizer_config__json=None)).templates == {}


@pytest.mark.parametrize(
    ("names", "tools", "wanted", "chosen"),
    [
        (("rag", "default", "tool_use"), None, None, "default"),
        (("rag", "default", "tool_use"), [], None, "tool_use"),
        (("rag", "default", "tool_use"), [], "rag", "rag"),
        (("rag", "default"), [], None, "default"),
        (("rag", "tool_use"), [], None, "tool_use"),
        ((), [], None, None),
    ],
)
def test_the_template_of_a_prompt(
    names: tuple, tools: list | None, wanted: str | None, chosen: str | None
) -> None:
    assert choose({name: name for name in names}, tools, wanted, "m") == chosen


@pytest.mark.parametrize(
    ("names", "wanted", "said"),
    [
        (("tool_use", "rag"), None, "m: has no default chat template, but rag, tool_use"),
        (("default", "rag"), "tools", "m: no chat template is called 'tools': it has default, rag"),
        (("default",), 3, "m: no chat template is called '3': it has default"),
        ((), "rag", "m: no chat template is called 'rag': it has none"),
    ],
)
def test_no_such_template(names: tuple, wanted: object, said: str) -> None:
    with pytest.raises(DataError) as caught:
        choose(dict.fromkeys(names, ""), None, wanted, "m")
    assert caught.value.message == said
    assert (caught.value.hint is not None) == (wanted is None)


def test_missing_tokenizer() -> None:
    with pytest.raises(NoInputError, match="crumb: no tokenizer.json") as caught:
        Tokenizer(Files(None))
    assert caught.value.hint and "convert it" in caught.value.hint
    for name, pull in (("org/name", True), ("/org/name", False)):
        with pytest.raises(NoInputError) as caught:
            Tokenizer(Files(None, name))
        assert ("toast-model pull org/name" in (caught.value.hint or "")) == pull


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b"\xff", b'{"model": {"type": "X"}}'])
def test_broken_tokenizer(data: bytes) -> None:
    with pytest.raises(DataError, match="crumb: broken tokenizer.json: ") as caught:
        Tokenizer(Files(tokenizer__json=data))
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("name", ["config", "generation_config", "tokenizer_config"])
@pytest.mark.parametrize("data", [b"{", b"[1]", b"\xff\xff", b"[" * 100_000])
def test_broken_configs(name: str, data: bytes) -> None:
    with pytest.raises(DataError, match=f"crumb: broken {name}.json: ") as caught:
        Tokenizer(Files(**{f"{name}__json": data}))
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "changed",
    [
        {"chat_template__jinja": b"\xff"},
        {"tokenizer_config__json": {"chat_template": 3}},
        {"tokenizer_config__json": {"chat_template": [{"template": "x"}]}},
        {"tokenizer_config__json": {"chat_template": ["x"]}},
        {"tokenizer_config__json": {"chat_template": [{"name": 1, "template": "x"}]}},
        {f"{TEMPLATES_FOLDER}/a__jinja": b"\xff"},
    ],
)
def test_broken_chat_templates(changed: dict) -> None:
    with pytest.raises(DataError, match="crumb: "):
        Tokenizer(Files(**changed))


def test_lone_surrogates_are_refused(crumb: Tokenizer) -> None:
    with pytest.raises(DataError, match="surrogate"):
        crumb.encode("a\ud800", add_special=False)


def test_odd_prompts(crumb: Tokenizer) -> None:
    assert crumb.encode("", add_special=True) == []
    ids = crumb.encode("\0" * 100_000, add_special=False)
    assert crumb.decode(ids) == "\0" * 100_000


def test_vocabulary_with_holes() -> None:
    model = tokenizers.models.WordLevel({"a": 0, "b": 900}, unk_token="a")
    assert Tokenizer(made_of(tokenizers.Tokenizer(model))).vocab_size == 901
