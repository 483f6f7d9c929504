"""`armature tco`: cost tables on the console, from result files and prices."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from armature_bench.compare.result import CompareResult, read_result
from armature_bench.console import MeasurementFailed
from armature_bench.tco.capacity import ServingTarget, parse_target
from armature_bench.tco.declared import (
    CostDifference,
    DeclaredCost,
    DeclaredMachine,
    beyond_p99,
    cost_difference,
    declared_costs,
    parse_machines,
)
from armature_bench.tco.prices import PriceTable, read_prices
from armature_bench.tco.published import (
    PUBLISHED_MACHINES,
    PUBLISHED_TARGET,
    SOURCE,
    PublishedComparison,
    comparison_to_json,
    costs_to_json,
    differences_to_json,
    machines_as_listed,
    published_comparison,
)
from armature_bench.tco.review import published_remarks
from armature_bench.tco.sizing import SizingSheet, sizing_sheets
from armature_bench.tco.tables import (
    cost_assumptions,
    declared_table,
    difference_table,
    missing_prices,
    pair_table,
    result_caveats,
    sheet_table,
)

MAX_TABLE_WIDTH = 1000


@dataclass(frozen=True, slots=True)
class CostArguments:
    """The arguments of `armature tco`.

    `target` is unparsed text such as `10000/s`, `machines` are unparsed `NAME=RATE,P99_MS,WATTS,PRICE`. `published`
    asks for a comparison published by others. Neither it nor `machines` needs result files.
    """

    paths: tuple[Path, ...] = ()
    target: str | None = None
    p99_ms: float | None = None
    instances: Path | None = None
    published: bool = False
    json: bool = False
    machines: tuple[str, ...] = ()
    hours_a_day: float = 24
    days_a_year: float = 365

    @property
    def hours_a_year(self) -> float:
        return self.hours_a_day * self.days_a_year


@dataclass(frozen=True, slots=True)
class CostReport:
    target: ServingTarget
    sheets: tuple[SizingSheet, ...]
    assumptions: tuple[str, ...]
    doubts: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def keeps_p99(self) -> bool:
        return any(sheet.rows for sheet in self.sheets)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class DeclaredReport:
    """What is reported on the machines of `--machine`: costs, the others against the first, and who is left out."""

    target: ServingTarget
    costs: tuple[DeclaredCost, ...]
    differences: tuple[CostDifference, ...]
    notes: tuple[str, ...]

    @property
    def keeps_p99(self) -> bool:
        return bool(self.costs)

    def to_json(self) -> dict[str, Any]:
        return {
            "target": dataclasses.asdict(self.target),
            "lines": costs_to_json(self.costs),
            "differences": differences_to_json(self.differences),
            "notes": self.notes,
        }


@dataclass(frozen=True, slots=True)
class PublishedReport:
    """What is reported on the published comparison. `listed`: at the price table's prices and watts, if it has all."""

    target: ServingTarget
    page: PublishedComparison
    listed: PublishedComparison | None
    notes: tuple[str, ...]
    remarks: tuple[str, ...]

    @property
    def keeps_p99(self) -> bool:
        return bool(self.page.costs)

    def to_json(self) -> dict[str, Any]:
        return comparison_to_json(self.page) | {
            "source": SOURCE,
            "target": dataclasses.asdict(self.target),
            "at_list_prices": None if self.listed is None else comparison_to_json(self.listed),
            "notes": self.notes,
            "remarks": self.remarks,
        }


def run_tco(asked: CostArguments) -> int:
    """Print the cost tables and return the exit status: 1 if nothing of what was given keeps the p99.

    Raises a `MeasurementFailed` that says what would be right if the arguments or files are invalid.
    """
    _check_arguments(asked)
    prices = read_prices(asked.instances)
    target = PUBLISHED_TARGET if asked.target is None else parse_target(asked.target)
    costs = _build_report(asked, prices, target) if asked.paths else None
    declared = _declared_report(asked, target) if asked.machines else None
    published = _published_report(asked, prices, target) if asked.published else None
    if asked.json:
        fields = {} if costs is None else costs.to_json()
        named = {"declared": declared, "published": published}
        fields |= {name: report.to_json() for name, report in named.items() if report is not None}
        sys.stdout.write(json.dumps(fields) + "\n")
    else:
        if costs is not None:
            _print_costs(costs)
        if declared is not None:
            _print_declared(declared, asked.hours_a_year)
        if published is not None:
            _print_published(published, asked.hours_a_year)
    reports = [report for report in (costs, declared, published) if report is not None]
    return 0 if any(report.keeps_p99 for report in reports) else 1


def _check_arguments(asked: CostArguments) -> None:
    if not asked.paths and not asked.published and not asked.machines:
        raise MeasurementFailed(
            "no result files given: armature bench compare writes them; --machine and --published need none."
        )
    if (asked.paths or (asked.machines and not asked.published)) and asked.target is None:
        raise MeasurementFailed(
            "--target is missing: give the load that all machines together must serve, such as 10000/s, 1e6/day or 5000tok/s."
        )
    if asked.p99_ms is not None and not 0 < asked.p99_ms < float("inf"):
        raise MeasurementFailed(f"--p99-ms must be above 0 and finite, not {asked.p99_ms:g}.")
    for flag, value, most in (("--hours-a-day", asked.hours_a_day, 24), ("--days-a-year", asked.days_a_year, 366)):
        if not 0 < value <= most:
            raise MeasurementFailed(f"{flag} must be above 0 and at most {most}, not {value:g}.")


def _build_report(asked: CostArguments, prices: PriceTable, target: ServingTarget) -> CostReport:
    results = _with_unique_names([read_result(path) for path in asked.paths])
    _check_same_model(results)
    limit = None if asked.p99_ms is None else asked.p99_ms / 1e3
    found = sizing_sheets(results, prices, target, limit, asked.hours_a_year)
    if not found:
        raise MeasurementFailed(
            "the result files hold no load that was served without failures, so no cost can be computed."
        )
    return CostReport(
        target=target,
        sheets=tuple(found),
        assumptions=tuple(cost_assumptions(results, prices, found, target, limit, asked.hours_a_year)),
        doubts=tuple(result_caveats(results)),
        missing=tuple(missing_prices(results, prices)),
    )


def _declared_report(asked: CostArguments, target: ServingTarget) -> DeclaredReport:
    machines = parse_machines(asked.machines)
    beyond = beyond_p99(machines, asked.p99_ms)
    kept = [machine for machine in machines if machine.name not in beyond]
    costs = declared_costs(kept, target, asked.hours_a_year)
    differences = tuple(cost_difference(costs[0], other) for other in costs[1:])
    return DeclaredReport(target, costs, differences, tuple(beyond.values()))


def _published_report(asked: CostArguments, prices: PriceTable, target: ServingTarget) -> PublishedReport:
    if target.unit != "samples":
        raise MeasurementFailed("the published comparison counts samples: give --target in samples, such as 10000/s.")
    beyond, hours = beyond_p99(PUBLISHED_MACHINES, asked.p99_ms), asked.hours_a_year
    listed = machines_as_listed(prices, hours)

    def kept(machines: Sequence[DeclaredMachine]) -> PublishedComparison:
        return published_comparison(target, hours, [each for each in machines if each.name not in beyond])

    return PublishedReport(
        target=target,
        page=kept(PUBLISHED_MACHINES),
        listed=None if listed is None else kept(listed),
        notes=tuple(beyond.values()),
        remarks=tuple(published_remarks(prices)),
    )


def _check_same_model(results: Sequence[CompareResult]) -> None:
    """Refuse results of different models: their costs would mislead next to each other."""
    first = results[0]
    for other in results[1:]:
        if other.model_shape != first.model_shape:
            raise MeasurementFailed(
                f"{first.name} and {other.name} are results of different models: they cannot be compared."
            )


def _with_unique_names(results: Sequence[CompareResult]) -> list[CompareResult]:
    """Add the precision to names that occur more than once. Raises `MeasurementFailed` if they are still equal."""
    names = [result.name for result in results]
    named = [result if names.count(result.name) == 1 else _with_precision(result) for result in results]
    names = [result.name for result in named]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise MeasurementFailed(
            f"two results are called {twice}: measure with --name, or edit `name` in one of the files."
        )
    return named


def _with_precision(result: CompareResult) -> CompareResult:
    precision = ((result.info.get("plan") or {}).get("precision") or {}).get("value", "")
    return result.model_copy(update={"name": f"{result.name} {precision}".strip()})


def _print_costs(costs: CostReport) -> None:
    _print_sentences("Caveats", costs.doubts)
    for sheet in costs.sheets:
        if sheet.rows:
            _print_table(sheet_table(sheet, costs.target))
        _print_sentences("" if sheet.rows else f"{sheet.work}: {costs.target}", [*_cheapest(sheet), *sheet.notes])
        if sheet.pairs:
            _print_table(pair_table(sheet.pairs))
    if any(sheet.rows for sheet in costs.sheets) and not any(sheet.pairs for sheet in costs.sheets):
        _print_sentences("", ["There is no pair of Arm and x86 machines with the same number of vCPUs to compare."])
    _print_sentences("Missing prices", costs.missing)
    _print_sentences("Assumptions", costs.assumptions)


def _cheapest(sheet: SizingSheet) -> list[str]:
    row = sheet.cheapest
    if row is None:
        return []
    return [
        f"Cheapest: {row.machines:,} × {row.machine.name}, ${row.annual_dollars:,.0f} a year (as {row.result} was measured)."
    ]


def _print_declared(report: DeclaredReport, hours_a_year: float) -> None:
    load = f"{report.target}, {hours_a_year:,.10g} hours a year"
    if report.costs:
        _print_table(declared_table(report.costs, report.target, f"As given by --machine: {load}"))
    if report.differences:
        _print_table(difference_table(report.differences, "The others against the first"))
    _print_sentences("", report.notes)


def _print_published(report: PublishedReport, hours_a_year: float) -> None:
    load = f"BERT-Large at {report.target}, {hours_a_year:,.10g} hours a year"
    tables = ((report.page, f"As published: {load}"), (report.listed, "At the prices and watts of the price table"))
    for comparison, title in tables:
        if comparison is not None and comparison.costs:
            _print_table(declared_table(comparison.costs, report.target, title))
        if comparison is not None and comparison.differences:
            _print_table(difference_table(comparison.differences, "Arm against x86 of the same size"))
    _print_sentences("", [*report.notes, f"Source of the rates, of each p99 and of the first table: {SOURCE}"])
    _print_sentences(f"Review of the published figures, at {PUBLISHED_TARGET} all year", report.remarks)


def _print_table(table: Table) -> None:
    """Print the table without truncation: on a narrow terminal, lines wrap."""
    console = Console()
    needed = Measurement.get(console, console.options.update(max_width=MAX_TABLE_WIDTH), table).maximum
    title, table.title = table.title, None
    sys.stdout.write(f"{title}\n")
    Console(width=max(needed, console.width)).print(table)
    sys.stdout.write("\n")


def _print_sentences(title: str, sentences: Sequence[str]) -> None:
    if sentences:
        sys.stdout.write((f"{title}\n" if title else "") + "".join(f"- {sentence}\n" for sentence in sentences) + "\n")
