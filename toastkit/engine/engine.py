"""THE engine: a model and its operations: prefill, step, score; restore, read, consume.

    engine = Engine(store, policies)            opens; nothing is loaded before the first pass
    logits = engine.prefill(ids, cache)         read the prompt in chunks
    logits = engine.step(token, cache)          one more token; lazy, nothing is waited for

Before each pass, policies (holdings.policy) decide which weights are on the device, and in which
form. `mlx_lm.models` supplies the architecture and the cache classes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, WeakValueDictionary

import mlx.core as mx

from toastkit.engine import device
from toastkit.engine.big_little import look_ahead, take_step, whole_step
from toastkit.engine.last_token import LastToken
from toastkit.engine.run_again import run_step
from toastkit.engine.savepoints import hold_no_views, longest, take_savepoint, undone_on_failure
from toastkit.engine.state import Caches, ModelState
from toastkit.holdings.forms import ORIGINAL
from toastkit.holdings.holdings import Holdings
from toastkit.holdings.policy import NO_WISH, PROMPT, Policy, Wish, decided, let_go
from toastkit.holdings.streams import arrays_in
from toastkit.model.supported import reads_on_host
from toastkit.native.starting import OFF, NativeOptions
from toastkit.store.dtypes import loading
from toastkit.store.jobs import host_writes
from toastkit.store.ledger import CACHE, Ledger
from toastkit.store.skeleton import MISFITS, cannot_run
from toastkit.store.store import Store

if TYPE_CHECKING:
    from toastkit.experts.experts_policy import ExpertsPolicy
    from toastkit.gears.gear_policy import GearPolicy
    from toastkit.residency.residency_policy import ResidencyPolicy
    from toastkit.session.directory import Session

# Tokens per prefill pass. More would delay Ctrl-C on the CPU, and MLX unrolls recurrent layers.
CHUNK = {"cpu": 256, "gpu": 2048}
CLEAR_CACHE_EVERY = 256  # steps between mx.clear_cache() calls, as in mlx_lm
PREPARED_SHARE = 0.5  # of an expected form is made per step: the forecast is two steps ahead


class Engine:
    """A model.

    store: the checkpoint; it stays open. policies: decide about the weights; without any, all are
    loaded as they are. dtype: of activations, None for the default of the device. cache_bytes: what
    forms not in use may keep, see Holdings.budget. notify: takes a line if mlx_lm computes
    something other than the checkpoint asks for (at once, or when a context passes a sliding window
    that is not honoured), and if logits come out as NaN. native: see NativeOptions. kv_bits: see
    store/kv_bits.py.

    model: the architecture, an mlx_lm module, whose weights the holdings put into it. vocab:
    entries in the logits. context: tokens that it can read, None if its config does not say. gears,
    residency, experts: the policies of these names. ledger: bytes on the device, by owner.
    reads_on_host: the graph of a step depends on its token's value. last_token: of prompts. Raises
    UsageError for options that it cannot honour.
    """

    def __init__(
        self,
        store: Store,
        policies: Sequence[Policy] = (),
        *,
        device_name: str = "auto",
        dtype: str | None = None,
        kv_bits: int | None = None,
        cache_bytes: int | None = None,
        notify: Callable[[str], None] | None = None,
        native: NativeOptions = OFF,
    ):
        self.device = device.start(device_name)
        self.native = device.native_products(native, self.device, notify)
        self.files, self.config = store.files, store.config
        self.vocab, self.context = store.config.vocab, store.config.context
        types = loading(dtype, self.device == "cpu", self.native, kv_bits)
        self.dtype, self.kv_dtype = types.dtype, types.kv_dtype
        self.ledger = Ledger()
        self._notify, self.model = notify, store.model
        self._window = store.fitted.window
        self._window_told = self._window is None  # then steps check nothing
        self._nan_told = notify is None
        self._say(*store.fitted.warnings(self.files.name))
        device.check_dtype(self.dtype, self.device, self.model)
        self.reads_on_host = reads_on_host(type(self.model).__module__.rpartition(".")[2])
        self.holdings = Holdings(store, types, self.ledger, cache_bytes, notify)
        self.policies = tuple(policies)
        named: dict[str, Any] = {policy.name: policy for policy in policies}
        self.gears: GearPolicy | None = named.get("gears")
        self.residency: ResidencyPolicy | None = named.get("residency")
        self.experts: ExpertsPolicy | None = named.get("experts")
        for policy in self.policies:
            policy.attach(self.holdings)
        self._caches: WeakValueDictionary[int, Caches] = WeakValueDictionary()
        self.ledger.measure(CACHE, lambda: sum(c.nbytes for c in list(self._caches.values())))
        self._ahead: WeakSet[ModelState] = WeakSet()  # with a step built ahead
        self._loaded, self._has_run, self._steps = False, False, 0
        self.last_token = LastToken()

    def _say(self, *lines: str) -> None:
        if self._notify is not None:
            for line in lines:
                self._notify(line)

    def leave_warnings(self) -> None:
        """Tell nothing of passes from now on: whoever runs them asks for `window_warning` and
        `nan_warning`, and tells."""
        self._window_told = self._nan_told = True

    def close(self) -> None:
        """Close the checkpoint's files. What is loaded stays usable."""
        self.holdings.close()

    # ---------------------------------------------------------------------- weights and policies

    def load(self, prompts: bool = True) -> None:
        """Load the weights that the policies want at first. The first pass calls it if nobody has.
        prompts: False if none will be read, which saves examining the model for last_token.py, a
        sixth of the CPU time of loading crumb. Raises DataError, IOFailure, NoInputError."""
        if not self._loaded:
            examined = prompts and not any(policy.tells_steps for policy in self.policies)
            deciding = [policy for policy in self.policies if policy.decide(PROMPT)]
            self._change(deciding, self.holdings.modules, examined)
            self._loaded = True

    def decide(self, wish: Wish) -> bool:
        """Have the policies decide about the next pass; return True if anything changed. The
        weights have the wanted forms when this returns. Raises as `load`; everything is then as it
        was."""
        self.load()
        deciding = [policy for policy in self.policies if policy.decide(wish)]
        if not deciding:
            return False
        for state in list(self._ahead):
            state.take_back()  # its graph refers to arrays that leave
        self._change(deciding, (path for policy in deciding for path in policy.paths))
        return True

    def _change(
        self, deciding: Sequence[Policy], paths: Iterable[str], examined: bool = False
    ) -> None:
        """Bring modules into the forms wanted of them, and notify the policies that decided so.
        examined: examine the model for last_token.py, too: if all of it will be loaded, then, as
        plans of native layers are made once for what is loaded; else while nothing is."""
        start = time.perf_counter()
        try:
            wanted = decided(dict.fromkeys(paths, ORIGINAL), self.policies)
            later = examined and all(form.whole for form in wanted.values())
            if examined and not later:
                self.last_token.examine(self.holdings)
            let_go(self.holdings, wanted)
            made = self.holdings.change(wanted) or 0
        except BaseException:
            for policy in self.policies:  # all, as what was to make room may have left
                policy.failed()
            raise
        for policy in deciding:
            policy.changed(time.perf_counter() - start, made)
        if later:
            self.last_token.examine(self.holdings)

    def shift(self, gear: str) -> bool:
        """Shift the model into a gear; False if it is in it already. Raises as `load`."""
        return self.decide(Wish(gear))

    def prepare(self, wish: Wish) -> None:
        """Start preparing what the policies expect to want soon."""
        for place, policy in enumerate(self.policies, 1):
            if forms := dict(policy.expect(wish)):
                forms = decided(forms, self.policies[place:])
                self.holdings.prepare(forms, PREPARED_SHARE)

    @property
    def steps_together(self) -> bool:
        """True if all policies allow several states to step in one pass."""
        return all(policy.steps_together for policy in self.policies)

    def begin_run(self) -> None:
        """Have the policies start counting here."""
        for policy in self.policies:
            policy.begin_run()

    def run_report(self) -> dict[str, Any]:
        """Return the policies' reports on the run, by name."""
        return {p.name: report for p in self.policies if (report := p.run_report())}

    # ------------------------------------------------------------------------------------ caches

    def new_cache(self) -> Caches:
        """Return empty caches, one per layer; see Holdings.new_caches."""
        return self.counted(self.holdings.new_caches())

    def counted(self, layers: Iterable[Any]) -> Caches:
        """Return caches as a list whose bytes the ledger counts for as long as it lives."""
        caches = Caches(layers)
        self._caches[id(caches)] = caches
        return caches

    # ------------------------------------------------------------------------------------ states

    def restore(
        self, session: Session | None, ids: Sequence[int], source: Session | None = None
    ) -> tuple[ModelState, int]:
        """Return the state from which a prompt can be continued, and how many of its tokens it
        holds.

        ids: the prompt's tokens. source: the session to read, if it is not the one to write. If the
        whole prompt is stored with its logits nothing is left to run; otherwise at least one token
        is, because logits come from running it.
        """
        read = source or session
        count = 0 if read is None else read.reusable(ids)
        if read is None or count == 0:
            return ModelState(self.new_cache(), session=session), 0
        # Before the caches: a writer that goes on meanwhile leaves their rows, not these.
        logits = read.logits() if count == len(ids) else None
        points = read.restore_savepoints(count, self.new_cache)
        cache = self.counted(read.restore(count, self.new_cache))
        if count in read.savepoints:
            points.append(take_savepoint(cache, count))  # or the next commit would drop it
        state = ModelState(cache, list(ids[:count]), session=session, savepoints=points)
        if source is not None and session is not None:
            session.goes_on_from(source, count, len(ids))
        if logits is not None:
            state.logits = mx.array(logits)  # type: ignore[arg-type]
        return state, count

    def reading(
        self, state: ModelState, ids: Sequence[int], chunk: Callable[[], int | None] = lambda: None
    ) -> Iterator[int]:
        """Prefill what the state does not hold of the prompt yet; yield the number of tokens it
        holds after each pass. Until the last pass the state has no logits."""
        held = len(state.tokens)
        if held == len(ids):
            return
        state.logits = state.passed = None
        for done, logits in self._passes(ids[held:], state.cache, chunk):
            state.tokens.extend(ids[len(state.tokens) : held + done])
            state.logits = logits
            state.write_ahead(len(ids))
            yield held + done

    def consume(self, state: ModelState, token: int | mx.array, wish: Wish = NO_WISH) -> None:
        """Run one more token of a state, and set its logits, float32 (vocab,), lazy.

        token: an id, or a device array () uint32 that has not been computed yet. wish: what is
        known of this pass; the policies decide first. Raises as `load`; the state is then as it
        was.
        """
        self.decide(wish)
        self.count_step()
        self.prepare(wish)
        self.holdings.counted_experts()  # those of prompts since the last step
        if self.experts is None:
            state.logits = state.next_logits(self.step, token)
        else:
            state.logits = take_step(self.experts, self.step, state, token)
        state.tokens.append(token)
        state.experts = self.holdings.counted_experts()

    def count_step(self) -> None:
        """Have the policies count a step."""
        for policy in self.policies:
            policy.count_step()

    def uncount_step(self) -> None:
        """Have the policies take back the last step they counted."""
        for policy in self.policies:
            policy.uncount_step()

    def look_ahead(self, state: ModelState) -> None:
        """Build a state's next step for a token to come, unless building its graph would run
        layers."""
        waits = self.reads_on_host or self.holdings.reads_in_passes
        if state.ahead is None and host_writes() and not waits:
            sure = not any(policy.tells_steps for policy in self.policies)
            state.ahead = look_ahead(self.experts, self.step, state, sure)
            self._ahead.add(state)

    # ------------------------------------------------------------------------------------ passes

    def prefill(self, ids: Sequence[int], cache: list, chunk: int | None = None) -> mx.array:
        """Read prompt tokens into the cache; return the logits (vocab,) float32 after the last. No
        others are computed: the last token is a step, or see last_token.py.

        ids: at least one. chunk: tokens per pass, None for what suits the device.
        """
        *_, (_, logits) = self._passes(ids, cache, lambda: chunk)
        assert logits is not None  # it was the last pass
        return logits

    def _passes(
        self, ids: Sequence[int], cache: list, chunk: Callable[[], int | None]
    ) -> Iterator[tuple[int, mx.array | None]]:
        """Run the passes of a prefill; yield (tokens read so far, logits), which only the last one
        has. chunk(): tokens of the next pass, None for the device's default."""
        total, done, logits = len(ids), 0, None
        while done < total:
            self.decide(PROMPT)
            count = self.last_token.pass_size(total - done, cache, chunk(), CHUNK[self.device])
            part = mx.array(list(ids[done : done + count]), mx.uint32)[None]
            done += count
            with whole_step(self.experts) if done == total else nullcontext():
                if count == 1 and done == total:
                    logits = self.step(part, cache)
                else:
                    with self.last_token.alone():
                        rows = self._run(part, cache)
                    logits = rows[0, -1].astype(mx.float32) if done == total else None
                    del rows  # they hold cache arrays, which MLX would otherwise copy
                    hold_no_views(cache)
                mx.eval(logits, arrays_in(cache))
            if count > 1 or done < total:
                mx.clear_cache()
            if logits is not None:
                self._check_logits(logits)
            yield done, logits

    def _check_logits(self, logits: mx.array) -> None:
        """Warn once if a prompt's logits are NaN."""
        if not self._nan_told and (warning := self.nan_warning(logits)):
            self._say(f"warning: {warning}")
            self._nan_told = True

    def step(self, token: int | mx.array, cache: list) -> mx.array:
        """Return logits (vocab,) float32 after one more token. Lazy: the caller evaluates, once a
        token.

        token: an id, or a device array () that has not been computed yet.
        """
        ids = mx.array([[token]], mx.uint32) if isinstance(token, int) else token.reshape(1, 1)
        return self.step_rows(ids, cache)[0]

    def step_rows(self, ids: mx.array, cache: list) -> mx.array:
        """Return logits (B, vocab) float32 after one more token of each of B states, lazy.

        ids: uint32 (B, 1). cache: of the B states together, see batch.Batch.
        """
        self._steps += 1
        if self._steps % CLEAR_CACHE_EVERY == 0:
            mx.clear_cache()
        return run_step(self.holdings, lambda: self._run(ids, cache), cache)

    def score(self, ids: Sequence[int], cache: list) -> mx.array:
        """Return logits (N, vocab) float32 of N ids: row i predicts what follows ids[i]. Lazy."""
        return self._run(mx.array(list(ids), mx.uint32)[None], cache)[0].astype(mx.float32)

    def _run(self, ids: mx.array, cache: list) -> mx.array:
        """Run a pass of the model: logits (B, N, vocab) for ids (B, N), lazy."""
        self.load()
        try:
            # A pass that reads weights can fail half way. (The caches of a batch are then dropped.)
            reads = self.holdings.reads_in_passes and ids.shape[0] == 1
            with undone_on_failure(cache, ids.shape[1]) if reads else nullcontext():
                logits = self.model(ids, cache=cache)
        except MISFITS as error:
            if self._has_run:
                raise
            raise cannot_run(self.files.name, error) from error
        self._has_run = True
        if not self._window_told and (warning := self.window_warning(longest(cache))):
            self._say(f"warning: {warning}")
            self._window_told = True
        return logits

    def nan_warning(self, logits: mx.array) -> str | None:
        """Return a warning if there is a NaN in logits (vocab,) float32, else None. The weights
        hold NaN then, most likely."""
        if not mx.isnan(logits).any().item():
            return None
        return (
            f"{self.files.name} gives NaN for logits: are its weights damaged? "
            "toast-model verify --values finds out"
        )

    def window_warning(self, count: int) -> str | None:
        """Return a warning if a context of `count` tokens exceeds a sliding window that the
        architecture does not honour, else None."""
        if self._window is None or count <= self._window:
            return None
        return (
            f"{self.files.name}: past {self._window:,} tokens mlx_lm looks further back than the "
            "model's sliding window: its answers are others than they should be"
        )
