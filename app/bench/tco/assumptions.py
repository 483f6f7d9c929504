"""Everything that the tables take for granted, in sentences, so that a reader may disagree with one."""

from __future__ import annotations

from collections.abc import Sequence

from app.bench.compare.result import Result
from app.bench.tco.prices import HOURS_A_YEAR, Family, Prices
from app.bench.tco.sizing import Sheet
from app.bench.tco.target import Target


def assumptions(
    results: Sequence[Result], prices: Prices, sheets: Sequence[Sheet], target: Target, limit: float | None
) -> list[str]:
    rows = [row for sheet in sheets for row in sheet.rows]
    found = [prices.find(result.instance) for result in results if result.instance]
    families = {each[0].name: each[0] for each in found if each}
    said = [
        f"The target of {target} arrives evenly, all {HOURS_A_YEAR:,} hours of a year; machines are whole.",
        _of_utilisation(limit),
    ]
    if any(row.machine.share != 1 for row in rows):
        said.append(
            "Other sizes of the family than the measured one: rate and watts in proportion to cores (cards where there are any), "
            "at the same p99; sizes with no more memory than the weights take are left out. Measure the size that you choose."
        )
    if any(row.annual_dollars is not None for row in rows):
        said.append(
            "Dollars are the machines' rent alone: no traffic, storage, people, taxes, discounts; watts cost nothing extra."
        )
    said += _of_watts({row.watts_basis for row in rows if row.watts is not None})
    return said + [_of_family(family) for family in families.values()]


def doubts(results: Sequence[Result]) -> list[str]:
    """What each result file says against itself."""
    said = []
    for result in results:
        said += [f"{result.name}: {doubt}" for doubt in result.doubts]
        if not result.complete:
            said.append(f"{result.name}: the measurement was interrupted; what it has may not be its best load.")
        if any(point.failures for point in result.points):
            said.append(f"{result.name}: points where requests failed are not counted.")
    return said


def missing_prices(results: Sequence[Result], prices: Prices) -> list[str]:
    """Why there is no dollar column, or a hole in it."""
    said = []
    for result in results:
        if result.hourly_price is not None:
            continue
        if result.instance is None:
            said.append(
                f"{result.name}: no price: its file names no instance (armature bench compare --instance ROW) and no --hourly-price."
            )
        elif (found := prices.find(result.instance)) is None:
            said.append(f"{result.name}: no price: {result.instance} is in no table; give one with --instances FILE.")
        elif found[1].dollars_an_hour is None:
            said.append(f"{result.name}: no price: the table knows {result.instance} without one.")
    return said


def _of_utilisation(limit: float | None) -> str:
    if limit is None:
        return (
            "Machines run at the highest rate that was measured, whatever its latency: give --p99-ms to keep one, and leave room."
        )
    return (
        f"Machines run at the highest measured rate whose p99 of a whole request was within {limit * 1e3:g} ms; "
        "nothing is read between measured loads, nothing is left for a machine that fails, and clients waited for their answers: "
        "traffic that does not wait has a longer tail at the same rate."
    )


def _of_watts(bases: set[str]) -> list[str]:
    said = []
    if any(basis.startswith("measured") for basis in bases):
        said.append(
            "Measured watts are those of what was counted (rapl: the processor and its memory), idle included, under that load."
        )
    if any(not basis.startswith("measured") for basis in bases):
        said.append(
            "Other watts are nobody's measurement of this load: each says whose figure it is, and compare only equal kinds."
        )
    return said


def _of_family(family: Family) -> str:
    day = f"as of {family.as_of}" if family.as_of else f"read on {family.read}"
    note = f" {family.note}" if family.note else ""
    return f"{family.name}: {family.cloud}, {family.processor}, on demand in {family.region} {day}, {family.source}.{note}"
