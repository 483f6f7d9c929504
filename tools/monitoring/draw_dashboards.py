"""Draw the dashboards: `python -m tools.monitoring.draw_dashboards --url http://HOST:9090 --into docs/dashboards`.

Panels have Grafana's positions and show the results of their queries. Axes, colours and fonts are matplotlib's, not
Grafana's: it cannot be installed here. *engine*, which asks about one instance, shows the first one alone.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from textwrap import wrap
from typing import Any

import httpx
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, MultipleLocator
from PIL import Image

from tools.monitoring.check_dashboards import DASHBOARDS, Prometheus, Query, Window, is_number, substituted, variables

COLUMN_INCHES, ROW_INCHES, MARGIN_INCHES = 0.5, 0.34, 0.1
DPI = 110  # 12 inches: a page of 900 pixels shows letters of ten
LETTER_INCHES = 0.068  # of a legend
# No two of them look alike, to colour-blind readers either; a panel with more series repeats them with dashes.
HUES = ("#0072b2", "#d55e00", "#009e73", "#b3589a", "#8a6d00", "#56b4e9", "#1b1f24", "#a40e26", "#7f7f7f", "#e6ab02")
INK, MUTED, PAPER, GROUND = "#1b1f24", "#57606a", "#ffffff", "#eef1f4"
STYLE: Any = {
    "font.size": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": MUTED,
    "text.parse_math": False,
}
LEGEND_LINES = 5
MOST_TICKS = 4
ONE_INSTANCE = "Armature: engine"
PREFIX = "armature-"  # of every pod's name: legends leave it out


@dataclass(frozen=True, slots=True)
class Shown:
    """A series of a panel: its legend, labels, times and values."""

    legend: str
    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]
    ref: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:9090", help="URL of the Prometheus that scraped the servers")
    parser.add_argument("--minutes", type=float, default=10.0, help="minutes to look back")
    parser.add_argument("--end", type=float, default=time.time(), help="seconds since 1970; default: now")
    parser.add_argument(
        "--rate-seconds", type=int, default=60, help="seconds of $__rate_interval: at least four scrapes"
    )
    parser.add_argument("--into", type=Path, required=True, help="folder for a PNG of each dashboard")
    arguments = parser.parse_args()
    window = Window(arguments.end - 60 * arguments.minutes, arguments.end, arguments.rate_seconds)
    with httpx.Client(base_url=arguments.url, timeout=30) as client:
        draw(Prometheus(client), window, arguments.into)
    return 0


def draw(prometheus: Prometheus, window: Window, into: Path) -> None:
    """Write a PNG of each dashboard."""
    into.mkdir(parents=True, exist_ok=True)
    with rc_context(STYLE):
        for file in sorted(DASHBOARDS.glob("*.json")):
            figure = drawn(prometheus, json.loads(file.read_text()), window)
            picture = BytesIO()
            figure.savefig(picture, format="png", dpi=DPI)
            Image.open(picture).convert("RGB").quantize(128, method=Image.Quantize.FASTOCTREE).save(
                into / f"{file.stem}.png", optimize=True
            )


def drawn(prometheus: Prometheus, dashboard: Mapping[str, Any], window: Window) -> Figure:
    filled, only = variables(prometheus, dashboard, window), ""  # the instance's name, if there is one
    if dashboard["title"] == ONE_INSTANCE:
        filled["instance"] = filled["instance"].split("|")[0]
        only = filled["instance"].replace("\\", "").removeprefix(PREFIX)
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"]) + 2
    figure = Figure(figsize=(24 * COLUMN_INCHES + MARGIN_INCHES, rows * ROW_INCHES), facecolor=GROUND)
    figure.text(0.006, 1 - 1 / rows, dashboard["title"], fontsize=15, weight="bold", color=INK, va="center")
    for panel in dashboard["panels"]:
        place = panel["gridPos"] | {"y": panel["gridPos"]["y"] + 2}
        if panel["type"] == "row":
            figure.text(
                0.006,
                1 - (place["y"] + 0.5) / rows,
                panel["title"],
                fontsize=11,
                weight="bold",
                color=MUTED,
                va="center",
            )
            continue
        shown = [
            replace(one, legend=one.legend.replace(only, "").strip() or only) if only else one
            for one in _answers(prometheus, panel, filled, window)
        ]
        axes = _axes(figure, place, rows, panel)
        if shown or panel["type"] == "stat":
            DRAW[panel["type"]](axes, panel, shown)
        else:
            _empty(axes, panel["fieldConfig"]["defaults"].get("noValue", "no data here"))
    return figure


def _empty(axes: Axes, why: str) -> None:
    axes.set_axis_off()
    axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", va="center", fontsize=10, color=MUTED)


def _axes(figure: Figure, place: Mapping[str, int], rows: int, panel: Mapping[str, Any]) -> Axes:
    """Draw the panel's card with its title, and return the axes in it."""
    width, height = figure.get_size_inches()
    left, wide = place["x"] * COLUMN_INCHES + MARGIN_INCHES, place["w"] * COLUMN_INCHES - MARGIN_INCHES
    below, high = (rows - place["y"] - place["h"]) * ROW_INCHES + MARGIN_INCHES, place["h"] * ROW_INCHES - MARGIN_INCHES
    card = figure.add_axes(
        (left / width, below / height, wide / width, high / height), facecolor=PAPER, xticks=[], yticks=[]
    )
    card.spines[:].set_visible(False)
    card.text(0.07 / wide, 1 - 0.16 / high, panel["title"], fontsize=9.5, weight="bold", color=INK, va="center")
    if panel["type"] in ("stat", "table"):
        return card
    foot = 1.08 if panel["type"] == "timeseries" else 0.32
    inner = ((left + 0.86) / width, (below + foot) / height, (wide - 1.0) / width, (high - foot - 0.38) / height)
    return figure.add_axes(inner, facecolor=PAPER)


def _answers(
    prometheus: Prometheus, panel: Mapping[str, Any], filled: Mapping[str, str], window: Window
) -> list[Shown]:
    shown = []
    for target in panel["targets"]:
        query = Query(
            "", panel["title"], target["refId"], target["expr"], target["legendFormat"], bool(target.get("instant"))
        )
        # A shorter run has no five minutes: a rate over them would take the time before it for idle.
        span = f"[{min(300, round(window.end - window.start))}s]"
        expr = substituted(query.expr, filled).replace("[5m]", span)
        for series in prometheus.answers(query, expr, window):
            labels: dict[str, str] = series["metric"]
            legend = re.sub(r"\{\{(\w+)\}\}", lambda found, known=labels: known.get(found[1], ""), query.legend)  # type: ignore[misc]
            values = [series["value"]] if query.instant else series["values"]
            points = [(float(at), float(value)) for at, value in values if is_number(value)]
            shown.append(Shown(legend.replace(PREFIX, "").strip() or "value", labels, points, query.ref))
    return shown


def _lines(axes: Axes, panel: Mapping[str, Any], shown: Sequence[Shown]) -> None:
    defaults, unit = panel["fieldConfig"]["defaults"], panel["fieldConfig"]["defaults"]["unit"]
    end = max(one.points[-1][0] for one in shown)
    for index, one in enumerate(sorted(shown, key=lambda one: _natural(one.legend))):
        axes.plot(
            [at - end for at, _ in one.points],
            [value for _, value in one.points],
            color=HUES[index % len(HUES)],
            linestyle="-" if index < len(HUES) else "--",
            linewidth=1.3,
            label=f"{one.legend}  {told(one.points[-1][1], unit)}",
        )
    if defaults["custom"].get("scaleDistribution"):
        axes.set_yscale("log")
        axes.minorticks_off()
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,), numticks=2 * MOST_TICKS))
    elif unit == "bytes":
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MultipleLocator(2**20 * decimal_step(axes.get_ylim()[1] / 2**20 / MOST_TICKS)))
    else:
        top = 1.06 * max(value for one in shown for _, value in one.points)
        axes.set_ylim(0, defaults.get("max") or top or 1.0)
        axes.yaxis.set_major_locator(MaxNLocator(MOST_TICKS, steps=[1, 2, 2.5, 5, 10]))
    for step in defaults.get("thresholds", {}).get("steps", ())[1:]:
        if step["value"] <= 3 * axes.get_ylim()[1]:
            axes.axhline(step["value"], color=step["color"], linestyle="--", linewidth=0.9)
    low, high = axes.get_ylim()
    ticks = [tick for tick in axes.get_yticks() if low <= tick <= high]
    axes.set_yticks(ticks, tick_labels(ticks, unit))
    _time_axis(axes)
    axes.grid(axis="y", color=GROUND)
    _legend(axes)


def decimal_step(least: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return power * next(step for step in (1, 2, 5, 10) if step * power >= least)


def _natural(legend: str) -> list[tuple[int, str]]:
    """Return a key that sorts 2 before 16."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", legend)]


def _time_axis(axes: Axes) -> None:
    """Label seconds before the end, in minutes where there are several."""
    span = abs(axes.get_xlim()[0])
    size, word = (60.0, "min") if span > 150 else (1.0, "s")
    axes.xaxis.set_major_locator(MultipleLocator(size * _round_step(span / size / MOST_TICKS)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / size:g} {word}" if value else "now"))
    axes.tick_params(colors=MUTED, length=2)


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 15, 20, 30, 60 that is not below `least`."""
    return next((step for step in (1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 30.0) if step >= least), 60.0)


def tick_labels(ticks: Sequence[float], unit: str) -> list[str]:
    """Return the shortest labels that all differ."""
    labels: list[str] = []
    for digits in range(2, 10):
        labels = [told(tick, unit, digits) for tick in ticks]
        if len(set(labels)) == len(labels):
            break
    return labels


def _legend(axes: Axes) -> None:
    """Draw the legend below the axes, in as many columns as its words leave room for."""
    handles, labels = axes.get_legend_handles_labels()
    inches = axes.bbox.width / axes.figure.dpi + 0.86
    columns = max(1, min(3, int(inches / (LETTER_INCHES * max(map(len, labels), default=1) + 0.35))))
    most = LEGEND_LINES * columns
    if len(labels) > most:
        highest = sorted(range(len(labels)), key=lambda index: -handles[index].get_ydata()[-1])[: most - 1]
        left_out = len(labels) - len(highest)
        handles = [*(handles[index] for index in highest), Line2D([], [], linestyle="none")]
        labels = [*(labels[index] for index in highest), f"and {left_out} more"]
    axes.legend(
        handles,
        labels,
        loc="upper left",
        bbox_to_anchor=(-0.82 / (axes.bbox.width / axes.figure.dpi), -0.22 / (axes.bbox.height / axes.figure.dpi)),
        ncols=columns,
        frameon=False,
        fontsize=8.5,
        handlelength=1.2,
        columnspacing=1.0,
        labelspacing=0.15,
        borderpad=0.0,
    )


def _figure_of_now(axes: Axes, panel: Mapping[str, Any], shown: Sequence[Shown]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    if not shown:
        axes.text(0.5, 0.42, defaults.get("noValue", "no value"), ha="center", va="center", fontsize=10, color=MUTED)
        return
    value = shown[0].points[-1][1]
    steps = [step for step in defaults["thresholds"]["steps"] if step["value"] is None or value >= step["value"]]
    text = told(value, defaults["unit"])
    axes.text(0.5, 0.42, text, ha="center", va="center", fontsize=17, weight="bold", color=COLOURS[steps[-1]["color"]])


COLOURS = {"green": "#1a7f37", "orange": "#bc6a00", "red": "#b3261e", "transparent": INK}


def _table(axes: Axes, panel: Mapping[str, Any], shown: Sequence[Shown]) -> None:
    columns = panel["transformations"][1]["options"]
    names = columns["renameByName"]
    placed = sorted(columns["indexByName"], key=columns["indexByName"].__getitem__)
    keys, values = [key for key in placed if key not in names], [names[key] for key in placed if key in names]
    units = {each["matcher"]["options"]: each["properties"][0]["value"] for each in panel["fieldConfig"]["overrides"]}
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for one in shown:
        name = names.get(f"Value #{one.ref}", names.get("Value", ""))
        lines.setdefault(tuple(one.labels.get(key, "") for key in keys), {})[name] = told(
            one.points[-1][1], units[name]
        )
    header = [*keys, *values]
    cells = [[*found, *(told_of.get(name, "") for name in values)] for found, told_of in sorted(lines.items())]
    width = max(6, int(axes.bbox.width / axes.figure.dpi / len(header) / LETTER_INCHES / 1.25))
    line = 0.34 / (axes.bbox.height / axes.figure.dpi)
    for row, words in enumerate([header, *cells]):
        for column, word in enumerate(words):
            axes.text(
                (column + 0.1) / len(header),
                1 - line * (row + 1.6),
                "\n".join(wrap(word.replace(PREFIX, ""), width)),
                fontsize=8.5,
                weight="normal" if row else "bold",
                color=INK,
                va="center",
            )


def _heat(axes: Axes, panel: Mapping[str, Any], shown: Sequence[Shown]) -> None:
    """Draw a heat map: the difference between each bucket and the one below."""
    every = sorted(shown, key=lambda one: float(one.labels["le"]))
    pairs = zip(every, [None, *every[:-1]], strict=True)
    used = [index for index, (one, under) in enumerate(pairs) if under is None or one.points != under.points]
    used = [index for index in used if any(value > 0 for _, value in every[index].points)] or [0]
    buckets, end = every[used[0] : used[-1] + 1], max(one.points[-1][0] for one in shown)
    below: dict[float, float] = dict(every[used[0] - 1].points) if used[0] else {}
    for index, one in enumerate(buckets):
        values = dict(one.points)
        heights = {at: value - below.get(at, 0.0) for at, value in values.items() if value > below.get(at, 0.0)}
        moments = [at - end for at in heights]
        axes.scatter(moments, [index] * len(heights), c=list(heights.values()), cmap="Oranges", marker="s", s=9)
        below = values
    shown_rows = range(0, len(buckets), max(1, len(buckets) // 6))
    axes.set_yticks(shown_rows, [told(float(buckets[row].labels["le"]), "s") for row in shown_rows])
    _time_axis(axes)


def told(value: float, unit: str, digits: int = 3) -> str:
    """Return a number as text with the unit's prefix, of so many significant digits."""
    if unit == "percentunit":
        return f"{number(100 * value, digits)}%"
    if unit == "s" and 0 < abs(value) < 1:
        return f"{number(1000 * value, digits)} ms"
    if unit == "bytes":
        return f"{number(value / 2**20, digits)} MiB"
    if unit == "currencyUSD":
        return f"${number(value, digits)}"
    words = {"s": " s", "reqps": " req/s", "watt": " W", "joule": " J", "short": ""}
    return number(value, digits) + words.get(unit, unit.removeprefix("suffix:"))


def number(value: float, digits: int) -> str:
    """Return a number of so many significant digits without an exponent; from 10,000 on with k, M or G."""
    if not value:
        return "0"
    if abs(value) >= 1e4:
        power = min(3, int(math.log10(abs(value)) / 3))
        return number(value / 1000**power, digits) + "kMG"[power - 1]
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


DRAW: Mapping[str, Callable[[Axes, Mapping[str, Any], Sequence[Shown]], None]] = {
    "timeseries": _lines,
    "stat": _figure_of_now,
    "table": _table,
    "heatmap": _heat,
}


if __name__ == "__main__":
    sys.exit(main())
