"""The cost tables for the console: one for each kind of work, and Arm compared with x86."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from app.bench.console import number
from app.bench.tco.published import CLAIMS, SAMPLES_PER_SECOND, Line
from app.bench.tco.sizing import Pair, Row, Sheet
from app.bench.tco.target import Target

NONE = "–"


def sheet_table(sheet: Sheet, target: Target) -> Table:
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


def pair_table(pairs: Sequence[Pair]) -> Table:
    """Return the table of Arm and x86 machines with the same number of vCPUs."""
    columns = {
        "vCPUs": [str(pair.arm.machine.vcpus) for pair in pairs],
        "Arm": [_named(pair.arm) for pair in pairs],
        "x86": [_named(pair.x86) for pair in pairs],
        "machines": [f"{pair.arm.machines} : {pair.x86.machines}" for pair in pairs],
        "Arm $/year": [_dollars(pair.arm.annual_dollars) for pair in pairs],
        "x86 $/year": [_dollars(pair.x86.annual_dollars) for pair in pairs],
        "Arm/x86 $": [_ratio(pair.dollars) for pair in pairs],
        "Arm/x86 kW": [_ratio(pair.watts) for pair in pairs],
    }
    return _table("Arm against x86, with the same number of vCPUs", columns, left=("Arm", "x86"))


def published_table(lines: Iterable[Line], title: str) -> Table:
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


def _named(row: Row) -> str:
    return row.machine.name if row.machine.name == row.result else f"{row.machine.name} ({row.result})"


def _number(value: float | None) -> str:
    return NONE if value is None else number(value)


def _dollars(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def _ratio(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def _milliseconds(value: float | None) -> str:
    return NONE if value is None else _number(value * 1e3)


def _kilowatts(value: float | None) -> str:
    return NONE if value is None else _number(value / 1e3)
