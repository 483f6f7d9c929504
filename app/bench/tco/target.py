"""The load that all machines together must serve, as an operator types it: `10000/s`, `1e6/day`, `5000tok/s`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from app.bench.stats import MeasurementFailed

Unit = Literal["samples", "tokens"]
SECONDS = {"s": 1, "sec": 1, "second": 1, "min": 60, "minute": 60, "h": 3600, "hour": 3600, "day": 86400, "d": 86400}
WORDS: dict[str, Unit] = {
    "": "samples",
    **dict.fromkeys(("sample", "samples", "req", "request", "requests", "text", "texts", "vector", "vectors", "rows"), "samples"),
    **dict.fromkeys(("tok", "token", "tokens"), "tokens"),
}
SHAPE = re.compile(r"\s*(?P<number>[-+0-9.,_e]+?)\s*(?P<word>[a-z]*)\s*/\s*(?P<time>[a-z]+)\s*", re.IGNORECASE)

THOUSANDS = re.compile(r"[1-9]\d{0,2}(,\d{3})+(\.\d+)?")


@dataclass(frozen=True, slots=True)
class Target:
    """A rate per second.

    Samples are whole answers: generations, vectors, rows. Tokens are those of a decoder's answers or an encoder's
    texts.
    """

    per_second: float
    unit: Unit = "samples"

    def __str__(self) -> str:
        return f"{self.per_second:,.10g} {self.unit} a second"


def read_target(text: str) -> Target:
    """Parse a target.

    Raises:
        MeasurementFailed: The text is not a target; the message says what would be right.
    """
    shape = SHAPE.fullmatch(text)
    if shape is None:
        raise MeasurementFailed(
            f"--target {text!r} is not understood: write 10000/s, 600/min, 1e6/day or 5000tok/s, for example."
        )
    word, time = shape["word"].lower(), shape["time"].lower()
    if time not in SECONDS:
        raise MeasurementFailed(f"--target {text!r}: {time!r} is not a unit of time; use s, min, h or day.")
    if word not in WORDS:
        raise MeasurementFailed(f"--target {text!r}: {word!r} is not a known unit; use samples or tok.")
    per_second = _number(shape["number"], text) / SECONDS[time]
    if not per_second > 0 or math.isinf(per_second):
        raise MeasurementFailed(f"--target {text!r} must be above 0 and finite.")
    return Target(per_second, WORDS[word])


def _number(digits: str, text: str) -> float:
    """Parse a number. Commas may only separate thousands: `1,5` might mean one and a half."""
    try:
        return float(digits.replace(",", "") if THOUSANDS.fullmatch(digits) else digits)
    except ValueError:
        raise MeasurementFailed(f"--target {text!r}: {digits!r} is not a number.") from None
