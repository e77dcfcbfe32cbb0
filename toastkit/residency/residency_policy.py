"""Residency: a policy that decides which decoder layers stay on the device (paper 001, section 3).

The others are streamed. With "auto" the number of resident layers follows available memory, checked
every 64 tokens; with a budget it shrinks as caches grow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from toastkit.errors import UsageError
from toastkit.holdings.forms import Form
from toastkit.holdings.holdings import Holdings
from toastkit.holdings.policy import Policy, Wish
from toastkit.holdings.pressure import LOW, Checks, Pressure
from toastkit.residency.memory import available_memory
from toastkit.residency.model_sizes import cache_holds, sizes_in, sizes_of, streamable
from toastkit.residency.residency_options import COUNTED, ResidencyOptions
from toastkit.residency.sizing import (
    USUAL_CONTEXT,
    WINDOW,
    Sizes,
    adaptive,
    cache_reserve,
    first_count,
    least_budget,
    placed,
)
from toastkit.store.ledger import CACHE, SESSIONS

SPARE_LAYERS = 2  # read ahead beyond the first, if the number of resident layers is given


class ResidencyPolicy(Policy):
    """Keeps some layers resident and streams the others. See holdings.policy.Policy.

    available(): bytes of memory available to this process. notify: called with a warning when
    caches outgrow a budget. steps(): matrices that another policy gives forms of its own in steps,
    but not in prefill, and those forms. resident: the resident layers, as last applied. shed,
    grown: layers given up and taken back, in total, but for those that a change of forms takes.
    """

    name = "residency"
    variant = ""  # the results are those of a wholly resident model, to the bit
    changes_forms = True
    tells_steps = False

    def __init__(
        self,
        options: ResidencyOptions,
        available: Callable[[], int] = available_memory,
        notify: Callable[[str], None] | None = None,
        steps: Callable[[], tuple[list[str], set[Form]]] | None = None,
    ):
        self.options = options
        self.paths: list[str] = []
        self.resident: frozenset[int] = frozenset()
        self.shed = self.grown = 0
        self._available, self._notify = available, notify
        self._wanted: frozenset[int] | None = None
        self._warned = self._anew = False
        self._checks = Checks()
        self._loaded = False
        self._steps, self._in_steps, self._forms_change = steps, False, False
        self._step_sizes: Sizes | None = None

    def attach(self, holdings: Holdings) -> None:
        """Attach to a model. Raises UsageError for a budget that it cannot run in."""
        self._holdings, self._store = holdings, holdings.store
        self._layer_of = streamable(holdings)
        self.paths = list(self._layer_of)
        self.sizes = sizes_of(holdings)
        self._pressure = Pressure(self.layers)
        if self._steps is not None and self.options.kind in ("bytes", "auto"):
            paths, forms = self._steps()
            in_steps = sizes_in(forms, holdings, self.sizes, paths)
            self._step_sizes = in_steps if in_steps != self.sizes else None
        if not self.paths and self._asked_count() < self.layers and self._notify is not None:
            name = self._store.files.name
            self._notify(f"warning: --resident {self.options}: no layer of {name} can be streamed")
        if self.options.kind == "bytes":
            self._check_budget()
            holdings.limit = int(self.options.amount), self._layer_of

    @property
    def _now(self) -> Sizes:
        """The sizes in the forms of the next pass."""
        return self._step_sizes if self._in_steps and self._step_sizes else self.sizes

    @property
    def layers(self) -> int:
        """How many layers the model has."""
        return len(self.sizes.layers)

    @property
    def least(self) -> int:
        """Bytes of the smallest budget, with the initial size of caches."""
        return max(map(least_budget, filter(None, (self.sizes, self._step_sizes))))

    def _check_budget(self) -> None:
        if self.options.amount < self.least:
            name = self._store.files.name
            slots = any(holding.slots for holding in self._holdings.modules.values())
            what = "slots for experts, what else" if slots else "what"
            raise UsageError(
                f"--resident {self.options}: {name} needs {-(-self.least // (1 << 20))}M at least",
                hint=f"for {what} lies outside its layers, two of them, and caches to begin with",
            )

    # ------------------------------------------------------------------------------------- deciding

    def decide(self, wish: Wish) -> bool:
        """True if the resident layers change."""
        before, anew = self._wanted, self._anew
        self._anew = self._forms_change = False
        if self.options.kind == "auto":
            self._holdings.limit = None  # but for a change of all forms
        if before is None:  # the model is to be loaded
            self._wanted = placed(self._first_count(), range(self.layers), self.options.placement)
            self._choose_cache(self._wanted)
        elif self._warned:
            self._warned = False
            self._pressure.emergency(len(before))
            self._wanted, self._in_steps = frozenset(), not wish.prompt
        elif self._step_sizes is not None and self._in_steps == wish.prompt:
            self._wanted = self._layers_after_shift(len(before))
        elif self.options.kind == "auto" and self._checks.due():
            self._wanted = self._layers_for(self._adapted_count(len(before)))
        elif self.options.kind == "bytes":
            count = self._within_budget(sorted(before))
            if anew:  # a longer context may have taken some
                count = max(count, self._first_count())
            self._wanted = self._layers_for(count)
        return self._wanted != self.resident or not self._loaded or self._forms_change

    def _layers_after_shift(self, count: int) -> frozenset[int]:
        """The layers to stay as steps follow prefill, or the reverse, in forms of other sizes.
        count: of those that stay now; no more, if memory has been short in this run."""
        self._in_steps, self._forms_change = not self._in_steps, True
        if self.options.kind == "auto":
            room = self._available() + self._holdings.ledger.total() - LOW
            self._holdings.limit = room, self._layer_of
        most = self.layers if self._pressure.ceiling == self.layers else count
        fits = min(self._first_count(), most)
        if fits >= count:
            return self._layers_for(fits)
        return placed(fits, range(self.layers), self.options.placement)

    def _asked_count(self) -> int:
        """How many layers are asked for; all, if they are not counted."""
        kind, amount, count = self.options.kind, self.options.amount, self.layers
        if kind == "layers":
            return min(count, int(amount))
        return int(count * amount / 100 + 0.5) if kind == "percent" else count

    def _first_count(self) -> int:
        """How many layers are resident to begin with (equations 1 and 2)."""
        kind, amount = self.options.kind, self.options.amount
        if not self.paths:
            return self.layers
        if kind in COUNTED:
            return self._asked_count()
        placement = self.options.placement
        reserve, given = self._reserve, kind == "bytes"
        memory = int(amount) if given else self._available()
        if self._loaded:
            reserve = max(reserve, self._caches)
            memory += 0 if given else self._holdings.ledger.total()
        return first_count(self._now, memory, given, reserve, placement)

    @property
    def _caches(self) -> int:
        """Bytes of caches now, those of finished conversations included."""
        ledger = self._holdings.ledger
        return ledger.of(CACHE) + ledger.of(SESSIONS)

    @property
    def _reserve(self) -> int:
        """Bytes to reserve for caches."""
        context = self.options.context or self._store.config.context or USUAL_CONTEXT
        return cache_reserve(self.sizes, self.options.priority, context)

    def _adapted_count(self, count: int) -> int:
        """How many layers are to be resident with the memory available now."""
        now = self._available()
        reserve = max(self._reserve, self._caches)
        # Without this model, what it has on the device would be available too.
        room = now + self._holdings.ledger.total()
        fitting = adaptive(self._now, room, reserve, self.options.placement)
        return self._pressure.update(now, count, fitting)

    def _within_budget(self, stay: Sequence[int]) -> int:
        """How many of the resident layers still fit, as caches have grown. Sets the rest of the
        budget as memory for reading ahead, or, if all layers stay, for forms that are not in
        use."""
        count, caches, sizes = len(stay), self._caches, self._now
        room = self.options.amount - sizes.outside
        window = 0 if count == self.layers else WINDOW * max(sizes.layers)
        while count and sum(sizes.layers[i] for i in stay[:count]) > room - window - caches:
            window = WINDOW * max(sizes.layers)
            count -= 1
        if not count and room < window + caches and self._notify is not None:
            self._notify(
                f"warning: --resident {self.options}: the context has outgrown it, and no layer "
                "stays that could go"
            )
            self._notify = None
        reserve = self._reserve
        kept = window + max(reserve, caches) + sum(sizes.layers[i] for i in stay[:count])
        spare = max(0, int(room - kept))
        self._holdings.streams.spare_bytes = spare
        # Caches may grow in the pass that follows.
        self._holdings.keep(max(0, spare - reserve) if count == self.layers else 0)
        return count

    def _layers_for(self, count: int) -> frozenset[int]:
        """The layers for a new count: of the resident ones, the highest are dropped first."""
        now = sorted(self._wanted or ())
        if count <= len(now):
            return frozenset(now[: max(0, count)])
        chosen = placed(count, range(self.layers), self.options.placement)
        more = [i for i in sorted(chosen) if i not in now]
        return frozenset([*now, *more[: count - len(now)]])

    def form(self, path: str, form: Form) -> Form:
        """The form, streamed unless the layer is to be resident."""
        wanted = self._wanted or frozenset()
        return form if self._layer_of[path] in wanted else form._replace(streamed=True)

    def changed(self, seconds: float, made: int) -> None:
        """Called when the wanted layers are resident."""
        assert self._wanted is not None  # `decide` has set it
        if self._loaded and not self._forms_change:
            self.shed += len(self.resident - self._wanted)
            self.grown += len(self._wanted - self.resident)
        self.resident, self._loaded = self._wanted, True
        # With a number of layers, memory use should be about what the user expects; if memory is
        # watched, reading ahead is unlimited; with a budget it gets the rest of that.
        spare = SPARE_LAYERS * max(self._now.layers)
        self._holdings.streams.spare_bytes = None if self.options.kind == "auto" else spare
        if self.options.kind == "bytes":
            self._within_budget(sorted(self.resident))
        self._choose_cache(self.resident)

    def _choose_cache(self, resident: frozenset[int]) -> None:
        """Choose whether reads use the page cache: if it cannot hold everything that is read once
        per token, nothing in it is ever reused, and it evicts the data of others."""
        self._store.keeps_cached = cache_holds(self._holdings, resident, self._available())

    def failed(self) -> None:
        """Called when the layers could not be changed: the same ones stay resident, but for those
        that had left to make room, and so do the forms."""
        self._in_steps ^= self._forms_change
        if self._loaded:
            self.resident = self.resident.difference(self._holdings.streams.layers)
        self._wanted = self.resident if self._loaded else None

    def memory_warning(self) -> None:
        """Shed all layers before the next pass (section 3.4)."""
        self._warned = bool(self.paths)  # else there is nothing to give up

    # ------------------------------------------------------------------------------------- counting

    def begin_run(self) -> None:
        """Reset the counts, and what was given up: what was too much in one run may not be in the
        next."""
        super().begin_run()
        self._anew = True
        self._pressure = Pressure(self.layers)

    def count_step(self) -> None:
        self._checks.count_step()

    def _report_of(self, counts: dict[str, Any]) -> dict[str, Any]:
        """Resident layers, of how many; and the counts."""
        return {"resident": len(self.resident), "layers": self.layers, **counts}

    def _counts(self) -> dict[str, Any]:
        """Bytes read; seconds that passes waited for layers, and computed them; streamed layers
        run; layers shed and grown."""
        times = self._holdings.streams.times
        return {
            "read": self._store.reader.bytes_read,
            "wait": round(times.wait, 6),
            "compute": round(times.compute, 6),
            "passes": times.layers,
            "shed": self.shed,
            "grown": self.grown,
        }
