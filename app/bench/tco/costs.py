"""The arithmetic: number of machines for a target, and their cost."""

from __future__ import annotations

import math

from app.bench.tco.prices import HOURS_A_YEAR

SECONDS_A_YEAR = HOURS_A_YEAR * 3600
ROUNDING = 1e-9  # tolerance for floating-point error in a quotient that is a whole number


def machines_needed(per_second: float, rate: float) -> int:
    """Return the number of whole machines for `per_second` units at `rate` units per second and machine."""
    assert rate > 0, "the rate of a machine must be above 0"
    return max(1, math.ceil(per_second / rate - ROUNDING))


def annual_dollars(machines: int, dollars_an_hour: float) -> float:
    """Return the cost of machines that run all year."""
    return machines * dollars_an_hour * HOURS_A_YEAR


def dollars_per_million(annual: float, per_second: float) -> float:
    """Return the cost of a million units, if `per_second` of them are served all year for `annual` dollars."""
    return annual / (per_second * SECONDS_A_YEAR) * 1e6
