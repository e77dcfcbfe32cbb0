"""A service whose model has gears: each conversation is answered as if it were alone."""

from __future__ import annotations

import pytest

from tests.model.checkpoints import open_crumb
from tests.model.service_driver import Asked, Driver
from toastkit.gears.gear_options import GearOptions
from toastkit.gears.monitor import MonitorOptions
from toastkit.gears.selector import SelectorOptions
from toastkit.stages.follow import GearRules, GearSettings

pytestmark = pytest.mark.usefixtures("homes")

PROMPTS = ["Tell me a story about a fox.", "What is 12 + 7?", "Prove that pi is irrational. Why?"]
# All gears come within a few tokens.
LIVELY = MonitorOptions(window=2, low=0.3, high=1.2)
RULES = GearRules(SelectorOptions(LIVELY, 1), calibrated=False)
COUNT = 6  # tokens of an answer


def told(asked: Asked) -> list[tuple]:
    return [(token["id"], token["gear"]) for token in asked.channel.all_of("token")]


@pytest.mark.parametrize("mode", ["auto", "low"])
def test_conversations_share_a_model_with_gears(mode: str) -> None:
    gears = GearSettings(GearOptions(mode, "all"), RULES)
    engine = open_crumb(gear_options=gears.options)
    assert engine.gears is not None and engine.steps_together == (mode != "auto")
    alone = []
    for prompt in PROMPTS:
        fresh = Driver(engine, cache_bytes=0, spill_bytes=0, gears=gears)
        alone.append(fresh.start(prompt, max_tokens=COUNT))
        fresh.finish()
    driver = Driver(engine, gears=gears)
    asked = [driver.start(PROMPTS[0], max_tokens=COUNT)]
    driver.turns_until(lambda: len(asked[0].ids) == 3)  # the others are read while it answers
    asked += [driver.start(prompt, max_tokens=COUNT) for prompt in PROMPTS[1:]]
    driver.finish()
    seen = set()
    for mine, wanted in zip(asked, alone):
        assert mine.answer == wanted.answer and told(mine) == told(wanted)
        counts = mine.stats["gears"]
        assert sum(counts.values()) == len(mine.ids)
        seen |= set(counts)
    assert seen == {mode} if mode != "auto" else len(seen) > 1
    report = driver.service.report()["gears"]
    assert report["mode"] == mode and report["bytes"] == engine.gears.device_bytes
    assert report["shifts"] > 0


def test_what_is_kept_is_kept_by_gear() -> None:
    """A state whose answer was computed in low gear is no state of a model without gears."""
    roots = set()
    for mode in (None, "low", "auto"):
        gears = None if mode is None else GearSettings(GearOptions(mode))
        options = None if gears is None else gears.options
        engine = open_crumb(gear_options=options)
        driver = Driver(engine, gears=gears)
        driver.start(PROMPTS[1], max_tokens=4)
        driver.finish()
        driver.service.save_all()
        found = [kept.path for kept in driver.kept]
        assert len(found) == 1 and found[0] is not None
        roots.add(found[0].parent)
    assert len(roots) == 3
