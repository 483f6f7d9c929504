"""Draw the dashboards: `python -m tools.monitoring.draw_dashboards --url http://HOST:9090 --into docs/dashboards`.

Panels have Grafana's positions and show the results of their queries. Axes, colours and fonts are matplotlib's, not
Grafana's.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from PIL import Image

from tools.monitoring.check_dashboards import DASHBOARDS, Prometheus, Query, Window, is_number, substituted, variables

COLUMN_INCHES, ROW_INCHES, MARGIN_INCHES = 0.62, 0.3, 0.1
DPI = 80
HUES = ("#0072b2", "#d55e00", "#009e73", "#b3589a", "#8a6d00", "#3f3f9f", "#56b4e9", "#a40e26")
INK, MUTED, PAPER, GROUND = "#1b1f24", "#57606a", "#ffffff", "#eef1f4"
STYLE: Any = {
    "font.size": 6.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": MUTED,
    "text.parse_math": False,
}
LONGEST_LEGEND = 5


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
    filled = variables(prometheus, dashboard, window)
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"]) + 2
    figure = Figure(figsize=(24 * COLUMN_INCHES + MARGIN_INCHES, rows * ROW_INCHES), facecolor=GROUND)
    figure.text(0.006, 1 - 1 / rows, dashboard["title"], fontsize=13, weight="bold", color=INK, va="center")
    for panel in dashboard["panels"]:
        place = panel["gridPos"] | {"y": panel["gridPos"]["y"] + 2}
        if panel["type"] == "row":
            figure.text(
                0.006,
                1 - (place["y"] + 0.5) / rows,
                panel["title"],
                fontsize=9,
                weight="bold",
                color=MUTED,
                va="center",
            )
            continue
        DRAW[panel["type"]](_axes(figure, place, rows, panel), panel, _answers(prometheus, panel, filled, window))
    return figure


def _axes(figure: Figure, place: Mapping[str, int], rows: int, panel: Mapping[str, Any]) -> Axes:
    """Draw the panel's card with its title, and return the axes in it."""
    width, height = figure.get_size_inches()
    left, wide = place["x"] * COLUMN_INCHES + MARGIN_INCHES, place["w"] * COLUMN_INCHES - MARGIN_INCHES
    below, high = (rows - place["y"] - place["h"]) * ROW_INCHES + MARGIN_INCHES, place["h"] * ROW_INCHES - MARGIN_INCHES
    card = figure.add_axes(
        (left / width, below / height, wide / width, high / height), facecolor=PAPER, xticks=[], yticks=[]
    )
    card.spines[:].set_visible(False)
    card.text(0.06 / wide, 1 - 0.13 / high, panel["title"], fontsize=7.5, weight="bold", color=INK, va="center")
    if panel["type"] in ("stat", "table"):
        return card
    foot = 0.62 if panel["type"] == "timeseries" else 0.25
    inner = ((left + 0.5) / width, (below + foot) / height, (wide - 0.6) / width, (high - foot - 0.3) / height)
    return figure.add_axes(inner, facecolor=PAPER)


def _answers(
    prometheus: Prometheus, panel: Mapping[str, Any], filled: Mapping[str, str], window: Window
) -> list[Shown]:
    shown = []
    for target in panel["targets"]:
        query = Query(
            "", panel["title"], target["refId"], target["expr"], target["legendFormat"], bool(target.get("instant"))
        )
        for series in prometheus.answers(query, substituted(query.expr, filled), window):
            labels: dict[str, str] = series["metric"]
            legend = re.sub(r"\{\{(\w+)\}\}", lambda found, known=labels: known.get(found[1], ""), query.legend)  # type: ignore[misc]
            values = [series["value"]] if query.instant else series["values"]
            points = [(float(at), float(value)) for at, value in values if is_number(value)]
            shown.append(Shown(legend.strip() or "value", labels, points, query.ref))
    return shown


def _lines(axes: Axes, panel: Mapping[str, Any], shown: Sequence[Shown]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    end = max((one.points[-1][0] for one in shown), default=0.0)
    for index, one in enumerate(shown):
        times = [(at - end) / 60 for at, _ in one.points]
        axes.plot(
            times,
            [value for _, value in one.points],
            color=HUES[index % len(HUES)],
            linewidth=1.1,
            label=_named(one, defaults["unit"]),
        )
    if defaults["custom"].get("scaleDistribution"):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    for step in defaults.get("thresholds", {}).get("steps", ())[1:]:
        if step["value"] <= 3 * axes.get_ylim()[1]:
            axes.axhline(step["value"], color=step["color"], linestyle="--", linewidth=0.8)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: told(value, defaults["unit"])))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} min" if value else "now"))
    axes.tick_params(colors=MUTED, length=2)
    axes.grid(axis="y", color=GROUND)
    handles, labels = axes.get_legend_handles_labels()
    kept = slice(0, LONGEST_LEGEND)
    axes.legend(
        handles[kept],
        labels[kept],
        loc="upper left",
        bbox_to_anchor=(-0.45 / axes.bbox.width * axes.figure.dpi, -0.13),
        ncols=2,
        frameon=False,
        fontsize=5.5,
    )


def _named(one: Shown, unit: str) -> str:
    return f"{one.legend}  {told(one.points[-1][1], unit)}"


def _figure_of_now(axes: Axes, panel: Mapping[str, Any], shown: Sequence[Shown]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    if not shown:
        axes.text(0.5, 0.42, defaults.get("noValue", "no value"), ha="center", va="center", fontsize=9, color=MUTED)
        return
    value = shown[0].points[-1][1]
    steps = [step for step in defaults["thresholds"]["steps"] if step["value"] is None or value >= step["value"]]
    text = told(value, defaults["unit"])
    axes.text(0.5, 0.42, text, ha="center", va="center", fontsize=15, weight="bold", color=COLOURS[steps[-1]["color"]])


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
    for row, words in enumerate([header, *cells]):
        for column, word in enumerate(words):
            weight = "normal" if row else "bold"
            axes.text(
                (column + 0.15) / len(header),
                0.75 - 0.2 * row,
                word,
                fontsize=6.5,
                weight=weight,
                color=INK,
                va="center",
            )


def _heat(axes: Axes, panel: Mapping[str, Any], shown: Sequence[Shown]) -> None:
    """Draw a heat map: the difference between each bucket and the one below."""
    buckets = sorted(shown, key=lambda one: float(one.labels["le"]))
    below: dict[float, float] = {}
    for index, one in enumerate(buckets):
        values = dict(one.points)
        heights = {at: value - below.get(at, 0.0) for at, value in values.items() if value > below.get(at, 0.0)}
        axes.scatter(list(heights), [index] * len(heights), c=list(heights.values()), cmap="Oranges", marker="s", s=9)
        below = values
    bounds = [float(one.labels["le"]) for one in buckets]
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda at, _: told(bounds[int(at)], "s") if 0 <= at < len(bounds) else "")
    )
    axes.set_xticks([])
    axes.tick_params(colors=MUTED, length=2)


def told(value: float, unit: str) -> str:
    """Return a number as text with the unit's prefix."""
    if unit == "percentunit":
        return f"{100 * value:.3g}%"
    if unit == "s" and 0 < value < 1:
        return f"{1000 * value:.3g} ms"
    if unit == "bytes":
        return f"{value / 2**20:.4g} MiB"
    if unit == "currencyUSD":
        return f"${value:.3f}"
    words = {"s": " s", "reqps": " req/s", "watt": " W", "joule": " J", "short": ""}
    return f"{value:,.4g}" + words.get(unit, unit.removeprefix("suffix:"))


DRAW: Mapping[str, Callable[[Axes, Mapping[str, Any], Sequence[Shown]], None]] = {
    "timeseries": _lines,
    "stat": _figure_of_now,
    "table": _table,
    "heatmap": _heat,
}


if __name__ == "__main__":
    sys.exit(main())
