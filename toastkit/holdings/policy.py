"""What a policy is: it decides, before each pass of the model, which module has which form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from toastkit.holdings.forms import Form

if TYPE_CHECKING:
    from toastkit.holdings.holdings import Holdings


class Wish(NamedTuple):
    """What is known of the pass that comes. gear: low, mid or high, where somebody chose one.
    expected: the gear that is coming after it, perhaps. prompt: it reads a prompt."""

    gear: str | None = None
    expected: str | None = None
    prompt: bool = False


NO_WISH = Wish()
PROMPT = Wish(prompt=True)


class Policy:
    """Decides forms, and nothing else; `Holdings` makes them come about, `Engine` asks. This one
    decides nothing: what a policy has no use for it leaves as it is here.

    name: of its report. variant: what it does to the results, in a word that can be part of a
    directory's name. paths: of the modules that it decides about; policies that decide about the
    same ones are asked in their order, each what becomes of the form that the one before wants.
    changes_forms: whether the forms that it wants are now these, now those, so that passes of two
    kinds in turn cost something. steps_together: whether several states may take a step in one
    pass. tells_steps: whether a prompt's last token is to be a step, because it is to the policy
    another thing than a prompt.
    """

    name: str
    variant = ""
    paths: list[str]
    changes_forms = False
    steps_together = True
    tells_steps = True

    def attach(self, holdings: Holdings) -> None:
        """Takes on a model. Raises UsageError where there is nothing to decide."""

    def decide(self, wish: Wish) -> bool:
        """Whether the pass that comes is to find other forms than the last one. Asked before each
        pass: what is no matter of forms, such as how many experts run, is settled here too."""
        return False

    def form(self, path: str, form: Form) -> Form:
        """The form of a module in that pass. form: what it would be without this policy."""
        return form

    def changed(self, seconds: float, made: int) -> None:
        """The forms have come about; so many modules had to be read or made."""

    def failed(self) -> None:
        """The forms have not come about: those before are still there."""

    def expect(self, wish: Wish) -> Mapping[str, Form]:
        """The forms that may be wanted soon, to prepare; empty where none are."""
        return {}

    def memory_warning(self) -> None:
        """Memory is short: what can be given up leaves before the next pass. May be called by a
        signal's handler, or another thread."""

    def begin_run(self) -> None:
        """Counts from here on."""

    def count_step(self) -> None:
        """A step is being run in the forms as they are."""

    def run_report(self) -> dict[str, Any]:
        """Of the run since `begin_run`."""
        return {}

    def report(self) -> dict[str, Any]:
        """Of all runs so far, for a daemon's status."""
        return {}


def warn_of_memory(policies: Sequence[Policy]) -> None:
    """Has all of them give up what they can. For a signal's handler, too."""
    for policy in policies:
        policy.memory_warning()


def decided(forms: dict[str, Form], policies: Sequence[Policy]) -> dict[str, Form]:
    """What becomes of the forms of modules, by path, when policies are asked in their order."""
    for policy in policies:
        forms.update({p: policy.form(p, forms[p]) for p in policy.paths if p in forms})
    return forms
