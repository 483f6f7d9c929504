"""The page of `armature bench http --report`: its figures, the percentiles of each latency, and each request over time.

The plots are drawn here and not by matplotlib, which an installed package does not have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from armature_bench.console import BenchOutcome, Figure, MeasurementFailed, format_number
from armature_bench.report.load_series import LatencyMeasure, LoadSeries, load_series, log_bounds, log_place
from armature_bench.report.page import PageSection, Plot, ReportPage, render_page
from armature_bench.report.tables import ReportTable, ResultNotes, RowGroup, TableCell, TableRow

WIDTH, HEIGHT = 900, 320
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 40, 45  # margins
NUM_COLOURS = 6  # of the page's style sheet
DASHES = ("", "7 3", "2 3")  # further loads have the colours again, with other lines
MAX_DOTS = 1500  # of one series, to limit the size of the page
MAX_CURVE_POINTS = 200
SHARES = (0.0, 0.5, 0.9, 0.99, 0.999)
MARKS = ("M-3,0a3,3 0 1,0 6,0a3,3 0 1,0 -6,0Z", "M-3,-3h6v6h-6Z", "M0,-4L4,3H-4Z", "M0,-4L4,0L0,4L-4,0Z")


def check_page(file: Path) -> None:
    """Raise `MeasurementFailed` for a place that is a directory or in none, before anything is measured."""
    if file.is_dir():
        raise MeasurementFailed(f"--report {file} is a directory: name a file such as {file / 'load.html'}")
    if not file.parent.is_dir():
        raise MeasurementFailed(f"--report {file}: the directory {file.parent} does not exist")


def write_load_page(outcome: BenchOutcome, file: Path, version: str) -> None:
    """Write the page. Raises `MeasurementFailed` if the file cannot be written."""
    try:
        file.write_text(render_load_page(outcome, version, datetime.now(UTC)), encoding="utf-8")
    except OSError as error:
        raise MeasurementFailed(f"the page cannot be written to {file}: {error}.") from error


def render_load_page(outcome: BenchOutcome, version: str, made_at: datetime) -> str:
    doubts = [*outcome.mistakes, *([] if outcome.complete else ["Interrupted: these are the requests until then."])]
    sections = [
        PageSection(measure.name, tuple(_plots(measure, series)))
        for measure, series in load_series(outcome.details["runs"]).items()
    ]
    page = ReportPage(
        f"Load on {outcome.subject}",
        [ResultNotes("This measurement", tuple(doubts), outcome.notes)],
        [f"{figure.name}: {format_number(figure.value)} {figure.unit}." for figure in _rates(outcome.figures)],
        [*sections, PageSection("Figures", tables=(_figure_table(outcome.figures),))],
        [f"Measured by armature bench http {version}, {made_at:%Y-%m-%d %H:%M} UTC."],
    )
    return render_page(page)


def _rates(figures: Sequence[Figure]) -> Iterator[Figure]:
    return (figure for figure in figures if figure.unit.endswith("/s") and figure.p99 is None)


def _figure_table(figures: Sequence[Figure]) -> ReportTable:
    parts = [name for name in ("p90", "p95") if any(name in figure.parts for figure in figures)]
    rows = tuple(TableRow(figure.name, tuple(map(TableCell, _cells(figure, parts)))) for figure in figures)
    heads = ("p50 or value", *parts, "p99", "ratio", "unit")
    return ReportTable("Figures", ("", "figure"), heads, (RowGroup("", rows),))


def _cells(figure: Figure, parts: Sequence[str]) -> Iterator[str]:
    for value in (figure.value, *(figure.parts.get(name) for name in parts), figure.p99, figure.ratio):
        yield "–" if value is None else format_number(value)
    yield figure.unit


def _plots(measure: LatencyMeasure, all_series: Sequence[LoadSeries]) -> Iterator[Plot]:
    bounds = log_bounds(all_series)
    ends = ", ".join(
        f"{series.label} from {_milliseconds(min(series.seconds))} to {_milliseconds(max(series.seconds))}"
        for series in all_series
    )
    last = max(_position(1 - 0.5 / len(series.seconds)) for series in all_series)
    shares = [share for share in SHARES if _position(share) <= last]
    ticks = [(_position(share) / last, f"{100 * share:g}%") for share in shares]
    curves = [_curve(series, last, bounds) for series in all_series]
    title = f"{measure.name} by percentile"
    caption = (
        f"The {measure.meaning}: this share of the requests took at most so long. Times are on a logarithmic scale."
    )
    alternative = f"{title}: {ends}."
    drawn = _draw(alternative, _Axes(bounds, ticks, "share of requests"), all_series, curves, are_lines=True)
    yield Plot(f"{measure.name}-percentiles", title, caption, alternative, drawn)
    end = max(max(series.at) for series in all_series) or 1.0
    ticks = [(index / 5, f"{format_number(end * index / 5)} s") for index in range(6)]
    dots = [_dots(series, end, bounds) for series in all_series]
    title = f"{measure.name} over time"
    caption = "Each request, by the time at which it was due in its run."
    alternative = f"{title}: {ends}."
    drawn = _draw(alternative, _Axes(bounds, ticks, "seconds of the run"), all_series, dots, are_lines=False)
    yield Plot(f"{measure.name}-time", title, caption, alternative, drawn)


def _position(share: float) -> float:
    """Return the position of a percentile: 0 for none, 1 for 90%, 2 for 99%."""
    return -math.log10(1 - share)


Points = list[tuple[float, float]]  # both 0 to 1


def _curve(series: LoadSeries, last: float, bounds: tuple[float, float]) -> Points:
    ordered = sorted(series.seconds)
    own_last = _position(1 - 0.5 / len(ordered))
    places = [own_last * index / (MAX_CURVE_POINTS - 1) for index in range(MAX_CURVE_POINTS)]
    ranks = dict.fromkeys(min(len(ordered) - 1, int((1 - 10**-place) * len(ordered))) for place in places)
    return [(_position((rank + 0.5) / len(ordered)) / last, log_place(ordered[rank], bounds)) for rank in ranks]


def _dots(series: LoadSeries, end: float, bounds: tuple[float, float]) -> Points:
    """Return the points of a series; of very many, the slowest and every so manyth other one."""
    pairs = list(zip(series.at, series.seconds, strict=True))
    step = math.ceil(len(pairs) / MAX_DOTS)
    if step > 1:
        slowest = sorted(pairs, key=lambda pair: -pair[1])[: MAX_DOTS // 5]
        pairs = sorted({*pairs[::step], *slowest})
    return [(max(at, 0.0) / end, log_place(seconds, bounds)) for at, seconds in pairs]


@dataclass(frozen=True, slots=True)
class _Axes:
    """The bounds of the latencies, and the ticks of the other axis: place from 0 to 1, and text."""

    bounds: tuple[float, float]
    ticks: Sequence[tuple[float, str]]
    label: str


def _draw(
    alternative: str, axes: _Axes, all_series: Sequence[LoadSeries], drawn: Sequence[Points], are_lines: bool
) -> str:
    """Return a plot as SVG; its colours are variables of the page's style sheet."""
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(alternative)}" font-size="12">']
    parts += _grid(axes)
    place = LEFT
    for index, (series, points) in enumerate(zip(all_series, drawn, strict=True)):
        colour = f"var(--series-{index % NUM_COLOURS})"
        mark = MARKS[index % len(MARKS)]
        if are_lines:
            dash = DASHES[index // NUM_COLOURS % len(DASHES)]
            line = "L".join(f"{_x(x):.1f},{_y(y):.1f}" for x, y in points)
            style = f'style="stroke: {colour}" stroke-width="2" stroke-dasharray="{dash}"'
            parts.append(f'<path d="M{line}" fill="none" {style}/>')
            ends = points[-1:]
        else:
            ends = points
        path = "".join(f'<path d="{mark}" transform="translate({_x(x):.1f},{_y(y):.1f})"/>' for x, y in ends)
        parts.append(f'<g style="fill: {colour}" fill-opacity="{1 if are_lines else 0.6}">{path}</g>')
        parts.append(f'<g style="fill: {colour}"><path d="{mark}" transform="translate({place + 5},20)"/></g>')
        parts.append(f'<text x="{place + 14}" y="24" style="fill: var(--ink)">{escape(series.label)}</text>')
        place += 30 + 7 * len(series.label)
    return "".join([*parts, "</svg>"])


def _grid(axes: _Axes) -> Iterator[str]:
    low, high = axes.bounds
    for step in _log_ticks(low, high):
        y = _y(log_place(step, axes.bounds))
        yield f'<path d="M{LEFT},{y:.1f}H{WIDTH - RIGHT}" style="stroke: var(--grid)"/>'
        text = f'x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" style="fill: var(--muted)"'
        yield f"<text {text}>{_milliseconds(step)}</text>"
    for place, tick in axes.ticks:
        yield f'<path d="M{_x(place):.1f},{TOP}V{HEIGHT - BOTTOM}" style="stroke: var(--grid)"/>'
        text = f'x="{_x(place):.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle" style="fill: var(--muted)"'
        yield f"<text {text}>{escape(tick)}</text>"
    text = f'x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle" style="fill: var(--muted)"'
    yield f"<text {text}>{escape(axes.label)}</text>"


def _log_ticks(low: float, high: float) -> list[float]:
    """Return round times between the bounds: powers of ten, and 2 and 5 between if there are few."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 2, 5) if high / low < 1000 else (1,)
    ticks = [digit * 10.0**power for power in decades for digit in digits]
    return [tick for tick in ticks if low <= tick <= high] or [low, high]


def _milliseconds(seconds: float) -> str:
    return f"{format_number(1e3 * seconds)} ms"


def _x(place: float) -> float:
    return LEFT + place * (WIDTH - LEFT - RIGHT)


def _y(place: float) -> float:
    return HEIGHT - BOTTOM - place * (HEIGHT - TOP - BOTTOM)
