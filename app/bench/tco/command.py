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

from app.bench.compare.result import Result, read_result
from app.bench.stats import MeasurementFailed
from app.bench.tco.assumptions import assumptions, doubts, missing_prices
from app.bench.tco.prices import Prices, read_prices
from app.bench.tco.published import SOURCE, at_list_prices, published, remarks, saving
from app.bench.tco.sizing import Sheet, sheets
from app.bench.tco.tables import pair_table, published_table, published_title, sheet_table
from app.bench.tco.target import Target, read_target

WIDEST = 1000


@dataclass(frozen=True, slots=True)
class Asked:
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
class Costs:
    """Everything that is reported on a set of result files."""

    target: Target
    sheets: tuple[Sheet, ...]
    assumptions: tuple[str, ...]
    doubts: tuple[str, ...]
    missing: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-serializable values."""
        return dataclasses.asdict(self)


def print_costs(asked: Asked) -> int:
    """Print the cost tables and return the exit status: 1 if no load of any result kept the p99.

    Raises:
        MeasurementFailed: The arguments or files are invalid; the message says what would be right.
    """
    _refuse_nothing(asked)
    prices = read_prices(asked.instances)
    costs = _costs(asked, prices) if asked.paths else None
    if asked.json:
        fields = {} if costs is None else costs.to_json()
        sys.stdout.write(json.dumps(fields | ({"published": _published_json(prices)} if asked.published else {})) + "\n")
    else:
        if costs is not None:
            _print_costs(costs)
        if asked.published:
            _print_published(prices)
    return 0 if costs is None or any(sheet.rows for sheet in costs.sheets) else 1


def _refuse_nothing(asked: Asked) -> None:
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


def _costs(asked: Asked, prices: Prices) -> Costs:
    assert asked.target is not None, "refused before"
    target = read_target(asked.target)
    results = _told_apart([read_result(path) for path in asked.paths])
    _refuse_mixture(results)
    limit = None if asked.p99_ms is None else asked.p99_ms / 1e3
    found = sheets(results, prices, target, limit)
    if not found:
        raise MeasurementFailed("the result files hold no load that was served without failures, so no cost can be computed.")
    return Costs(
        target=target,
        sheets=tuple(found),
        assumptions=tuple(assumptions(results, prices, found, target, limit)),
        doubts=tuple(doubts(results)),
        missing=tuple(missing_prices(results, prices)),
    )


def _refuse_mixture(results: Sequence[Result]) -> None:
    """Refuse results of different models, whose costs would mislead next to each other."""
    first = results[0]
    for other in results[1:]:
        if other.model_shape != first.model_shape:
            raise MeasurementFailed(f"{first.name} and {other.name} are results of different models: they cannot be compared.")


def _told_apart(results: Sequence[Result]) -> list[Result]:
    """Return the results with unique names, by adding the precision to names that occur more than once.

    Raises:
        MeasurementFailed: Names are still equal.
    """
    names = [result.name for result in results]
    named = [result if names.count(result.name) == 1 else _with_precision(result) for result in results]
    names = [result.name for result in named]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise MeasurementFailed(f"two results are called {twice}: measure with --name, or edit `name` in one of the files.")
    return named


def _with_precision(result: Result) -> Result:
    precision = ((result.info.get("plan") or {}).get("precision") or {}).get("value", "")
    return result.model_copy(update={"name": f"{result.name} {precision}".strip()})


def _print_costs(costs: Costs) -> None:
    _say("Caveats", costs.doubts)
    for sheet in costs.sheets:
        if sheet.rows:
            _show(sheet_table(sheet, costs.target))
        _say("" if sheet.rows else f"{sheet.work}: {costs.target}", [*_cheapest(sheet), *sheet.notes])
        if sheet.pairs:
            _show(pair_table(sheet.pairs))
    if any(sheet.rows for sheet in costs.sheets) and not any(sheet.pairs for sheet in costs.sheets):
        _say("", ["There is no pair of Arm and x86 machines with the same number of vCPUs to compare."])
    _say("Missing prices", costs.missing)
    _say("Assumptions", costs.assumptions)


def _cheapest(sheet: Sheet) -> list[str]:
    row = sheet.cheapest
    if row is None:
        return []
    return [f"Cheapest: {row.machines:,} × {row.machine.name}, ${row.annual_dollars:,.0f} a year (as {row.result} was measured)."]


def _print_published(prices: Prices) -> None:
    pair, listed = published(), at_list_prices(prices)
    _show(published_table(pair, published_title()))
    _say("", [f"The second costs {saving(pair):.1%} less. Source (only its beginning was readable): {SOURCE}"])
    if listed is not None:
        _show(published_table(listed, "The same rates at the prices of the shipped table"))
        _say("", [f"The second costs {saving(listed):.1%} less."])
    _say("Review of the published figures", remarks(prices))


def _published_json(prices: Prices) -> dict[str, Any]:
    listed = at_list_prices(prices)
    return {
        "source": SOURCE,
        "lines": [dataclasses.asdict(line) for line in published()],
        "at_list_prices": None if listed is None else [dataclasses.asdict(line) for line in listed],
        "remarks": remarks(prices),
    }


def _show(table: Table) -> None:
    """Print the table without truncation: on a narrow terminal, lines wrap."""
    console = Console()
    needed = Measurement.get(console, console.options.update(max_width=WIDEST), table).maximum
    title, table.title = table.title, None
    sys.stdout.write(f"{title}\n")
    Console(width=max(needed, console.width)).print(table)
    sys.stdout.write("\n")


def _say(title: str, sentences: Sequence[str]) -> None:
    if sentences:
        sys.stdout.write((f"{title}\n" if title else "") + "".join(f"- {sentence}\n" for sentence in sentences) + "\n")
