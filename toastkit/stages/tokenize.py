"""tokenize: prompts into token frames, through the checkpoint's chat template if it has one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, cached_property, partial
from types import MappingProxyType
from typing import Any, NamedTuple

from toastkit.errors import DataError
from toastkit.frames import Frame, Head, Tokens, pack_ids
from toastkit.model.config import ModelConfig, check_ids, fingerprint
from toastkit.model.files import ModelFiles
from toastkit.prefix import common_prefix
from toastkit.text import pieces
from toastkit.text.chat_template import CALLS, CHOICE, choose, render
from toastkit.text.exact_numbers import are, counted
from toastkit.text.messages import AS_TEXT, content_text, documents, with_text
from toastkit.text.tokenizer import Tokenizer
from toastkit.threads import in_background

# Room that --truncate leaves for the answer without --max-tokens.
ANSWER_ROOM = 256
MAX_TOKENS = 1 << 20  # of a prompt, if the config gives no context length
MAX_CLASSIFIED = 1 << 17  # characters examined to guess the difficulty
KEPT_HEAD = 1 << 10  # characters of a text that --truncate keeps before its tail


class PromptOptions(NamedTuple):
    """raw: no chat template. generation_prompt: the template opens the assistant's turn.
    template_arguments: variables for the template. tools: JSON schemas for it. truncate: shorten a
    prompt that is too long, leaving room for max_tokens; None: whoever asks cannot have that. note:
    called with one line when that happens, and one for each variable that the template ignores."""

    raw: bool = False
    generation_prompt: bool = True
    template_arguments: Mapping[str, Any] = MappingProxyType({})
    tools: list[dict] | None = None
    truncate: bool | None = False
    max_tokens: int | None = None
    note: Callable[[str], None] | None = None


class Prompt(NamedTuple):
    """A prompt: raw text, or messages for the chat template. where: it was found, of many."""

    text: str | None = None
    messages: list[dict] | None = None
    where: str | None = None


@contextmanager
def at(where: str | None) -> Iterator[None]:
    """A DataError names the place, if there is one."""
    try:
        yield
    except DataError as error:
        if where is None:
            raise
        raise DataError(f"{where}: {error.message}", error.hint) from error


def difficulty(prompt: Prompt) -> dict[str, Any]:
    """How hard a prompt looks, as put into a head for gear selection: judged by the raw text or the
    last message, not by the history before it."""
    from toastkit.gears.classifier import classify

    text = prompt.text if prompt.messages is None else content_text(prompt.messages[-1])
    return classify((text or "")[:MAX_CLASSIFIED])._asdict()


class PromptTokenizer:
    """Render and tokenise prompts for one checkpoint.

    tokenizer: the checkpoint's, if already loaded; else it is loaded on demand.
    """

    def __init__(
        self,
        files: ModelFiles,
        config: ModelConfig,
        options: PromptOptions,
        tokenizer: Tokenizer | None = None,
    ):
        self.files = files
        self.vocab = config.vocab
        self._config = config
        self._options = options
        self._noted: set[str] = set()
        self._fingerprint: Callable[[], str] = cache(partial(fingerprint, files))
        if tokenizer is not None:
            tokenizer.check_fits(config.vocab)
            self.tokenizer = tokenizer

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's. Raises as Tokenizer, DataError for one that is another model's."""
        tokenizer = Tokenizer(self.files)
        tokenizer.check_fits(self.vocab)
        return tokenizer

    def start_fingerprint(self) -> None:
        """Start making the fingerprint, on a thread: it is reading and hashing."""
        self._fingerprint = in_background(self._fingerprint, "fingerprint")

    @property
    def fingerprint(self) -> str:
        """The checkpoint's, which does not require its tokenizer."""
        return self._fingerprint()

    def render(self, prompt: Prompt) -> str:
        """The text to tokenise. Without a template, messages are joined by blank lines."""
        if prompt.messages is None:
            return prompt.text or ""
        options = self._options
        arguments = dict(options.template_arguments)
        wanted = arguments.pop(CHOICE, None)
        template = choose(self.tokenizer.templates, options.tools, wanted, self.files.name)
        if template is None:
            unused = [*arguments, *([] if options.tools is None else ["tools"])]
            unused += [CALLS] * any(message.get(CALLS) for message in prompt.messages)
            for name in unused:
                self._note_once(f"{self.files.name} has no chat template to make use of {name!r}")
            if any(map(documents, prompt.messages)):
                raise DataError(f"{self.files.name} has no chat template for documents", AS_TEXT)
            return "\n\n".join(map(content_text, prompt.messages))
        return render(
            template,
            prompt.messages,
            add_generation_prompt=options.generation_prompt,
            special_tokens=self.tokenizer.special_tokens,
            arguments=arguments,
            tools=options.tools,
            note=self._note_once,
        )

    def _note_once(self, line: str) -> None:
        """Report a line once: many prompts share their options, and one may be rendered
        repeatedly."""
        if self._options.note is not None and line not in self._noted:
            self._noted.add(line)
            self._options.note(line)

    def encode(self, prompt: Prompt) -> list[int]:
        """The prompt's token ids. Raises DataError for an empty one, or one over the context, which
        is tokenised no further than it takes to tell."""
        with at(prompt.where):
            return self._encode(prompt)

    def _encode(self, prompt: Prompt) -> list[int]:
        limit = self._config.context or MAX_TOKENS
        truncate = self._options.truncate and self._config.context is not None
        whole = prompt
        if truncate:
            prompt = self.shortened(prompt, limit)
        text = self.render(prompt)
        if not truncate:
            self._check_size(text, limit)
        ids = self._ids(prompt, text, None if truncate else limit)
        if not ids:
            raise DataError("empty prompt")
        if len(ids) <= limit:
            return ids
        exact = prompt is whole and (truncate or len(text) <= pieces.PIECE)
        count = f"the prompt has {'' if exact else 'at least '}{counted(len(ids), 'token')}"
        if not truncate:
            raise self._too_long(count, limit)
        wanted = self._options.max_tokens or ANSWER_ROOM
        room = max(limit - min(wanted, limit // 2), 1)
        short = self._truncate(prompt, whole, ids, room)
        if self._options.note is not None:
            left = f"{counted(len(short), 'token')} {are(len(short))} left"
            self._options.note(
                f"{count}, the model's context is {limit}: its beginning is cut off, {left}"
            )
        return short

    def _ids(self, prompt: Prompt, text: str | None = None, most: int | None = None) -> list[int]:
        """Ids of a prompt. text: its rendering, if known. most: as in Tokenizer.encode. Raises
        DataError for ids outside the model's vocabulary, which added tokens and the post-processor
        may give."""
        templated = prompt.messages is not None and bool(self.tokenizer.templates)
        text = self.render(prompt) if text is None else text
        ids = self.tokenizer.encode_prompt(text, templated, most)
        check_ids(ids, self.vocab)
        return ids

    def _check_size(self, text: str, limit: int) -> None:
        """Raise DataError for a text that cannot fit, whatever its tokens are."""
        if len(text) <= pieces.PIECE:
            return  # examining a vocabulary takes longer than tokenising this
        reach = self.tokenizer.reach
        if reach is not None and len(text) > limit * reach:
            count = f"the prompt has {len(text)} characters, {limit * reach} at most can fit"
            raise self._too_long(count, limit)

    def _too_long(self, what: str, limit: int) -> DataError:
        if self._config.context is None:
            return DataError(f"{what}, and without a context in config.json {limit} is the limit")
        hint = "shorten it" + (", or give --truncate" if self._options.truncate is False else "")
        return DataError(f"{what}, the model's context is {limit}", hint=hint)

    def shortened(self, prompt: Prompt, limit: int) -> Prompt:
        """An equivalent of this prompt for truncation, or itself: long texts without a middle that
        cannot be kept, which is then not tokenised."""
        if prompt.messages is None:
            text = self._ends(prompt.text or "", limit)
            return prompt if text == prompt.text else Prompt(text=text)
        contents = [content_text(message) for message in prompt.messages]
        texts = [self._ends(content, limit) for content in contents]
        if texts == contents:
            return prompt
        short = zip(prompt.messages, texts, contents)
        messages = [
            m if text == content else with_text(m, text, True) for m, text, content in short
        ]
        return Prompt(messages=messages)

    def _ends(self, text: str, limit: int) -> str:
        """A text's beginning, and its end with more than 2 * limit tokens: at most `limit` of those
        are kept, too far from the cut to depend on it."""
        size = 8 * limit
        while KEPT_HEAD + size < len(text):
            end = text[-size:]
            if len(self.tokenizer.encode(end, False, 2 * limit)) > 2 * limit:
                return text[:KEPT_HEAD] + end
            size *= 2
        return text

    def turning_points(self, prompt: Prompt, ids: list[int]) -> list[int]:
        """Where other prompts may branch off this one: positions to resume at, ascending.

        ids: of the prompt. The first is where its last message begins, for another message after
        the same history; the second is how far the next turn will share its beginning, whatever the
        answer: templates open the assistant's turn differently from how they render it later, and
        some drop the reasoning of earlier turns. Found by rendering such prompts. Fewer if the
        template refuses them.
        """
        if prompt.messages is None or not self.tokenizer.templates:
            return []
        *history, last = prompt.messages
        other = with_text(last, "x" if content_text(last)[:1] != "x" else "y")
        like = {"content": last.get("content")}
        more = [with_text({**like, "role": role}, "x") for role in ("assistant", "user")]
        text = self.render(prompt)
        found = set()
        for messages in ([*history, other], [*prompt.messages, *more]):
            try:
                found.add(self._common_tokens(text, ids, Prompt(messages=messages)))
            except DataError:
                continue
        return sorted(n for n in found if 0 < n < len(ids))

    def _common_tokens(self, text: str, ids: list[int], other: Prompt) -> int:
        """Length of the common token prefix of two prompts, up to where a special token begins:
        there the tokens on the left do not depend on what is to the right."""
        end = common_prefix(text, self.render(other))
        special = filter(None, self.tokenizer.special_texts)
        start = max((text.rfind(piece, 0, end) for piece in special), default=-1)
        if start > 0:
            tail = self.tokenizer.encode(text[start:], add_special=False)
            if tail == ids[len(ids) - len(tail) :]:
                return len(ids) - len(tail)
        count = common_prefix(ids, self._ids(other))
        return max(count - 1, 0)

    def _truncate(self, prompt: Prompt, whole: Prompt, ids: list[int], room: int) -> list[int]:
        """Drop tokens from the beginning: of a raw prompt, else of the longest message, so that the
        template stays intact. whole: the prompt before it was shortened."""
        if prompt.messages is None or whole.messages is None:
            return ids[-room:]
        messages = list(prompt.messages)
        lengths = [len(content_text(message)) for message in whole.messages]
        excess, more = len(ids) - room, 0
        while excess > 0:
            longest = max(range(len(lengths)), key=lengths.__getitem__)
            text = content_text(messages[longest])
            content = self.tokenizer.encode(text, add_special=False)
            if not content:
                raise DataError(f"the prompt cannot be cut down to {counted(room, 'token')}")
            # Half a character has more tokens than the whole: it is dropped too.
            left = self.tokenizer.decode(content[excess + more :]).lstrip("\ufffd")
            if len(left) >= len(text):  # sentencepiece prefixes any text again
                more += 1
                continue
            messages[longest] = with_text(messages[longest], left, keep=True)
            lengths[longest] = len(left)
            excess -= len(content)
            if excess <= 0:
                ids = self._ids(Prompt(messages=messages))
                excess = len(ids) - room
        return ids

    def head(self, session: str | None) -> Head:
        """The frame that begins a run of this model."""
        return Head(
            model=self.files.name,
            fingerprint=self.fingerprint,
            vocab=self.vocab,
            eos=self.tokenizer.eos_ids,
            session=session,
        )


def tokenize(
    prompts: Iterable[Prompt],
    tokenizer: PromptTokenizer,
    session: str | None = None,
    rated: bool = True,
) -> Iterator[Frame]:
    """A run for each prompt: its head and its tokens. rated: the head tells how hard the prompt
    looks."""
    head: Head | None = None
    for prompt in prompts:
        ids = tokenizer.encode(prompt)
        head = head or tokenizer.head(session)
        yield replace(head, extra={"difficulty": difficulty(prompt)} if rated else {})
        role = prompt.messages[-1]["role"] if prompt.messages else "user"
        yield Tokens(pack_ids(ids), role)
