"""Tables and notes of the report, independent of how they are rendered: the console and the page show the same ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any, Literal

from armature_bench.compare.result import CompareResult
from armature_bench.console import MeasurementFailed
from armature_bench.report.figures import (
    METRIC_GROUPS,
    MILLI,
    LoadCase,
    MetricGroup,
    PricedResult,
    ReportMetric,
    info_section,
    load_cases,
    load_name,
)
from armature_bench.report.slow_steps import CAUSE_DESCRIPTIONS, cause_statistics, phase_statistics

Verdict = Literal["", "better", "worse"]
EQUAL_TOLERANCE = 0.05  # a ratio closer to 1 than this is neither better nor worse


@dataclass(frozen=True, slots=True)
class TableCell:
    """One cell. `ratio` is relative to the first result, which has 1.00; empty if there is nothing to compare."""

    text: str
    ratio: str = ""
    verdict: Verdict = ""


@dataclass(frozen=True, slots=True)
class TableRow:
    name: str
    cells: tuple[TableCell, ...]


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows that belong together, such as the results of one load. `name` may be empty."""

    name: str
    rows: tuple[TableRow, ...]


@dataclass(frozen=True, slots=True)
class ReportTable:
    """One table.

    `row_headings` are the headings of the columns with the groups' and rows' names, `heads` of the cells. `numeric`:
    cells are numbers.
    """

    title: str
    row_headings: tuple[str, str]
    heads: tuple[str, ...]
    groups: tuple[RowGroup, ...]
    note: str = ""
    numeric: bool = True

    @property
    def is_grouped(self) -> bool:
        return any(group.name for group in self.groups)


def compared_cell(value: float | None, first: float | None, more_is_better: bool | None) -> TableCell:
    """Return the cell of a number, with its ratio to the first result's."""
    if value is None:
        return TableCell("–")
    if not first or more_is_better is None:
        return TableCell(format_three_digits(value))
    ratio = value / first
    verdict: Verdict = ""
    if abs(ratio - 1) >= EQUAL_TOLERANCE:
        verdict = "better" if (ratio > 1) == more_is_better else "worse"
    return TableCell(format_three_digits(value), format_ratio(ratio), verdict)


def format_three_digits(value: float) -> str:
    """Format a number with three significant digits: `1,234`, `56.7`, `0.0123`. Integers are shown in full."""
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    rounded = float(f"{value:.3g}")
    digits = 2 - math.floor(math.log10(abs(rounded))) if rounded else 0
    return f"{rounded:.{max(0, min(9, digits))}f}"


def format_ratio(ratio: float) -> str:
    return f"{ratio:.2f}×" if ratio < 100 else f"{ratio:,.0f}×"


def text_cells(texts: Sequence[str]) -> tuple[TableCell, ...]:
    """Return cells of text without comparison; a dash for an empty text."""
    return tuple(TableCell(text or "–") for text in texts)


_MEMORY_TOLERANCE = 0.1  # kernels reserve different amounts, and hosts may balloon memory of a virtual machine


@dataclass(frozen=True, slots=True)
class ReportOrigin:
    """The program's version where the report is made, and that machine's facts in the form of `/info`."""

    version: str
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ResultNotes:
    """The notes on one result. `doubts`: reasons why figures may be wrong. `remarks`: where they come from."""

    name: str
    doubts: tuple[str, ...]
    remarks: tuple[str, ...]


def check_comparable(results: Sequence[CompareResult], force: bool) -> None:
    """Raise `MeasurementFailed` if the models differ in size or shape, unless `force` is given."""
    first = results[0]
    for other in results[1:]:
        differs = _differing_fields(first.model_shape, other.model_shape)
        if differs and not force:
            raise MeasurementFailed(
                f"{first.name} and {other.name} are of different models ({'; '.join(differs)}): their figures do not compare the "
                f"machines. --force compares them anyway, and the report says so."
            )


def collect_notes(results: Sequence[CompareResult], here: ReportOrigin) -> list[ResultNotes]:
    return [
        ResultNotes(
            name,
            (*_result_caveats(result, results), *_differences_from_first(result, results[0])),
            _remarks(result, here),
        )
        for result, name in zip(results, unique_names(results), strict=True)
    ]


def unique_names(results: Sequence[CompareResult]) -> list[str]:
    """Return the name of each result in the report, numbered where several have the same name."""
    given = [result.name for result in results]
    return [
        name if given.count(name) == 1 else f"{name} ({given[: index + 1].count(name)})"
        for index, name in enumerate(given)
    ]


def _result_caveats(result: CompareResult, results: Sequence[CompareResult]) -> list[str]:
    found = list(result.doubts)
    if not result.complete and not found:
        found.append("Incomplete: the measurement was interrupted.")
    for point in result.points:
        if point.failures:
            failures = ", ".join(f"{number} × {reason}" for reason, number in sorted(point.failures.items()))
            asked = len(point.request_seconds) + sum(point.failures.values())
            found.append(f"Some of {asked} requests failed at {load_name(point.load)}: {failures}.")
    forced = info_section(result.info, "facts", "native").get("forced")
    if forced:
        found.append(f"Its kernels were forced to {forced}, although the processor may support more.")
    own = {point.load for point in result.points}
    missing = [load_name(case.load) for case in load_cases(results) if case.load not in own]
    if missing:
        found.append(f"Not measured here, but in another result: {_first_three(missing)}.")
    return found


def _differences_from_first(result: CompareResult, first: CompareResult) -> list[str]:
    """Return how a result differs from the first in more than the machine and its plan."""
    found = []
    differs = _differing_fields(first.model_shape, result.model_shape)
    if differs:
        found.append(
            f"The model differs from that of the first result ({'; '.join(differs)}): compared because of --force."
        )
    versions = [str(each.info.get("version")) for each in (first, result)]
    if versions[0] != versions[1]:
        found.append(f"The server has version {versions[1]}, that of the first result {versions[0]}.")
    builds = [torch_version(each) for each in (first, result)]
    if builds[0] != builds[1]:
        found.append(f"It ran with torch {builds[1]}, the first result with {builds[0]}.")
    return found


def _remarks(result: CompareResult, here: ReportOrigin) -> tuple[str, ...]:
    facts = info_section(result.info, "facts")
    found = []
    if not is_same_machine(facts, here.facts):
        found.append(
            f"Measured on another machine ({machine_name(facts)}) than the one that made this report ({machine_name(here.facts)})."
        )
    version = str(result.info.get("version"))
    if version != here.version:
        found.append(f"Measured with version {version}; this report was made with {here.version}.")
    if result.url is not None:
        found.append(f"Measured on a server that was already running, at {result.url}.")
    return tuple(found)


def is_same_machine(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two sets of facts describe equal machines, by hardware and not by name."""
    sizes = [facts.get("memory_bytes") or 0 for facts in (one, other)]
    kinds = [(facts.get("cpu"), facts.get("architecture"), len(facts.get("cores", ()))) for facts in (one, other)]
    return kinds[0] == kinds[1] and max(sizes) - min(sizes) <= _MEMORY_TOLERANCE * max(sizes)


def machine_name(facts: Mapping[str, Any]) -> str:
    """Return a name such as `Intel Xeon @ 2.50GHz, 8 cores`."""
    cpu = info_section(facts, "cpu")
    vendor, name = str(cpu.get("vendor", "")), str(cpu.get("name", "an unknown processor"))
    label = cpu.get("product") or (name if vendor in name else f"{vendor} {name}")
    cores = len(facts.get("cores", ()))
    return f"{label}, {cores} core{'s' * (cores != 1)}"


def torch_version(result: CompareResult) -> str:
    """Return the torch version without its build suffix."""
    return str(info_section(result.info, "facts", "torch").get("version", "of unknown version")).partition("+")[0]


def _differing_fields(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return descriptions such as `hidden size 2048 and 4096`, at most three."""
    names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    return [f"{name.replace('_', ' ')} {first.get(name)} and {other.get(name)}" for name in names[:3]]


def _first_three(texts: Sequence[str]) -> str:
    return "; ".join(texts[:3]) + (f"; and {len(texts) - 3} more" if len(texts) > 3 else "")


_PERCENTILES = ("p50", "p99", "p99.9", "longest")
# Decisions that follow from others, or are a path on one machine's disk.
_NOT_COMPARED = (
    "pack_folder",
    "prompt_cache",
    "prompt_cache_bytes",
    "decode_tokens_per_second",
    "prefill_tokens_per_second",
    "capacity_tokens_per_second",
    "roofline_ratio",
)


def head_table(results: Sequence[PricedResult], names: Sequence[str]) -> ReportTable:
    """Return the table of what was compared, with a column for each result."""
    columns = [_head(result) for result in results]
    rows = tuple(
        TableRow(name, text_cells([column[name] for column in columns]))
        for name in columns[0]
        if any(col[name] for col in columns)
    )
    return ReportTable("What was compared", ("", "property"), tuple(names), (RowGroup("", rows),), numeric=False)


def metric_tables(cases: Sequence[LoadCase], names: Sequence[str]) -> list[ReportTable]:
    """Return a table for each topic with any value. Loads without a value in a topic are left out."""
    return [table for topic in METRIC_GROUPS if (table := _figures(topic, cases, names)).groups]


def step_tables(results: Sequence[CompareResult], names: Sequence[str]) -> list[ReportTable]:
    """Return the tables of step times and of the causes of slow steps, or none if no steps were recorded."""
    taken = [RowGroup(name, tuple(_phase_rows(result))) for name, result in zip(names, results, strict=True)]
    lost = [RowGroup(name, tuple(_cause_rows(result))) for name, result in zip(names, results, strict=True)]
    tables = [
        ReportTable(
            "Duration of the engine's steps",
            ("result", "steps"),
            ("number", *(f"{name} (ms)" for name in _PERCENTILES), *(f"{name} (× usual)" for name in _PERCENTILES[1:])),
            tuple(group for group in taken if group.rows),
            "All loads together. Usual is the median of steps with the same phase and load and about the same size.",
        ),
        ReportTable(
            "Causes of slow steps",
            ("result", "cause"),
            ("steps", "of all steps (%)", "longest (ms)", "time lost (%)"),
            tuple(group for group in lost if group.rows),
            "Slow means more than 1.5 times the usual. Time lost: the time beyond the usual, as a share of the time of all steps. "
            + "; ".join(f"{name.replace('_', ' ')}: {why}" for name, why in CAUSE_DESCRIPTIONS.items())
            + ".",
        ),
    ]
    return [table for table in tables if table.groups]


def decision_table(results: Sequence[CompareResult], names: Sequence[str]) -> ReportTable | None:
    """Return the table of decisions that differ between plans, with their reasons; None if none differs."""
    plans = [info_section(result.info, "plan") for result in results]
    differing = [
        name
        for name in plans[0]
        if name not in _NOT_COMPARED and any(_value(plan, name) != _value(plans[0], name) for plan in plans[1:])
    ]
    if not differing:
        return None
    rows = tuple(
        TableRow(name.replace("_", " "), text_cells([_decision(plan, name) for plan in plans])) for name in differing
    )
    note = "Decisions that are equal in all plans are left out, and so are those that only report measurements."
    return ReportTable(
        "Where the plans differ, and why", ("", "decision"), tuple(names), (RowGroup("", rows),), note, numeric=False
    )


def _head(priced: PricedResult) -> dict[str, str]:
    result = priced.result
    info, plan = result.info, info_section(result.info, "plan")
    facts, model = info_section(info, "facts"), info_section(info, "model")
    quota = info_section(facts, "cgroup").get("quota_cores")
    meters = dict.fromkeys(point.energy.source for point in result.points if point.energy)
    return {
        "machine": machine_name(facts) + (f", a quota of {quota:g}" if quota is not None else ""),
        "architecture": str(facts.get("architecture", "")),
        "memory": f"{facts.get('memory_bytes', 0) / 2**30:.0f} GiB",
        "instance": result.instance or "",
        "price": "" if result.hourly_price is None else f"${result.hourly_price:g} an hour",
        "price read": priced.origin,
        "model": f"{model.get('name', '?')}, {model.get('num_parameters', 0) / 1e6:,.0f}M parameters",
        "precision": _text(_value(plan, "precision")),
        "kernels": _text(_value(plan, "kernels")),
        "threads": _text(_value(plan, "threads")),
        "energy by": ", ".join(meters),
        "version": f"{info.get('version')}, torch {torch_version(result)}",
        "measured": f"{_date(result.began_at)}, by version {result.measured_by}",
        "server's flags": " ".join(_public_flags(result.flags)),
    }


def _public_flags(flags: Sequence[str]) -> Iterator[str]:
    """Yield the server's flags with paths shortened to file names, since folders may be private."""
    for flag in flags:
        name, _, value = flag.partition("=")
        yield f"{name}={PurePath(value).name}" if "/" in value else flag


def _figures(topic: MetricGroup, cases: Sequence[LoadCase], names: Sequence[str]) -> ReportTable:
    metrics = [metric for metric in topic.metrics if any(metric.read(each) is not None for each in _all(cases))]
    groups = [RowGroup(load_name(case.load), tuple(_rows(case, metrics, names))) for case in cases]
    heads = tuple(f"{metric.name} ({metric.unit})" if metric.unit else metric.name for metric in metrics)
    non_empty = tuple(group for group in groups if any(cell.text != "–" for row in group.rows for cell in row.cells))
    compared_here = len(names) > 1 and any(metric.more_is_better is not None for metric in metrics)
    note = topic.note + (f" Next to each figure: its ratio to {names[0]}." if compared_here else "")
    return ReportTable(topic.title, ("load", "result"), heads, non_empty, note)


def _all(cases: Sequence[LoadCase]) -> Iterator[Any]:
    return (each for case in cases for each in case.measured if each is not None)


def _rows(case: LoadCase, metrics: Sequence[ReportMetric], names: Sequence[str]) -> Iterator[TableRow]:
    first = case.measured[0]
    for name, each in zip(names, case.measured, strict=True):
        cells = []
        for metric in metrics:
            against = metric.read(first) if first and len(names) > 1 else None
            cells.append(compared_cell(metric.read(each) if each else None, against, metric.more_is_better))
        yield TableRow(name, tuple(cells))


def _phase_rows(result: CompareResult) -> Iterator[TableRow]:
    for phase in phase_statistics(result):
        took = [format_three_digits(seconds * MILLI) for seconds in phase.seconds]
        yield TableRow(
            phase.name,
            text_cells([f"{phase.num_steps:,}", *took, *(format_three_digits(ratio) for ratio in phase.over_usual)]),
        )


def _cause_rows(result: CompareResult) -> Iterator[TableRow]:
    for cause in cause_statistics(result):
        shares = (
            format_three_digits(cause.share * 100),
            format_three_digits(cause.longest_seconds * MILLI),
            format_three_digits(cause.lost_share * 100),
        )
        yield TableRow(cause.name.replace("_", " "), text_cells([f"{cause.num_steps:,}", *shares]))


def _value(plan: Mapping[str, Any], name: str) -> Any:
    return (plan.get(name) or {}).get("value")


def _decision(plan: Mapping[str, Any], name: str) -> str:
    reason = (plan.get(name) or {}).get("reason", "")
    return f"{_text(_value(plan, name), name)}: {reason}" if reason else _text(_value(plan, name), name)


def _text(value: Any, name: str = "") -> str:
    if value is None or value == []:
        return "–"
    if isinstance(value, bool):
        return "on" if value else "off"
    if name.endswith("_bytes"):
        return f"{value / 2**20:,.0f} MiB"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
