"""The plot of the latency distribution: percentile curves with the slowest percentiles stretched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from app.bench.report import style
from app.bench.report.figures import MILLI
from app.bench.report.loads import Case, Column, load_name
from app.bench.report.style import Plot, Words, drawn

_SHARES = (0.0, 0.5, 0.9, 0.99, 0.999, 0.9999)
_MOST_DOTS = 240  # per curve: more than its width in pixels
_LOGARITHMIC_FROM = 8.0  # logarithmic scale if the longest exceeds the median by this factor
_USUAL_CLIENTS = 8


@dataclass(frozen=True, slots=True)
class _Panel:
    title: str
    case: Case
    column: Column


def latency_plot(cases: Sequence[Case], names: Sequence[str]) -> Plot | str:
    """Return the plot, or a sentence that says why there is none.

    There is a panel for each kind of latency, or for each load if there is only one kind.
    """
    panels = _panels(cases)
    if not panels:
        return "No load was measured by all results, so no latency distribution is drawn."
    loads = "; ".join(dict.fromkeys(load_name(panel.case.load) for panel in panels))
    words = Words(
        "latency",
        "Latency, from the fastest to the slowest",
        f"Each point gives the percentage (x) that took no longer than a time (y). Measured with {loads}. A curve ends with its samples.",
        f"Percentile curves of {', '.join(panel.title for panel in panels)} for {', '.join(names)}, measured with {loads}.",
    )

    def draw(figure: Figure) -> None:
        drawings = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, panel in zip(drawings, panels, strict=True):
            _draw(axes, panel, names)
        figure.legend(handles=style.keys(names), loc="outside upper left", ncols=4)

    return drawn(words, (9.4, 3.6), draw)


def _panels(cases: Sequence[Case]) -> list[_Panel]:
    shared = [case for case in cases if all(case.measured)]
    if not shared:
        return []
    if shared[0].load.kind == "generate":
        shortest = [case for case in shared if case.load.tokens == shared[0].load.tokens]
        case = min(shortest, key=lambda each: abs(each.load.clients - _USUAL_CLIENTS))
        panels = [
            _Panel("time to first token", case, lambda point: point.first_token_seconds),
            _Panel("token to token", case, lambda point: point.gap_seconds),
            _Panel("whole answer", case, lambda point: point.request_seconds),
        ]
    else:
        panels = [_Panel(load_name(case.load), case, lambda point: point.request_seconds) for case in _ends(shared)]
    return [panel for panel in panels if any(each and panel.column(each.point) for each in panel.case.measured)]


def _ends(cases: Sequence[Case]) -> list[Case]:
    """Return the extreme cases with the shortest texts: the smallest load, the largest batch, the most clients."""
    shortest = [case for case in cases if case.load.tokens == cases[0].load.tokens]
    largest = max(shortest, key=lambda case: (case.load.batch, -case.load.clients))
    crowded = max(shortest, key=lambda case: case.load.clients)
    return list({case.load: case for case in (shortest[0], largest, crowded)}.values())


def _draw(axes: Axes, panel: _Panel, names: Sequence[str]) -> None:
    lines: list[list[float]] = [sorted(panel.column(each.point)) if each else [] for each in panel.case.measured]
    for index, samples in enumerate(lines):
        if samples:
            places, values = curve(samples)
            axes.plot(places, [value * MILLI for value in values], color=style.colour_of(index), label=names[index])
    longest = max(len(samples) for samples in lines)
    shares = [share for share in _SHARES if share < 1 - 0.5 / longest]
    style.plain_ticks(axes, "x", [place_of(share) for share in shares], [f"{share * 100:g}" for share in shares])
    style.time_axis(axes, [value * MILLI for samples in lines for value in samples], _LOGARITHMIC_FROM)
    axes.set_title(panel.title)
    axes.set_xlabel("percent that took no longer")
    axes.set_ylabel("milliseconds")


def curve(samples: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return positions and values of the percentile curve of sorted samples, as dense in the tail as before it."""
    last = place_of(1 - 0.5 / len(samples))
    places = [last * index / (_MOST_DOTS - 1) for index in range(_MOST_DOTS)]
    ranks = dict.fromkeys(min(len(samples) - 1, int((1 - 10**-place) * len(samples))) for place in places)
    return [place_of((rank + 0.5) / len(samples)) for rank in ranks], [samples[rank] for rank in ranks]


def place_of(share: float) -> float:
    """Return the position of a percentile: 0 for none, 1 for 90%, 2 for 99%."""
    return -math.log10(1 - share)
