"""The difficulty of a prompt, estimated from its text before any entropy is known.

Paper 003 section 11: a cheap score of the text picks the gear that an answer starts in; observed
entropy overrides it within a few steps. It is a guess from the surface, and meant to be no more.

    score = 2 n_math + 1.5 n_code + 0.3 min(words / 50, 3) + 1.5 [mean word length > 6.5]

The paper leaves open what counts. Here:

    word      text between blanks, punctuation included
    keyword   one of KEYWORDS in any case, not next to an ASCII letter, digit or underscore
    symbol    one of SYMBOLS or UNICODE_SYMBOLS; a run of the same one counts once (==, =====);
              * between two operands, which excludes emphasis and bullets;
              / likewise, except between two letters without blanks (and/or, paths, addresses);
              - between blanks and beside a digit: elsewhere it is mostly a hyphen or a dash;
              π not beside another Greek letter, which excludes Greek prose.
              Operands are letters, digits and brackets; blanks are on both sides or on neither.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from toastkit.frames import GEARS

HIGH_SCORE = 4.0
MID_SCORE = 1.5
MATH_WEIGHT = 2.0
CODE_WEIGHT = 1.5
LENGTH_WEIGHT = 0.3
WORDS_A_STEP = 50
MAX_STEPS = 3
LONG_WORDS_SCORE = 1.5
LONG_WORDS = 6.5  # characters
LARGEST = 2**53  # number in a map that JSON represents exactly

SYMBOLS = "=+^<>%"
UNICODE_SYMBOLS = "−×÷±√∑∏∫∂∇∞∝≈≠≡≤≥∈∉⊂⊆∪∩∧∨¬∀∃⇒⇔⊕⊗"
_PROGRAMMING = """
algorithm api array async await bash binary bool boolean bug class code coding compile compiler
complexity const css debug def enum exception float function git html implement import int java
javascript json kotlin lambda loop null parser pointer printf println program programming python
query recursion recursive refactor regex return rust script sql stdin stdout struct subroutine
swift syntax tuple typescript unittest variable void while xml yaml
"""
_REASONING = """
analyse analyze axiom calculate compute conjecture corollary deduce derivation derivative derive
determine equation evaluate factorise factorize formula hence hypothesis inequality infer integer
integral lemma logic logical logically matrix maximise maximize minimise minimize optimise optimize
polynomial probability proof prove puzzle reason reasoning simplify solve step steps theorem
therefore why
"""
KEYWORDS = frozenset((_PROGRAMMING + _REASONING).split())

# Each begins with a character set, which the search skips to. They are compiled on first use: most
# importers of this file only need Difficulty.
_ALWAYS = f"([{re.escape(SYMBOLS + UNICODE_SYMBOLS)}])\\1*"
_BETWEEN = (
    r"[*/π-](?:"
    r"(?<=[\w)\]]\*)(?=[\w(\[])"  # a*b
    r"|(?<=[\w)\]] [*/])(?= [\w(\[])"  # a * b, a / b
    r"|(?<=[\d)\]]/)(?=[\w(\[])"  # 1/b
    r"|(?<=\w/)(?=[\d(\[])"  # a/2
    r"|(?<=\d -)(?= )|(?<=\S -)(?= \d)"  # 1 - a, a - 2
    r"|(?<=π)(?<![α-ωά-ώΑ-Ω]π)(?![α-ωά-ώΑ-Ω])"
    r")"
)
_ALONE = bytes(c if chr(c).isalnum() or c == 95 else 32 for c in range(128)).ljust(256)
_KEYWORDS = frozenset(word.encode("ascii") for word in KEYWORDS)


class Difficulty(NamedTuple):
    """A prompt's score, and the gear to start in. math, code: its symbols and keywords. words:
    their number. mean_length: characters per word; 0 without words."""

    score: float
    gear: str
    math: int
    code: int
    words: int
    mean_length: float

    @classmethod
    def from_map(cls, fields: Any) -> Difficulty | None:
        """The inverse of _asdict; None for anything else, as it may come from any stream. Unknown
        fields are ignored."""
        if not isinstance(fields, dict):
            return None
        kinds = {"math": int, "code": int, "words": int, "score": float, "mean_length": float}
        values: dict[str, Any] = {name: fields.get(name) for name in kinds}
        for name, kind in kinds.items():
            if type(values[name]) not in (int, kind) or not 0 <= values[name] < LARGEST:
                return None
        gear = fields.get("gear")
        return cls(gear=gear, **values) if gear in GEARS else None

    def explain(self) -> str:
        """The terms of the score, in one line."""
        long_words = LONG_WORDS_SCORE if self.mean_length > LONG_WORDS else 0
        return (
            f"score {short(self.score)} = {MATH_WEIGHT:g} x {self.math} math"
            f" + {CODE_WEIGHT:g} x {self.code} code"
            f" + {LENGTH_WEIGHT:g} x min({self.words}/{WORDS_A_STEP}, {MAX_STEPS})"
            f" + {long_words:g} -> {self.gear}"
        )


def classify(text: str) -> Difficulty:
    """Estimate the difficulty of a prompt (paper 003 section 11). Linear in the text's length."""
    lengths = [len(word) for word in text.split()]
    words = len(lengths)
    mean = round(sum(lengths) / words, 6) if words else 0.0
    symbols, code = _symbols(text), _keywords(text)
    score = MATH_WEIGHT * symbols + CODE_WEIGHT * code
    score += LENGTH_WEIGHT * min(words / WORDS_A_STEP, MAX_STEPS)
    score += LONG_WORDS_SCORE if mean > LONG_WORDS else 0.0
    # Rounded as in frames; the terms are multiples of 0.006 and 0.5, so this is exact.
    score = round(score, 6)
    return Difficulty(score, gear_of(score), symbols, code, words, mean)


def gear_of(score: float) -> str:
    """The gear to start in, by score."""
    if score >= HIGH_SCORE:
        return "high"
    return "mid" if score >= MID_SCORE else "low"


def short(score: float) -> str:
    """A score without trailing zeros: 4.8, 4.804, 12."""
    return f"{score:.3f}".rstrip("0").rstrip(".")


def _symbols(text: str) -> int:
    return sum(1 for pattern in (_ALWAYS, _BETWEEN) for _ in re.finditer(pattern, text))


def _keywords(text: str) -> int:
    words = text.encode("ascii", "replace").lower().translate(_ALONE).split()
    return sum(map(_KEYWORDS.__contains__, words))
