"""The tables of the report: what was compared, metrics with ratios, step times and causes, plan differences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any

from app.bench.compare.result import Result
from app.bench.report.figures import MILLI, TOPICS, Metric, Topic
from app.bench.report.judging import machine_name, torch_of
from app.bench.report.loads import Case, load_name, part
from app.bench.report.pricing import Priced
from app.bench.report.table import Group, Row, Table, compared, number, plain
from app.bench.report.tails import CAUSES, causes, phases

_PERCENTILES = ("p50", "p99", "p99.9", "longest")
# Decisions that follow from others, or are a path on one machine's disk.
_NOT_COMPARED = (
    "pack_folder",
    "decode_tokens_per_second",
    "prefill_tokens_per_second",
    "capacity_tokens_per_second",
    "roofline_ratio",
)


def head_table(results: Sequence[Priced], names: Sequence[str]) -> Table:
    """Return the table of what was compared, with a column for each result."""
    columns = [_head(result) for result in results]
    rows = tuple(
        Row(name, plain([column[name] for column in columns])) for name in columns[0] if any(col[name] for col in columns)
    )
    return Table("What was compared", ("", ""), tuple(names), (Group("", rows),), numeric=False)


def figure_tables(cases: Sequence[Case], names: Sequence[str]) -> list[Table]:
    """Return a table for each topic with any value. Loads without a value in a topic are left out."""
    return [table for topic in TOPICS if (table := _figures(topic, cases, names)).groups]


def tail_tables(results: Sequence[Result], names: Sequence[str]) -> list[Table]:
    """Return the tables of step times and of the causes of slow steps, or none if no steps were recorded."""
    taken = [Group(name, tuple(_phase_rows(result))) for name, result in zip(names, results, strict=True)]
    lost = [Group(name, tuple(_cause_rows(result))) for name, result in zip(names, results, strict=True)]
    tables = [
        Table(
            "Duration of the engine's steps",
            ("result", "steps"),
            ("number", *(f"{name} (ms)" for name in _PERCENTILES), *(f"{name} (× usual)" for name in _PERCENTILES[1:])),
            tuple(group for group in taken if group.rows),
            "All loads together. Usual is the median of steps with the same phase and load and about the same size.",
        ),
        Table(
            "Causes of slow steps",
            ("result", "cause"),
            ("steps", "of all steps (%)", "longest (ms)", "time lost (%)"),
            tuple(group for group in lost if group.rows),
            "Slow means more than 1.5 times the usual. Time lost: the time beyond the usual, as a share of the time of all steps. "
            + "; ".join(f"{name.replace('_', ' ')}: {why}" for name, why in CAUSES.items())
            + ".",
        ),
    ]
    return [table for table in tables if table.groups]


def decision_table(results: Sequence[Result], names: Sequence[str]) -> Table | None:
    """Return the table of decisions that differ between plans, with their reasons; None if none differs."""
    plans = [part(result.info, "plan") for result in results]
    differing = [
        name
        for name in plans[0]
        if name not in _NOT_COMPARED and any(_value(plan, name) != _value(plans[0], name) for plan in plans[1:])
    ]
    if not differing:
        return None
    rows = tuple(Row(name.replace("_", " "), plain([_decision(plan, name) for plan in plans])) for name in differing)
    note = "Decisions that are equal in all plans are left out, and so are those that only report measurements."
    return Table("Where the plans differ, and why", ("", "decision"), tuple(names), (Group("", rows),), note, numeric=False)


def _head(priced: Priced) -> dict[str, str]:
    result = priced.result
    info, plan = result.info, part(result.info, "plan")
    facts, model = part(info, "facts"), part(info, "model")
    quota = part(facts, "cgroup").get("quota_cores")
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
        "version": f"{info.get('version')}, torch {torch_of(result)}",
        "measured": f"{_date(result.began_at)}, by version {result.measured_by}",
        "server's flags": " ".join(_flags(result.flags)),
    }


def _flags(flags: Sequence[str]) -> Iterator[str]:
    """Yield the server's flags with paths shortened to file names, since folders may be private."""
    for flag in flags:
        name, _, value = flag.partition("=")
        yield f"{name}={PurePath(value).name}" if "/" in value else flag


def _figures(topic: Topic, cases: Sequence[Case], names: Sequence[str]) -> Table:
    metrics = [metric for metric in topic.metrics if any(metric.read(each) is not None for each in _all(cases))]
    groups = [Group(load_name(case.load), tuple(_rows(case, metrics, names))) for case in cases]
    heads = tuple(f"{metric.name} ({metric.unit})" if metric.unit else metric.name for metric in metrics)
    told = tuple(group for group in groups if any(cell.text != "–" for row in group.rows for cell in row.cells))
    compared_here = len(names) > 1 and any(metric.more_is_better is not None for metric in metrics)
    note = topic.note + (f" Next to each figure: its ratio to {names[0]}." if compared_here else "")
    return Table(topic.title, ("load", "result"), heads, told, note)


def _all(cases: Sequence[Case]) -> Iterator[Any]:
    return (each for case in cases for each in case.measured if each is not None)


def _rows(case: Case, metrics: Sequence[Metric], names: Sequence[str]) -> Iterator[Row]:
    first = case.measured[0]
    for name, each in zip(names, case.measured, strict=True):
        cells = []
        for metric in metrics:
            against = metric.read(first) if first and len(names) > 1 else None
            cells.append(compared(metric.read(each) if each else None, against, metric.more_is_better))
        yield Row(name, tuple(cells))


def _phase_rows(result: Result) -> Iterator[Row]:
    for phase in phases(result):
        took = [number(seconds * MILLI) for seconds in phase.seconds]
        yield Row(phase.name, plain([f"{phase.num_steps:,}", *took, *(number(ratio) for ratio in phase.beyond)]))


def _cause_rows(result: Result) -> Iterator[Row]:
    for cause in causes(result):
        shares = number(cause.share * 100), number(cause.longest_seconds * MILLI), number(cause.lost_share * 100)
        yield Row(cause.name.replace("_", " "), plain([f"{cause.num_steps:,}", *shares]))


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
