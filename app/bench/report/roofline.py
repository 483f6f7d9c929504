"""The roofline plot: a machine's memory bandwidth and compute limits, and the rates that steps reached.

A step reads the weights once, however many tokens it has: the more tokens, the more operations per byte. The limits
are those that the server measured when it was calibrated. The dots are steps that it ran during the loads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from app.bench.compare.result import Result
from app.bench.report import style
from app.bench.report.loads import part
from app.bench.report.style import Plot, Words, drawn

GIGA = 1e9
ENOUGH_STEPS = 5  # minimum number of steps of about the same size for a median to be shown
_MARKS = {"decode": "o", "prefill": "^", "encode": "s"}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The limits of a machine, and the demand of the model.

    `read_bytes_per_second` is the memory bandwidth, `operations_per_second` the speed of matrix products.
    `bytes_per_step` is what a step reads, `operations_per_token` the work per token.
    """

    reads: float
    products: float
    step_bytes: float
    token_operations: float

    def bound(self, intensity: float) -> float:
        """Return the upper limit in operations per second at `intensity` operations per byte."""
        return min(self.products, self.reads * intensity)


@dataclass(frozen=True, slots=True)
class Reached:
    """Steps of about the same size: phase, tokens, operations per byte read, and operations per second."""

    phase: str
    tokens: float
    intensity: float
    rate: float


def roofline_plot(results: Sequence[Result], names: Sequence[str]) -> Plot | str:
    """Return the plot, or a sentence if no machine has known limits."""
    known = [
        (index, ceilings, reached(result, ceilings)) for index, result in enumerate(results) if (ceilings := ceilings_of(result))
    ]
    if not known:
        return "The limits of these machines are unknown (not calibrated, or not for long enough), so there is no roofline."
    missing = [name for index, name in enumerate(names) if index not in {each for each, _, _ in known}]
    words = Words(
        "roofline",
        "Reached rates and the limits of each machine (roofline)",
        "The slope is the memory bandwidth, the flat part the speed of matrix products, both measured on that machine. "
        "The number next to each dot is the tokens per step: more tokens do more work with the same bytes. "
        "The work of attention is not counted. "
        "A dot above the slope is not an error: the weights were then in a cache."
        + (f" Unknown for {', '.join(missing)}." if missing else ""),
        "Operations a second against operations a byte. "
        + "; ".join(_told(names[index], ceilings, dots) for index, ceilings, dots in known),
    )

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for index, ceilings, dots in known:
            _draw(axes, index, ceilings, dots)
        style.logarithmic(axes, "x", *axes.get_xlim())
        style.logarithmic(axes, "y", *axes.get_ylim())
        axes.set_xlabel("operations per byte of weights that a step reads")
        axes.set_ylabel("billion operations a second")
        phases = dict.fromkeys(dot.phase for _, _, dots in known for dot in dots)
        figure.legend(handles=[*_keys(names, known), *_phase_keys(phases)], loc="outside upper left", ncols=2)

    return drawn(words, (9.4, 4.4), draw)


def ceilings_of(result: Result) -> Ceilings | None:
    """Return the limits of a result's machine, or None if it has no accepted calibration."""
    measured = part(result.info, "calibration", "measurements")
    plan, trials = part(result.info, "plan"), measured.get("trials", ())
    trial = next((trial for trial in trials if _is_served(trial, plan)), None)
    reads, products = measured.get("read_bytes_per_second"), measured.get("products_per_second", {})
    if measured.get("fallback") or trial is None or not reads:
        return None
    best = max(products.get(precision, 0.0) for precision in _multiplying(trial))
    if not best or not trial.get("read_bytes") or not trial.get("operations_per_token"):
        return None
    return Ceilings(reads, best, trial["read_bytes"], trial["operations_per_token"])


def reached(result: Result, ceilings: Ceilings) -> list[Reached]:
    """Return the medians of normal steps by phase and approximate size."""
    found: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for point in result.points:
        steps = point.steps
        for phase, tokens, seconds, cause in zip(steps.phase, steps.tokens, steps.seconds, steps.cause, strict=True):
            if not cause and tokens and seconds > 0:
                found.setdefault((phase, tokens.bit_length()), []).append((tokens, seconds))
    return [_reached(phase, each, ceilings) for (phase, _), each in sorted(found.items()) if len(each) >= ENOUGH_STEPS]


def _reached(phase: str, steps: Sequence[tuple[int, float]], ceilings: Ceilings) -> Reached:
    tokens = median(each for each, _ in steps)
    rate = median(each * ceilings.token_operations / seconds for each, seconds in steps)
    return Reached(phase, tokens, tokens * ceilings.token_operations / ceilings.step_bytes, rate)


def _is_served(trial: Mapping[str, Any], plan: Mapping[str, Any]) -> bool:
    return all(
        trial.get(name) == plan.get(name, {}).get("value", trial.get(name)) for name in ("precision", "threads", "int8_copy")
    )


def _multiplying(trial: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the precisions of the matrix products: a 4-bit model may also have an 8-bit copy of its weights."""
    return (trial["precision"], "int8") if trial.get("int8_copy") else (trial["precision"],)


def _draw(axes: Axes, index: int, ceilings: Ceilings, dots: Sequence[Reached]) -> None:
    colour = style.colour_of(index)
    ridge, smallest = ceilings.products / ceilings.reads, ceilings.token_operations / ceilings.step_bytes
    ends = [min([smallest, *(dot.intensity for dot in dots)]) / 1.5, max([ridge * 4, *(dot.intensity for dot in dots)]) * 1.5]
    places = sorted([*ends, ridge])
    axes.loglog(places, [ceilings.bound(place) / GIGA for place in places], color=colour, linewidth=2.0)
    for dot in dots:
        axes.plot([dot.intensity], [dot.rate / GIGA], color=colour, marker=_MARKS.get(dot.phase, "D"), markersize=6)
        where = (dot.intensity, dot.rate / GIGA)
        away, side = (-7, "right") if index % 2 else (7, "left")  # alternate the side, so that two results do not overlap
        axes.annotate(f"{dot.tokens:g}", where, xytext=(away, -3), textcoords="offset points", fontsize=8, color=colour, ha=side)


def _keys(names: Sequence[str], known: Sequence[tuple[int, Ceilings, list[Reached]]]) -> list[Line2D]:
    return [
        Line2D([], [], color=style.colour_of(index), linewidth=2.0, label=f"{style.short(names[index])}: {_roof(ceilings)}")
        for index, ceilings, _ in known
    ]


def _phase_keys(phases: Mapping[str, None]) -> list[Line2D]:
    return [
        Line2D([], [], color=style.MUTED, marker=_MARKS.get(phase, "D"), linestyle="", label=f"{phase} steps") for phase in phases
    ]


def _told(name: str, ceilings: Ceilings, dots: Sequence[Reached]) -> str:
    parts = [
        f"{dot.phase} of {dot.tokens:g} tokens {dot.rate / ceilings.bound(dot.intensity):.0%} of its ceiling" for dot in dots
    ]
    return f"{name}: {_roof(ceilings)}; " + (", ".join(parts) or "no steps were recorded")


def _roof(ceilings: Ceilings) -> str:
    return f"{ceilings.reads / GIGA:,.0f} GB/s, {ceilings.products / GIGA:,.0f} billion operations/s"
