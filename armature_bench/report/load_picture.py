"""A picture of `armature bench http` in characters: the distribution of each latency, and its course over time."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table

from armature_bench.console import format_number
from armature_bench.report.load_series import LatencyMeasure, LoadSeries, load_series, log_bounds, log_place

BARS = "▁▂▃▄▅▆▇█"
DISTRIBUTION_COLUMNS = 32
TIME_COLUMNS = 24
MIN_REQUESTS = 2  # fewer are no distribution


def load_picture(runs: Sequence[Mapping[str, Any]]) -> Group:
    """Return one table for each latency; `runs` are from the bench's JSON object."""
    tables = [_table(measure, series) for measure, series in load_series(runs).items()]
    return Group(*(part for table in tables for part in ("", table)))


def _table(measure: LatencyMeasure, all_series: Sequence[LoadSeries]) -> Table:
    bounds = log_bounds(all_series)
    low, high = (format_number(1e3 * bound) for bound in bounds)
    most = max(max(filter(None, slot_medians(series, TIME_COLUMNS)), default=0.0) for series in all_series)
    table = Table(title=f"{measure.name}: {measure.meaning}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("p50, ms", justify="right", no_wrap=True)
    table.add_column(f"{low} ms{f'to {high} ms':>{DISTRIBUTION_COLUMNS - len(low) - 3}}", no_wrap=True)
    table.add_column(f"over time, 0 to {format_number(1e3 * most)} ms", no_wrap=True)
    for series in all_series:
        table.add_row(
            series.label,
            format_number(1e3 * statistics.median(series.seconds)),
            draw_distribution(series, bounds),
            draw_over_time(series, most),
        )
    return table


def draw_distribution(series: LoadSeries, bounds: tuple[float, float]) -> str:
    """Return the number of requests by latency as bars; the axis is logarithmic, and the highest bar is the most."""
    if len(series.seconds) < MIN_REQUESTS:
        return ""
    counts = [0] * DISTRIBUTION_COLUMNS
    for seconds in series.seconds:
        counts[min(DISTRIBUTION_COLUMNS - 1, int(log_place(seconds, bounds) * DISTRIBUTION_COLUMNS))] += 1
    return "".join(_bar(count / max(counts)) for count in counts)


def draw_over_time(series: LoadSeries, most: float) -> str:
    """Return the median latency of each part of the run as bars from zero to `most`; blank where nothing was due."""
    if len(series.seconds) < MIN_REQUESTS or most <= 0:
        return ""
    return "".join(_bar(median / most) for median in slot_medians(series, TIME_COLUMNS))


def slot_medians(series: LoadSeries, num_slots: int) -> list[float]:
    """Return the median latency of the requests in each of `num_slots` equal parts of the run, 0 without any."""
    end = max(series.at) or 1.0
    slots: list[list[float]] = [[] for _ in range(num_slots)]
    for at, seconds in zip(series.at, series.seconds, strict=True):
        slots[min(num_slots - 1, int(num_slots * max(at, 0.0) / end))].append(seconds)
    return [statistics.median(slot) if slot else 0.0 for slot in slots]


def _bar(share: float) -> str:
    return BARS[min(len(BARS) - 1, int(share * len(BARS)))] if share > 0 else " "
