"""Plots of the latency distribution and of throughput with p99 latency, and the style that all plots share.

Colours can be distinguished by colour-blind readers. The SVG in the page uses variables of the page's style sheet as
colours, so that plots follow its light or dark mode. Percentile curves stretch the slowest percentiles.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO, StringIO
from statistics import median
from typing import Any, Literal

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import StrMethodFormatter

from armature_bench.report.comparison import load_axes
from armature_bench.report.figures import MILLI, Column, LoadCase, load_name, size_name
from armature_bench.report.page import Plot

INK, MUTED, GRID, PAPER = "#1b1f24", "#57606a", "#d8dee4", "#ffffff"
# Results in order: six hues after Okabe and Ito that are dark enough for lines, jfly.uni-koeln.de/color
RESULT_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b3589a", "#8a6d00", "#3f3f9f")
RESULT_MARKERS = ("o", "s", "^", "D", "v", "P")
CAUSE_COLOURS = {
    "prefill": "#0072b3",
    "page_fault": "#d55e01",
    "garbage_collection": "#009e74",
    "throttled": "#b3589b",
    "compiled": "#8a6d01",
    "preempted": "#3f3fa0",
    "thermal": "#c4206b",
    "frequency": "#5b7f2b",
    "descheduled": "#a40e26",
    "unknown": "#1b1f25",
    "between steps": "#57606b",
}
CAUSE_MARKERS = dict(zip(CAUSE_COLOURS, "osv^DP<>Xpd", strict=True))
# Names of the colours in the page's style sheet. All values above are distinct, even where two look the same.
CSS_VARIABLES = {
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    PAPER: "paper",
    **{colour: f"series-{index}" for index, colour in enumerate(RESULT_COLOURS)},
    **{colour: f"cause-{index}" for index, colour in enumerate(CAUSE_COLOURS.values())},
}
DPI = 160
MAX_NAME_LENGTH = 36
LOG_AXIS_CUTOFF = 20.0  # a logarithmic scale leaves out times shorter than the median by this factor
_STYLE: Any = {  # its type differs between versions of matplotlib
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "figure.facecolor": PAPER,
    "figure.constrained_layout.use": True,
    "svg.fonttype": "none",
    "text.parse_math": False,  # a dollar sign in a name is not math
}


@dataclass(frozen=True, slots=True)
class PlotText:
    name: str
    title: str
    caption: str
    alternative: str


def render_plot(text: PlotText, size: tuple[float, float], draw: Callable[[Figure], None]) -> Plot:
    """Run `draw` on a figure of `size` inches and return it as SVG and PNG."""
    with rc_context(_STYLE | {"svg.hashsalt": text.name}):
        figure = Figure(figsize=size)
        draw(figure)
        picture, vectors = BytesIO(), StringIO()
        figure.savefig(picture, format="png", dpi=DPI, metadata={"Software": None})
        figure.set_layout_engine("none")  # keep the layout that was computed for the PNG
        figure.patch.set_visible(False)
        figure.savefig(vectors, format="svg", metadata={"Date": None, "Creator": None})
    svg = inline_svg(vectors.getvalue(), text.name, text.alternative)
    return Plot(text.name, text.title, text.caption, text.alternative, svg, picture.getvalue())


def inline_svg(svg: str, name: str, alternative: str) -> str:
    """Prepare an SVG for the page: no header, the page's colours and font, and ids that are unique in the page."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->\s*", "", body, flags=re.DOTALL)
    body = re.sub(
        r"<defs>\s*<style.*?</style>\s*</defs>", "", body, flags=re.DOTALL
    )  # it would apply to the whole page
    used = set(re.findall(r'(?:href="|url\()#([\w.-]+)', body))
    body = re.sub(r' id="([\w.-]+)"', lambda found: f' id="{name}-{found[1]}"' if found[1] in used else "", body)
    body = re.sub(r'(href="|url\()#', rf"\1#{name}-", body)
    body = re.sub(
        r"#[0-9a-f]{6}\b",
        lambda found: f"var(--{CSS_VARIABLES[found[0]]})" if found[0] in CSS_VARIABLES else found[0],
        body,
    )
    box = re.search(r'viewBox="[^"]+"', body)
    assert box, "matplotlib writes a viewBox"
    label = alternative.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    head = f'<svg {box[0]} role="img" aria-label="{label}" xmlns:xlink="http://www.w3.org/1999/xlink">'
    return head + body[body.index(">", box.end()) + 1 :].strip()


def result_colour(index: int) -> str:
    return RESULT_COLOURS[index % len(RESULT_COLOURS)]


def result_marker(index: int) -> str:
    """Return the marker of a result. Colours repeat after the sixth result, but then with another marker."""
    return RESULT_MARKERS[(index + index // len(RESULT_COLOURS)) % len(RESULT_MARKERS)]


def line_style(index: int) -> dict[str, Any]:
    """Return the line style of a result, as arguments of matplotlib's `plot`."""
    return {"color": result_colour(index), "marker": result_marker(index)}


def legend_handles(names: Sequence[str]) -> list[Line2D]:
    return [Line2D([], [], **line_style(index), label=short_name(name)) for index, name in enumerate(names)]


def short_name(name: str) -> str:
    """Shorten a name for the legend, and replace a leading underscore, since matplotlib hides such labels."""
    return (name if len(name) <= MAX_NAME_LENGTH else f"{name[: MAX_NAME_LENGTH - 1]}…").replace(
        "_", "\u2017", 1 if name[:1] == "_" else 0
    )


def cause_colour(cause: str) -> str:
    return CAUSE_COLOURS.get(cause, CAUSE_COLOURS["unknown"])


def cause_marker(cause: str) -> str:
    return CAUSE_MARKERS.get(cause, CAUSE_MARKERS["unknown"])


def set_ticks(axes: Axes, axis: str, ticks: list[float], labels: list[str] | None = None) -> None:
    """Set exactly these ticks, without minor ticks."""
    chosen = axes.xaxis if axis == "x" else axes.yaxis
    chosen.set_ticks(ticks, labels if labels is not None else [f"{tick:,g}" for tick in ticks])
    chosen.set_ticks([], minor=True)


def set_time_axis(axes: Axes, values: Sequence[float], logarithmic_from: float) -> None:
    """Set the y axis: linear from zero, or logarithmic if the longest is far above the median.

    The axis is logarithmic if the longest value is at least `logarithmic_from` times the median. It then leaves out
    values below a twentieth of the median, unless `logarithmic_from` is 0.
    """
    positive = [value for value in values if value > 0]
    if not positive or max(positive) < logarithmic_from * median(positive):
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    else:
        shortest = median(positive) / LOG_AXIS_CUTOFF if logarithmic_from else 0.0
        set_log_axis(axes, "y", max(min(positive), shortest) / 1.2, max(positive) * 1.2)


def set_log_axis(axes: Axes, axis: str, low: float, high: float) -> None:
    """Set a logarithmic axis with ticks at 1, 2, 5, or fewer if space is short."""
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = [step * 10.0**power for power in range(-9, 13) for step in steps if low <= step * 10.0**power <= high]
        if len(ticks) < 9:
            break
    if axis == "x":
        axes.set_xscale("log")
        axes.set_xlim(low, high)
    else:
        axes.set_yscale("log")
        axes.set_ylim(low, high)
    set_ticks(axes, axis, ticks)


_TICK_QUANTILES = (0.0, 0.5, 0.9, 0.99, 0.999, 0.9999)
_MAX_CURVE_POINTS = 240  # per curve: more than its width in pixels
_LOGARITHMIC_FROM = 8.0  # logarithmic scale if the longest exceeds the median by this factor
_DEFAULT_CLIENTS = 8


@dataclass(frozen=True, slots=True)
class _Panel:
    title: str
    case: LoadCase
    column: Column


def latency_plot(cases: Sequence[LoadCase], names: Sequence[str]) -> Plot | str:
    """Return the plot, or a sentence that says why there is none.

    There is a panel for each kind of latency, or for each load if there is only one kind.
    """
    panels = _panels(cases)
    if not panels:
        return "No load was measured by all results, so no latency distribution is drawn."
    loads = "; ".join(dict.fromkeys(load_name(panel.case.load) for panel in panels))
    text = PlotText(
        "latency",
        "Latency, from the fastest to the slowest",
        f"Each point gives the percentage (x) that took no longer than a time (y). Measured with {loads}. A curve ends with its samples.",
        f"Percentile curves of {', '.join(panel.title for panel in panels)} for {', '.join(names)}, measured with {loads}.",
    )

    def draw(figure: Figure) -> None:
        drawings = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, panel in zip(drawings, panels, strict=True):
            _draw(axes, panel, names)
        figure.legend(handles=legend_handles(names), loc="outside upper left", ncols=4)

    return render_plot(text, (9.4, 3.6), draw)


def _panels(cases: Sequence[LoadCase]) -> list[_Panel]:
    shared = [case for case in cases if all(case.measured)]
    if not shared:
        return []
    if shared[0].load.kind == "generate":
        shortest = [case for case in shared if case.load.tokens == shared[0].load.tokens]
        case = min(shortest, key=lambda each: abs(each.load.clients - _DEFAULT_CLIENTS))
        panels = [
            _Panel("time to first token", case, lambda point: point.first_token_seconds),
            _Panel("token to token", case, lambda point: point.gap_seconds),
            _Panel("whole answer", case, lambda point: point.request_seconds),
        ]
    else:
        panels = [
            _Panel(load_name(case.load), case, lambda point: point.request_seconds) for case in _extreme_cases(shared)
        ]
    return [panel for panel in panels if any(each and panel.column(each.point) for each in panel.case.measured)]


def _extreme_cases(cases: Sequence[LoadCase]) -> list[LoadCase]:
    """Return the extreme cases with the shortest texts: the smallest load, the largest batch, the most clients."""
    shortest = [case for case in cases if case.load.tokens == cases[0].load.tokens]
    largest = max(shortest, key=lambda case: (case.load.batch, -case.load.clients))
    crowded = max(shortest, key=lambda case: case.load.clients)
    return list({case.load: case for case in (shortest[0], largest, crowded)}.values())


def _draw(axes: Axes, panel: _Panel, names: Sequence[str]) -> None:
    lines: list[list[float]] = [sorted(panel.column(each.point)) if each else [] for each in panel.case.measured]
    for index, samples in enumerate(lines):
        if samples:
            places, values = percentile_curve(samples)
            axes.plot(places, [value * MILLI for value in values], color=result_colour(index), label=names[index])
    longest = max(len(samples) for samples in lines)
    shares = [share for share in _TICK_QUANTILES if share < 1 - 0.5 / longest]
    set_ticks(axes, "x", [quantile_position(share) for share in shares], [f"{share * 100:g}" for share in shares])
    set_time_axis(axes, [value * MILLI for samples in lines for value in samples], _LOGARITHMIC_FROM)
    axes.set_title(panel.title)
    axes.set_xlabel("percent that took no longer")
    axes.set_ylabel("milliseconds")


def percentile_curve(samples: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return positions and values of the percentile curve of sorted samples, as dense in the tail as before it."""
    last = quantile_position(1 - 0.5 / len(samples))
    places = [last * index / (_MAX_CURVE_POINTS - 1) for index in range(_MAX_CURVE_POINTS)]
    ranks = dict.fromkeys(min(len(samples) - 1, int((1 - 10**-place) * len(samples))) for place in places)
    return [quantile_position((rank + 0.5) / len(samples)) for rank in ranks], [samples[rank] for rank in ranks]


def quantile_position(share: float) -> float:
    """Return the position of a percentile: 0 for none, 1 for 90%, 2 for 99%."""
    return -math.log10(1 - share)


_DASHES: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")
_AXES = {"clients": "clients at once", "batch": "texts or rows per request, one client"}


@dataclass(frozen=True, slots=True)
class _ThroughputCurve:
    """One curve of one result and one size of load. `dots`: position, units per second, p99 in milliseconds."""

    result: int
    size: str
    dots: tuple[tuple[int, float, float], ...]


def throughput_plots(cases: Sequence[LoadCase], names: Sequence[str]) -> list[Plot]:
    """Return one plot by clients and one by batch size, if they were varied."""
    return [
        _plot(axis, lines, cases, names) for axis in _AXES if (lines := _throughput_curves(axis, cases, len(names)))
    ]


def _plot(axis: str, lines: Sequence[_ThroughputCurve], cases: Sequence[LoadCase], names: Sequence[str]) -> Plot:
    unit = "tokens" if any(each and each.tokens for case in cases for each in case.measured) else "rows"
    text = PlotText(
        f"throughput-{axis}",
        f"Throughput against {'concurrency' if axis == 'clients' else 'batch size'}, and its p99",
        "Left: more is better. Right: less is better, logarithmic scale. Higher concurrency raises throughput and latency.",
        f"{unit} a second and p99 of a request against {_AXES[axis]}: "
        + "; ".join(_describe_curve(line, names, unit) for line in lines),
    )

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        for curve in lines:
            plot_style = line_style(curve.result) | {
                "linestyle": _DASHES[_sizes(lines).index(curve.size) % len(_DASHES)]
            }
            places = [place for place, _, _ in curve.dots]
            left.plot(places, [rate for _, rate, _ in curve.dots], **plot_style)
            right.plot(places, [p99 for _, _, p99 in curve.dots], **plot_style)
        _label(left, axis, lines, "throughput", f"{unit} a second")
        _label(right, axis, lines, "p99 of a request", "milliseconds")
        set_time_axis(left, [0.0], 1.0)
        set_time_axis(right, [p99 for curve in lines for _, _, p99 in curve.dots], 0.0)
        figure.legend(handles=[*legend_handles(names), *_legend_handles(lines)], loc="outside upper left", ncols=4)

    return render_plot(text, (9.4, 3.8), draw)


def _throughput_curves(axis: str, cases: Sequence[LoadCase], num_results: int) -> list[_ThroughputCurve]:
    found: dict[tuple[int, str, int], list[tuple[int, float, float]]] = {}
    for case in cases:
        for index, held in (
            (index, held) for index in range(num_results) for along, held in load_axes(case.load) if along == axis
        ):
            each = case.measured[index]
            p99 = each.quantile(lambda point: point.request_seconds, 0.99) if each else None
            if each and each.rate and p99 is not None:
                dot = (getattr(case.load, axis), each.rate, p99 * MILLI)
                found.setdefault((index, size_name(case.load), held), []).append(dot)
    return [
        _ThroughputCurve(index, size, tuple(sorted(dots))) for (index, size, _), dots in found.items() if len(dots) > 1
    ]


def _label(axes: Axes, axis: str, lines: Sequence[_ThroughputCurve], title: str, unit: str) -> None:
    axes.set_xscale("log", base=2)
    set_ticks(axes, "x", sorted({float(place) for line in lines for place, _, _ in line.dots}))
    axes.set_title(title)
    axes.set_xlabel(_AXES[axis])
    axes.set_ylabel(unit)


def _sizes(lines: Sequence[_ThroughputCurve]) -> list[str]:
    return list(dict.fromkeys(line.size for line in lines))


def _legend_handles(lines: Sequence[_ThroughputCurve]) -> list[Line2D]:
    sizes = _sizes(lines)
    if len(sizes) < 2:
        return []
    return [
        Line2D([], [], color=MUTED, linestyle=_DASHES[index % len(_DASHES)], label=size)
        for index, size in enumerate(sizes)
    ]


def _describe_curve(line: _ThroughputCurve, names: Sequence[str], unit: str) -> str:
    first, last = line.dots[0], line.dots[-1]
    return (
        f"{names[line.result]} with {line.size} from {first[1]:,.0f} {unit}/s at {first[0]} (p99 {first[2]:,.0f} ms) "
        f"to {last[1]:,.0f} at {last[0]} (p99 {last[2]:,.0f} ms)"
    )
