"""Plots of token gaps (or step times) over time during one load, and the roofline of a machine with its steps.

Slow gaps are coloured by cause: the slow step that ran in them, or the prompt that was processed in them. If steps ran
for less than half of a gap, its cause is outside of the engine's steps.

The roofline shows memory bandwidth and compute limits, measured when the server was calibrated, and the rates that
steps reached during the loads. A step reads the weights once: the more tokens, the more operations per byte.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from armature_bench.compare.result import CompareResult, LoadPoint, StepColumns
from armature_bench.report import plots
from armature_bench.report.figures import MILLI, LoadCase, info_section, load_name
from armature_bench.report.page import Plot
from armature_bench.report.plots import PlotText, render_plot

SLOW_RATIO = 1.5  # times the median; the server records the cause of steps slower than this
BETWEEN_STEPS = "between steps"
_MAX_NORMAL_POINTS = 3000  # normal ones, all results together, to limit the size of the page
_MAX_SLOW_POINTS = 1500


@dataclass(frozen=True, slots=True)
class TimelinePoint:
    """One gap or step. `at`: seconds since the load began; `cause` is empty if the time was normal."""

    at: float
    seconds: float
    cause: str = ""


def timeline_plot(cases: Sequence[LoadCase], names: Sequence[str]) -> Plot | str:
    """Return the plot, with a row for each result on one scale, or a sentence that says why there is none."""
    case = _chosen(cases)
    if case is None:
        return "No load that all results share has tokens or steps, so nothing is drawn over time."
    beats = [_timeline_points(each.point) if each else [] for each in case.measured]
    what = "Time from token to token" if _has_gaps(case) else "Time of the engine's steps"
    usual, slow = _thinning(beats, _MAX_NORMAL_POINTS, out=False), _thinning(beats, _MAX_SLOW_POINTS, out=True)
    text = PlotText(
        "rhythm",
        f"{what}, over the load",
        f"{load_name(case.load)}. What took more than {SLOW_RATIO:g} times the median is coloured by what caused it"
        + (f"; one in {usual} of the others is drawn" if usual > 1 else "")
        + (f", and one in {slow} of the coloured ones." if slow > 1 else ".")
        + " Tokens that arrived together with the previous one may be below the visible range.",
        f"{what} at {load_name(case.load)}. "
        + "; ".join(_describe_result(name, each) for name, each in zip(names, beats, strict=True)),
    )

    def draw(figure: Figure) -> None:
        rows = figure.subplots(len(beats), 1, squeeze=False, sharey=True)[:, 0]
        for axes, name, each in zip(rows, names, beats, strict=True):
            _draw(axes, each, usual, slow)
            axes.set_title(name)
            axes.set_ylabel("milliseconds")
            axes.set_xlim(left=0)
        plots.set_time_axis(rows[0], [beat.seconds * MILLI for each in beats for beat in each], 12.0)
        rows[-1].set_xlabel("seconds since the load began")
        figure.legend(handles=_legend_handles(beats), loc="outside upper left", ncols=5)

    return render_plot(text, (9.4, 0.9 + 2.2 * len(beats)), draw)


def token_gaps(point: LoadPoint) -> list[TimelinePoint]:
    """Return the gap before each token after the first, and the cause of each long gap."""
    usual = median(point.gap_seconds) * SLOW_RATIO
    steps = _StepIndex(point.steps)
    rows = zip(point.gap_at, point.gap_seconds, strict=True)
    return [
        TimelinePoint(at - point.began, took, steps.cause(at - took, at) if took > usual else "") for at, took in rows
    ]


class _StepIndex:
    """The steps of a load, sorted by their ends."""

    def __init__(self, steps: StepColumns) -> None:
        rows = zip(steps.at, steps.seconds, steps.phase, steps.cause, strict=True)
        self._rows = sorted((at + seconds, at, phase, cause) for at, seconds, phase, cause in rows)
        self._ends = [end for end, *_ in self._rows]

    def cause(self, began: float, ended: float) -> str:
        """Return the cause with slow steps that overlap this interval most.

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
        return "unknown" if busy > (ended - began) / 2 else BETWEEN_STEPS


def _timeline_points(point: LoadPoint) -> list[TimelinePoint]:
    if point.gap_seconds:
        return token_gaps(point)
    rows = zip(point.steps.at, point.steps.seconds, point.steps.cause, strict=True)
    return [TimelinePoint(at - point.began, seconds, cause) for at, seconds, cause in rows]


def _chosen(cases: Sequence[LoadCase]) -> LoadCase | None:
    """Return the case with the shortest prompts or texts and the most clients: it has the highest concurrency."""
    possible = [
        case
        for case in cases
        if all(each and (each.point.gap_seconds or each.point.steps.at) for each in case.measured)
    ]
    return max(possible, key=lambda case: (-case.load.tokens, case.load.clients, case.load.batch), default=None)


def _has_gaps(case: LoadCase) -> bool:
    return any(each and each.point.gap_seconds for each in case.measured)


def _thinning(beats: Sequence[Sequence[TimelinePoint]], most: int, out: bool) -> int:
    """Return n such that drawing every n-th point draws at most `most` points."""
    return -(-sum(bool(beat.cause) == out for each in beats for beat in each) // most) or 1


def _draw(axes: Axes, beats: Sequence[TimelinePoint], usual: int, slow: int) -> None:
    _draw_points(axes, [beat for beat in beats if not beat.cause][::usual], plots.MUTED, ".", 2.0)
    out = [beat for beat in beats if beat.cause][::slow]
    for cause in dict.fromkeys(beat.cause for beat in out):
        _draw_points(
            axes,
            [beat for beat in out if beat.cause == cause],
            plots.cause_colour(cause),
            plots.cause_marker(cause),
            4.5,
        )


def _draw_points(axes: Axes, beats: Sequence[TimelinePoint], colour: str, mark: str, size: float) -> None:
    places, values = [round(beat.at, 4) for beat in beats], [beat.seconds * MILLI for beat in beats]
    axes.plot(places, values, color=colour, marker=mark, markersize=size, linestyle="", markeredgewidth=0)


def _legend_handles(beats: Sequence[Sequence[TimelinePoint]]) -> list[Line2D]:
    causes = dict.fromkeys(beat.cause for each in beats for beat in each if beat.cause)
    named = [("as usual", plots.MUTED, ".")]
    named += [(cause.replace("_", " "), plots.cause_colour(cause), plots.cause_marker(cause)) for cause in causes]
    return [
        Line2D([], [], color=colour, marker=mark, linestyle="", markeredgewidth=0, label=name)
        for name, colour, mark in named
    ]


def _describe_result(name: str, beats: Sequence[TimelinePoint]) -> str:
    causes = [beat.cause for beat in beats if beat.cause]
    counted = ", ".join(f"{causes.count(cause)} {cause.replace('_', ' ')}" for cause in dict.fromkeys(causes))
    return f"{name}: {len(beats)} times, {len(causes)} of them stand out" + (f" ({counted})" if causes else "")


GIGA = 1e9
MIN_STEPS_PER_DOT = 5  # minimum number of steps of about the same size for a median to be shown
_MARKS = {"decode": "o", "prefill": "^", "encode": "s"}


@dataclass(frozen=True, slots=True)
class RooflineLimits:
    """The limits of a machine, and the demand of the model.

    `reads` is the memory bandwidth in bytes per second, `products` the speed in operations per second of matrix
    products. `bytes_per_step` is what a step reads, `operations_per_token` the work per token.
    """

    reads: float
    products: float
    bytes_per_step: float
    operations_per_token: float

    def bound(self, intensity: float) -> float:
        """Return the upper limit in operations per second at `intensity` operations per byte."""
        return min(self.products, self.reads * intensity)


@dataclass(frozen=True, slots=True)
class RooflinePoint:
    """Steps of about the same size: phase, tokens, operations per byte read, and operations per second."""

    phase: str
    tokens: float
    intensity: float
    rate: float


def roofline_plot(results: Sequence[CompareResult], names: Sequence[str]) -> Plot | str:
    """Return the plot, or a sentence if no machine has known limits."""
    known = [
        (index, ceilings, roofline_points(result, ceilings))
        for index, result in enumerate(results)
        if (ceilings := roofline_limits(result))
    ]
    if not known:
        return "The limits of these machines are unknown (not calibrated, or not for long enough), so there is no roofline."
    missing = [name for index, name in enumerate(names) if index not in {each for each, _, _ in known}]
    text = PlotText(
        "roofline",
        "Reached rates and the limits of each machine (roofline)",
        "The slope is the memory bandwidth, the flat part the speed of matrix products, both measured on that machine. "
        "The number next to each dot is the tokens per step: more tokens do more work with the same bytes. "
        "The work of attention is not counted. "
        "A dot above the slope is not an error: the weights were then in a cache."
        + (f" Unknown for {', '.join(missing)}." if missing else ""),
        "Operations a second against operations a byte. "
        + "; ".join(_describe_machine(names[index], ceilings, dots) for index, ceilings, dots in known),
    )

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for index, ceilings, dots in known:
            _draw_roofline(axes, index, ceilings, dots)
        plots.set_log_axis(axes, "x", *axes.get_xlim())
        plots.set_log_axis(axes, "y", *axes.get_ylim())
        axes.set_xlabel("operations per byte of weights that a step reads")
        axes.set_ylabel("billion operations a second")
        phases = dict.fromkeys(dot.phase for _, _, dots in known for dot in dots)
        figure.legend(
            handles=[*_roofline_legend_handles(names, known), *_phase_keys(phases)], loc="outside upper left", ncols=2
        )

    return render_plot(text, (9.4, 4.4), draw)


def roofline_limits(result: CompareResult) -> RooflineLimits | None:
    """Return the limits of a result's machine, or None if it has no accepted calibration."""
    measured = info_section(result.info, "calibration", "measurements")
    plan, trials = info_section(result.info, "plan"), measured.get("trials", ())
    trial = next((trial for trial in trials if _is_chosen_trial(trial, plan)), None)
    reads, products = measured.get("read_bytes_per_second"), measured.get("products_per_second", {})
    if measured.get("fallback") or trial is None or not reads:
        return None
    best = max(products.get(precision, 0.0) for precision in _product_precisions(trial))
    if not best or not trial.get("read_bytes") or not trial.get("operations_per_token"):
        return None
    return RooflineLimits(reads, best, trial["read_bytes"], trial["operations_per_token"])


def roofline_points(result: CompareResult, ceilings: RooflineLimits) -> list[RooflinePoint]:
    found: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for point in result.points:
        steps = point.steps
        for phase, tokens, seconds, cause in zip(steps.phase, steps.tokens, steps.seconds, steps.cause, strict=True):
            if not cause and tokens and seconds > 0:
                found.setdefault((phase, tokens.bit_length()), []).append((tokens, seconds))
    return [
        _roofline_point(phase, each, ceilings)
        for (phase, _), each in sorted(found.items())
        if len(each) >= MIN_STEPS_PER_DOT
    ]


def _roofline_point(phase: str, steps: Sequence[tuple[int, float]], ceilings: RooflineLimits) -> RooflinePoint:
    tokens = median(each for each, _ in steps)
    rate = median(each * ceilings.operations_per_token / seconds for each, seconds in steps)
    return RooflinePoint(phase, tokens, tokens * ceilings.operations_per_token / ceilings.bytes_per_step, rate)


def _is_chosen_trial(trial: Mapping[str, Any], plan: Mapping[str, Any]) -> bool:
    return all(
        trial.get(name) == plan.get(name, {}).get("value", trial.get(name))
        for name in ("precision", "threads", "int8_copy")
    )


def _product_precisions(trial: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the precisions of the matrix products: a 4-bit model may also have an 8-bit copy of its weights."""
    return (trial["precision"], "int8") if trial.get("int8_copy") else (trial["precision"],)


def _draw_roofline(axes: Axes, index: int, ceilings: RooflineLimits, dots: Sequence[RooflinePoint]) -> None:
    colour = plots.result_colour(index)
    ridge, smallest = ceilings.products / ceilings.reads, ceilings.operations_per_token / ceilings.bytes_per_step
    ends = [
        min([smallest, *(dot.intensity for dot in dots)]) / 1.5,
        max([ridge * 4, *(dot.intensity for dot in dots)]) * 1.5,
    ]
    places = sorted([*ends, ridge])
    axes.loglog(places, [ceilings.bound(place) / GIGA for place in places], color=colour, linewidth=2.0)
    for dot in dots:
        axes.plot([dot.intensity], [dot.rate / GIGA], color=colour, marker=_MARKS.get(dot.phase, "D"), markersize=6)
        where = (dot.intensity, dot.rate / GIGA)
        away, side = (
            (-7, "right") if index % 2 else (7, "left")
        )  # alternate the side, so that two results do not overlap
        axes.annotate(
            f"{dot.tokens:g}", where, xytext=(away, -3), textcoords="offset points", fontsize=8, color=colour, ha=side
        )


def _roofline_legend_handles(
    names: Sequence[str], known: Sequence[tuple[int, RooflineLimits, list[RooflinePoint]]]
) -> list[Line2D]:
    return [
        Line2D(
            [],
            [],
            color=plots.result_colour(index),
            linewidth=2.0,
            label=f"{plots.short_name(names[index])}: {_format_limits(ceilings)}",
        )
        for index, ceilings, _ in known
    ]


def _phase_keys(phases: Mapping[str, None]) -> list[Line2D]:
    return [
        Line2D([], [], color=plots.MUTED, marker=_MARKS.get(phase, "D"), linestyle="", label=f"{phase} steps")
        for phase in phases
    ]


def _describe_machine(name: str, ceilings: RooflineLimits, dots: Sequence[RooflinePoint]) -> str:
    parts = [
        f"{dot.phase} of {dot.tokens:g} tokens {dot.rate / ceilings.bound(dot.intensity):.0%} of its ceiling"
        for dot in dots
    ]
    return f"{name}: {_format_limits(ceilings)}; " + (", ".join(parts) or "no steps were recorded")


def _format_limits(ceilings: RooflineLimits) -> str:
    return f"{ceilings.reads / GIGA:,.0f} GB/s, {ceilings.products / GIGA:,.0f} billion operations/s"
