"""Number of machines of each size for a target, their cost and power, and pairs of Arm and x86 machines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from armature_bench.compare.result import CompareResult
from armature_bench.console import format_number
from armature_bench.tco.capacity import (
    MIN_REQUESTS_FOR_P99,
    MachineOption,
    P99Exceeded,
    ServingTarget,
    SustainedLoad,
    WorkKind,
    best_sustained_load,
    machine_options,
    points_by_work,
)
from armature_bench.tco.prices import HOURS_A_YEAR, PriceTable

ROUNDING = 1e-9  # tolerance for floating-point error in a quotient that is a whole number


@dataclass(frozen=True, slots=True)
class SizingRow:
    """The machines of one size that together serve the target. None means unknown.

    `rate` is of one machine, in the target's unit per second. `watts` is of all machines together under that load.
    """

    result: str
    machine: MachineOption
    load: str
    rate: float
    utilisation: float
    p99_seconds: float | None
    machines: int
    annual_dollars: float | None
    dollars_per_million_samples: float | None
    dollars_per_million_tokens: float | None
    watts: float | None
    watts_basis: str


@dataclass(frozen=True, slots=True)
class ArmX86Pair:
    """An Arm machine and an x86 machine with the same number of vCPUs.

    `dollars`, `p99`, `watts` and `machines` are ratios of Arm to x86; None if one of the two is unknown.
    """

    arm: SizingRow
    x86: SizingRow
    dollars: float | None
    p99: float | None
    watts: float | None
    machines: float


@dataclass(frozen=True, slots=True)
class SizingSheet:
    work: WorkKind
    rows: tuple[SizingRow, ...]
    pairs: tuple[ArmX86Pair, ...]
    notes: tuple[str, ...]

    @property
    def cheapest(self) -> SizingRow | None:
        """The row with the fewest dollars per year, then the fewest machines; None if no price is known."""
        priced = [
            (row.annual_dollars, row.machines, index)
            for index, row in enumerate(self.rows)
            if row.annual_dollars is not None
        ]
        return self.rows[min(priced)[2]] if priced else None


def sizing_sheets(
    results: Sequence[CompareResult],
    prices: PriceTable,
    target: ServingTarget,
    p99_limit: float | None,
    hours_a_year: float = HOURS_A_YEAR,
) -> list[SizingSheet]:
    """Return a sheet for each kind of work. A result without that work has no rows in it.

    `p99_limit` is in seconds. The target is served and the machines are paid for `hours_a_year`. Raises
    `MeasurementFailed` if a result does not fit the instance that it names.
    """
    named = [(result, machine_options(result, prices, hours_a_year), points_by_work(result)) for result in results]
    found: list[SizingSheet] = []
    for work in dict.fromkeys(work for _, _, each in named for work in each):
        rows: list[SizingRow] = []
        notes: list[str] = []
        for result, machines, each in named:
            if work not in each:
                notes.append(f"{result.name} has no measurement of {work}.")
                continue
            sustained = best_sustained_load(each[work], target.unit, p99_limit)
            notes += _remarks(result.name, sustained, p99_limit)
            if isinstance(sustained, SustainedLoad):
                rows += [_row(result.name, machine, sustained, target, hours_a_year) for machine in machines]
        found.append(SizingSheet(work, tuple(rows), tuple(pair_arm_with_x86(rows)), tuple(notes)))
    return found


def pair_arm_with_x86(rows: Sequence[SizingRow]) -> list[ArmX86Pair]:
    arms, x86s = ([row for row in rows if row.machine.architecture == each] for each in ("arm64", "x86_64"))
    return [_pair(arm, x86) for arm in arms for x86 in x86s if arm.machine.vcpus == x86.machine.vcpus]


def _row(
    result: str, machine: MachineOption, sustained: SustainedLoad, target: ServingTarget, hours: float
) -> SizingRow:
    rate = sustained.rate * machine.share
    machines = machines_needed(target.per_second, rate)
    samples, tokens = (
        target.per_second * each / sustained.rate
        for each in (sustained.samples_per_second, sustained.tokens_per_second)
    )
    annual = None if machine.dollars_an_hour is None else annual_dollars(machines, machine.dollars_an_hour, hours)
    watts, basis = _watts(sustained, machine)
    return SizingRow(
        result=result,
        machine=machine,
        load=sustained.load.name,
        rate=rate,
        utilisation=sustained.utilisation,
        p99_seconds=sustained.p99,
        machines=machines,
        annual_dollars=annual,
        dollars_per_million_samples=None if annual is None else dollars_per_million(annual, samples, hours),
        dollars_per_million_tokens=None if annual is None or not tokens else dollars_per_million(annual, tokens, hours),
        watts=None if watts is None else watts * machines,
        watts_basis=basis,
    )


def _watts(sustained: SustainedLoad, machine: MachineOption) -> tuple[float | None, str]:
    """Return watts and their source: measured joules first, then the table's figure, then modelled joules."""
    if sustained.watts is not None and sustained.watts_source != "modelled":
        return sustained.watts * machine.share, f"measured ({sustained.watts_source})"
    if machine.watts is not None:
        return machine.watts, machine.watts_basis
    return (None, "") if sustained.watts is None else (sustained.watts * machine.share, "modelled")


def _pair(arm: SizingRow, x86: SizingRow) -> ArmX86Pair:
    """Return the pair with its ratios.

    Watts are compared only if they have the same source: a TDP is not comparable with a measurement.
    """
    watts = _ratio(arm.watts, x86.watts) if arm.watts_basis == x86.watts_basis else None
    dollars, p99 = _ratio(arm.annual_dollars, x86.annual_dollars), _ratio(arm.p99_seconds, x86.p99_seconds)
    return ArmX86Pair(arm, x86, dollars, p99, watts, arm.machines / x86.machines)


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other else one / other


def _remarks(name: str, sustained: SustainedLoad | P99Exceeded, limit: float | None) -> list[str]:
    if isinstance(sustained, P99Exceeded):
        least = (
            "no request was timed"
            if sustained.least_p99 is None
            else f"the lowest was {format_number(sustained.least_p99 * 1e3)} ms"
        )
        return [f"{name}: no measured load kept a p99 of {(limit or 0) * 1e3:g} ms; {least}."]
    if limit is not None and sustained.num_requests < MIN_REQUESTS_FOR_P99:
        return [
            f"{name}: the p99 is the slowest of {sustained.num_requests} requests; measure longer for a reliable p99 (--seconds)."
        ]
    return []


def machines_needed(per_second: float, rate: float) -> int:
    """Return the number of whole machines for `per_second` units at `rate` units per second and machine."""
    assert rate > 0, "the rate of a machine must be above 0"
    return max(1, math.ceil(per_second / rate - ROUNDING))


def annual_dollars(machines: int, dollars_an_hour: float, hours_a_year: float = HOURS_A_YEAR) -> float:
    return machines * dollars_an_hour * hours_a_year


def dollars_per_million(annual: float, per_second: float, hours_a_year: float = HOURS_A_YEAR) -> float:
    """Return the cost of a million units, if `per_second` of them are served in those hours for `annual` dollars."""
    return annual / (per_second * hours_a_year * 3600) * 1e6
