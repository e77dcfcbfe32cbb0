"""Prepare a request for the model: render, tokenise, check. Needs no device; any thread."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from toastkit.daemon.history import conversation_hash
from toastkit.daemon.requests import Request
from toastkit.daemon.service_settings import ServiceSettings
from toastkit.errors import DataError, NoInputError, ToastError, UsageError
from toastkit.model.config import check_ids, fingerprint, load_config, sampling_defaults
from toastkit.model.locate import find, for_stream, locate
from toastkit.sampling.sampling_options import SamplingOptions
from toastkit.stages.tokenize import Prompt, PromptOptions, PromptTokenizer, difficulty
from toastkit.text.chat_template import start_rendering
from toastkit.text.exact_numbers import counted
from toastkit.text.tokenizer import templates
from toastkit.text.turns import TurnTokenizer

RECALLED = 1 << 17  # tokens of recent conversations, 0.3 s of CPU time


@dataclass(frozen=True)
class Prepared:
    """request: as received. ids: the prompt's tokens. key: hash of its history, all messages but
    the last. points: positions worth a savepoint, see PromptTokenizer.turning_points. sampling: the
    chain, with a seed. fingerprint: of the model. revision: of its settings. notes: a line for
    everything in the request that the chat template ignores, and for files that are not taken."""

    request: Request
    ids: list[int]
    key: int
    points: list[int]
    sampling: SamplingOptions
    fingerprint: str
    revision: int = 0
    notes: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    def save_key(self, answer: str) -> int:
        """The hash of the next turn's history if it is this prompt and the answer."""
        reply = {"role": "assistant", "content": answer}
        return conversation_hash([*messages_of(self.request), reply], self.request.tools)


def messages_of(request: Request) -> list[dict]:
    """The conversation that a request stands for. A prompt is one user turn; raw text and tokens
    have no turns, and get distinct roles that no template knows."""
    if request.messages is not None:
        return request.messages
    if request.prompt is not None:
        role = "raw" if request.options.raw else "user"
        return [{"role": role, "content": request.prompt}]
    return [{"role": "tokens", "content": str(request.tokens)}]


class Preparer:
    """Prepare requests for the checkpoint that the settings select. Thread-safe. wants_points: the
    model has layers that cannot be trimmed, so savepoints are useful. Raises NoInputError,
    DataError for its files."""

    wants_points = True

    def __init__(self, settings: ServiceSettings):
        self._settings = settings
        self.files = files = locate(settings.model)
        self._state: list | None = files.state()  # before anything is read
        self._warnings: tuple[str, ...] = ()
        self._revision = 0
        self._config = load_config(files)
        start_rendering(templates(files).values())
        self.fingerprint = fingerprint(files)
        self.tokenizer = TurnTokenizer(files)
        self._defaults = sampling_defaults(files)
        self.head = self._prompts(Request()).head(None)

    def changed(self) -> bool:
        """True, once for each change, if -m selects other files now, or if these have been written
        to. A model that is gone is no change."""
        before = self._state
        try:
            self._state = find(self._settings.model).state()
        except NoInputError:
            return False
        except ToastError:
            self._state = None  # something that cannot be read
        return self._state != before

    def prepared_alike(self, prepared: Prepared) -> bool:
        """False if that request has to be prepared again, since something has changed."""
        return (prepared.fingerprint, prepared.revision) == (self.fingerprint, self._revision)

    def stay(self, problem: str) -> None:
        """Serve on, though the files have changed, and tell whoever asks why."""
        self._warnings = (f"answered by the model as it was: {problem}",)
        self._revision += 1

    def take_settings(self, other: Preparer) -> None:
        """Sample as another Preparer of the same model does."""
        self._defaults, self._warnings = other._defaults, ()
        self._revision += 1

    def _prompts(
        self, request: Request, note: Callable[[str], None] | None = None
    ) -> PromptTokenizer:
        options = request.options
        settings = PromptOptions(
            raw=options.raw, template_arguments=options.template, tools=request.tools,
            truncate=None, max_tokens=options.max_tokens, note=note,
        )  # fmt: skip
        return PromptTokenizer(self.files, self._config, settings, self.tokenizer)

    def prepare(self, request: Request) -> Prepared:
        """Raises DataError for an invalid prompt, UsageError for options that do not fit the model,
        or a residency or expert setting that differs, NoInputError for a request for another
        model."""
        if request.model is not None:
            self._check_model(request.model)
        if request.resident is not None:
            _check_setting("--resident", self._settings.policies.resident, request.resident)
        if request.experts is not None:
            _check_setting("--experts", self._settings.policies.chosen_experts, request.experts)
        revision, sampling = self._revision, self._sampling(request)
        if request.tokens is not None:
            self._check(request.tokens)
            ids, points = request.tokens, [len(request.tokens) - 1]
            key = conversation_hash([], request.tools)
            mark = self.fingerprint
            return Prepared(request, ids, key, points, sampling, mark, revision, self._warnings)
        lines = list(self._warnings)
        prompts = self._prompts(request, lines.append)
        raw = request.options.raw
        prompt = Prompt(request.prompt) if raw else Prompt(messages=messages_of(request))
        ids = prompts.encode(prompt)
        key = conversation_hash(messages_of(request)[:-1], request.tools)
        # Raw text is repeated or continued: a pass ends before its last token, if caches cannot be
        # trimmed to that position.
        points = [len(ids) - 1] if raw else []
        if self.wants_points and not raw:
            points = prompts.turning_points(prompt, ids)
        extra, mark = {"difficulty": difficulty(prompt)}, self.fingerprint
        return Prepared(request, ids, key, points, sampling, mark, revision, tuple(lines), extra)

    def warm_up(self) -> None:
        """Prepare a dummy prompt, so that imports, compilation and the template renderer's process
        do not delay the first real one."""
        with suppress(ToastError):  # a template may refuse it
            self.prepare(Request(prompt="Hello"))
        import_module("toastkit.sampling.host")  # and numpy, for the first sampled answer

    def recall(self) -> None:
        """Tokenise the most recent conversations on disk: usually one of them is continued."""
        from toastkit.daemon.spill import last_used

        left = RECALLED
        for ids in last_used(self.fingerprint):
            if (left := left - len(ids)) < 0:
                break
            with suppress(ToastError):
                text = self.tokenizer.decode_as_library(ids, keep_special=True)
                self.tokenizer.encode(text, add_special=False)

    def _check_model(self, name: str) -> None:
        if name != self.files.name:
            try:
                for_stream(None, name, self.fingerprint)
            except ToastError:
                raise NoInputError(f"the daemon runs {self.files.name}, not {name}") from None

    def _check(self, ids: list[int]) -> None:
        limit = self._config.context
        if limit is not None and len(ids) > limit:
            count = counted(len(ids), "token")
            raise DataError(f"the prompt has {count}, the model's context is {limit}")
        check_ids(ids, self._config.vocab)

    def _sampling(self, request: Request) -> SamplingOptions:
        options = request.options
        seed = options.seed
        if seed is None:
            seed = int.from_bytes(os.urandom(4), "little")
        chain = SamplingOptions(
            **{**self._defaults, **options.sampling},
            logit_bias=options.logit_bias,
            bans=options.ban,
            seed=seed,
        )
        chain.validate(self._config.vocab)
        return chain


def _check_setting(flag: str, own: str, wanted: str) -> None:
    if wanted != own:
        raise UsageError(
            f"the daemon runs with {flag} {own}, not {flag} {wanted[:100]}",
            hint="--no-daemon answers without it",
        )


def current_model(
    settings: ServiceSettings, threads: Executor, known: Preparer | None = None
) -> Preparer:
    """The Preparer of the settings' model as its files are now: `known` if they are the same, else
    a new one, which warms up on these threads. Raises as Preparer."""
    preparer = Preparer(settings)
    if known is not None and known.fingerprint == preparer.fingerprint:
        known.take_settings(preparer)
        return known
    preparer.tokenizer.load_all()  # here, and not in the middle of answers
    if settings.spill_bytes:
        threads.submit(preparer.recall)
    threads.submit(preparer.warm_up)
    return preparer
