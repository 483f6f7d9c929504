"""How the plots look: colours that colour-blind people tell apart, each with a mark of its own, and one drawing for page and PNG.

The page's drawings are vectors whose colours are variables of its style sheet, so that they are light or dark as it is.
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
# Results by their order. The eight hues of Okabe and Ito, the first six that are dark enough for lines: jfly.uni-koeln.de/color
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
# What a colour is called in the page's style sheet: no two of the above are alike, not even where they look it.
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
SHORTEST = 20.0  # so many times shorter than the median, and a time is left out where the scale is logarithmic
_STYLE: Any = {  # matplotlib's own type of it differs from version to version
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
    "text.parse_math": False,  # a dollar in a name is a dollar
}


@dataclass(frozen=True, slots=True)
class Plot:
    """`alternative` says in words what the plot shows; `svg` stands in the page, `png` (bytes) beside it as `NAME.png`."""

    name: str
    title: str
    caption: str
    alternative: str
    svg: str
    png: bytes


@dataclass(frozen=True, slots=True)
class Words:
    """What is said of a plot."""

    name: str
    title: str
    caption: str
    alternative: str


def drawn(words: Words, size: tuple[float, float], draw: Callable[[Figure], None]) -> Plot:
    """`size` in inches. What `draw` puts on the figure, as vectors and as a picture."""
    with rc_context(_STYLE | {"svg.hashsalt": words.name}):
        figure = Figure(figsize=size)
        draw(figure)
        picture, vectors = BytesIO(), StringIO()
        figure.savefig(picture, format="png", dpi=DPI, metadata={"Software": None})
        figure.set_layout_engine("none")  # all stays where it was found to fit
        figure.patch.set_visible(False)
        figure.savefig(vectors, format="svg", metadata={"Date": None, "Creator": None})
    svg = inline(vectors.getvalue(), words.name, words.alternative)
    return Plot(words.name, words.title, words.caption, words.alternative, svg, picture.getvalue())


def inline(svg: str, name: str, alternative: str) -> str:
    """As a part of a page: without a head, in the page's colours and font, with no name that another drawing might have too."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->\s*", "", body, flags=re.DOTALL)
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", body, flags=re.DOTALL)  # it would hold for the whole page
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
    return SERIES[index % len(SERIES)]


def mark_of(index: int) -> str:
    """Further results have a colour again, but with another mark."""
    return MARKS[(index + index // len(SERIES)) % len(MARKS)]


def line(index: int) -> dict[str, Any]:
    """How the line of a result looks."""
    return {"color": colour_of(index), "marker": mark_of(index)}


def keys(names: Sequence[str]) -> list[Line2D]:
    """What the colours stand for."""
    return [Line2D([], [], **line(index), label=short(name)) for index, name in enumerate(names)]


def short(name: str) -> str:
    """As much of a name as a legend has room for; matplotlib hides what begins with a line."""
    return (name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…").replace(
        "_", "\u2017", 1 if name[:1] == "_" else 0
    )


def cause_colour(cause: str) -> str:
    return CAUSE_COLOURS.get(cause, CAUSE_COLOURS["unknown"])


def cause_mark(cause: str) -> str:
    return CAUSE_MARKS.get(cause, CAUSE_MARKS["unknown"])


def plain_ticks(axes: Axes, axis: str, ticks: list[float], labels: list[str] | None = None) -> None:
    """Only these, with no smaller ones between."""
    chosen = axes.xaxis if axis == "x" else axes.yaxis
    chosen.set_ticks(ticks, labels if labels is not None else [f"{tick:,g}" for tick in ticks])
    chosen.set_ticks([], minor=True)


def time_axis(axes: Axes, values: Sequence[float], logarithmic_from: float) -> None:
    """From zero; logarithmic where the longest is so many times the one in the middle, and then without what is next to nothing."""
    positive = [value for value in values if value > 0]
    if not positive or max(positive) < logarithmic_from * median(positive):
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    else:
        shortest = median(positive) / SHORTEST if logarithmic_from else 0.0
        logarithmic(axes, "y", max(min(positive), shortest) / 1.2, max(positive) * 1.2)


def logarithmic(axes: Axes, axis: str, low: float, high: float) -> None:
    """With figures that are written out: 1, 2, 5, or fewer where there is no room."""
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
