"""The assumptions behind the cost tables, the caveats of the results, and missing prices, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from app.bench.compare.result import Result
from app.bench.tco.prices import HOURS_A_YEAR, Family, Prices
from app.bench.tco.sizing import Sheet
from app.bench.tco.target import Target


def assumptions(
    results: Sequence[Result], prices: Prices, sheets: Sequence[Sheet], target: Target, limit: float | None
) -> list[str]:
    """Return the assumptions that apply to these tables. `limit`: highest allowed p99 in seconds, or None."""
    rows = [row for sheet in sheets for row in sheet.rows]
    found = [prices.find(result.instance) for result in results if result.instance]
    families = {each[0].name: each[0] for each in found if each}
    said = [
        f"The target of {target} arrives evenly during all {HOURS_A_YEAR:,} hours of a year; only whole machines count.",
        _of_utilisation(limit),
    ]
    if any(row.machine.share != 1 for row in rows):
        said.append(
            "Other sizes of the family than the measured one: rate and watts in proportion to cores (cards where there are any), "
            "at the same p99; sizes with less memory than the weights need are left out. Measure the size that you choose."
        )
    if any(row.annual_dollars is not None for row in rows):
        said.append(
            "Dollars are the machines' rent alone: no traffic, storage, staff, taxes or discounts; electricity is not added."
        )
    said += _of_watts({row.watts_basis for row in rows if row.watts is not None})
    return said + [_of_family(family) for family in families.values()]


def doubts(results: Sequence[Result]) -> list[str]:
    """Return the caveats that each result file contains."""
    said = []
    for result in results:
        said += [f"{result.name}: {doubt}" for doubt in result.doubts]
        if not result.complete:
            said.append(f"{result.name}: the measurement was interrupted, so its best load may be missing.")
        if any(point.failures for point in result.points):
            said.append(f"{result.name}: points where requests failed are not counted.")
    return said


def missing_prices(results: Sequence[Result], prices: Prices) -> list[str]:
    """Return the reason for each result that has no price."""
    said = []
    for result in results:
        if result.hourly_price is not None:
            continue
        if result.instance is None:
            said.append(
                f"{result.name}: no price: its file names no instance (armature bench compare --instance ROW) and no --hourly-price."
            )
        elif (found := prices.find(result.instance)) is None:
            said.append(f"{result.name}: no price: {result.instance} is not in the price table; add it with --instances FILE.")
        elif found[1].dollars_an_hour is None:
            said.append(f"{result.name}: no price: the table lists {result.instance} without one.")
    return said


def _of_utilisation(limit: float | None) -> str:
    if limit is None:
        return "Machines run at the highest measured rate, whatever its latency: set --p99-ms to limit it, and plan some reserve."
    return (
        f"Machines run at the highest measured rate whose p99 of a whole request was within {limit * 1e3:g} ms; "
        "no interpolation between measured loads, no reserve for a failed machine, and clients waited for their answers: "
        "traffic that does not wait has a longer tail at the same rate."
    )


def _of_watts(bases: set[str]) -> list[str]:
    said = []
    if any(basis.startswith("measured") for basis in bases):
        said.append(
            "Measured watts cover what the meter counts (rapl: the processor and its memory), idle power included, under that load."
        )
    if any(not basis.startswith("measured") for basis in bases):
        said.append(
            "Other watts were not measured under this load: each names its source; compare only figures of the same kind."
        )
    return said


def _of_family(family: Family) -> str:
    day = f"as of {family.as_of}" if family.as_of else f"read on {family.read}"
    note = f" {family.note}" if family.note else ""
    return f"{family.name}: {family.cloud}, {family.processor}, on demand in {family.region} {day}, {family.source}.{note}"
