"""THE engine: a model, and the three things one does with it: prefill, step, score.

    logits = engine.prefill(ids, cache)         read the prompt in chunks
    logits = engine.step(token, cache)          one more token; lazy, nothing is waited for

`mlx_lm.models` supplies the architecture and the cache classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from toastkit.engine import device
from toastkit.engine.protocol import NO_WISH, Wish
from toastkit.engine.state import ModelState, restore_state
from toastkit.errors import DataError, UsageError
from toastkit.gears.options import GearOptions
from toastkit.model.config import ModelConfig, load_config
from toastkit.model.files import ModelFiles
from toastkit.model.supported import reads_on_host
from toastkit.session.directory import Session
from toastkit.store.checkpoint import DTYPES, activation_dtype, load_weights
from toastkit.store.ledger import CACHE, Ledger
from toastkit.store.skeleton import MISFITS
from toastkit.store.store import Store

if TYPE_CHECKING:
    from toastkit.gears.manager import PrecisionManager

# Tokens per prefill pass. On the CPU the recurrent layers unroll in Python, so larger chunks gain
# nothing and hold Ctrl-C up longer.
CHUNK = {"cpu": 256, "gpu": 2048}
CLEAR_CACHE_EVERY = 256  # steps between returns of MLX's free buffers, as mlx_lm does


class Engine:
    """A loaded model.

    files: the checkpoint. dtype: of activations, None for the default of the device. notify: is
    told a line where mlx_lm computes something else than the checkpoint asks for: at once, or when
    a context passes a window that is not kept to; and when logits come out as NaN. ledger: who
    keeps how many bytes on the device. reads_on_host: the graph of a step depends on its token's
    value. gear_options: None leaves gears out altogether. gears: who shifts them; None without
    gears, and for a checkpoint that is quantised already.
    """

    def __init__(
        self,
        files: ModelFiles,
        *,
        device_name: str = "auto",
        dtype: str | None = None,
        notify: Callable[[str], None] | None = None,
        gear_options: GearOptions | None = None,
    ):
        self.device = device.start(device_name)
        self.files = files
        self.config: ModelConfig = load_config(files)
        self.dtype = dtype or activation_dtype(self.device == "cpu")
        self.ledger = Ledger()
        self._notify = notify
        store = Store(files, self.config)
        load_weights(store, self.dtype, self.ledger)
        self._model = store.model
        self._window = store.fitted.window
        self._window_told = self._window is None  # then nothing is looked at in a step
        self._has_run = False
        self._say(*store.fitted.warnings(files.name))
        self._check_dtype()
        self.reads_on_host = reads_on_host(type(self._model).__module__.rpartition(".")[2])
        self.gears = self._gears_of(store, gear_options)
        if self.gears is None:
            store.close()
        self._steps = 0

    def _say(self, *lines: str) -> None:
        if self._notify is not None:
            for line in lines:
                self._notify(line)

    def _check_dtype(self) -> None:
        """Raises UsageError for a dtype that MLX cannot compute this model in."""
        if self.device != "cpu" or self.dtype in (None, "float32"):
            return
        if any(type(module).__name__ == "SwitchLinear" for module in self._model.modules()):
            raise UsageError(
                f"--dtype {self.dtype}: on the CPU, MLX computes experts in float32 only"
            )

    def _gears_of(self, store: Store, options: GearOptions | None) -> PrecisionManager | None:
        """The gears of the loaded model. A quantised checkpoint has none: paper 003, section 12.2.
        Raises UsageError where it would have to shift nevertheless."""
        if options is None or not options.on:
            return None
        if store.quantization is not None:
            if options.fixed in ("low", "mid"):
                raise UsageError(
                    f"--gear {options.fixed}: {self.files.name} is quantised already",
                    hint="--gear auto shows what its gears would do",
                )
            if self._notify is not None and options.mode == "auto":
                self._notify(
                    f"{self.files.name} is quantised already: gears are shown and not shifted"
                )
            return None
        from toastkit.gears.manager import PrecisionManager

        dtype = None if self.dtype is None else DTYPES[self.dtype]
        return PrecisionManager(store, dtype, self.ledger, options, self._notify)

    def close(self) -> None:
        """Lets go of the checkpoint's files, which gears hold open. The model stays usable."""
        if self.gears is not None:
            self.gears.close()

    @property
    def vocab(self) -> int:
        """Entries in the logits."""
        return self.config.vocab

    @property
    def context(self) -> int | None:
        """Tokens that the model can read, None where its config does not say."""
        return self.config.context

    def new_cache(self) -> list:
        """Empty caches, one per layer, of the classes that the architecture wants."""
        from mlx_lm.models.cache import make_prompt_cache

        return make_prompt_cache(self._model)

    def prefill(
        self,
        ids: Sequence[int],
        cache: list,
        *,
        chunk: int | None = None,
        progress: Callable[[int, int], bool] | None = None,
    ) -> tuple[int, mx.array | None]:
        """Reads prompt tokens into the cache.

        ids: at least one. chunk: tokens per pass. progress(done, total) is called after each pass;
        when it returns True, reading stops there.
        Returns (tokens read, logits (vocab,) float32 after the last), logits None if it was stopped
        early. Only the last token's logits are ever computed: the other passes evaluate the caches.
        """
        for done, logits in self._passes(ids, cache, lambda: chunk):
            stopped = progress is not None and progress(done, len(ids))
            if stopped and logits is None:
                break
        return done, logits

    def _passes(
        self, ids: Sequence[int], cache: list, chunk: Callable[[], int | None]
    ) -> Iterator[tuple[int, mx.array | None]]:
        """The passes of a prefill: (tokens read so far, logits), which only the last one has.
        chunk(): tokens of the next pass, None for the device's default."""
        total, done = len(ids), 0
        if self.gears is not None:
            self.gears.shift("high")  # a prompt is read densely: section 7.2
        while total - done > 1:
            count = min(chunk() or CHUNK[self.device], total - done - 1)
            self._run(mx.array(list(ids[done : done + count]), mx.uint32)[None], cache)
            mx.eval([layer.state for layer in cache])
            mx.clear_cache()
            done += count
            yield done, None
        logits = self.step(ids[-1], cache)
        mx.eval(logits, [layer.state for layer in cache])
        self.ledger.put_bytes(CACHE, sum(layer.nbytes for layer in cache))
        self._check_logits(logits)
        yield total, logits

    def restore(
        self, session: Session | None, ids: Sequence[int], source: Session | None = None
    ) -> tuple[ModelState, int]:
        """As of StepEngine: see state.restore_state."""
        return restore_state(self, session, ids, source)

    def reading(
        self,
        state: ModelState,
        ids: Sequence[int],
        chunk: Callable[[], int | None] = lambda: None,
    ) -> Iterator[int]:
        """As of StepEngine."""
        held = len(state.tokens)
        if held == len(ids):
            return
        state.logits = None
        rest, before = ids[held:], 0
        for done, logits in self._passes(rest, state.cache, chunk):
            state.tokens.extend(rest[before:done])
            before, state.logits = done, logits
            yield held + done

    def begin_run(self) -> None:
        if self.gears is not None:
            self.gears.begin_run()

    def consume(self, state: ModelState, token: int | mx.array, wish: Wish = NO_WISH) -> None:
        """As of StepEngine: in a gear that is fixed, or else in the one wished for."""
        if self.gears is not None:
            fixed = self.gears.options.fixed
            gear = fixed or wish.gear
            if gear is not None and gear != self.gears.gear:
                state.settle()  # the next step's graph was built of modules that leave
            self.gears.step(gear)
            if wish.expected is not None and fixed is None:
                self.gears.prepare(wish.expected)
        state.run(self, token)

    def look_ahead(self, state: ModelState) -> None:
        state.look_ahead(self)

    def run_report(self) -> dict[str, Any]:
        return {} if self.gears is None else {"gears": self.gears.run_report()}

    def _check_logits(self, logits: mx.array) -> None:
        """Says once that a model computes nonsense: its weights hold NaN, most likely."""
        if self._notify is not None and mx.isnan(logits).any().item():
            self._notify(
                f"warning: {self.files.name} gives NaN for logits: are its weights damaged? "
                "toast-model verify --values finds out"
            )
            self._notify = None

    def step(self, token: int | mx.array, cache: list) -> mx.array:
        """Logits (vocab,) float32 after one more token. Lazy: the caller evaluates, once a token.

        token: an id, or a device array () of one that has not been computed yet.
        """
        ids = mx.array([[token]], mx.uint32) if isinstance(token, int) else token.reshape(1, 1)
        return self.step_rows(ids, cache)[0]

    def step_rows(self, ids: mx.array, cache: list) -> mx.array:
        """Logits (B, vocab) float32 after one more token of each of B states, lazy.

        ids: uint32 (B, 1). cache: of the B states together, see batch.Batch."""
        self._steps += 1
        if self._steps % CLEAR_CACHE_EVERY == 0:
            mx.clear_cache()
        return self._run(ids, cache)[:, -1].astype(mx.float32)

    def score(self, ids: Sequence[int], cache: list) -> mx.array:
        """Logits (len(ids), vocab) float32: row i is what the model expects after ids[i]. Lazy."""
        return self._run(mx.array(list(ids), mx.uint32)[None], cache)[0].astype(mx.float32)

    def _run(self, ids: mx.array, cache: list) -> mx.array:
        """A pass of the model: logits (B, N, vocab) for ids (B, N), lazy."""
        try:
            logits = self._model(ids, cache=cache)
        except MISFITS as error:
            if self._has_run:
                raise
            raise DataError(
                f"{self.files.name}: mlx_lm cannot run a model with this config.json: {error}"
            ) from error
        self._has_run = True
        if not self._window_told and (warning := self.window_warning(_longest(cache))):
            self._say(f"warning: {warning}")
            self._window_told = True
        return logits

    def window_warning(self, count: int) -> str | None:
        """What is wrong with so many tokens of context: they pass a sliding window that the
        architecture does not keep to. None where nothing is."""
        if self._window is None or count <= self._window:
            return None
        return (
            f"{self.files.name}: past {self._window:,} tokens mlx_lm looks further back than the "
            "model's sliding window: its answers are others than they should be"
        )


def _longest(cache: list) -> int:
    """The tokens in the caches, of the longest state in a batch."""
    for layer in cache:
        for name in ("offset", "_idx"):
            count = getattr(layer, name, None)
            if isinstance(count, int):
                return count
    return 0
