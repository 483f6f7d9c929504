"""The plot of token gaps over time during one load, or of step times if there are no tokens.

Slow ones are coloured by cause. The cause of a gap is the slow step that ran in it, or the prompt that was processed
in it. If steps ran for less than half of the gap, its cause is outside of the engine's steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from app.bench.compare.result import Point, Steps
from app.bench.report import style
from app.bench.report.figures import MILLI
from app.bench.report.loads import Case, load_name
from app.bench.report.style import Plot, Words, drawn

STANDS_OUT = 1.5  # times the median; the server records the cause of steps slower than this
OUTSIDE = "between steps"
_MOST_DOTS = 3000  # normal ones, all results together, to limit the size of the page
_MOST_OUTLIERS = 1500


@dataclass(frozen=True, slots=True)
class Beat:
    """One gap or step. `at`: seconds since the load began; `cause` is empty if the time was normal."""

    at: float
    seconds: float
    cause: str = ""


def rhythm_plot(cases: Sequence[Case], names: Sequence[str]) -> Plot | str:
    """Return the plot, with a row for each result on one scale, or a sentence that says why there is none."""
    case = _chosen(cases)
    if case is None:
        return "No load that all results share has tokens or steps, so nothing is drawn over time."
    beats = [_beats(each.point) if each else [] for each in case.measured]
    what = "Time from token to token" if _has_gaps(case) else "Time of the engine's steps"
    usual, slow = _thinning(beats, _MOST_DOTS, out=False), _thinning(beats, _MOST_OUTLIERS, out=True)
    words = Words(
        "rhythm",
        f"{what}, over the load",
        f"{load_name(case.load)}. What took more than {STANDS_OUT:g} times the median is coloured by what caused it"
        + (f"; one in {usual} of the others is drawn" if usual > 1 else "")
        + (f", and one in {slow} of the coloured ones." if slow > 1 else ".")
        + " Tokens that arrived together with the previous one may be below the visible range.",
        f"{what} at {load_name(case.load)}. " + "; ".join(_told(name, each) for name, each in zip(names, beats, strict=True)),
    )

    def draw(figure: Figure) -> None:
        rows = figure.subplots(len(beats), 1, squeeze=False, sharey=True)[:, 0]
        for axes, name, each in zip(rows, names, beats, strict=True):
            _draw(axes, each, usual, slow)
            axes.set_title(name)
            axes.set_ylabel("milliseconds")
            axes.set_xlim(left=0)
        style.time_axis(rows[0], [beat.seconds * MILLI for each in beats for beat in each], 12.0)
        rows[-1].set_xlabel("seconds since the load began")
        figure.legend(handles=_keys(beats), loc="outside upper left", ncols=5)

    return drawn(words, (9.4, 0.9 + 2.2 * len(beats)), draw)


def beats_of(point: Point) -> list[Beat]:
    """Return the gap before each token after the first, and the cause of each long gap."""
    usual = median(point.gap_seconds) * STANDS_OUT
    steps = _Steps(point.steps)
    rows = zip(point.gap_at, point.gap_seconds, strict=True)
    return [Beat(at - point.began, took, steps.cause(at - took, at) if took > usual else "") for at, took in rows]


class _Steps:
    """The steps of a load, sorted by their ends."""

    def __init__(self, steps: Steps) -> None:
        rows = zip(steps.at, steps.seconds, steps.phase, steps.cause, strict=True)
        self._rows = sorted((at + seconds, at, phase, cause) for at, seconds, phase, cause in rows)
        self._ends = [end for end, *_ in self._rows]

    def cause(self, began: float, ended: float) -> str:
        """Return the cause whose slow steps overlap this interval most.

        If there are none: `prefill` if a prompt was processed in it, `unknown` if steps ran for over half of it, else
        `BETWEEN_STEPS`.
        """
        shares: dict[str, float] = {}
        busy = 0.0
        for end, at, phase, cause in self._rows[bisect_right(self._ends, began) :]:
            if at >= ended:
                break
            shared = min(end, ended) - max(at, began)
            busy += shared
            if cause:
                shares[cause] = shares.get(cause, 0.0) + shared
            elif phase == "prefill":
                shares.setdefault(phase, 0.0)
        if shares:
            return max(shares, key=lambda cause: shares[cause])
        return "unknown" if busy > (ended - began) / 2 else OUTSIDE


def _beats(point: Point) -> list[Beat]:
    if point.gap_seconds:
        return beats_of(point)
    rows = zip(point.steps.at, point.steps.seconds, point.steps.cause, strict=True)
    return [Beat(at - point.began, seconds, cause) for at, seconds, cause in rows]


def _chosen(cases: Sequence[Case]) -> Case | None:
    """Return the case with the shortest prompts or texts and the most clients: it has the highest concurrency."""
    possible = [case for case in cases if all(each and (each.point.gap_seconds or each.point.steps.at) for each in case.measured)]
    return max(possible, key=lambda case: (-case.load.tokens, case.load.clients, case.load.batch), default=None)


def _has_gaps(case: Case) -> bool:
    return any(each and each.point.gap_seconds for each in case.measured)


def _thinning(beats: Sequence[Sequence[Beat]], most: int, out: bool) -> int:
    """Return n such that drawing every n-th point draws at most `most` points."""
    return -(-sum(bool(beat.cause) == out for each in beats for beat in each) // most) or 1


def _draw(axes: Axes, beats: Sequence[Beat], usual: int, slow: int) -> None:
    _dots(axes, [beat for beat in beats if not beat.cause][::usual], style.MUTED, ".", 2.0)
    out = [beat for beat in beats if beat.cause][::slow]
    for cause in dict.fromkeys(beat.cause for beat in out):
        _dots(axes, [beat for beat in out if beat.cause == cause], style.cause_colour(cause), style.cause_mark(cause), 4.5)


def _dots(axes: Axes, beats: Sequence[Beat], colour: str, mark: str, size: float) -> None:
    places, values = [round(beat.at, 4) for beat in beats], [beat.seconds * MILLI for beat in beats]
    axes.plot(places, values, color=colour, marker=mark, markersize=size, linestyle="", markeredgewidth=0)


def _keys(beats: Sequence[Sequence[Beat]]) -> list[Line2D]:
    causes = dict.fromkeys(beat.cause for each in beats for beat in each if beat.cause)
    named = [("as usual", style.MUTED, ".")]
    named += [(cause.replace("_", " "), style.cause_colour(cause), style.cause_mark(cause)) for cause in causes]
    return [
        Line2D([], [], color=colour, marker=mark, linestyle="", markeredgewidth=0, label=name) for name, colour, mark in named
    ]


def _told(name: str, beats: Sequence[Beat]) -> str:
    causes = [beat.cause for beat in beats if beat.cause]
    counted = ", ".join(f"{causes.count(cause)} {cause.replace('_', ' ')}" for cause in dict.fromkeys(causes))
    return f"{name}: {len(beats)} times, {len(causes)} of them stand out" + (f" ({counted})" if causes else "")
