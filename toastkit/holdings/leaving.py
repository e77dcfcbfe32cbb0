"""What has to leave before a change of forms, so that all of it stays within a limit."""

from __future__ import annotations

from collections.abc import Mapping

from toastkit.holdings.forms import Form
from toastkit.holdings.holdings import Holdings


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
