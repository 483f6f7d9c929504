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

from app.bench.compare.result import CompareResult, read_result
from app.bench.console import MeasurementFailed
from app.bench.tco.capacity import ServingTarget, parse_target
from app.bench.tco.prices import PriceTable, read_prices
from app.bench.tco.published import SOURCE, costs_at_list_prices, published_costs, published_remarks, saving_ratio
from app.bench.tco.sizing import SizingSheet, sizing_sheets
from app.bench.tco.tables import (
    cost_assumptions,
    missing_prices,
    pair_table,
    published_table,
    published_title,
    result_caveats,
    sheet_table,
)

MAX_TABLE_WIDTH = 1000


@dataclass(frozen=True, slots=True)
class CostArguments:
    """The arguments of `armature tco`.

    `target` is unparsed text such as `10000/s`. `published` asks for a comparison published by others, which needs no
    files.
    """

    paths: tuple[Path, ...] = ()
    target: str | None = None
    p99_ms: float | None = None
    instances: Path | None = None
    published: bool = False
    json: bool = False


@dataclass(frozen=True, slots=True)
class CostReport:
    """Everything that is reported on a set of result files."""

    target: ServingTarget
    sheets: tuple[SizingSheet, ...]
    assumptions: tuple[str, ...]
    doubts: tuple[str, ...]
    missing: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-serializable values."""
        return dataclasses.asdict(self)


def run_tco(asked: CostArguments) -> int:
    """Print the cost tables and return the exit status: 1 if no load of any result kept the p99.

    Raises:
        MeasurementFailed: The arguments or files are invalid; the message says what would be right.
    """
    _check_arguments(asked)
    prices = read_prices(asked.instances)
    costs = _build_report(asked, prices) if asked.paths else None
    if asked.json:
        fields = {} if costs is None else costs.to_json()
        sys.stdout.write(
            json.dumps(fields | ({"published": _published_json(prices)} if asked.published else {})) + "\n"
        )
    else:
        if costs is not None:
            _print_costs(costs)
        if asked.published:
            _print_published(prices)
    return 0 if costs is None or any(sheet.rows for sheet in costs.sheets) else 1


def _check_arguments(asked: CostArguments) -> None:
    if not asked.paths and not asked.published:
        raise MeasurementFailed("no result files given: armature bench compare writes them; --published needs none.")
    if asked.paths and asked.target is None:
        raise MeasurementFailed(
            "--target is missing: give the load that all machines together must serve, such as 10000/s, 1e6/day or 5000tok/s."
        )
    if not asked.paths and (asked.target is not None or asked.p99_ms is not None):
        raise MeasurementFailed("--target and --p99-ms need result files; the published comparison has a fixed target.")
    if asked.p99_ms is not None and not 0 < asked.p99_ms < float("inf"):
        raise MeasurementFailed(f"--p99-ms must be above 0 and finite, not {asked.p99_ms:g}.")


def _build_report(asked: CostArguments, prices: PriceTable) -> CostReport:
    assert asked.target is not None, "refused before"
    target = parse_target(asked.target)
    results = _with_unique_names([read_result(path) for path in asked.paths])
    _check_same_model(results)
    limit = None if asked.p99_ms is None else asked.p99_ms / 1e3
    found = sizing_sheets(results, prices, target, limit)
    if not found:
        raise MeasurementFailed(
            "the result files hold no load that was served without failures, so no cost can be computed."
        )
    return CostReport(
        target=target,
        sheets=tuple(found),
        assumptions=tuple(cost_assumptions(results, prices, found, target, limit)),
        doubts=tuple(result_caveats(results)),
        missing=tuple(missing_prices(results, prices)),
    )


def _check_same_model(results: Sequence[CompareResult]) -> None:
    """Refuse results of different models, whose costs would mislead next to each other."""
    first = results[0]
    for other in results[1:]:
        if other.model_shape != first.model_shape:
            raise MeasurementFailed(
                f"{first.name} and {other.name} are results of different models: they cannot be compared."
            )


def _with_unique_names(results: Sequence[CompareResult]) -> list[CompareResult]:
    """Return the results with unique names, by adding the precision to names that occur more than once.

    Raises:
        MeasurementFailed: Names are still equal.
    """
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


def _print_published(prices: PriceTable) -> None:
    pair, listed = published_costs(), costs_at_list_prices(prices)
    _print_table(published_table(pair, published_title()))
    _print_sentences(
        "", [f"The second costs {saving_ratio(pair):.1%} less. Source (only its beginning was readable): {SOURCE}"]
    )
    if listed is not None:
        _print_table(published_table(listed, "The same rates at the prices of the shipped table"))
        _print_sentences("", [f"The second costs {saving_ratio(listed):.1%} less."])
    _print_sentences("Review of the published figures", published_remarks(prices))


def _published_json(prices: PriceTable) -> dict[str, Any]:
    listed = costs_at_list_prices(prices)
    return {
        "source": SOURCE,
        "lines": [dataclasses.asdict(line) for line in published_costs()],
        "at_list_prices": None if listed is None else [dataclasses.asdict(line) for line in listed],
        "remarks": published_remarks(prices),
    }


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
