"""The cost tables for the console, one for each kind of work and for Arm against x86, and the sentences around them.

The sentences state the assumptions behind the tables, the caveats of the results, and missing prices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from app.bench.compare.result import CompareResult
from app.bench.console import format_number
from app.bench.tco.capacity import ServingTarget
from app.bench.tco.prices import HOURS_A_YEAR, InstanceFamily, PriceTable
from app.bench.tco.published import CLAIMS, SAMPLES_PER_SECOND, PublishedCost
from app.bench.tco.sizing import ArmX86Pair, SizingRow, SizingSheet

NONE = "–"


def sheet_table(sheet: SizingSheet, target: ServingTarget) -> Table:
    """Return the table of one kind of work. Empty columns are left out."""
    unit = f"{target.unit}/s"
    columns = {
        "result": [row.result for row in sheet.rows],
        "machine": [row.machine.name for row in sheet.rows],
        "vCPUs": [str(row.machine.vcpus or NONE) for row in sheet.rows],
        "cores": [str(row.machine.cores or NONE) for row in sheet.rows],
        "at load": [row.load for row in sheet.rows],
        f"{unit} each": [_number(row.rate) for row in sheet.rows],
        "of its peak": [f"{row.utilisation:.0%}" for row in sheet.rows],
        "p99 ms": [_milliseconds(row.p99_seconds) for row in sheet.rows],
        "machines": [f"{row.machines:,}" for row in sheet.rows],
        "$/year": [_dollars(row.annual_dollars) for row in sheet.rows],
        "$/M samples": [_number(row.dollars_per_million_samples) for row in sheet.rows],
        "$/M tokens": [_number(row.dollars_per_million_tokens) for row in sheet.rows],
        "kW": [_kilowatts(row.watts) for row in sheet.rows],
        "watts by": [row.watts_basis or NONE for row in sheet.rows],
    }
    return _table(f"{sheet.work}: {target}", columns, left=("result", "machine", "at load", "watts by"))


def pair_table(pairs: Sequence[ArmX86Pair]) -> Table:
    """Return the table of Arm and x86 machines with the same number of vCPUs."""
    columns = {
        "vCPUs": [str(pair.arm.machine.vcpus) for pair in pairs],
        "Arm": [_machine_label(pair.arm) for pair in pairs],
        "x86": [_machine_label(pair.x86) for pair in pairs],
        "machines": [f"{pair.arm.machines} : {pair.x86.machines}" for pair in pairs],
        "Arm $/year": [_dollars(pair.arm.annual_dollars) for pair in pairs],
        "x86 $/year": [_dollars(pair.x86.annual_dollars) for pair in pairs],
        "Arm/x86 $": [_ratio(pair.dollars) for pair in pairs],
        "Arm/x86 kW": [_ratio(pair.watts) for pair in pairs],
    }
    return _table("Arm against x86, with the same number of vCPUs", columns, left=("Arm", "x86"))


def published_table(lines: Iterable[PublishedCost], title: str) -> Table:
    """Return the table of a published comparison."""
    rows = list(lines)
    columns = {
        "machine": [line.claim.instance for line in rows],
        "samples/s": [f"{line.claim.samples_per_second:g}" for line in rows],
        "$/h": [f"{line.claim.dollars_an_hour:g}" for line in rows],
        "exactly": [f"{line.exactly:.2f}" for line in rows],
        "machines": [str(line.machines) for line in rows],
        "$/year": [_dollars(line.annual_dollars) for line in rows],
        "$/M samples": [f"{line.dollars_per_million:.3f}" for line in rows],
    }
    return _table(title, columns, left=("machine",))


def published_title() -> str:
    """Return the title of the published comparison."""
    names = " and ".join(claim.instance for claim in CLAIMS)
    return f"As published: BERT-Large at {SAMPLES_PER_SECOND:,.0f} samples/s all year, {names}"


def _table(title: str, columns: dict[str, list[str]], left: Sequence[str]) -> Table:
    made = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    used = {name: cells for name, cells in columns.items() if any(cell != NONE and cell != "" for cell in cells)}
    for name in used:
        made.add_column(name, no_wrap=True, justify="left" if name in left else "right")
    for cells in zip(*used.values(), strict=True):
        made.add_row(*cells)
    return made


def _machine_label(row: SizingRow) -> str:
    return row.machine.name if row.machine.name == row.result else f"{row.machine.name} ({row.result})"


def _number(value: float | None) -> str:
    return NONE if value is None else format_number(value)


def _dollars(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def _ratio(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def _milliseconds(value: float | None) -> str:
    return NONE if value is None else _number(value * 1e3)


def _kilowatts(value: float | None) -> str:
    return NONE if value is None else _number(value / 1e3)


def cost_assumptions(
    results: Sequence[CompareResult],
    prices: PriceTable,
    sheets: Sequence[SizingSheet],
    target: ServingTarget,
    limit: float | None,
) -> list[str]:
    """Return the assumptions that apply to these tables. `limit`: highest allowed p99 in seconds, or None."""
    rows = [row for sheet in sheets for row in sheet.rows]
    found = [prices.find(result.instance) for result in results if result.instance]
    families = {each[0].name: each[0] for each in found if each}
    said = [
        f"The target of {target} arrives evenly during all {HOURS_A_YEAR:,} hours of a year; only whole machines count.",
        _utilisation_sentence(limit),
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
    said += _watts_sentences({row.watts_basis for row in rows if row.watts is not None})
    return said + [_family_sentence(family) for family in families.values()]


def result_caveats(results: Sequence[CompareResult]) -> list[str]:
    """Return the caveats that each result file contains."""
    said = []
    for result in results:
        said += [f"{result.name}: {doubt}" for doubt in result.doubts]
        if not result.complete:
            said.append(f"{result.name}: the measurement was interrupted, so its best load may be missing.")
        if any(point.failures for point in result.points):
            said.append(f"{result.name}: points where requests failed are not counted.")
    return said


def missing_prices(results: Sequence[CompareResult], prices: PriceTable) -> list[str]:
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
            said.append(
                f"{result.name}: no price: {result.instance} is not in the price table; add it with --instances FILE."
            )
        elif found[1].dollars_an_hour is None:
            said.append(f"{result.name}: no price: the table lists {result.instance} without one.")
    return said


def _utilisation_sentence(limit: float | None) -> str:
    if limit is None:
        return "Machines run at the highest measured rate, whatever its latency: set --p99-ms to limit it, and plan some reserve."
    return (
        f"Machines run at the highest measured rate whose p99 of a whole request was within {limit * 1e3:g} ms; "
        "no interpolation between measured loads, no reserve for a failed machine, and clients waited for their answers: "
        "traffic that does not wait has a longer tail at the same rate."
    )


def _watts_sentences(bases: set[str]) -> list[str]:
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


def _family_sentence(family: InstanceFamily) -> str:
    day = f"as of {family.as_of}" if family.as_of else f"read on {family.read}"
    note = f" {family.note}" if family.note else ""
    return (
        f"{family.name}: {family.cloud}, {family.processor}, on demand in {family.region} {day}, {family.source}.{note}"
    )
