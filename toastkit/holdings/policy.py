"""The base class of policies, which decide before each pass which module has which form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from toastkit.holdings.forms import Form

if TYPE_CHECKING:
    from toastkit.holdings.holdings import Holdings


class Wish(NamedTuple):
    """What is known of the next pass. gear: low, mid or high, if one was chosen. expected: the gear
    that may follow it. prompt: it is prefill."""

    gear: str | None = None
    expected: str | None = None
    prompt: bool = False


NO_WISH = Wish()
PROMPT = Wish(prompt=True)


class Policy:
    """Decides forms, and nothing else: `Engine` asks it, and `Holdings` applies them. This base
    class decides nothing; a policy overrides what it needs.

    name: of its report. variant: a word for its effect on the results, usable in a directory's
    name. paths: of the modules that it decides about; policies that share modules are asked in
    order, each given the form that the previous one wants. changes_forms: true if its forms vary,
    so that alternating passes of two kinds cost something. steps_together: true if several states
    may take a step in one pass. tells_steps: true if the last token of a prompt is to be a step,
    because the policy distinguishes steps from prefill.
    """

    name: str
    variant = ""
    paths: list[str]
    changes_forms = False
    steps_together = True
    tells_steps = True
    _before: Mapping[str, Any] = {}  # the counts when the run began

    def attach(self, holdings: Holdings) -> None:
        """Attach to a model. Raises UsageError if the policy does not apply to it."""

    def decide(self, wish: Wish) -> bool:
        """True if the next pass needs other forms than the last. Called before each pass: settings
        other than forms, such as how many experts run, are applied here too."""
        return False

    def form(self, path: str, form: Form) -> Form:
        """The form of a module in the next pass. form: what it would be without this policy."""
        return form

    def changed(self, seconds: float, made: int) -> None:
        """Called when the forms have been applied. made: modules that had to be read or made."""

    def failed(self) -> None:
        """Called when the forms could not be applied: the previous ones are still in place."""

    def expect(self, wish: Wish) -> Mapping[str, Form]:
        """The forms that may be wanted soon, to prepare; empty for none."""
        return {}

    def memory_warning(self) -> None:
        """Called when memory is short: give up what can be given up before the next pass. May be
        called from a signal handler, or another thread."""

    def begin_run(self) -> None:
        """Reset the counts of `run_report`."""
        self._before = self._counts()

    def count_step(self) -> None:
        """Called for each step, in the current forms."""

    def uncount_step(self) -> None:
        """Called where the last step counted turns out to be after the end of its run."""

    def run_report(self) -> dict[str, Any]:
        """A report of the run since `begin_run`."""
        return self._report_of(self._run_counts())

    def report(self) -> dict[str, Any]:
        """A report of all runs so far, for a daemon's status."""
        return self._report_of(self._counts())

    def _counts(self) -> dict[str, Any]:
        """Numbers that only grow: of all runs so far."""
        return {}

    def _run_counts(self) -> dict[str, Any]:
        """The same of the run since `begin_run`."""
        now = self._counts()
        return {name: round(now[name] - self._before.get(name, 0), 6) for name in now}

    def _report_of(self, counts: dict[str, Any]) -> dict[str, Any]:
        """A report with these counts."""
        return counts


def warn_of_memory(policies: Sequence[Policy]) -> None:
    """Warn all policies that memory is short. Safe in a signal handler."""
    for policy in policies:
        policy.memory_warning()


def decided(forms: dict[str, Form], policies: Sequence[Policy]) -> dict[str, Form]:
    """The forms of modules, by path, after policies have been asked in order. Updates `forms`."""
    for policy in policies:
        forms.update({p: policy.form(p, forms[p]) for p in policy.paths if p in forms})
    return forms


def let_go(holdings: Holdings, wanted: Mapping[str, Form]) -> None:
    """Before a change to the wanted forms, by path: if there is no room for them beside what they
    replace, have that leave. Its layers are then streamed in their old forms, with which a pass has
    the results that it had, should the change fail."""
    if holdings.limit is None:
        return
    limit, leaving = holdings.limit
    modules = holdings.modules
    moves = {p: form for p, form in wanted.items() if modules[p].form != form}
    ready = holdings.ready([(modules[path], form) for path, form in moves.items()])
    made = {p: f for p, f in moves.items() if f.whole and (modules[p], f) not in ready}
    if not made:
        return
    holdings.streams.settle()  # layers read ahead for passes in other forms
    holdings.store.reader.drop_spare()
    size = sum(holdings.loaded.reading_bytes(path, form) for path, form in made.items())
    if holdings.ledger.total() + size > limit:
        now = {path: modules[path].form for path in moves if path in leaving}
        holdings.change({p: form._replace(streamed=True) for p, form in now.items() if form.whole})
