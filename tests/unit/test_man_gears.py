"""What the pages say of gears, against the code: numbers of the rules, fields of the files."""

from __future__ import annotations

import dataclasses
import re

import pytest

from tests.unit.mdoc import MAN, Page
from toastkit.commands.entropy_gear import WORDS
from toastkit.gears import calibration, classifier, monitor, selector, thresholds
from toastkit.session.gear_state import GEAR_FILE
from toastkit.stages.calibrate import ANSWER_TOKENS

GEAR = Page(MAN / "man1" / "toast-entropy-gear.1")
FRAMES = Page(MAN / "man5" / "toast-frames.5")
c = calibration


def test_numbers_of_the_rules() -> None:
    options = selector.SelectorOptions()
    score = (classifier.MATH_WEIGHT, classifier.CODE_WEIGHT, classifier.LENGTH_WEIGHT)
    assert (monitor.CATASTROPHIC, options.monitor.lookahead) == (0.9, 2)
    for phrase in (
        "over nine tenths of the greatest possible one",
        "would ask for in two steps",
        f"for a vocabulary of {options.monitor.reference_vocab:,}",
        f"held at least, 1 to {selector.LONGEST_DURATION:,}. "
        f"The default is {options.min_duration};",
        "score = {:g} math + {:g} code + {:g} min(words / {}, {}) + {:g} long".format(
            *score, classifier.WORDS_A_STEP, classifier.MAX_STEPS, classifier.LONG_WORDS_SCORE
        ),
        f"over {classifier.LONG_WORDS:g} characters",
        f"From {classifier.HIGH_SCORE:g} on the run begins in high gear, "
        f"from {classifier.MID_SCORE:g} on in mid",
        f"Of the positive entropies, {c.MIN_SAMPLES} at least, "
        f"low is the {c.LOW_PERCENT}th percentile and high the {c.HIGH_PERCENT}th",
        f"less than {c.PREFILL_BAND:g} bits apart",
        f"capped at {c.LOW_CAP:g} times log2 of the vocabulary, high at {c.HIGH_CAP:g} times",
        f"at least {c.MIN_LOW:g} bits; high is {c.HIGH_BY_MEDIAN:g} times low, "
        f"and at least {c.PROMPTS_BAND:g} bits above",
        f"Low is the {c.EASY_PERCENT}th percentile of the entropies in the answers to the easy "
        f"prompts, high the {c.HARD_PERCENT}th",
        f"They are at least {c.FILE_BAND:g} bits apart",
        f"the likeliest tokens, {ANSWER_TOKENS} at most",
    ):
        assert phrase in GEAR.words(), phrase


def test_words_of_calibrate() -> None:
    prefill, prompts, off = WORDS
    assert f"Ar {prefill} | {prompts} | file | {off}" in GEAR.part("SYNOPSIS")
    part = GEAR.part("DESCRIPTION", "Calibration")
    assert re.findall(r"^\.It (?:Cm|Ar) (\w+)$", part, re.M) == [prefill, prompts, "file"]
    assert f"\n.Cm {off}\n" in part


def test_files_and_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    part = GEAR.part("FILES")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    stored = str(thresholds.path("FINGERPRINT")).replace("/cache", "$XDG_CACHE_HOME")
    assert f".It Pa {stored}\n" in part and f".It Pa {GEAR_FILE}\n" in part
    names = [field.name for field in dataclasses.fields(calibration.Thresholds)]
    assert re.findall(r"^\.Va (\w+)", part, re.M) == ["schema", *names]
    assert f"\n.Va schema ,\nwhich is {thresholds.SCHEMA_VERSION},\n" in part


def test_what_a_head_says_of_a_prompt() -> None:
    part = FRAMES.part("KINDS", "head")
    told = part[part.index(".Li difficulty") : part.index(".Xr toast-sample")]
    listed = re.findall(r"^\.Li (\w+)", told, re.M)[1:]
    assert listed == list(classifier.classify("")._asdict())
