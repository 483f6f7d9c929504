"""The style of all plots: colours that colour-blind readers can distinguish, markers, and output as SVG and PNG.

The SVG in the page uses variables of the page's style sheet as colours, so that plots follow its light or dark mode.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO, StringIO
from statistics import median
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import StrMethodFormatter

INK, MUTED, GRID, PAPER = "#1b1f24", "#57606a", "#d8dee4", "#ffffff"
# Results in order: six hues after Okabe and Ito that are dark enough for lines, jfly.uni-koeln.de/color
SERIES = ("#0072b2", "#d55e00", "#009e73", "#b3589a", "#8a6d00", "#3f3f9f")
MARKS = ("o", "s", "^", "D", "v", "P")
CAUSE_COLOURS = {
    "prefill": "#0072b3",
    "page_fault": "#d55e01",
    "garbage_collection": "#009e74",
    "throttled": "#b3589b",
    "compiled": "#8a6d01",
    "preempted": "#3f3fa0",
    "descheduled": "#a40e26",
    "unknown": "#1b1f25",
    "between steps": "#57606b",
}
CAUSE_MARKS = dict(zip(CAUSE_COLOURS, "osv^DPXpd", strict=True))
# Names of the colours in the page's style sheet. All values above are distinct, even where two look the same.
VARIABLES = {
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    PAPER: "paper",
    **{colour: f"series-{index}" for index, colour in enumerate(SERIES)},
    **{colour: f"cause-{index}" for index, colour in enumerate(CAUSE_COLOURS.values())},
}
DPI = 160
LONGEST_NAME = 36
SHORTEST = 20.0  # a logarithmic scale leaves out times shorter than the median by this factor
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
class Plot:
    """A finished plot. `svg` is part of the page, `png` is written next to it; `alternative` is the alt text."""

    name: str
    title: str
    caption: str
    alternative: str
    svg: str
    png: bytes


@dataclass(frozen=True, slots=True)
class Words:
    """The texts of a plot."""

    name: str
    title: str
    caption: str
    alternative: str


def drawn(words: Words, size: tuple[float, float], draw: Callable[[Figure], None]) -> Plot:
    """Run `draw` on a figure of `size` inches and return it as SVG and PNG."""
    with rc_context(_STYLE | {"svg.hashsalt": words.name}):
        figure = Figure(figsize=size)
        draw(figure)
        picture, vectors = BytesIO(), StringIO()
        figure.savefig(picture, format="png", dpi=DPI, metadata={"Software": None})
        figure.set_layout_engine("none")  # keep the layout that was computed for the PNG
        figure.patch.set_visible(False)
        figure.savefig(vectors, format="svg", metadata={"Date": None, "Creator": None})
    svg = inline(vectors.getvalue(), words.name, words.alternative)
    return Plot(words.name, words.title, words.caption, words.alternative, svg, picture.getvalue())


def inline(svg: str, name: str, alternative: str) -> str:
    """Prepare an SVG for the page: no header, the page's colours and font, and ids that are unique in the page."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->\s*", "", body, flags=re.DOTALL)
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", body, flags=re.DOTALL)  # it would apply to the whole page
    used = set(re.findall(r'(?:href="|url\()#([\w.-]+)', body))
    body = re.sub(r' id="([\w.-]+)"', lambda found: f' id="{name}-{found[1]}"' if found[1] in used else "", body)
    body = re.sub(r'(href="|url\()#', rf"\1#{name}-", body)
    body = re.sub(r"#[0-9a-f]{6}\b", lambda found: f"var(--{VARIABLES[found[0]]})" if found[0] in VARIABLES else found[0], body)
    box = re.search(r'viewBox="[^"]+"', body)
    assert box, "matplotlib writes a viewBox"
    label = alternative.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    head = f'<svg {box[0]} role="img" aria-label="{label}" xmlns:xlink="http://www.w3.org/1999/xlink">'
    return head + body[body.index(">", box.end()) + 1 :].strip()


def colour_of(index: int) -> str:
    """Return the colour of the result with this index."""
    return SERIES[index % len(SERIES)]


def mark_of(index: int) -> str:
    """Return the marker of a result. Colours repeat after the sixth result, but then with another marker."""
    return MARKS[(index + index // len(SERIES)) % len(MARKS)]


def line(index: int) -> dict[str, Any]:
    """Return the line style of a result, as arguments of matplotlib's `plot`."""
    return {"color": colour_of(index), "marker": mark_of(index)}


def keys(names: Sequence[str]) -> list[Line2D]:
    """Return the legend handles of the results."""
    return [Line2D([], [], **line(index), label=short(name)) for index, name in enumerate(names)]


def short(name: str) -> str:
    """Shorten a name for the legend, and replace a leading underscore, since matplotlib hides such labels."""
    return (name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…").replace(
        "_", "\u2017", 1 if name[:1] == "_" else 0
    )


def cause_colour(cause: str) -> str:
    """Return the colour of a cause of slow steps."""
    return CAUSE_COLOURS.get(cause, CAUSE_COLOURS["unknown"])


def cause_mark(cause: str) -> str:
    """Return the marker of a cause of slow steps."""
    return CAUSE_MARKS.get(cause, CAUSE_MARKS["unknown"])


def plain_ticks(axes: Axes, axis: str, ticks: list[float], labels: list[str] | None = None) -> None:
    """Set exactly these ticks, without minor ticks."""
    chosen = axes.xaxis if axis == "x" else axes.yaxis
    chosen.set_ticks(ticks, labels if labels is not None else [f"{tick:,g}" for tick in ticks])
    chosen.set_ticks([], minor=True)


def time_axis(axes: Axes, values: Sequence[float], logarithmic_from: float) -> None:
    """Set the y axis: linear from zero, or logarithmic if the longest is far above the median.

    The axis is logarithmic if the longest value is at least `logarithmic_from` times the median. It then leaves out
    values below a twentieth of the median, unless `logarithmic_from` is 0.
    """
    positive = [value for value in values if value > 0]
    if not positive or max(positive) < logarithmic_from * median(positive):
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    else:
        shortest = median(positive) / SHORTEST if logarithmic_from else 0.0
        logarithmic(axes, "y", max(min(positive), shortest) / 1.2, max(positive) * 1.2)


def logarithmic(axes: Axes, axis: str, low: float, high: float) -> None:
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
    plain_ticks(axes, axis, ticks)
