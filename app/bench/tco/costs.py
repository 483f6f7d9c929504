"""The arithmetic: how many machines a target needs, and what so many cost. Numbers in, numbers out."""

from __future__ import annotations

import math

from app.bench.tco.prices import HOURS_A_YEAR

SECONDS_A_YEAR = HOURS_A_YEAR * 3600
ROUNDING = 1e-9  # a quotient that is whole but for floating point is whole


def machines_needed(per_second: float, rate: float) -> int:
    """Whole machines: one cannot rent 83.3."""
    assert rate > 0, "a machine that serves nothing is no choice"
    return max(1, math.ceil(per_second / rate - ROUNDING))


def annual_dollars(machines: int, dollars_an_hour: float) -> float:
    """Of machines that run all year."""
    return machines * dollars_an_hour * HOURS_A_YEAR


def dollars_per_million(annual: float, per_second: float) -> float:
    """What a million of them cost where so many a second are served all year."""
    return annual / (per_second * SECONDS_A_YEAR) * 1e6
