"""Plots of throughput against the number of clients or the batch size, each with the p99 latency next to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from app.bench.report import style
from app.bench.report.answer import axes as axes_of
from app.bench.report.figures import MILLI
from app.bench.report.loads import Case, size_name
from app.bench.report.style import Plot, Words, drawn

_DASHES: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")
_AXES = {"clients": "clients at once", "batch": "texts or rows per request, one client"}


@dataclass(frozen=True, slots=True)
class _Line:
    """One curve of one result and one size of load. `dots`: position, units per second, p99 in milliseconds."""

    result: int
    size: str
    dots: tuple[tuple[int, float, float], ...]


def throughput_plots(cases: Sequence[Case], names: Sequence[str]) -> list[Plot]:
    """Return one plot by clients and one by batch size, if they were varied."""
    return [_plot(axis, lines, cases, names) for axis in _AXES if (lines := _lines(axis, cases, len(names)))]


def _plot(axis: str, lines: Sequence[_Line], cases: Sequence[Case], names: Sequence[str]) -> Plot:
    unit = "tokens" if any(each and each.tokens for case in cases for each in case.measured) else "rows"
    words = Words(
        f"throughput-{axis}",
        f"Throughput against {'concurrency' if axis == 'clients' else 'batch size'}, and its p99",
        "Left: more is better. Right: less is better, logarithmic scale. Higher concurrency raises throughput and latency.",
        f"{unit} a second and p99 of a request against {_AXES[axis]}: " + "; ".join(_told(line, names, unit) for line in lines),
    )

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        for line in lines:
            look = style.line(line.result) | {"linestyle": _DASHES[_sizes(lines).index(line.size) % len(_DASHES)]}
            places = [place for place, _, _ in line.dots]
            left.plot(places, [rate for _, rate, _ in line.dots], **look)
            right.plot(places, [p99 for _, _, p99 in line.dots], **look)
        _label(left, axis, lines, "throughput", f"{unit} a second")
        _label(right, axis, lines, "p99 of a request", "milliseconds")
        style.time_axis(left, [0.0], 1.0)
        style.time_axis(right, [p99 for line in lines for _, _, p99 in line.dots], 0.0)
        figure.legend(handles=[*style.keys(names), *_keys(lines)], loc="outside upper left", ncols=4)

    return drawn(words, (9.4, 3.8), draw)


def _lines(axis: str, cases: Sequence[Case], num_results: int) -> list[_Line]:
    found: dict[tuple[int, str, int], list[tuple[int, float, float]]] = {}
    for case in cases:
        for index, held in ((index, held) for index in range(num_results) for along, held in axes_of(case.load) if along == axis):
            each = case.measured[index]
            p99 = each.quantile(lambda point: point.request_seconds, 0.99) if each else None
            if each and each.rate and p99 is not None:
                dot = (getattr(case.load, axis), each.rate, p99 * MILLI)
                found.setdefault((index, size_name(case.load), held), []).append(dot)
    return [_Line(index, size, tuple(sorted(dots))) for (index, size, _), dots in found.items() if len(dots) > 1]


def _label(axes: Axes, axis: str, lines: Sequence[_Line], title: str, unit: str) -> None:
    axes.set_xscale("log", base=2)
    style.plain_ticks(axes, "x", sorted({float(place) for line in lines for place, _, _ in line.dots}))
    axes.set_title(title)
    axes.set_xlabel(_AXES[axis])
    axes.set_ylabel(unit)


def _sizes(lines: Sequence[_Line]) -> list[str]:
    return list(dict.fromkeys(line.size for line in lines))


def _keys(lines: Sequence[_Line]) -> list[Line2D]:
    sizes = _sizes(lines)
    if len(sizes) < 2:
        return []
    return [
        Line2D([], [], color=style.MUTED, linestyle=_DASHES[index % len(_DASHES)], label=size) for index, size in enumerate(sizes)
    ]


def _told(line: _Line, names: Sequence[str], unit: str) -> str:
    first, last = line.dots[0], line.dots[-1]
    return (
        f"{names[line.result]} with {line.size} from {first[1]:,.0f} {unit}/s at {first[0]} (p99 {first[2]:,.0f} ms) "
        f"to {last[1]:,.0f} at {last[0]} (p99 {last[2]:,.0f} ms)"
    )
