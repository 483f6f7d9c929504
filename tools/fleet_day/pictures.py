"""Pictures of simulated days as SVG, for light and dark pages. Needs matplotlib (the extra `bench`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from tools.draw_readme_chart import DARK, LIGHT, Theme
from tools.fleet_day.scenarios import MIXED_NAME

OBJECTIVE = 2.361  # seconds to a first token: docs/alerts.md
# By pool or fleet: colours of Okabe and Ito that colour-blind readers tell apart, for light and for dark pages.
COLOURS = {"light": ("#0072b2", "#d55e00", "#009e73"), "dark": ("#56b4e9", "#e69f00", "#2dc08d")}
MARKERS = ("o", "s", "^")
WORDS = {"sizes": "as configured", "waits": "by waits alone"}


def write_pictures(found: Mapping[str, Any], folder: Path, png: Path | None = None) -> list[Path]:
    """Write the pictures into a folder, and as PNG into another one. Returns the SVG files."""
    import matplotlib

    written = []
    for theme in (LIGHT, DARK):
        with matplotlib.rc_context(_style(theme)):
            for name, draw in (("fleet-day", _draw_day), ("fleet-sizes", _draw_sizes)):
                figure = draw(found["runs"], theme)
                if figure is None:
                    continue
                path = folder / f"{name}-{theme.name}.svg"
                stream = StringIO()
                figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": "tools/fleet_day"})
                path.write_text("".join(f"{line.rstrip()}\n" for line in stream.getvalue().splitlines()), "utf-8")
                written.append(path)
                if png is not None:
                    figure.savefig(png / f"{name}-{theme.name}.png", dpi=110)
    return written


def _style(theme: Theme) -> dict[str, Any]:
    paint = dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "xtick.color", "ytick.color"), theme.text
    )
    return paint | {
        "figure.facecolor": theme.background,
        "savefig.facecolor": theme.background,
        "axes.facecolor": theme.background,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.titlesize": 11,
        "axes.labelsize": 10,
        "grid.color": theme.text,
        "grid.alpha": 0.15,
        "font.size": 10,
        "font.sans-serif": ["DejaVu Sans"],
        "svg.fonttype": "none",
        "svg.hashsalt": "armature",
        "legend.frameon": False,
    }


def _draw_day(runs: Sequence[Mapping[str, Any]], theme: Theme) -> Any:
    """Draw requests, pods and the p99 of a first token over the day, a column for each fleet."""
    from matplotlib.figure import Figure

    shown = [run for run in runs if "series" in run and (run["table"] == "sizes" or run["name"] == MIXED_NAME)]
    if not shown:
        return None
    figure = Figure(figsize=(10.5, 6.2), layout="constrained")
    axes = figure.subplots(3, len(shown), sharex=True, sharey="row", squeeze=False)
    figure.suptitle(f"A day of {shown[0]['pods']:,} pods' worth of traffic", fontsize=12)
    colours = dict(zip(("arm", "x86"), COLOURS[theme.name], strict=False))
    for column, run in enumerate(shown):
        series, hours = run["series"], run["series"]["hours"]
        requests, pods, waits = (axes[line][column] for line in range(3))
        requests.set_title(title(run), fontsize=10)
        requests.plot(hours, series["requests_per_second"], color=theme.text, linewidth=1.4)
        ready = list(zip(*series["ready"], strict=True))
        paints = [colours.get(name, COLOURS[theme.name][2]) for name in run["pools"]]
        pods.stackplot(hours, *ready, labels=run["pools"], colors=paints, alpha=0.85, linewidth=0)
        pods.legend(loc="upper left", fontsize=9)
        waits.plot(hours, series["first_token_p99"], color=theme.text, linewidth=1.4)
        waits.axhline(OBJECTIVE, color=COLOURS[theme.name][1], linestyle="--", linewidth=1.2)
        waits.set_xticks(range(0, 25, 6), [f"{hour}:00" for hour in range(0, 25, 6)], fontsize=8)
    for line, label in enumerate(("requests/s", "pods ready", "first token\np99, seconds")):
        axes[line][0].set_ylabel(label)
        axes[line][0].set_ylim(bottom=0)
    axes[2][0].text(0.3, OBJECTIVE, "objective", color=COLOURS[theme.name][1], fontsize=9, va="bottom")
    return figure


def title(run: Mapping[str, Any]) -> str:
    """Return the heading of a column: the fleet, its autoscaler and its dollars."""
    return f"{run['name']}, {WORDS[run['table']]}: ${sum(run['dollars']):,.0f}"


def _draw_sizes(runs: Sequence[Mapping[str, Any]], theme: Theme) -> Any:
    """Draw the dollars per million requests and the p99 of a first token of each fleet by size."""
    from matplotlib.figure import Figure

    shown = [run for run in runs if run["table"] in WORDS]
    if len({run["pods"] for run in shown}) < 2:
        return None
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    dollars, waits = figure.subplots(1, 2)
    for index, name in enumerate(dict.fromkeys(run["name"] for run in shown)):
        for table, line in (("sizes", "-"), ("waits", ":")):
            mine = [run for run in shown if (run["name"], run["table"]) == (name, table)]
            sizes = [run["pods"] for run in mine]
            look = {"color": COLOURS[theme.name][index % 3], "marker": MARKERS[index % 3], "linestyle": line}
            label = f"{name}, {WORDS[table]}"
            dollars.plot(sizes, [run["dollars_per_million"] for run in mine], label=label, **look)
            waits.plot(sizes, [run["first_token"][1] for run in mine], **look)
    waits.axhline(OBJECTIVE, color=theme.text, linestyle="--", linewidth=1.2)
    waits.text(0.02, OBJECTIVE + 0.2, "objective", transform=waits.get_yaxis_transform(), fontsize=9)
    for axes, title in ((dollars, "dollars per million requests"), (waits, "first token, p99 in seconds")):
        axes.set_title(title)
        axes.set_xscale("log")
        sizes = sorted({run["pods"] for run in shown})
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.minorticks_off()
        axes.set_xlabel("pods' worth of traffic")
        axes.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    return figure
