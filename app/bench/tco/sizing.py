"""Number of machines of each size for a target, their cost and power, and pairs of Arm and x86 machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.bench.compare.result import Result
from app.bench.console import number
from app.bench.tco.costs import annual_dollars, dollars_per_million, machines_needed
from app.bench.tco.kept import ENOUGH_FOR_P99, Kept, NotKept, Work, most_kept, works
from app.bench.tco.machines import Machine, machines_of
from app.bench.tco.prices import Prices
from app.bench.tco.target import Target


@dataclass(frozen=True, slots=True)
class Row:
    """The machines of one size that together serve the target. None means unknown.

    `rate` is of one machine, in the target's unit per second. `watts` is of all machines together under that load.
    """

    result: str
    machine: Machine
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
class Pair:
    """An Arm machine and an x86 machine with the same number of vCPUs.

    `dollars`, `watts` and `machines` are ratios of Arm to x86; None if one of the two is unknown.
    """

    arm: Row
    x86: Row
    dollars: float | None
    watts: float | None
    machines: float


@dataclass(frozen=True, slots=True)
class Sheet:
    """One kind of work, and the machines that each result needs for it."""

    work: Work
    rows: tuple[Row, ...]
    pairs: tuple[Pair, ...]
    notes: tuple[str, ...]

    @property
    def cheapest(self) -> Row | None:
        """The row with the fewest dollars per year, then the fewest machines; None if no price is known."""
        priced = [
            (row.annual_dollars, row.machines, index) for index, row in enumerate(self.rows) if row.annual_dollars is not None
        ]
        return self.rows[min(priced)[2]] if priced else None


def sheets(results: Sequence[Result], prices: Prices, target: Target, p99_limit: float | None) -> list[Sheet]:
    """Return a sheet for each kind of work. A result without that work has no rows in it.

    Args:
        results: The measured results.
        prices: The price table.
        target: The load that all machines together must serve.
        p99_limit: The highest p99 in seconds, or None.

    Raises:
        MeasurementFailed: A result does not fit the instance that it names.
    """
    named = [(result, machines_of(result, prices), works(result)) for result in results]
    found: list[Sheet] = []
    for work in dict.fromkeys(work for _, _, each in named for work in each):
        rows: list[Row] = []
        notes: list[str] = []
        for result, machines, each in named:
            if work not in each:
                notes.append(f"{result.name} has no measurement of {work}.")
                continue
            kept = most_kept(each[work], target.unit, p99_limit)
            notes += _remarks(result.name, kept, p99_limit)
            if isinstance(kept, Kept):
                rows += [_row(result.name, machine, kept, target) for machine in machines]
        found.append(Sheet(work, tuple(rows), tuple(against(rows)), tuple(notes)))
    return found


def against(rows: Sequence[Row]) -> list[Pair]:
    """Pair every Arm machine with every x86 machine that has the same number of vCPUs."""
    arms, x86s = ([row for row in rows if row.machine.architecture == each] for each in ("arm64", "x86_64"))
    return [_pair(arm, x86) for arm in arms for x86 in x86s if arm.machine.vcpus == x86.machine.vcpus]


def _row(result: str, machine: Machine, kept: Kept, target: Target) -> Row:
    rate = kept.rate * machine.share
    machines = machines_needed(target.per_second, rate)
    samples, tokens = (target.per_second * each / kept.rate for each in (kept.samples_per_second, kept.tokens_per_second))
    annual = None if machine.dollars_an_hour is None else annual_dollars(machines, machine.dollars_an_hour)
    watts, basis = _watts(kept, machine)
    return Row(
        result=result,
        machine=machine,
        load=kept.load.name,
        rate=rate,
        utilisation=kept.utilisation,
        p99_seconds=kept.p99,
        machines=machines,
        annual_dollars=annual,
        dollars_per_million_samples=None if annual is None else dollars_per_million(annual, samples),
        dollars_per_million_tokens=None if annual is None or not tokens else dollars_per_million(annual, tokens),
        watts=None if watts is None else watts * machines,
        watts_basis=basis,
    )


def _watts(kept: Kept, machine: Machine) -> tuple[float | None, str]:
    """Return watts and their source: measured joules first, then the table's figure, then modelled joules."""
    if kept.watts is not None and kept.watts_source != "modelled":
        return kept.watts * machine.share, f"measured ({kept.watts_source})"
    if machine.watts is not None:
        return machine.watts, machine.watts_basis
    return (None, "") if kept.watts is None else (kept.watts * machine.share, "modelled")


def _pair(arm: Row, x86: Row) -> Pair:
    """Return the pair with its ratios.

    Watts are compared only if they have the same source: a TDP is not comparable with a measurement.
    """
    watts = _over(arm.watts, x86.watts) if arm.watts_basis == x86.watts_basis else None
    return Pair(arm, x86, _over(arm.annual_dollars, x86.annual_dollars), watts, arm.machines / x86.machines)


def _over(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other else one / other


def _remarks(name: str, kept: Kept | NotKept, limit: float | None) -> list[str]:
    if isinstance(kept, NotKept):
        least = "no request was timed" if kept.least_p99 is None else f"the lowest was {number(kept.least_p99 * 1e3)} ms"
        return [f"{name}: no measured load kept a p99 of {(limit or 0) * 1e3:g} ms; {least}."]
    if limit is not None and kept.num_requests < ENOUGH_FOR_P99:
        return [f"{name}: the p99 is the slowest of {kept.num_requests} requests; measure longer for a reliable p99 (--seconds)."]
    return []
