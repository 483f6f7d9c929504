"""Machines by figures that somebody states: what a target costs with them, and differences between them.

No result file is needed. The figures come from the command line (`--machine`) or from a published page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from armature_bench.console import MeasurementFailed
from armature_bench.tco.capacity import ServingTarget
from armature_bench.tco.prices import HOURS_A_YEAR
from armature_bench.tco.sizing import annual_dollars, dollars_per_million, machines_needed

UNKNOWN = "-"
NUM_FIGURES = 4  # rate, p99, watts, price


@dataclass(frozen=True, slots=True)
class DeclaredMachine:
    """A machine as it is stated. None: not stated.

    `rate`: units of the target per second. `p99_ms`: of a whole request. `watts`: of the machine under load.
    """

    name: str
    rate: float
    p99_ms: float | None
    watts: float | None
    dollars_an_hour: float | None

    @property
    def rate_per_watt(self) -> float | None:
        """Units a second and watt, which is units per joule."""
        return None if self.watts is None else self.rate / self.watts


@dataclass(frozen=True, slots=True)
class DeclaredCost:
    """The machines that serve a target. `exactly`: before rounding up. `watts`: of all of them."""

    machine: DeclaredMachine
    exactly: float
    machines: int
    annual_dollars: float | None
    dollars_per_million: float | None
    watts: float | None


@dataclass(frozen=True, slots=True)
class CostDifference:
    """What the second kind of machine saves against the first. None: a figure is not stated.

    `dollars` is per year; the others are shares of the first's figure, negative if the second's is higher.
    """

    first: DeclaredCost
    second: DeclaredCost
    dollars: float | None
    dollars_share: float | None
    p99_share: float | None
    watts_share: float | None


def parse_machine(text: str) -> DeclaredMachine:
    """Parse `NAME=RATE,P99_MS,WATTS,PRICE`; all but the rate may be `-`, for not known.

    Raises `MeasurementFailed` if the text has another form, or a figure is not above 0.
    """
    name, _, figures = text.rpartition("=")
    parts = [part.strip() for part in figures.split(",")]
    if not name.strip() or len(parts) != NUM_FIGURES:
        raise MeasurementFailed(
            f"--machine {text!r} is not understood: write NAME=RATE,P99_MS,WATTS,PRICE, for example "
            "c7g.16xlarge=165,23,150,2.09; '-' stands for a figure that is not known."
        )
    rate, p99_ms, watts, price = (_figure(part, text) for part in parts)
    if rate is None:
        raise MeasurementFailed(f"--machine {text!r}: the rate must be known; only the other figures may be '-'.")
    return DeclaredMachine(name.strip(), rate, p99_ms, watts, price)


def parse_machines(texts: Iterable[str]) -> tuple[DeclaredMachine, ...]:
    """Parse every `--machine`. Raises `MeasurementFailed` if one is invalid, or two have the same name."""
    machines = tuple(parse_machine(text) for text in texts)
    names = [machine.name for machine in machines]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise MeasurementFailed(f"--machine {twice} is given twice: give each a name of its own.")
    return machines


def declared_costs(
    machines: Sequence[DeclaredMachine], target: ServingTarget, hours_a_year: float = HOURS_A_YEAR
) -> tuple[DeclaredCost, ...]:
    return tuple(_cost(machine, target.per_second, hours_a_year) for machine in machines)


def cost_difference(first: DeclaredCost, second: DeclaredCost) -> CostDifference:
    one, other = first.annual_dollars, second.annual_dollars
    return CostDifference(
        first=first,
        second=second,
        dollars=None if one is None or other is None else one - other,
        dollars_share=_share_less(one, other),
        p99_share=_share_less(first.machine.p99_ms, second.machine.p99_ms),
        watts_share=_share_less(first.watts, second.watts),
    )


def beyond_p99(machines: Sequence[DeclaredMachine], limit_ms: float | None) -> dict[str, str]:
    """Return the machines that are not known to keep the p99, by name, each with a sentence."""
    if limit_ms is None:
        return {}
    return {
        machine.name: f"{machine.name} is left out: its p99 is not stated, and {limit_ms:g} ms are asked for."
        if machine.p99_ms is None
        else f"{machine.name} is left out: its p99 of {machine.p99_ms:g} ms is above {limit_ms:g} ms."
        for machine in machines
        if machine.p99_ms is None or machine.p99_ms > limit_ms
    }


def _figure(part: str, text: str) -> float | None:
    if part == UNKNOWN:
        return None
    try:
        value = float(part)
    except ValueError:
        raise MeasurementFailed(f"--machine {text!r}: {part!r} is not a number.") from None
    if not 0 < value < math.inf:
        raise MeasurementFailed(f"--machine {text!r}: {part!r} must be above 0 and finite.")
    return value


def _cost(machine: DeclaredMachine, per_second: float, hours_a_year: float) -> DeclaredCost:
    count, price = machines_needed(per_second, machine.rate), machine.dollars_an_hour
    annual = None if price is None else annual_dollars(count, price, hours_a_year)
    return DeclaredCost(
        machine=machine,
        exactly=per_second / machine.rate,
        machines=count,
        annual_dollars=annual,
        dollars_per_million=None if annual is None else dollars_per_million(annual, per_second, hours_a_year),
        watts=None if machine.watts is None else count * machine.watts,
    )


def _share_less(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else 1 - other / one
