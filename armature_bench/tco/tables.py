"""The cost tables for the console, one for each kind of work and for Arm against x86, and the sentences around them.

The sentences state the assumptions behind the tables, the caveats of the results, and missing prices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from armature_bench.compare.result import CompareResult
from armature_bench.console import format_number
from armature_bench.tco.capacity import SERVER_PRICE, ServingTarget
from armature_bench.tco.declared import CostDifference, DeclaredCost
from armature_bench.tco.prices import InstanceFamily, PriceTable
from armature_bench.tco.sizing import ArmX86Pair, SizingRow, SizingSheet

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
        "$/h": [_price(row.machine.dollars_an_hour) for row in sheet.rows],
        "price by": [row.machine.price_basis or NONE for row in sheet.rows],
        "$/year": [_dollars(row.annual_dollars) for row in sheet.rows],
        "$/M samples": [_number(row.dollars_per_million_samples) for row in sheet.rows],
        "$/M tokens": [_number(row.dollars_per_million_tokens) for row in sheet.rows],
        "kW": [_kilowatts(row.watts) for row in sheet.rows],
        "watts by": [row.watts_basis or NONE for row in sheet.rows],
    }
    return _table(f"{sheet.work}: {target}", columns, left=("result", "machine", "at load", "price by", "watts by"))


def pair_table(pairs: Sequence[ArmX86Pair]) -> Table:
    columns = {
        "vCPUs": [str(pair.arm.machine.vcpus) for pair in pairs],
        "Arm": [_machine_label(pair.arm) for pair in pairs],
        "x86": [_machine_label(pair.x86) for pair in pairs],
        "machines": [f"{pair.arm.machines} : {pair.x86.machines}" for pair in pairs],
        "Arm $/year": [_dollars(pair.arm.annual_dollars) for pair in pairs],
        "x86 $/year": [_dollars(pair.x86.annual_dollars) for pair in pairs],
        "Arm/x86 $": [_ratio(pair.dollars) for pair in pairs],
        "Arm/x86 p99": [_ratio(pair.p99) for pair in pairs],
        "Arm/x86 kW": [_ratio(pair.watts) for pair in pairs],
    }
    return _table("Arm against x86, with the same number of vCPUs", columns, left=("Arm", "x86"))


def declared_table(costs: Iterable[DeclaredCost], target: ServingTarget, title: str) -> Table:
    rows = list(costs)
    unit = target.unit
    columns = {
        "machine": [cost.machine.name for cost in rows],
        f"{unit}/s": [f"{cost.machine.rate:,.10g}" for cost in rows],
        "p99 ms": [_figure(cost.machine.p99_ms) for cost in rows],
        "W": [_figure(cost.machine.watts) for cost in rows],
        "$/h": [_price(cost.machine.dollars_an_hour) for cost in rows],
        "exactly": [f"{cost.exactly:,.2f}" for cost in rows],
        "machines": [f"{cost.machines:,}" for cost in rows],
        "$/year": [_dollars(cost.annual_dollars) for cost in rows],
        f"$/M {unit}": [_thousandths(cost.dollars_per_million) for cost in rows],
        "kW": [_kilowatts(cost.watts) for cost in rows],
        f"{unit}/s/W": [_ratio(cost.machine.rate_per_watt) for cost in rows],
    }
    return _table(title, columns, left=("machine",))


def difference_table(differences: Sequence[CostDifference], title: str) -> Table:
    columns = {
        "machine": [each.second.machine.name for each in differences],
        "against": [each.first.machine.name for each in differences],
        "machines": [f"{each.second.machines:,} : {each.first.machines:,}" for each in differences],
        "$/year less": [_dollars(each.dollars) for each in differences],
        "$ less": [_share(each.dollars_share) for each in differences],
        "p99 less": [_share(each.p99_share) for each in differences],
        "kW less": [_share(each.watts_share) for each in differences],
    }
    return _table(title, columns, left=("machine", "against"))


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


def _price(value: float | None) -> str:
    return NONE if value is None else f"{value:.4g}"


def _figure(value: float | None) -> str:
    return NONE if value is None else f"{value:,.10g}"


def _thousandths(value: float | None) -> str:
    return NONE if value is None else f"{value:.3f}"


def _share(value: float | None) -> str:
    return NONE if value is None else f"{value:.1%}"


def _kilowatts(value: float | None) -> str:
    return NONE if value is None else _number(value / 1e3)


def cost_assumptions(
    results: Sequence[CompareResult],
    prices: PriceTable,
    sheets: Sequence[SizingSheet],
    target: ServingTarget,
    limit: float | None,
    hours_a_year: float,
) -> list[str]:
    """Return the assumptions that apply to these tables. `limit`: highest allowed p99 in seconds, or None."""
    rows = [row for sheet in sheets for row in sheet.rows]
    found = [prices.find(result.instance) for result in results if result.instance]
    families = {each[0].name: each[0] for each in found if each}
    said = [
        f"The target of {target} arrives evenly during {hours_a_year:,.10g} hours of a year, and machines are paid for these; "
        "only whole machines count.",
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
    said += _price_sentences(results, prices)
    said += _watts_sentences({row.watts_basis for row in rows if row.watts is not None})
    return said + [_family_sentence(family) for family in families.values()]


def result_caveats(results: Sequence[CompareResult]) -> list[str]:
    said = []
    for result in results:
        said += [f"{result.name}: {doubt}" for doubt in result.doubts]
        if not result.complete:
            said.append(f"{result.name}: the measurement was interrupted, so its best load may be missing.")
        if any(point.failures for point in result.points):
            said.append(f"{result.name}: points where requests failed are not counted.")
    return said


def missing_prices(results: Sequence[CompareResult], prices: PriceTable) -> list[str]:
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


def _price_sentences(results: Sequence[CompareResult], prices: PriceTable) -> list[str]:
    """Name each price that comes from a server, with the list price that it replaces."""
    said = []
    for result in results:
        if result.hourly_price is None:
            continue
        found = None if result.instance is None else prices.find(result.instance)
        listed = None if found is None else found[1].dollars_an_hour
        machine = result.instance or result.name
        beside = f"; the table has {listed:.4g} for it, and its own prices for the other sizes" if listed else ""
        said.append(
            f"{machine}: {result.hourly_price:.4g} dollars an hour are its {SERVER_PRICE}'s --hourly-price{beside}."
        )
    return said


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
