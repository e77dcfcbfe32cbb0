"""Output of toast-perplexity: lines or JSON, with a summary of the gears."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toastkit.frames import GEARS
from toastkit.text.exact_numbers import counted
from toastkit.text.terminal import shown

if TYPE_CHECKING:
    from toastkit.engine.perplexity import Scores, Totals
    from toastkit.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Text:
    """A text to score. name: the file, "-" for stdin. ids: its tokens; the first is not scored.
    bytes: UTF-8 bytes of the scored tokens."""

    name: str
    ids: list[int]
    bytes: int


@dataclass(frozen=True)
class Gearing:
    """The gears of a run. mode: auto, low, mid or high. scope, bits: of GearOptions. widths: bits
    of a managed weight by gear; None if no gear changes anything."""

    mode: str
    scope: str
    bits: tuple[int, int]
    widths: dict[str, float] | None

    def words(self, totals: Totals) -> list[str]:
        """The parts of a line on the gears."""
        if self.mode != "auto":
            if self.widths is None:
                return [f"{self.mode} gear"]
            return [f"{self.mode} gear ({self.widths[self.mode]:g} bits, {self.scope})"]
        shares = (f"{gear} {totals.gears[gear] / totals.tokens:.0%}" for gear in GEARS)
        verb = "gears" if self.widths else "gears would be"
        mean = self._mean_bits(totals)
        return [
            f"{verb} {' '.join(shares)}",
            counted(totals.shifts, "shift"),
            *([] if mean is None else [f"mean {mean:.1f} bits"]),
        ]

    def facts(self, totals: Totals) -> dict[str, Any]:
        """The fields of a JSON object on the gears."""
        return {
            "gear": self.mode,
            "gear_scope": self.scope,
            "gear_bits": list(self.bits),
            "gears": {gear: totals.gears[gear] for gear in GEARS},
            "shifts": totals.shifts,
            "mean_bits": self._mean_bits(totals),
        }

    def _mean_bits(self, totals: Totals) -> float | None:
        from toastkit.gears.cost import mean_bits

        return None if self.widths is None else mean_bits(totals.gears, self.widths)


def line(name: str, totals: Totals, gearing: Gearing | None) -> str:
    """The line of a text, of a part of one, or of all texts."""
    parts = [
        f"{shown(name)}: perplexity {totals.perplexity:.4f}",
        f"entropy {totals.mean_entropy:.4f} bits",
        counted(totals.tokens, "token"),
        f"{totals.speed:.1f} tokens/s",
    ]
    if totals.bits_per_byte is not None:
        parts.insert(3, f"{totals.bits_per_byte:.4f} bits/byte")
    if gearing is not None:
        parts += gearing.words(totals)
    return ", ".join(parts)


class TextReport:
    """One line per text, printed when it is done."""

    def __init__(self, gearing: Gearing | None):
        self._gearing = gearing

    def tokens(self, text: Text, scores: Scores) -> None:
        """Nothing: tokens are not shown."""

    def total(self, of: Text | int, totals: Totals, told: dict[str, Any] | None = None) -> None:
        """Print the line of a text, or of that many together."""
        name = "total" if isinstance(of, int) else of.name
        fell = (told or {}).get("experts", {})
        more = f", fallback ratio {fell['ratio']:.4f}" if fell.get("mode") == "mobile" else ""
        print(line(name, totals, self._gearing) + more, flush=True)


class JsonReport:
    """One JSON object for each token, one for each text after its tokens, one for all texts."""

    def __init__(self, tokenizer: Tokenizer, window: int, gearing: Gearing | None):
        self._tokenizer = tokenizer
        self._window = window
        self._gearing = gearing
        self._stream: Any = None

    def tokens(self, text: Text, scores: Scores) -> None:
        """Print an object for each token."""
        if scores.position == 1:
            from toastkit.text.detokenizer import StreamingDetokenizer

            self._stream = StreamingDetokenizer(self._tokenizer, keep_special=True)
            self._stream.add(text.ids[0])
        # The gears are those of the passes that predicted the tokens.
        gears = [{"gear": gear} for gear in scores.gears or ()] or [{}] * len(scores.ids)
        values = zip(scores.ids, scores.logprobs, scores.entropies, gears)
        for pos, (token, logprob, entropy, gear) in enumerate(values, scores.position):
            piece = self._stream.add(token)
            if pos == len(text.ids) - 1:
                piece += self._stream.finish()
            self._write(
                {
                    "file": text.name, "pos": pos, "id": token, "text": piece,
                    "logprob": _finite(logprob), "entropy": _finite(entropy), **gear,
                }
            )  # fmt: skip
        sys.stdout.flush()

    def total(self, of: Text | int, totals: Totals, told: dict[str, Any] | None = None) -> None:
        """Print the totals of a text, or of that many together. told: more fields for its
        object."""
        what = {"files": of} if isinstance(of, int) else {"file": of.name}
        values = {
            "perplexity": _finite(totals.perplexity),
            "loss": _finite(totals.loss),
            "entropy": _finite(totals.mean_entropy),
            "tokens": totals.tokens,
            "bytes": totals.bytes,
            "bits_per_byte": _finite(totals.bits_per_byte),
            "window": self._window,
            "seconds": round(totals.seconds, 6),
            "tokens_per_second": _finite(totals.speed),
        }
        gears = {} if self._gearing is None else self._gearing.facts(totals)
        self._write({**what, **values, **gears, **(told or {})})
        sys.stdout.flush()

    def _write(self, value: dict[str, Any]) -> None:
        line = json.dumps(value, ensure_ascii=False)  # what is no UTF-8 in a file's name is escaped
        sys.stdout.buffer.write(line.encode(errors="backslashreplace") + b"\n")


Report = TextReport | JsonReport


def _finite(value: float | None) -> float | None:
    """The number; None for infinity and NaN, which JSON lacks."""
    return value if value is not None and math.isfinite(value) else None
