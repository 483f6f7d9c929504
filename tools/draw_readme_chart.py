"""Draw the README's chart of speed against peers from recorded results: `python -m tools.draw_readme_chart`.

Reads docs/results/peers.json and writes docs/results/peers-light.svg and peers-dark.svg. `--check` writes nothing and ends with
status 1 if a chart does not show the recorded figures. `--png DIR` writes PNG files too. Needs matplotlib (the extra `bench`).
"""

from __future__ import annotations

import argparse
import json
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "results"
RESULTS = FOLDER / "peers.json"
TITLE = "Armature's speed divided by the peer's, measured in the same run (striped: slower)"
BAR_STEP = 1.0  # distance between two bars, in data units
HEADING_STEP = 1.5  # extra distance for the heading of a run
_SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Theme:
    """Colours of one chart. `faster` and `slower` are colours of Okabe and Ito that colour-blind readers tell apart."""

    name: str
    text: str
    background: str
    faster: str
    slower: str


LIGHT = Theme("light", text="#1f2328", background="#ffffff", faster="#0072b2", slower="#d55e00")
DARK = Theme("dark", text="#e6edf3", background="#0d1117", faster="#56b4e9", slower="#e69f00")


@dataclass(frozen=True)
class Bar:
    """One comparison. `ratio` is our speed divided by the peer's."""

    label: str
    ratio: float
    caption: str


@dataclass(frozen=True)
class Group:
    """Comparisons of one run."""

    title: str
    bars: tuple[Bar, ...]


def read_groups(path: Path = RESULTS) -> list[Group]:
    """Read the recorded comparisons."""
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    return [Group(run["title"], tuple(_bar(each, run["unit"]) for each in run["comparisons"])) for run in runs]


def _bar(each: dict[str, Any], unit: str) -> Bar:
    caption = f"{each['ratio']:.2f}×   {each['ours']:g} and {each['theirs']:g} {unit}"
    return Bar(f"{each['workload']}  ·  {each['peer']}", each["ratio"], caption)


def draw(groups: list[Group], theme: Theme) -> Any:
    """Return a matplotlib figure with one horizontal bar for each comparison and a line at equal speed."""
    from matplotlib.figure import Figure

    rows = sum(len(group.bars) for group in groups) + HEADING_STEP * len(groups)
    figure = Figure(figsize=(10, 0.27 * rows + 0.7), facecolor=theme.background)
    axes = figure.add_axes((0.37, 0.01, 0.36, 0.93), facecolor=theme.background)
    height = 0.0
    for group in groups:
        height += HEADING_STEP
        place = axes.get_yaxis_transform()
        axes.text(
            -1.0, height - 0.55, group.title, transform=place, color=theme.text, weight="bold", va="center", fontsize=10
        )
        for bar in group.bars:
            slower = bar.ratio < 1
            axes.barh(
                height + BAR_STEP / 2,
                bar.ratio,
                height=0.68,
                color=theme.slower if slower else theme.faster,
                hatch="///" if slower else None,
                edgecolor=theme.background,
                linewidth=0,
                gid=f"bar-{bar.label}",
            )
            axes.text(
                -0.03,
                height + 0.52,
                bar.label,
                transform=place,
                color=theme.text,
                ha="right",
                va="center_baseline",
                fontsize=9,
            )
            axes.text(
                max(bar.ratio, 1.0) + 0.06,
                height + 0.52,
                bar.caption,
                color=theme.text,
                va="center_baseline",
                fontsize=9,
            )
            height += BAR_STEP
    axes.vlines(1.0, 0.5, height + 0.2, color=theme.text, linewidth=1)
    axes.text(1.0, 0.35, "equal", color=theme.text, ha="center", fontsize=9)
    axes.set_xlim(0, 4)
    axes.set_ylim(height + 0.2, -0.2)
    axes.set_axis_off()
    figure.text(0.015, 0.965, TITLE, color=theme.text, fontsize=11)
    return figure


def svg(groups: list[Group], theme: Theme) -> str:
    """Return the chart as SVG. Text stays text, and nothing in it depends on the day."""
    import matplotlib

    stream = StringIO()
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "armature", "font.sans-serif": ["DejaVu Sans"]}
    ):
        figure = draw(groups, theme)
        metadata = {"Date": None, "Creator": "tools/draw_readme_chart.py"}
        figure.savefig(stream, format="svg", facecolor=theme.background, metadata=metadata)
    return "".join(line.rstrip() + "\n" for line in stream.getvalue().splitlines())


def shown(text: str) -> tuple[list[str], dict[str, float]]:
    """Return the texts of an SVG, and the width of each bar relative to the unit bar of equal speed.

    Widths are measured on the drawing itself. The line at equal speed is at 1, and every bar starts at 0.
    """
    root = ElementTree.fromstring(text)
    texts = ["".join(each.itertext()).strip() for each in root.iter(f"{_SVG}text")]
    widths = {}
    for group in root.iter(f"{_SVG}g"):
        name = group.get("id", "")
        path = group.find(f".//{_SVG}path")
        if name.startswith("bar-") and path is not None:
            numbers = [
                float(part) for part in path.get("d", "").replace("M", " ").replace("L", " ").split() if _number(part)
            ]
            widths[name.removeprefix("bar-")] = max(numbers[0::2]) - min(numbers[0::2])
    return texts, widths


def _number(part: str) -> bool:
    try:
        float(part)
    except ValueError:
        return False
    return True


def differences(text: str, groups: list[Group]) -> list[str]:
    """Return a sentence for each recorded figure that a chart does not show."""
    texts, widths = shown(text)
    bars = [bar for group in groups for bar in group.bars]
    wanted = [group.title for group in groups] + [each for bar in bars for each in (bar.label, bar.caption)]
    found = [f"the text {each!r} is missing" for each in wanted if each not in texts]
    found += [f"the bar {name!r} is in no result" for name in widths if name not in {bar.label for bar in bars}]
    unit = widths.get(bars[0].label, 0.0) / bars[0].ratio
    for bar in bars:
        if abs(widths.get(bar.label, 0.0) - bar.ratio * unit) > 0.01 * unit or not unit:
            found.append(f"the bar {bar.label!r} does not have the length {bar.ratio:.2f}")
    return found


def main(arguments: list[str]) -> int:
    """Draw both charts, or check the committed ones."""
    parser = argparse.ArgumentParser(description="Draw the README's chart of speed against peers.")
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if a chart is out of date")
    parser.add_argument("--png", type=Path, metavar="DIR", help="write PNG files there, to look at")
    options = parser.parse_args(arguments)
    groups = read_groups()
    status = 0
    for theme in (LIGHT, DARK):
        path = FOLDER / f"peers-{theme.name}.svg"
        if options.check:
            for each in differences(path.read_text(encoding="utf-8"), groups):
                print(f"{path.name}: {each}. Run python -m tools.draw_readme_chart.", file=sys.stderr)
                status = 1
            continue
        path.write_text(svg(groups, theme), encoding="utf-8")
        if options.png:
            draw(groups, theme).savefig(options.png / f"peers-{theme.name}.png", dpi=110, facecolor=theme.background)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
