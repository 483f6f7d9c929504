"""The plot of the machine's ceilings with what was reached below them: what memory feeds to each operation, and what the cores can do.

A step reads the weights once, whatever its number of tokens: the more tokens, the more operations for each byte. Ceilings are those that
the server measured of its machine when it was calibrated; the dots are steps that it did while loads ran.
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
ENOUGH_STEPS = 5  # of about one size: fewer are no figure
_MARKS = {"decode": "o", "prefill": "^", "encode": "s"}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes that memory gives and operations that products do in a second; bytes that a step reads, operations of a token."""

    reads: float
    products: float
    step_bytes: float
    token_operations: float

    def bound(self, intensity: float) -> float:
        """Operations a second that no step of so many operations a byte passes."""
        return min(self.products, self.reads * intensity)


@dataclass(frozen=True, slots=True)
class Reached:
    """Steps of about one size: operations for each byte read, operations a second, and of what phase and size they were."""

    phase: str
    tokens: float
    intensity: float
    rate: float


def roofline_plot(results: Sequence[Result], names: Sequence[str]) -> Plot | str:
    """A sentence where no ceilings are known."""
    known = [
        (index, ceilings, reached(result, ceilings)) for index, result in enumerate(results) if (ceilings := ceilings_of(result))
    ]
    if not known:
        return "No ceilings are known of these machines (they were not calibrated, or in too little time): there is no roofline."
    missing = [name for index, name in enumerate(names) if index not in {each for each, _, _ in known}]
    words = Words(
        "roofline",
        "What was reached, under each machine's ceilings",
        "The slope is what memory can read, the level what products can do, both as measured on that machine. "
        "Beside each dot stands how many tokens such steps had: each further one does more with the same bytes. "
        "Attention's own work is not counted. "
        "A dot above the slope is no error: a cache then held the weights."
        + (f" Not known of {', '.join(missing)}." if missing else ""),
        "Operations a second against operations a byte. "
        + "; ".join(_told(names[index], ceilings, dots) for index, ceilings, dots in known),
    )

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for index, ceilings, dots in known:
            _draw(axes, index, ceilings, dots)
        style.logarithmic(axes, "x", *axes.get_xlim())
        style.logarithmic(axes, "y", *axes.get_ylim())
        axes.set_xlabel("operations for each byte of weights that a step reads")
        axes.set_ylabel("billion operations a second")
        phases = dict.fromkeys(dot.phase for _, _, dots in known for dot in dots)
        figure.legend(handles=[*_keys(names, known), *_phase_keys(phases)], loc="outside upper left", ncols=2)

    return drawn(words, (9.4, 4.4), draw)


def ceilings_of(result: Result) -> Ceilings | None:
    """None where the machine was not calibrated, or what was measured was not taken for true."""
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
    """Medians of the steps that took what such steps take, by phase and about size."""
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
    """Precisions whose products serve: beside four bits there may be a copy in eight."""
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
        away, side = (-7, "right") if index % 2 else (7, "left")  # of two results one to the left, one to the right
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
